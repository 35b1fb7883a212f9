"""What the entmax package promises of its maps, asked of ours."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import gradcheck

from . import entmax_shim as ours

ALPHAS = [1.2, 1.5, 1.75, 2.0, 2.25]
MAPS = {
    "sparsemax": ours.sparsemax,
    "sparsemax, top 3": partial(ours.sparsemax, k=3),
    "entmax15": ours.entmax15,
    "entmax15, top 3": partial(ours.entmax15, k=3),
    "sparsemax_bisect": ours.sparsemax_bisect,
    "entmax_bisect 1.25": partial(ours.entmax_bisect, alpha=1.25),
    "entmax_bisect 2.25": partial(ours.entmax_bisect, alpha=2.25),
    "normmax_bisect": ours.normmax_bisect,
    "budget_bisect": partial(ours.budget_bisect, budget=1.5),
}
every_map = pytest.mark.parametrize("name", MAPS)


def scores(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """A few dozen roundings of a weight."""
    limit = 64 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=limit)


@pytest.mark.parametrize("scale", [1e-5, 0.5, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_search_and_bisection_are_the_same_map(dtype: torch.dtype, scale: float) -> None:
    x = scores(4, 6, scale=scale).to(dtype)
    assert_close(ours.sparsemax_bisect(x), ours.sparsemax(x))
    assert_close(ours.entmax_bisect(x, alpha=2.0), ours.sparsemax(x))
    assert_close(ours.entmax_bisect(x, alpha=1.5), ours.entmax15(x))
    assert_close(ours.budget_bisect(x, budget=1), ours.sparsemax(x))


@pytest.mark.parametrize("scale", [1e-5, 0.5, 1e4])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("k", [1, 3, 30])
def test_partial_sorting_changes_nothing(dim: int, scale: float, k: int) -> None:
    x = scores(3, 4, 5, scale=scale)
    for function in (ours.sparsemax, ours.entmax15):
        assert torch.equal(function(x, dim=dim, k=k), function(x, dim=dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normmax_by_hand(dtype: torch.dtype) -> None:
    """For alpha = 2 the weights are proportional to s - t of Euclidean length one: with (3, 4, 12)
    / 13 the threshold is 0, and a score at it or below gets nothing."""
    x = torch.tensor([3, 4, 12, 0, -1], dtype=dtype) / 13
    expected = torch.tensor([3, 4, 12, 0, 0], dtype=dtype) / 19
    assert_close(ours.normmax_bisect(x, alpha=2.0, dim=0), expected)


def test_normmax_of_a_large_alpha_is_nearly_uniform() -> None:
    """|p|_inf is the limit: weights 1 / m on the m keys with sum [s - t]_+ = 1. For alpha = 1000
    a weight is (s - t)^(1/999), within log(1 / 0.06) / 999 < 3e-3 of one."""
    p = ours.normmax_bisect(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64), 1000.0)
    assert (p > 0).tolist() == [False, False, True, True, True]
    torch.testing.assert_close(p[2:], torch.full((3,), 1 / 3, dtype=p.dtype), rtol=3e-3, atol=0)


@pytest.mark.parametrize(
    ("row", "budget", "weights"),
    [
        ([0.0, 0.5, 3.0], 2, [0.25, 0.75, 1.0]),  # the best is full, the rest share one
        ([0.0, 0.5, 3.0], 3, [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0, 0.0], 3, [0.75, 0.75, 0.75, 0.75]),
        ([0.0, 4.0, 5.0], 2, [0.0, 1.0, 1.0]),
        ([0.0, 4.0, 5.0], 1.5, [0.0, 0.5, 1.0]),
    ],
)
def test_budget_by_hand(row: list[float], budget: float, weights: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float64)
    assert_close(ours.budget_bisect(x, budget=budget, dim=0), torch.tensor(weights))


@every_map
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradient_in_the_scores(name: str, dim: int) -> None:
    x = scores(2, 3, 4, seed=dim).requires_grad_()
    assert gradcheck(partial(MAPS[name], dim=dim), (x,))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_in_alpha(alpha: float) -> None:
    x = scores(3, 6).requires_grad_()
    a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    assert gradcheck(ours.entmax_bisect, (x, a))


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 5.0, 10.0])
def test_gradient_of_normmax_in_alpha(alpha: float) -> None:
    x = scores(3, 6).requires_grad_()
    a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    assert gradcheck(ours.normmax_bisect, (x, a))


@pytest.mark.parametrize("budget", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
def test_gradient_of_a_whole_budget(budget: float) -> None:
    x = scores(3, 6).requires_grad_()
    assert gradcheck(partial(ours.budget_bisect, budget=budget), (x,))


@pytest.mark.parametrize("budget", [0.5, 1.3, 2.6, 3.3, 4.9])
def test_gradient_in_the_budget(budget: float) -> None:
    """Not a whole number: there a row may be all zeros and ones, and the budget has a kink."""
    x = scores(3, 6).requires_grad_()
    k = torch.tensor(budget, dtype=torch.float64, requires_grad=True)
    assert gradcheck(ours.budget_bisect, (x, k))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_one_alpha_for_each_row_of_any_axis(dim: int) -> None:
    shape = [3, 4, 2, 5]
    x = scores(*shape, seed=dim)
    alpha_shape = [1 if axis == dim else size for axis, size in enumerate(shape)]
    alpha = 1 + 1.5 * scores(*alpha_shape, seed=9).abs()
    p = ours.entmax_bisect(x, alpha=alpha, dim=dim)
    rows = [[slice(None)] if axis == dim else range(size) for axis, size in enumerate(shape)]
    for index in product(*rows):
        assert_close(p[index], ours.entmax_bisect(x[index], alpha=alpha[index].item()))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradient_in_one_alpha_for_each_row(dim: int) -> None:
    x = scores(2, 2, 3, seed=dim).requires_grad_()
    alpha_shape = [1 if axis == dim else size for axis, size in enumerate(x.shape)]
    alpha = (1.1 + scores(*alpha_shape, seed=5).abs().clamp(max=1.5)).requires_grad_()
    assert gradcheck(partial(ours.entmax_bisect, dim=dim), (x, alpha))
    assert gradcheck(partial(ours.normmax_bisect, dim=dim), (x, alpha))


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_keys_get_nothing_and_change_nothing(name: str, dtype: torch.dtype) -> None:
    x = scores(2, 6, seed=42).to(dtype)
    masked = x.clone()
    masked[:, 3:] = -torch.inf
    p = MAPS[name](masked)
    assert bool((p[:, 3:] == 0).all())
    assert_close(p[:, :3], MAPS[name](x[:, :3]))


@every_map
def test_masked_keys_have_a_zero_gradient(name: str) -> None:
    x = scores(2, 6, seed=42)
    x[:, 3:] = -torch.inf
    x.requires_grad_()
    (MAPS[name](x) * scores(2, 6)).sum().backward()
    assert bool(x.grad.isfinite().all())
    assert bool((x.grad[:, 3:] == 0).all())
    assert bool((x.grad[:, :3] != 0).any())


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.75])
def test_alpha_below_one_is_refused(alpha: float) -> None:
    """entmax answers it; we say that we do not."""
    with pytest.raises(ValueError, match="alpha must be finite and >= 1"):
        ours.entmax_bisect(scores(2, 3), alpha=alpha)
