"""Shannon: Omega(p) = tau * sum p log(p / nu). Its map is softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fenchel._implicit import tilt
from fenchel._numerics import at_hand, readable, where
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
    leading_score,
    mass_gap,
    per_row,
)


@dataclass(frozen=True)
class Shannon(Regularizer):
    """max_p <s, p> - tau * sum p log(p / nu), solved by p = nu exp(s / tau) / Z.

    >>> fl.solve(scores, fl.Shannon(temperature=0.5)).weights

    temperature: a number, or a tensor that broadcasts over the rows.
    """

    temperature: float | Tensor = 1.0
    takes_base: ClassVar[bool] = True
    gap_is_loss: ClassVar[bool] = True
    full_support: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_parameter(
            self.temperature,
            "temperature",
            0.0,
            strict=True,
            remedy="; for the hard maximum use torch.argmax",
        )

    def value(self, weights: Tensor, base: Base) -> Tensor:
        tau = per_row(self.temperature, weights, "temperature").squeeze(-1)
        on = weights > 0
        log_ratio = where(on, weights, 1.0).log() - base.safe_log()
        outside = (on & ~base.allowed).any(-1)
        return where(~outside, tau * where(on, weights * log_ratio, 0.0).sum(-1), math.inf)

    def weigh(self, scores: Tensor) -> Tensor | None:
        if isinstance(self.temperature, Tensor) or self.temperature != 1:
            return None  # scores are divided after their anchor is taken off, not before
        if not readable(scores):
            return None
        if not at_hand(scores):
            return _softmax_unseen(scores)
        weights = torch.softmax(scores, -1)
        first = weights[..., 0]  # torch makes a whole row NaN, or nothing of it
        return None if bool(first.isnan().any()) else weights

    def maximize(self, scores: Tensor, base: Base) -> Maximum:
        tau = per_row(self.temperature, scores, "temperature")
        logits = clamp_scaled(scores / tau)
        weights, log_total = _softmax(logits, base)
        potential = (tau * log_total).squeeze(-1)
        threshold = torch.full_like(potential, -math.inf)
        return Maximum(weights, threshold, potential, Dual(potential))

    def curvature(self, weights: Tensor, base: Base) -> Curvature:
        tau = per_row(self.temperature, weights, "temperature")
        return Curvature.separable(weights / tau)

    def gap(self, scores: Tensor, weights: Tensor, dual: Dual, base: Base) -> Tensor:
        """tau KL(p | p*), key by key."""
        tau = exactly(per_row(self.temperature, scores, "temperature"))
        p, offset = exactly(weights), exactly(dual.offset).unsqueeze(-1)
        log_mass = base.safe_log()
        log_optimum = (exactly(scores) - offset) / tau
        if isinstance(log_mass, Tensor):
            log_optimum = log_optimum + exactly(log_mass)
        return (tau.squeeze(-1)) * (kl_terms(p, log_optimum, base.allowed).sum(-1) + mass_gap(p))

    def anchor(self, scores: Tensor, base: Base) -> Tensor:
        """The score of the heaviest key: a large score of hardly any mass decides nothing."""
        if base.plain:
            return super().anchor(scores, base)
        tau = per_row(self.temperature, scores, "temperature")
        return leading_score(scores, scores / tau + base.safe_log(), base.allowed)

    def scale(self, like: Tensor, base: Base) -> Tensor:
        return per_row(self.temperature, like, "temperature").squeeze(-1)

    def valid_rows(self, like: Tensor) -> Tensor:
        return in_range(per_row(self.temperature, like, "temperature"), 0.0, strict=True)


def kl_terms(p: Tensor, log_optimum: Tensor, allowed: Tensor) -> Tensor:
    """p log(p / g) - p + g for each key, g = exp(log_optimum); +inf for weight on a masked key."""
    optimum = where(allowed, log_optimum.exp(), 0.0)
    ratio = p / where(optimum > 0, optimum, 1.0)
    near = (optimum > 0) & (ratio < 1e30)
    close = optimum * bregman_power(where(near, ratio, 1.0), 0.0)
    # Far above an optimum that may underflow: p (L - 1 + exp(-L)) with L = log(p / g).
    log_ratio = where(p > 0, p, 1.0).log() - log_optimum
    far = where(p > 0, p * (log_ratio + torch.expm1(-log_ratio)), 0.0)
    return where((allowed & (p >= 0)) | (p == 0), torch.where(near, close, far), math.inf)


def clamp_scaled(scores: Tensor) -> Tensor:
    """Keep scores / temperature finite: beyond this a key has no weight in any family."""
    limit = torch.finfo(scores.dtype).max ** 0.5
    return scores.clamp(-limit, limit)


def _softmax_unseen(scores: Tensor) -> Tensor:
    """Where nobody looks whether a row is empty (zeros) or has no answer (NaN, no gradient)."""
    top = scores.detach().amax(-1, keepdim=True)  # NaN where the row has one
    solvable = top.isfinite()
    other = torch.where(top == -math.inf, 0.0, math.nan).to(scores.dtype)
    return torch.where(solvable, torch.softmax(where(solvable, scores, 0.0), -1), other)


def _softmax(logits: Tensor, base: Base) -> tuple[Tensor, Tensor]:
    """nu exp(logits) / Z and log Z (..., 1); zeros and 0 where a row allows nothing."""
    if base.whole:
        return torch.softmax(logits, -1), torch.logsumexp(logits, -1, keepdim=True)
    if base.mass is not None:
        return tilt(logits, base.mass)
    masked = where(base.allowed, logits + base.safe_log(), torch.finfo(logits.dtype).min)
    log_total = where(base.alive, torch.logsumexp(masked, -1, keepdim=True), 0.0)
    return where(base.allowed, torch.softmax(masked, -1), 0.0), log_total
