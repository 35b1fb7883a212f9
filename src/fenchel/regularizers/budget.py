"""Budget: Omega(p) = |p|^2 / 2 on 0 <= p <= 1 with sum p = k. Its map picks about k keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fenchel._kernels.budget import budget_threshold, unrolled_threshold
from fenchel._numerics import dot, exported_to_onnx, where
from fenchel.priors.measure import Base
from fenchel.regularizers.contract import (
    Curvature,
    Dual,
    Maximum,
    Regularizer,
    check_parameter,
    exactly,
    in_range,
    mass_gap,
    per_row,
    weigh_natively,
)


@dataclass(frozen=True)
class Budget(Regularizer):
    """max_p <s, p> - |p|^2 / 2 over 0 <= p <= 1, sum p = k, solved by p = clip(s - t, 0, 1).

    >>> fl.solve(scores, fl.Budget(3)).weights             # about three keys, none above one

    k: > 0, a number or a tensor that broadcasts over the rows, differentiable. A row with fewer
    than k unmasked keys is INFEASIBLE. k = 1 is sparsemax.
    """

    k: float | Tensor
    gap_is_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_parameter(self.k, "k", 0.0, strict=True, remedy="; k is the sum of a row's weights")

    def value(self, weights: Tensor, base: Base) -> Tensor:
        outside = ((weights > 0) & ~base.allowed) | (weights < 0) | (weights > 1)
        return where(~outside.any(-1), dot(weights, weights) / 2, math.inf)

    def weigh(self, scores: Tensor) -> Tensor | None:
        return None if isinstance(self.k, Tensor) else weigh_natively(scores, "budget", self.k)

    def maximize(self, scores: Tensor, base: Base) -> Maximum:
        k = per_row(self.k, scores, "k")
        count = base.allowed.sum(-1, keepdim=True)
        feasible = k <= count
        z = base.keep(scores, -math.inf).detach()
        usable = feasible & (count > 0)
        search = unrolled_threshold if exported_to_onnx() else budget_threshold
        start = where(usable, search(z, k.detach()), 0.0) if z.shape[-1] else 0.0 * k
        # The pieces are linear: with the free keys known, the threshold is a mean in the graph.
        t = _threshold_in_graph(scores, base.allowed, k, start)
        weights = where(base.allowed & usable, (scores - t).clamp(0, 1), 0.0)
        # Full and empty keys are constants; clamp would pass half a derivative at the corners.
        free = _free(scores.detach(), base.allowed, start)
        weights = torch.where(free, weights, weights.detach())
        potential = dot(scores, weights) - dot(weights, weights) / 2
        threshold = t.squeeze(-1)
        return Maximum(weights, threshold, potential, Dual(threshold), feasible.squeeze(-1))

    def curvature(self, weights: Tensor, base: Base) -> Curvature:
        free = (weights > 0) & (weights < 1)
        return Curvature.separable(free.to(weights.dtype))

    def gap(self, scores: Tensor, weights: Tensor, dual: Dual, base: Base) -> Tensor:
        """Per key (x - c)^2 / 2 + (x - c)(c - y) >= 0, y = s - t, c = clip(y, 0, 1)."""
        x = exactly(weights)
        y = exactly(scores) - exactly(dual.offset).unsqueeze(-1)
        c = y.clamp(0, 1)
        terms = where(base.allowed, (x - c) ** 2 / 2 + (x - c) * (c - y), 0.0)
        outside = ((x > 0) & ~base.allowed) | (x < 0) | (x > 1)
        total = terms.sum(-1) + mass_gap(x, exactly(self.total(scores)))
        return where(~outside.any(-1), total, math.inf)

    def anchor(self, scores: Tensor, base: Base) -> Tensor:
        """The ceil(k)-th largest score s: at t = s - 1 the keys up to it are full, at t = s those
        before it at most, so that the threshold lies within one of it."""
        if scores.shape[-1] == 0:
            return scores.new_full((*scores.shape[:-1], 1), -math.inf)
        ranked = base.keep(scores, -math.inf).sort(-1, descending=True).values
        last = (base.allowed.sum(-1, keepdim=True) - 1).clamp(min=0)
        rank = per_row(self.k, scores, "k").detach().nan_to_num(1.0).ceil().long() - 1
        return ranked.gather(-1, torch.minimum(rank.clamp(min=0), last))

    def total(self, like: Tensor) -> Tensor:
        return per_row(self.k, like, "k").squeeze(-1)

    def valid_rows(self, like: Tensor) -> Tensor:
        return in_range(per_row(self.k, like, "k"), 0.0, strict=True)


def _free(z: Tensor, allowed: Tensor, t: Tensor) -> Tensor:
    """Keys strictly between nothing and one."""
    return allowed & (z > t) & (z - 1 < t)


def _threshold_in_graph(scores: Tensor, allowed: Tensor, k: Tensor, start: Tensor) -> Tensor:
    free = _free(scores.detach(), allowed, start)
    full = allowed & (scores.detach() - 1 >= start)
    count = free.sum(-1, keepdim=True)
    inside = where(free, scores, 0.0).sum(-1, keepdim=True)
    mean = (inside + full.sum(-1, keepdim=True) - k) / count.clamp(min=1)
    return torch.where(count > 0, mean, start)
