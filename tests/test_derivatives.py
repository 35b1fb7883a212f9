"""Derivatives: in every parameter, to second order, through zeros, under every transform."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl

DOUBLE = torch.float64


def rows(seed=0, count=3, length=7):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(count, length, dtype=DOUBLE, generator=generator)


def base(seed=1, length=7):
    generator = torch.Generator().manual_seed(seed)
    return 0.2 + 2 * torch.rand(length, dtype=DOUBLE, generator=generator)


def tensor(*values):
    return torch.tensor(values, dtype=DOUBLE)


# Each case: a map of tensors to weights, and the tensors. Rows are checked below to have zeros
# and to keep 1e-3 from the boundary of the support.
CASES = {
    "shannon": (lambda s, t: fl.solve(s, fl.Shannon(t)), (rows(), tensor(0.5, 1.0, 2.0))),
    "shannon base": (lambda s, b: fl.solve(s, fl.Shannon(), base=b), (rows(), base())),
    "tsallis 1.5": (
        lambda s, a, t: fl.solve(s, fl.Tsallis(a, t)),
        (rows(), tensor(1.5, 1.5, 1.5), tensor(0.5, 1.0, 2.0)),
    ),
    "tsallis mixed": (
        lambda s, a, t: fl.solve(s, fl.Tsallis(a, t)),
        (rows(2), tensor(1.2, 2.0, 2.7), tensor(0.7)),
    ),
    "tsallis base": (
        lambda s, a, t, b: fl.solve(s, fl.Tsallis(a, t), base=b),
        (rows(3), tensor(1.3, 1.6, 2.5), tensor(0.7), base()),
    ),
    "tsallis static alpha, base": (
        lambda s, b: fl.solve(s, fl.Tsallis(2.0), base=b),
        (rows(4), base()),
    ),
    "tsallis prior": (
        lambda s, b: fl.solve(s, fl.Tsallis(1.4), base=fl.priors.Preference(b)),
        (rows(5), base(5) - 1),
    ),
    "norm": (lambda s, a: fl.solve(s, fl.Norm(a)), (rows(6), tensor(1.5, 2.0, 3.0))),
    "budget": (lambda s, k: fl.solve(s, fl.Budget(k)), (rows(7), tensor(1.5, 2.3, 3.6))),
    "fused": (lambda s, c: fl.solve(s, fl.Fused(c)), (rows(8), tensor(0.1, 0.2, 0.4))),
    "fused grid": (
        lambda s, c: fl.solve(s, fl.Fused(c, grid=(2, 4))),
        (rows(9, length=8), tensor(0.1, 0.2, 0.4)),
    ),
}
SPARSE = [name for name in CASES if not name.startswith("shannon")]


def leaves(name):
    return tuple(x.clone().requires_grad_() for x in CASES[name][1])


@pytest.mark.parametrize("name", SPARSE)
def test_cases_have_zeros_away_from_the_boundary(name):
    make, inputs = CASES[name]
    solution = make(*inputs)
    assert (solution.weights == 0).any()
    if not name.startswith("fused"):  # its threshold applies to the smoothed scores
        distance = (inputs[0] - solution.threshold.unsqueeze(-1)).abs()
        assert distance.min() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_first_derivative(name):
    make, _ = CASES[name]
    assert gradcheck(lambda *x: make(*x).weights, leaves(name))
    assert gradcheck(lambda *x: make(*x).potential, leaves(name))


@pytest.mark.parametrize("name", CASES)
def test_second_derivative(name):
    make, _ = CASES[name]
    assert gradgradcheck(lambda *x: make(*x).weights, leaves(name))


@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5", "tsallis base", "norm", "budget"])
def test_threshold_and_potential_differentiate(name):
    make, _ = CASES[name]
    if name != "shannon":
        assert gradcheck(lambda *x: make(*x).threshold, leaves(name))
    assert gradgradcheck(lambda *x: make(*x).potential, leaves(name))


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_equals_reverse_mode_in_every_argument(name):
    make, inputs = CASES[name]
    tangents = tuple(torch.randn_like(x) for x in inputs)
    _, forward = torch.func.jvp(lambda *x: make(*x).weights, inputs, tangents)
    jacobians = torch.autograd.functional.jacobian(lambda *x: make(*x).weights, inputs)
    reverse = sum(
        (jacobian * tangent).flatten(2).sum(-1)
        for jacobian, tangent in zip(jacobians, tangents, strict=True)
    )
    assert reverse.abs().max() > 1e-3  # a derivative that is silently zero would agree with itself
    assert (forward - reverse).abs().max() <= 1e-11 * reverse.abs().max()


def test_third_derivative_by_two_newton_steps():
    scores, a, b = rows(11)[0] / 4, rows(12)[0], rows(13)[0]

    def along(t):
        return (fl.entmax(scores + t * a, 1.3) * b).sum()

    def third(t):
        return torch.func.grad(torch.func.grad(torch.func.grad(along)))(t)

    def second(t):
        return torch.func.grad(torch.func.grad(along))(t)

    h = 1e-5
    zero = torch.zeros((), dtype=DOUBLE)
    difference = (second(zero + h) - second(zero - h)) / (2 * h)
    assert difference.abs() > 1e-2
    assert (third(zero) - difference).abs() <= 1e-6 * difference.abs()


@pytest.mark.parametrize("name", CASES)
def test_vmap_over_every_argument(name):
    make, inputs = CASES[name]
    stacked = tuple(torch.stack([x, x * 1.01]) for x in inputs)
    together = torch.func.vmap(lambda *x: make(*x).weights)(*stacked)
    for i in range(2):
        alone = make(*(x[i] for x in stacked)).weights
        assert (together[i] - alone).abs().max() <= 1e-13


def test_vmap_with_different_axes_and_unbatched_operands():
    scores, mass = torch.stack([rows(1), rows(2)], 1), base()  # (3, 2, 7)
    mapped = torch.func.vmap(
        lambda s, b: fl.solve(s, fl.Tsallis(1.4), base=b).weights, in_dims=(1, None)
    )(scores, mass)
    for i in range(2):
        alone = fl.solve(scores[:, i], fl.Tsallis(1.4), base=mass).weights
        assert (mapped[i] - alone).abs().max() <= 1e-14


def test_nested_vmap_and_hessian():
    scores = torch.stack([rows(1), rows(2)])  # (2, 3, 7)

    def energy(row):
        return (fl.entmax(row, 1.3) ** 2).sum()

    both = torch.func.vmap(torch.func.vmap(torch.func.hessian(energy)))(scores)
    for i in range(2):
        for j in range(3):
            alone = torch.autograd.functional.hessian(energy, scores[i, j])
            assert (both[i, j] - alone).abs().max() <= 1e-12


QUICK = ("tsallis base", "norm", "budget", "fused grid")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_compiles_whole_with_every_argument(name):
    make, _ = CASES[name]

    def weights(*x):
        return make(*x).weights

    torch._dynamo.reset()
    inputs = leaves(name)
    direction = torch.randn_like(inputs[0])
    fast = torch.compile(weights, fullgraph=True, backend="aot_eager")(*inputs)
    plain = weights(*inputs)
    assert (fast - plain).abs().max() <= 1e-14
    fast_gradients = torch.autograd.grad((fast * direction).sum(), inputs)
    for a, b in zip(
        fast_gradients, torch.autograd.grad((plain * direction).sum(), inputs), strict=True
    ):
        assert (a - b).abs().max() <= 1e-12 * (1 + b.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiles_with_the_default_backend(name):
    make, inputs = CASES[name]
    torch._dynamo.reset()
    fast = torch.compile(lambda *x: make(*x).weights, fullgraph=True)(*inputs)
    assert (fast - make(*inputs).weights).abs().max() <= 1e-13


@pytest.mark.parametrize("name", CASES)
def test_deterministic_algorithms(name):
    make, _ = CASES[name]
    gradients = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            inputs = leaves(name)
            out = make(*inputs).weights
            gradients.append(torch.autograd.grad((out**2).sum(), inputs))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "omega", [fl.Shannon(), fl.Tsallis(1.5), fl.Norm(2.0), fl.Budget(2), fl.Fused(0.2)], ids=str
)
def test_autocast_changes_nothing(omega):
    scores = rows().float().requires_grad_()
    plain = fl.solve(scores, omega)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fl.solve(scores, omega)
        gap, hessian = cast.gap, cast.hessian()
    assert torch.equal(cast.weights, plain.weights)
    assert torch.equal(gap, plain.gap)
    assert torch.equal(hessian, plain.hessian())
    one, two = (torch.autograd.grad((x.weights**2).sum(), scores)[0] for x in (plain, cast))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_half_precision_error_is_that_of_the_output(dtype, alpha):
    """Within twice the error of plain PyTorch in the same dtype, both against float32."""
    scores = rows(count=20, length=50).to(dtype)
    exact = fl.entmax(scores.float(), alpha)
    ours = (fl.entmax(scores, alpha).float() - exact).abs().max()
    reference = torch.softmax(scores.float(), -1)
    plain = (torch.softmax(scores, -1).float() - reference).abs().max()
    assert ours <= 2 * plain


@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0, 3.0])
def test_zero_mass_has_the_one_sided_derivative(alpha):
    scores = rows()[:1] / 4
    masked = int(scores.argmax())  # a key that would carry weight if it had mass
    mass = base()
    mass[masked] = 0
    direction = torch.randn(1, 7, dtype=DOUBLE)

    def value(m):
        return (fl.solve(scores, fl.Tsallis(alpha), base=m).weights * direction).sum()

    leaf = mass.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf), leaf)
    h = 1e-7
    bumped = mass.clone()
    bumped[masked] = h
    one_sided = (value(bumped) - value(mass)) / h
    assert one_sided.abs() > 1e-3
    assert (gradient[masked] - one_sided).abs() <= 1e-4 * one_sided.abs()
    assert gradient.isfinite().all()


def test_zero_mass_under_a_towering_score_stays_finite():
    scores = torch.tensor([[0.0, 1.0, 5000.0]], dtype=DOUBLE, requires_grad=True)
    mass = torch.tensor([1.0, 1.0, 0.0], dtype=DOUBLE, requires_grad=True)
    for alpha in (1.0, 1.01, 1.5, 2.0):
        weights = fl.solve(scores, fl.Tsallis(alpha), base=mass).weights
        gradients = torch.autograd.grad((weights**2).sum(), (scores, mass))
        assert all(g.isfinite().all() for g in gradients)
        assert weights[0, 2] == 0


def test_second_derivative_is_finite_at_zeros_of_a_wide_row():
    scores = (30 * rows(count=2, length=100)).requires_grad_()
    for omega in (fl.Tsallis(1.5), fl.Tsallis(2.0), fl.Norm(2.0)):
        weights = fl.solve(scores, omega).weights
        (first,) = torch.autograd.grad((weights**3).sum(), scores, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), scores)
        assert second.isfinite().all()
