"""Tolerances, each with its reason, and the assertions that use them."""

from __future__ import annotations

import torch
from torch import Tensor

import fenchel as fl

from .families import Family

# A weight is a few dozen rounded operations, a row's sum sqrt(n) more of them.
_ROUNDINGS = 64.0
# Largest slope of any tested map on its Lipschitz part, with masses up to 3 and temperatures down
# to 0.3: nu^(alpha-1) p^(2-alpha) / temperature, or p^(2-alpha)|p|^(alpha-1)/(alpha-1) summed.
_SLOPE = 64.0

# The default tolerance of `Fused` on a grid: gap relative to |s - mean|^2.
GRID_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-7}


def rounding(like: Tensor, size: float | Tensor = 1.0) -> float:
    """Error of a row computed from numbers of this size."""
    reach = max(1.0, float(torch.as_tensor(size).max()))
    return _ROUNDINGS * torch.finfo(like.dtype).eps * like.shape[-1] ** 0.5 * reach


def spread(scores: Tensor) -> float:
    """Largest distance of a score from its row's maximum: what centring leaves."""
    return float((scores.amax(-1) - scores.amin(-1)).max())


def weight_error(family: Family, scores: Tensor) -> float:
    """How far two computations of the same weights may be apart.

    Thresholds are rounded relative to the centred scores; the budget's and the fused maps' lie
    anywhere among them, the others within one temperature times log n of the maximum. The grid is
    iterated to a gap of its tolerance times |s - mean|^2, and weights are within sqrt(2 gap).
    """
    wide = not family.symmetric or family.name.startswith("budget")
    error = rounding(scores, spread(scores) if wide else 8.0)
    if family.iterated:
        error += 2 * (2 * GRID_TOLERANCE[scores.dtype] * _variance(scores)) ** 0.5
    return error


def answer_to(family: Family, change: float) -> float:
    """How far weights may move when every score moves by at most `change`."""
    return _SLOPE * change**family.exponent


def gap_limit(family: Family, scores: Tensor) -> float:
    """1e-12 temperatures in float64; in float32 1e-9 plus the square of a rounded threshold, for a
    gap is quadratic in the error of the weights. The grid's documented tolerance comes on top."""
    precise = scores.dtype == torch.float64
    limit = (1e-12 if precise else 1e-9) * max(family.temperature, 1.0)
    limit += scores.shape[-1] * (4 * torch.finfo(scores.dtype).eps * spread(scores)) ** 2
    return limit + (4 * GRID_TOLERANCE[scores.dtype] * _variance(scores) if family.iterated else 0)


def _variance(scores: Tensor) -> float:
    return float((scores - scores.mean(-1, True)).square().sum(-1).max())


def assert_near(actual: Tensor, expected: Tensor, error: float) -> None:
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    worst = float((actual - expected).abs().max()) if actual.numel() else 0.0
    assert worst <= error, f"off by {worst:.3e}, allowed {error:.3e}\n{actual}\n{expected}"


def assert_solved(solution: fl.Solution) -> None:
    assert bool((solution.status == fl.Status.OK).all()), solution.explain()


def assert_feasible(family: Family, scores: Tensor, mass: Tensor, solution: fl.Solution) -> None:
    p, total = solution.weights, family.total(scores, mass)
    assert_solved(solution)
    assert bool((p >= 0).all()), f"negative weight {p.min()}"
    assert bool((p[..., mass == 0] == 0).all()), "weight on a masked key"
    assert_near(p.sum(-1), torch.full_like(p.sum(-1), total), rounding(scores, total))


def assert_not_above(lower: Tensor, upper: Tensor, error: float) -> None:
    excess = float((lower - upper).max())
    assert excess <= error, f"exceeds by {excess:.3e}, allowed {error:.3e}\n{lower}\n{upper}"
