"""The named maps take one native pass where they can: nothing else may tell the difference."""

import math

import pytest
import torch

import fenchel as fl
from fenchel._kernels.rows import row_weights, row_weights_backward
from tests import needs

ALPHAS = [1.01, 1.2, 1.25, 1.3, 1.5, 1.7, 2.0]

pytestmark = needs.kernels("the named maps through them")


def through_solve(scores, alpha, dim=-1):
    """In torch's operations."""
    with fl.use("torch"):
        return fl.solve(scores, fl.Tsallis(alpha), dim=dim).weights


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("keys", [1, 2, 7, 8, 9, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_weights_and_gradients_are_those_of_solve(alpha, keys, spread):
    torch.manual_seed(keys)
    scores = (spread * torch.randn(5, keys, dtype=torch.float64)).requires_grad_()
    gradient = torch.randn(5, keys, dtype=torch.float64)
    weights, expected = fl.entmax(scores, alpha), through_solve(scores, alpha)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=2e-14)
    (mine,) = torch.autograd.grad(weights, scores, gradient)
    (theirs,) = torch.autograd.grad(expected, scores, gradient)
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


def test_the_native_operator_is_what_runs(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("prepared and maximised")

    monkeypatch.setattr("fenchel._solve.solve_fully", refuse)
    scores = torch.randn(3, 9)
    with fl.use("native"):
        assert fl.sparsemax(scores).equal(row_weights(scores, "tsallis", 1.0))
        assert fl.solve(scores, fl.Tsallis(2.0)).weights.equal(fl.sparsemax(scores))
    with fl.use("torch"), pytest.raises(AssertionError, match="prepared"):
        fl.sparsemax(scores)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_second_and_third_derivatives(alpha):
    torch.manual_seed(0)
    scores = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: fl.entmax(s, alpha), scores)
    assert torch.autograd.gradgradcheck(lambda s: fl.entmax(s, alpha), scores)

    def third(function):
        (first,) = torch.autograd.grad(function(scores).pow(2).sum(), scores, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), scores, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), scores)[0]

    torch.testing.assert_close(
        third(lambda s: fl.entmax(s, alpha)), third(lambda s: through_solve(s, alpha))
    )


@pytest.mark.parametrize("dim", [0, 1, 2, -2, -3])
def test_any_axis_and_any_layout(dim):
    scores = torch.randn(4, 5, 6, dtype=torch.float64)
    for layout in (scores, scores.transpose(0, 2), scores[:, ::2], scores[:1].expand(4, 5, 6)):
        weights, expected = fl.entmax(layout, 1.5, dim=dim), through_solve(layout, 1.5, dim)
        assert weights.shape == expected.shape
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precisions(dtype):
    scores = torch.randn(6, 50).to(dtype)
    weights = fl.entmax(scores, 1.5)
    assert weights.dtype == dtype
    torch.testing.assert_close(weights, through_solve(scores, 1.5))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_strange_rows(alpha):
    inf = math.inf
    scores = torch.tensor(
        [
            [0.0, 1.0, -inf, 0.5, 0.3, 0.2, 0.1, 0.0, -1.0],
            [-inf] * 9,
            [math.nan, *[1.0] * 8],
            [*[1.0] * 8, inf],
            [1e30, -1e30, *[0.0] * 7],
            [2.0] * 9,
        ]
    )
    weights, expected = fl.entmax(scores, alpha), through_solve(scores, alpha)
    torch.testing.assert_close(weights, expected, equal_nan=True)
    assert weights[2:4].isnan().all()
    assert (weights[1] == 0).all()
    leaf = scores.clone().requires_grad_()
    fl.entmax(leaf, alpha)[[0, 1, 4, 5]].pow(2).sum().backward()
    assert leaf.grad[[0, 1, 4, 5]].isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    scores = torch.randn(100, 333, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        weights = fl.entmax(scores, 1.3)
        gradient = row_weights_backward(scores, weights, "tsallis", 0.3)
    finally:
        torch.set_num_threads(before)
    assert weights.equal(fl.entmax(scores, 1.3))
    assert gradient.equal(row_weights_backward(scores, weights, "tsallis", 0.3))


def test_transforms_go_through_solve():
    scores = torch.randn(4, 7, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(fl.sparsemax)(scores), fl.sparsemax(scores))
    _, tangent = torch.func.jvp(fl.sparsemax, (scores,), (scores,))
    expected = torch.func.jvp(lambda s: through_solve(s, 2.0), (scores,), (scores,))[1]
    torch.testing.assert_close(tangent, expected)


def test_compiled():
    scores = torch.randn(4, 70, requires_grad=True)
    compiled = torch.compile(lambda s: fl.entmax(s, 1.5), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(scores), fl.entmax(scores, 1.5))
    (mine,) = torch.autograd.grad(compiled(scores).pow(2).sum(), scores)
    (theirs,) = torch.autograd.grad(fl.entmax(scores, 1.5).pow(2).sum(), scores)
    torch.testing.assert_close(mine, theirs)
