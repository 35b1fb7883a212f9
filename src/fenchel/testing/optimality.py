"""An answer certifies itself: its gap is below what rounding explains."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fenchel._numerics import compute_dtype
from fenchel.solution import Solution, Status


def gap_tolerance(dtype: torch.dtype) -> float:
    """Largest gap, relative to the temperature, that an exact answer may show."""
    return {torch.float64: 1e-12, torch.float32: 1e-9}.get(dtype, torch.finfo(dtype).eps ** 2 * 8)


def assert_optimal(solution: Solution) -> None:
    """Every row is OK or EMPTY and its gap is within `gap_tolerance`, else AssertionError."""
    wrong = (solution.status != Status.OK.value) & (solution.status != Status.EMPTY.value)
    assert not wrong.any(), solution.explain()
    tau = getattr(solution.regularizer, "temperature", 1.0)
    relative = solution.gap / tau
    bound = gap_tolerance(_precision(solution))
    assert (relative <= bound).all(), (
        f"largest gap / temperature is {relative.max().item():.3g}, allowed {bound:.3g}"
    )


def _precision(solution: Solution) -> torch.dtype:
    given = solution.weights.dtype
    return compute_dtype(given) if given in (torch.float32, torch.float64) else given


def perturbed(solution: Solution, size: float) -> Solution:
    """The same solution with `size` of weight moved from the heaviest key to the next (lost, in
    a row of one key): a wrong answer that is still a distribution."""
    p: Tensor = solution.weights.detach().movedim(solution.problem.axis, -1)
    order = p.argsort(-1, descending=True)
    move = torch.zeros_like(p).scatter(-1, order[..., :1], -size)
    move = move.scatter(-1, order[..., 1:2], size)
    return replace(solution, weights=(p + move).movedim(-1, solution.problem.axis))
