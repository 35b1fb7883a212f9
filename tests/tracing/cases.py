"""What tracers are given: every map and every attention, each with samples of its operands.

Shapes of the maps are those of torch's own samples for softmax, those of attention its samples for
`scaled_dot_product_attention`.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import fenchel as fl

F64 = torch.float64


class Case(NamedTuple):
    function: Callable
    samples: Callable  # () -> list of tuples of operands
    quick: bool = False  # traced in a second or two, so that it is in the quick suite


def normal(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def leaf(*shape, seed=0):
    return normal(*shape, seed=seed).requires_grad_()


def masses(*shape):
    return (normal(*shape, seed=1).abs() + 0.1).requires_grad_()


# ---- maps


def scores():
    return [(leaf(4),), (leaf(3, 4),), (leaf(2, 5, 4),), (leaf(3, 1),), (leaf(3, 0, 0),)]


def scores_and_masses():
    return [(leaf(3, 4), masses(3, 4)), (leaf(2, 3, 4), masses(4))]


def scores_and_alpha():
    alpha = torch.tensor([1.0, 1.5, 2.5], dtype=F64, requires_grad=True)
    return [(leaf(3, 4), alpha), (leaf(2, 3, 4), alpha)]


def grids():
    return [(leaf(3, 4),), (leaf(2, 5, 4),)]


def weights(make):
    return lambda s: fl.solve(s, make()).weights


MAPS = {
    "softmax": Case(lambda s: fl.softmax(s), scores, quick=True),
    "softmax, first axis": Case(lambda s: fl.softmax(s, dim=0), scores),
    "softmax, base": Case(lambda s, b: fl.softmax(s, base=b), scores_and_masses),
    "softmax, temperature": Case(weights(lambda: fl.Shannon(0.7)), scores),
    "sparsemax": Case(lambda s: fl.sparsemax(s), scores, quick=True),
    "sparsemax, base": Case(lambda s, b: fl.sparsemax(s, base=b), scores_and_masses),
    "entmax": Case(lambda s: fl.entmax(s), scores, quick=True),
    "entmax 1.2": Case(lambda s: fl.entmax(s, 1.2), scores),
    "entmax 3": Case(lambda s: fl.entmax(s, 3.0), scores),
    "entmax, alpha a tensor": Case(lambda s, a: fl.entmax(s, a), scores_and_alpha),
    "norm": Case(weights(lambda: fl.Norm(2.0)), scores, quick=True),
    "budget": Case(weights(lambda: fl.Budget(0.5)), scores, quick=True),
    "fused": Case(weights(lambda: fl.Fused(0.2)), scores),
    "fused grid": Case(weights(lambda: fl.Fused(0.2, grid=(2, 2))), grids),
}


# ---- attention


def operands(*changes):
    """Queries, keys and values, with three and four axes and some that broadcast."""
    shapes = [((4, 3, 8), (4, 6, 8)), ((2, 4, 3, 8), (2, 4, 6, 8)), ((4, 3, 8), (2, 4, 6, 8))]
    samples = [(leaf(*q), leaf(*kv, seed=1), leaf(*kv, seed=2)) for q, kv in shapes]
    return [(*sample, *(make() for make in changes)) for sample in samples]


def packed():
    starts = torch.tensor([0, 3, 3, 7])
    return [(leaf(7, 2, 8), leaf(7, 2, 8, seed=1), leaf(7, 2, 8, seed=2), starts)]


def attention(make, **options):
    return lambda q, k, v: fl.attention(q, k, v, make(), **options)


ATTENTIONS = {
    "softmax": Case(attention(fl.Shannon), operands, quick=True),
    "softmax, causal": Case(attention(fl.Shannon, is_causal=True), operands),
    "softmax, dropout": Case(attention(fl.Shannon, dropout_p=0.5), operands),
    "softmax, mask": Case(
        lambda q, k, v, m: fl.attention(q, k, v, attn_mask=m),
        lambda: operands(lambda: leaf(3, 6, seed=3)),
    ),
    "entmax": Case(attention(lambda: fl.Tsallis(1.5)), operands, quick=True),
    "entmax, causal": Case(attention(lambda: fl.Tsallis(1.5), is_causal=True), operands),
    "entmax, dropout": Case(attention(lambda: fl.Tsallis(1.5), dropout_p=0.5), operands),
    "entmax, mask": Case(
        lambda q, k, v, m: fl.attention(q, k, v, fl.Tsallis(1.5), attn_mask=m > 0),
        lambda: operands(lambda: normal(3, 6, seed=3)),
    ),
    "entmax, base": Case(
        lambda q, k, v, m: fl.attention(q, k, v, fl.Tsallis(1.5), base=m),
        lambda: operands(lambda: masses(3, 6)),
    ),
    "entmax, window": Case(
        attention(lambda: fl.Tsallis(1.5), base=fl.priors.SlidingWindow(3)), operands
    ),
    "norm": Case(attention(lambda: fl.Norm(2.0)), operands),
    "packed softmax": Case(
        lambda q, k, v, starts: fl.varlen_attention(q, k, v, starts), packed, quick=True
    ),
    "packed entmax": Case(
        lambda q, k, v, starts: fl.varlen_attention(
            q, k, v, starts, regularizer=fl.Tsallis(1.5), is_causal=True
        ),
        packed,
        quick=True,
    ),
}
CASES = MAPS | {f"attention: {name}": case for name, case in ATTENTIONS.items()}


def each(cases=CASES, slow=True):
    """Parameters (name, case); those that take long are in the slow suite if `slow` says so."""
    return [
        pytest.param(case, id=name, marks=[] if case.quick or not slow else [pytest.mark.slow])
        for name, case in cases.items()
    ]


# ---- lengths that change


class Dynamic(NamedTuple):
    """A function of tensors whose length, on some axes of each, is any number from two."""

    function: Callable
    operands: Callable  # (length) -> tuple of operands
    axes: tuple  # those of each operand that have the length
    quick: bool = False
    random: bool = False  # its output is never the same twice


def row(length):
    return (leaf(3, length),)


def row_and_masses(length):
    return leaf(3, length), masses(3, length)


def tokens(length):
    return tuple(leaf(2, 3, length, 8, seed=seed) for seed in range(3))


def tokens_and_mask(length):
    mask = normal(length, length, seed=3) > 0
    return *tokens(length), mask | torch.eye(length, dtype=torch.bool)


def a_map(name, operands=row, quick=False):
    return Dynamic(MAPS[name].function, operands, (1,) * len(operands(2)), quick)


def attends(make=lambda: fl.Tsallis(1.5), quick=False, **options):
    """Options that are functions are made from the query."""

    def function(q, k, v):
        made = {name: x(q) if callable(x) else x for name, x in options.items()}
        return fl.attention(q, k, v, make(), **made)

    return Dynamic(function, tokens, (2, 2, 2), quick, random="dropout_p" in options)


def attends_with_mask(make, quick=False):
    return Dynamic(
        lambda q, k, v, m: fl.attention(q, k, v, make(), attn_mask=m),
        tokens_and_mask,
        (2, 2, 2, (0, 1)),
        quick,
    )


def token_scale(query):
    return query.shape[-2] ** -0.5


DYNAMIC = {
    "softmax": a_map("softmax"),
    "softmax, base": a_map("softmax, base", row_and_masses),
    "softmax, temperature": a_map("softmax, temperature"),
    "sparsemax": a_map("sparsemax"),
    "sparsemax, base": a_map("sparsemax, base", row_and_masses),
    "entmax": a_map("entmax", quick=True),
    "entmax 1.2": a_map("entmax 1.2"),
    "entmax 3": a_map("entmax 3"),
    "norm": a_map("norm"),
    "budget": a_map("budget"),
    "fused": a_map("fused"),
    "loss": Dynamic(
        lambda s: fl.fenchel_young_loss(s, s.detach().softmax(-1), fl.Tsallis(1.5)), row, (1,)
    ),
    "attention: softmax": attends(fl.Shannon),
    "attention: softmax, causal": attends(fl.Shannon, is_causal=True),
    "attention: softmax, mask": attends_with_mask(fl.Shannon),
    "attention: softmax, window": attends(fl.Shannon, base=fl.priors.SlidingWindow(3)),
    "attention: softmax, ALiBi": attends(fl.Shannon, attn_mask=fl.priors.ALiBi(3)),
    "attention: softmax, softcap": attends(fl.Shannon, softcap=5.0),
    "attention: softmax, scale of the length": attends(fl.Shannon, scale=token_scale),
    "attention: entmax": attends(),
    "attention: entmax, causal": attends(is_causal=True, quick=True),
    "attention: entmax, mask": attends_with_mask(lambda: fl.Tsallis(1.5)),
    "attention: entmax, window": attends(base=fl.priors.SlidingWindow(3)),
    "attention: entmax, ALiBi": attends(attn_mask=fl.priors.ALiBi(3)),
    "attention: entmax, softcap": attends(softcap=5.0),
    "attention: entmax, scale of the length": attends(scale=token_scale, quick=True),
    "attention: entmax, dropout": attends(dropout_p=0.5),
    "attention: norm": attends(lambda: fl.Norm(2.0)),
}


def assert_as_eager(traced, case, length, gradients=True):
    """Output and gradients of what a tracer made, at this length."""
    operands = case.operands(length)
    actual, expected = traced(*operands), case.function(*operands)
    assert actual.shape == expected.shape
    if case.random:
        return
    assert_same(actual, expected)
    if gradients:
        followed = [x for x in operands if x.requires_grad]
        assert_same_gradients([actual], [expected], followed)


def assert_same(actual, expected, tolerance=1e-9):
    """Outputs, alone or several."""
    if isinstance(actual, tuple | list):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, tolerance)
        return
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_gradients(actual, expected, inputs, tolerance=1e-9):
    """Of a function of the output that treats no two entries alike."""
    for one, other in zip(actual, expected, strict=True):
        seed = torch.arange(other.numel(), dtype=other.dtype).cos().reshape(other.shape)
        gradients = (torch.autograd.grad((x * seed).sum(), inputs) for x in (one, other))
        assert_same(*map(list, gradients), tolerance)
