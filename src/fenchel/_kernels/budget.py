"""The threshold of the budgeted projection: sum clip(z - t, 0, 1) = k, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._kernels.operands import MOST_KEYS
from fenchel._kernels.operators import row_operator


@row_operator("budget_threshold", columns=1)
def budget_threshold(scores: Tensor, budget: Tensor) -> Tensor:
    """t (..., 1): the largest with sum clip(z - t, 0, 1) >= k. Dead keys are at -inf."""
    return _search(scores, budget, (2 * scores.shape[-1]).bit_length())


def unrolled_threshold(scores: Tensor, budget: Tensor) -> Tensor:
    """`budget_threshold` in steps whose number does not depend on the number of keys."""
    return _search(scores, budget, MOST_KEYS.bit_length() + 1)


def _search(scores: Tensor, budget: Tensor, halvings: int) -> Tensor:
    """The sum is piecewise linear and falls with t; its corners are z and z - 1. A binary search
    over the sorted corners finds the piece that holds k, and the piece is solved in closed form:
    finite, and exact whatever the range of the scores."""
    rows = torch.broadcast_shapes(scores.shape[:-1], budget.shape[:-1])
    z, k = scores.expand(*rows, -1), budget.expand(*rows, 1)
    corners = torch.cat([z, z - 1], -1).sort(-1, descending=True).values
    low = torch.zeros(k.shape, dtype=torch.long, device=z.device)  # sum < k at this corner
    live = (z > -torch.inf).sum(-1, keepdim=True)
    high = (2 * live - 1).clamp(min=0)  # sum = live count >= k, if feasible
    for _ in range(halvings):
        middle = (low + high) // 2
        enough = _fill(z, corners.gather(-1, middle)) >= k
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return _solve_piece(z, k, corners.gather(-1, low), corners.gather(-1, high))


def _fill(z: Tensor, t: Tensor) -> Tensor:
    return (z - t).clamp(0, 1).sum(-1, keepdim=True)


def _solve_piece(z: Tensor, k: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """Between two neighbouring corners the free keys are those strictly inside (0, 1)."""
    full = z - 1 >= upper
    free = (z > lower) & ~full
    count = free.sum(-1, keepdim=True)
    inside = torch.where(free, z, 0.0).sum(-1, keepdim=True)
    t = (inside + full.sum(-1, keepdim=True) - k) / count.clamp(min=1)
    return torch.where(count > 0, torch.clamp(t, lower, upper), lower)
