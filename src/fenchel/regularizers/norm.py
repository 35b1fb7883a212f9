"""Norm: Omega(p) = |p|_alpha. Its map is normmax (Blondel, Martins and Niculae, 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fenchel._implicit import Solve, attach
from fenchel._kernels.norm import norm_threshold, unrolled_threshold
from fenchel._numerics import dot, exported_to_onnx, where
from fenchel.priors.measure import Base
from fenchel.regularizers.contract import (
    Curvature,
    Dual,
    Maximum,
    Regularizer,
    bregman_power,
    check_parameter,
    exactly,
    in_range,
    mass_gap,
    normalize,
    per_row,
    weigh_natively,
)


@dataclass(frozen=True)
class Norm(Regularizer):
    """max_p <s, p> - |p|_alpha, solved by p ~ [s - t]_+^(1/(alpha-1)) with |[s - t]_+|_q = 1.

    >>> fl.solve(scores, fl.Norm(2.0)).weights             # tends to equal weights on few keys

    alpha: > 1, a number or a tensor that broadcasts over the rows, differentiable.
    """

    alpha: float | Tensor
    gap_is_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        remedy = "; at alpha = 1 the norm is constant on the simplex"
        check_parameter(self.alpha, "alpha", 1.0, strict=True, remedy=remedy)

    def value(self, weights: Tensor, base: Base) -> Tensor:
        outside = ((weights > 0) & ~base.allowed).any(-1)
        return where(~outside, _norm(weights, 1 + self._eps(weights)).squeeze(-1), math.inf)

    def weigh(self, scores: Tensor) -> Tensor | None:
        return (
            None
            if isinstance(self.alpha, Tensor)
            else weigh_natively(scores, "norm", self.alpha - 1)
        )

    def maximize(self, scores: Tensor, base: Base) -> Maximum:
        eps = self._eps(scores)
        search = unrolled_threshold if exported_to_onnx() else norm_threshold
        t = search(base.keep(scores, -math.inf).detach(), eps.detach())
        t = attach(t, partial(_linearise, base.allowed), scores, eps)
        y, on = _above(scores, base.allowed, t)
        weights = normalize(where(on, y.pow(1 / eps), 0.0))
        potential = dot(scores, weights) - self.value(weights, base)
        threshold = t.squeeze(-1)
        return Maximum(weights, threshold, potential, Dual(threshold))

    def curvature(self, weights: Tensor, base: Base) -> Curvature:
        eps = self._eps(weights)
        on = weights > 0
        p = where(on, weights, 1.0)
        # p = y^(q - 1) / X with y = (p / |p|)^eps and q - 1 = 1/eps, so that
        # dp/dy = (q - 1) p^(1 - eps) |p|^eps.
        size = where(on.any(-1, keepdim=True), _norm(weights, 1 + eps), 1.0)
        response = where(on, p.pow(1 - eps) * size.pow(eps) / eps, 0.0)
        return NormCurvature(response, weights)

    def gap(self, scores: Tensor, weights: Tensor, dual: Dual, base: Base) -> Tensor:
        """|p| - <s - t, p> as |p| times Young's terms p^alpha/alpha + y^q/q - p y, each >= 0."""
        p, s = exactly(weights), exactly(scores)
        eps = self._eps(s).detach()
        alpha = 1 + eps
        distance = s - exactly(dual.offset).unsqueeze(-1)
        size = _norm(p, alpha)
        unit = p / where(size > 0, size, 1.0)
        y = where(base.allowed, distance.clamp(min=0), 0.0)
        y = y / where(y.sum(-1, keepdim=True) > 0, _norm(y, alpha / eps), 1.0)
        optimum = y.pow(1 / eps)
        on = optimum > 0
        near = optimum.pow(alpha) * eps * bregman_power(unit / where(on, optimum, 1.0), eps)
        young = torch.where(on, near, unit.pow(alpha) / alpha)
        beyond = p * (-distance).clamp(min=0)
        outside = ((p > 0) & ~base.allowed).any(-1)
        total = size.squeeze(-1) * young.sum(-1) + beyond.sum(-1) + mass_gap(p)
        return where(~outside, total, math.inf)

    def valid_rows(self, like: Tensor) -> Tensor:
        return in_range(self._eps(like), 0.0, strict=True)

    def _eps(self, like: Tensor) -> Tensor:
        """alpha - 1 as a column, subtracted before rounding to the precision of `like`."""
        return per_row(self.alpha - 1, like, "alpha")


class NormCurvature(Curvature):
    """dp = (I - p 1^T) diag(r) (I - 1 p^T) ds: the threshold moves by <p, ds>, so the escort is p
    itself, and the normalisation of p takes the mean response out once more."""

    def apply(self, direction: Tensor) -> Tensor:
        moved = self.response * self.advantage(direction)
        return moved - self.escort * moved.sum(-1, keepdim=True)


def _norm(p: Tensor, alpha: Tensor) -> Tensor:
    """|p|_alpha (..., 1), relative to the largest entry so that small powers do not underflow."""
    if p.shape[-1] == 0:
        return p.new_zeros((*p.shape[:-1], 1))
    peak = p.detach().amax(-1, keepdim=True)
    on = p > 0
    ratio = where(on, p, 1.0) / where(peak > 0, peak, 1.0)
    total = where(on, ratio.pow(alpha), 0.0).sum(-1, keepdim=True)
    return where(peak > 0, peak * where(peak > 0, total, 1.0).pow(1 / alpha), 0.0)


def _above(scores: Tensor, allowed: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """[s - t]_+ with ones where it is zero, and where it is not."""
    on = allowed & (scores > t)
    return where(on, scores - t, 1.0), on


def _linearise(allowed: Tensor, t: Tensor, scores: Tensor, eps: Tensor) -> tuple[Tensor, Solve]:
    """sum [s - t]_+^q - 1, and the solution of what the threshold changes in it."""
    q = (1 + eps) / eps
    y, on = _above(scores, allowed, t)

    def solve(right: Tensor) -> Tensor:
        slope = where(on, q * y.pow(q - 1), 0.0).sum(-1, keepdim=True)
        alive = slope > 0
        return where(alive, right / where(alive, slope, 1.0), 0.0)

    return where(on, y.pow(q), 0.0).sum(-1, keepdim=True) - 1, solve
