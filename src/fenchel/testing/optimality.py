"""An answer certifies itself: its gap is below what rounding explains."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fenchel._solution import Solution, Status, gap_tolerance

__all__ = ["assert_optimal", "gap_tolerance", "perturbed"]


def assert_optimal(solution: Solution) -> None:
    """Every row is OK or EMPTY, which its gap decides, else AssertionError."""
    wrong = (solution.status != Status.OK.value) & (solution.status != Status.EMPTY.value)
    excess = (solution.gap - solution.tolerance).max().item() if wrong.any() else 0.0
    assert not wrong.any(), f"{solution.explain()}; largest gap above its tolerance: {excess:.3g}"


def perturbed(solution: Solution, size: float) -> Solution:
    """The same solution with `size` of weight moved from the heaviest key to the next (lost, in
    a row of one key): a wrong answer that is still a distribution."""
    p: Tensor = solution.weights.detach().movedim(solution.problem.axis, -1)
    order = p.argsort(-1, descending=True)
    move = torch.zeros_like(p).scatter(-1, order[..., :1], -size)
    move = move.scatter(-1, order[..., 1:2], size)
    return replace(solution, weights=(p + move).movedim(-1, solution.problem.axis))
