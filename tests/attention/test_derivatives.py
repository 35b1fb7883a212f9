"""Derivatives of attention: to second order, under every transform, never silently zero."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import fenchel as fl
from tests.attention.cases import (
    DOUBLE,
    INF,
    REGULARIZERS,
    chance,
    dense,
    draw,
    largest_difference,
    make_case,
    margin,
)

pytestmark = pytest.mark.usefixtures("kernels")
SMALL = {"lead": (2,), "queries": 3, "keys": 4, "d": 2, "d_value": 2}


HIDING = draw(3, 4).masked_fill(torch.arange(4) == 2, -INF)
CASES = {
    "shannon": make_case(fl.Shannon(), **SMALL),
    "shannon causal": make_case(fl.Shannon(), **SMALL, options={"is_causal": True}),
    "shannon constant mask": make_case(fl.Shannon(), **SMALL, options={"attn_mask": HIDING}),
    "shannon mask": make_case(
        fl.Shannon(), **SMALL, options=lambda x: {"attn_mask": x["mask"]}, mask=draw(3, 3, 4)
    ),
    "shannon base": make_case(
        fl.Shannon(0.7), **SMALL, options=lambda x: {"base": x["base"]}, base=draw(3, 4).exp()
    ),
    "shannon temperature": make_case(
        lambda x: fl.Shannon(x["temperature"]), **SMALL, temperature=draw(3, 2, 1).exp()
    ),
    "tsallis 1.5": make_case(fl.Tsallis(1.5), **SMALL, options={"is_causal": True}),
    "tsallis 1.3": make_case(fl.Tsallis(1.3), **SMALL, spread=3),
    "sparsemax": make_case(fl.Tsallis(2.0), **SMALL),
    "tsallis 2.5": make_case(fl.Tsallis(2.5), **SMALL),
    "tsallis mask": make_case(
        fl.Tsallis(1.5),
        **SMALL,
        options=lambda x: {"attn_mask": x["mask"]},
        mask=draw(3, 3, 4),
        seed=1,
    ),
    "tsallis base": make_case(
        fl.Tsallis(1.4), **SMALL, options=lambda x: {"base": x["base"]}, base=draw(3, 4).exp()
    ),
    "tsallis alpha, temperature": make_case(
        lambda x: fl.Tsallis(x["alpha"], x["temperature"]),
        **SMALL,
        alpha=torch.tensor([[1.3], [2.4]], dtype=DOUBLE),
        temperature=torch.tensor(0.8, dtype=DOUBLE),
        seed=4,
    ),
    "tsallis slopes": make_case(
        fl.Tsallis(1.5),
        **SMALL,
        options=lambda x: {"base": fl.priors.ALiBi(2, x["slopes"])},
        slopes=draw(3, 2).abs(),
    ),
    "grouped": make_case(
        fl.Tsallis(1.5), **{**SMALL, "lead": (4,)}, kv_lead=(2,), options={"enable_gqa": True}
    ),
    "norm": make_case(fl.Norm(2.0), **SMALL, seed=2),
    "budget": make_case(fl.Budget(1.6), **SMALL),
}
SPARSE = [name for name in CASES if not name.startswith("shannon")]


def as_function(case, attend=fl.attention):
    """A function of the leaves one by one."""
    return lambda *leaves: case.call(attend, dict(zip(case.leaves, leaves, strict=True)))


def leaves_of(case):
    return tuple(x.clone().requires_grad_() for x in case.leaves.values())


@pytest.mark.parametrize("name", SPARSE)
def test_cases_keep_away_from_the_boundary(name):
    assert margin(CASES[name]) > 1e-3
    case = CASES[name]
    options = case.options(case.leaves)
    regularizer = case.regularizer
    regularizer = (
        regularizer if isinstance(regularizer, fl.Regularizer) else regularizer(case.leaves)
    )
    solution = fl.attention_solution(*case.operands(case.leaves), regularizer, **options)
    seen = 10 * 2 if options.get("is_causal") else solution.status.numel() * 4
    assert solution.support_size.sum() < seen  # some weight is zero


@pytest.mark.parametrize("name", CASES)
def test_first_derivative(name):
    assert gradcheck(as_function(CASES[name]), leaves_of(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_second_derivative(name):
    assert gradgradcheck(as_function(CASES[name]), leaves_of(CASES[name]), fast_mode=True)


def second(function, leaves):
    leaves = tuple(x.clone().requires_grad_() for x in leaves)
    output = function(*leaves)
    first = torch.autograd.grad(output, leaves, draw(5, *output.shape), create_graph=True)
    total = sum((g * draw(i, *g.shape)).sum() for i, g in enumerate(first))
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_those_of_the_dense_computation(name):
    case = CASES[name]
    actual = second(as_function(case), case.leaves.values())
    expected = second(as_function(case, dense), case.leaves.values())
    assert max(x.abs().max() for x in expected) > 1e-3
    for ours, theirs in zip(actual, expected, strict=True):
        assert largest_difference(ours, theirs) <= 1e-10 * max(1, theirs.abs().max())


@pytest.mark.parametrize("name", ["shannon", "shannon constant mask", "tsallis 1.5"])
def test_third_derivatives_are_those_of_the_dense_computation(name):
    def third(attend):
        leaves = leaves_of(CASES[name])
        total = as_function(CASES[name], attend)(*leaves).square().sum()
        for _ in range(2):
            once = torch.autograd.grad(total, leaves, create_graph=True)
            total = sum(x.square().sum() for x in once)
        return torch.autograd.grad(total, leaves)

    for ours, theirs in zip(third(fl.attention), third(dense), strict=True):
        assert theirs.abs().max() > 1e-3
        assert largest_difference(ours, theirs) <= 1e-9 * theirs.abs().max()


def tangents_of(case):
    return tuple(draw(20 + i, *x.shape) for i, x in enumerate(case.leaves.values()))


def dense_jvp(case, tangents):
    """From reverse mode of the dense computation: no forward mode in it."""
    jacobians = torch.autograd.functional.jacobian(
        as_function(case, dense), tuple(case.leaves.values())
    )
    rank = jacobians[0].ndim - tangents[0].ndim
    return sum(
        (jacobian * tangent).flatten(rank).sum(-1) if tangent.ndim else jacobian * tangent
        for jacobian, tangent in zip(jacobians, tangents, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name):
    case = CASES[name]
    tangents = tangents_of(case)
    expected = dense_jvp(case, tangents)
    assert expected.abs().max() > 1e-3
    output, moved = torch.func.jvp(as_function(case), tuple(case.leaves.values()), tangents)
    assert largest_difference(output, as_function(case, dense)(*case.leaves.values())) <= 1e-13
    assert largest_difference(moved, expected) <= 1e-11 * expected.abs().max()
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x, t) for x, t in zip(case.leaves.values(), tangents, strict=True)
        ]
        moved = forward_ad.unpack_dual(as_function(case)(*duals)).tangent
    assert largest_difference(moved, expected) <= 1e-11 * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_in_one_argument_at_a_time(name):
    """A path that looks at the query only would leave the others' tangents out."""
    case = CASES[name]
    function, reference = as_function(case), as_function(case, dense)
    for index, (tangent, leaf) in enumerate(
        zip(tangents_of(case), case.leaves.values(), strict=True)
    ):

        def one(x, f, at=index):
            return f(*[x if i == at else y for i, y in enumerate(case.leaves.values())])

        _, moved = torch.func.jvp(lambda x: one(x, function), (leaf,), (tangent,))
        jacobian = torch.autograd.functional.jacobian(
            lambda x: one(x, reference),
            leaf,
        )
        expected = (jacobian * tangent).flatten(3).sum(-1) if leaf.ndim else jacobian * tangent
        assert expected.abs().max() > 1e-3
        assert largest_difference(moved, expected) <= 1e-11 * max(1, expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_func_grad_and_vjp(name):
    case = CASES[name]
    numbers = tuple(range(len(case.leaves)))
    leaves = tuple(case.leaves.values())

    def loss(attend):
        return lambda *x: as_function(case, attend)(*x).square().sum()

    expected = torch.autograd.grad(loss(dense)(*(x := leaves_of(case))), x)
    gradients = torch.func.grad(loss(fl.attention), argnums=numbers)(*leaves)
    output, pull = torch.func.vjp(as_function(case), *leaves)
    pulled = pull(2 * output)
    for ours, again, theirs in zip(gradients, pulled, expected, strict=True):
        assert theirs.abs().max() > 1e-3
        assert largest_difference(ours, theirs) <= 1e-11 * max(1, theirs.abs().max())
        assert largest_difference(again, theirs) <= 1e-11 * max(1, theirs.abs().max())


@pytest.mark.parametrize("name", ["shannon", "shannon mask", "tsallis 1.5", "tsallis base"])
def test_hessian(name):
    case = CASES[name]
    for at in range(len(case.leaves)):

        def loss(x, attend, at=at):
            y = [x if i == at else y for i, y in enumerate(case.leaves.values())]
            return as_function(case, attend)(*y).pow(3).sum()

        leaf = list(case.leaves.values())[at]
        expected = torch.autograd.functional.hessian(lambda x: loss(x, dense), leaf)
        hessian = torch.func.hessian(lambda x: loss(x, fl.attention))(leaf)
        assert expected.abs().max() > 1e-3
        assert largest_difference(hessian, expected) <= 1e-10 * expected.abs().max()


VMAPS = ["shannon", "shannon 0.6", "tsallis 1.3", "tsallis 1.5", "tsallis 2", "tsallis 3", "norm"]


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_over_the_batch(name):
    q, k, v = draw(0, 3, 4, 5, 3), draw(1, 3, 2, 6, 3), draw(2, 3, 2, 6, 2)
    for options in ({}, {"is_causal": True}, {"attn_mask": chance(1, 0.6, 5, 6)}):

        def attend(q, k, v, options=options):
            return fl.attention(q, k, v, REGULARIZERS[name], enable_gqa=True, **options)

        expected = dense(q, k, v, REGULARIZERS[name], enable_gqa=True, **options)
        assert largest_difference(torch.func.vmap(attend)(q, k, v), expected) <= 1e-13


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_over_one_operand(name):
    operands = draw(0, 2, 5, 3), draw(1, 2, 6, 3), draw(2, 2, 6, 2)
    for at in range(3):
        many = draw(7, 4, *operands[at].shape)

        def attend(x, at=at, function=fl.attention):
            return function(
                *[x if i == at else y for i, y in enumerate(operands)], REGULARIZERS[name]
            )

        expected = torch.stack([attend(x, function=dense) for x in many])
        assert largest_difference(torch.func.vmap(attend)(many), expected) <= 1e-13


@pytest.mark.parametrize("wants", [False, True], ids=["constant query", "query with gradient"])
@pytest.mark.parametrize("size", [2**22, 1], ids=["one tile", "tiles"])
@pytest.mark.parametrize("what", ["mask", "base", "slopes", "alpha", "factor"])
def test_vmap_over_a_parameter_alone(what, size, wants, tiles):
    """Query, key and value are ordinary tensors here, and may belong to another graph."""
    q, k, v = draw(0, 2, 18, 2), draw(1, 2, 5, 2), draw(2, 2, 5, 2)
    q.requires_grad_(wants)
    many, weights = 1 + draw(7, 3, 2).abs(), draw(8, 18, 5)

    def attend(x, function=fl.attention):
        column = x[:, None, None]
        softmax, entmax = {
            "mask": lambda: ({"attn_mask": column * weights},) * 2,
            "base": lambda: ({"base": column * weights.exp()},) * 2,
            "slopes": lambda: ({"base": fl.priors.ALiBi(2, x)},) * 2,
            "alpha": lambda: ({}, {}),
            "factor": lambda: ({}, {}),
        }[what]()
        alpha = x[:, None] if what == "alpha" else 1.5
        first = function(q, k, v, fl.Shannon(), **softmax)
        return column * (first + function(q, k, v, fl.Tsallis(alpha), **entmax))

    expected = torch.stack([attend(x, dense) for x in many])
    tiles(size)
    actual = torch.func.vmap(attend)(many)
    assert largest_difference(actual, expected) <= 1e-13
    if wants:
        gradient, right = (
            torch.autograd.grad(y.square().sum(), q, retain_graph=True)[0]
            for y in (actual, expected)
        )
        assert largest_difference(gradient, right) <= 1e-11


@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5"])
def test_gradients_one_example_at_a_time(name):
    q, k, v = draw(0, 3, 2, 5, 3), draw(1, 3, 2, 6, 3), draw(2, 3, 2, 6, 2)

    def loss(q, k, v):
        return fl.attention(q, k, v, REGULARIZERS[name], is_causal=True).square().sum()

    actual = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = dense(*leaves, REGULARIZERS[name], is_causal=True)
    expected = torch.autograd.grad(output.square().sum(), leaves)
    for ours, theirs in zip(actual, expected, strict=True):
        assert largest_difference(ours, theirs) <= 1e-12


COMPILED = {
    "shannon": (fl.Shannon(), {}),
    "shannon masked": (fl.Shannon(), {"attn_mask": draw(4, 6, 6), "is_causal": True}),
    "shannon prior": (fl.Shannon(), {"base": fl.priors.Causal() * fl.priors.ALiBi(2)}),
    "tsallis 1.5": (fl.Tsallis(1.5), {"is_causal": True}),
    "dropout": (fl.Tsallis(2.0), {"dropout_p": 0.4}),
    "norm": (fl.Norm(2.0), {"attn_mask": chance(4, 0.7, 6, 6)}),
}


def both(function, operands):
    leaves = [x.clone().requires_grad_() for x in operands]
    torch.manual_seed(3)
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, draw(9, *output.shape))]


DEAR = ("shannon", "shannon masked", "norm")  # compilers are slow; three of six stand for them


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in DEAR else ()) for name in COMPILED],
)
def test_compiled_whole_it_is_the_same(name):
    regularizer, options = COMPILED[name]
    operands = draw(0, 2, 2, 6, 3), draw(1, 2, 2, 6, 3), draw(2, 2, 2, 6, 2)

    def attend(q, k, v):
        return fl.attention(q, k, v, regularizer, **options)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(both(compiled, operands), both(attend, operands), strict=True):
        assert expected.abs().max() > 1e-3
        assert largest_difference(actual, expected) <= 1e-12


def test_compiled_with_alpha_as_input_it_is_the_same():
    operands = draw(0, 2, 2, 6, 3), draw(1, 2, 2, 6, 3), draw(2, 2, 2, 6, 2)
    alpha = torch.tensor([[1.3], [2.2]], dtype=DOUBLE)

    def attend(q, k, v, a):
        return fl.attention(q, k, v, fl.Tsallis(a))

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    pairs = zip(both(compiled, (*operands, alpha)), both(attend, (*operands, alpha)), strict=True)
    for actual, expected in pairs:
        assert expected.abs().max() > 1e-3
        assert largest_difference(actual, expected) <= 1e-11
