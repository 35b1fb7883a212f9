"""Tsallis: Omega(p) = tau * sum nu omega(p / nu), omega(x) = (x^alpha - x)/(alpha (alpha - 1)).

Its map is alpha-entmax (Peters, Niculae and Martins, 2019): softmax at alpha = 1, sparsemax at 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fenchel._numerics import dot, expm1_ratio, log1p_ratio, masked_max, where
from fenchel.kernels.tsallis import tsallis_offset
from fenchel.priors import Base
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
    per_row,
)
from fenchel.regularizers.shannon import Shannon, clamp_scaled, exponent_limit, kl_terms


@dataclass(frozen=True)
class Tsallis(Regularizer):
    """max_p <s, p> - tau * sum nu omega(p / nu), omega(x) = (x^alpha - x)/(alpha (alpha - 1)).

    >>> fl.solve(scores, fl.Tsallis(1.5)).weights          # exact zeros

    alpha: >= 1, a number or a tensor that broadcasts over the rows; the larger, the sparser.
    temperature: likewise, > 0. Both are differentiable; at alpha = 1 from the right.
    """

    alpha: float | Tensor
    temperature: float | Tensor = 1.0
    takes_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        remedy = "; for alpha < 1 the map has full support and is not implemented"
        check_parameter(self.alpha, "alpha", 1.0, remedy=remedy)
        Shannon(self.temperature)  # the same check, once

    def value(self, weights: Tensor, base: Base) -> Tensor:
        eps = self._eps(weights)
        tau = per_row(self.temperature, weights, "temperature").squeeze(-1)
        on = weights > 0
        log_ratio = where(on, weights, 1.0).log() - base.safe_log()
        # nu omega(p / nu) = p ((p / nu)^(alpha - 1) - 1) / (alpha (alpha - 1))
        power = log_ratio * expm1_ratio(eps * log_ratio)
        total = where(on, weights * power / (1 + eps), 0.0).sum(-1)
        outside = (on & ~base.allowed).any(-1)
        return where(~outside, tau * total, math.inf)

    def maximize(self, scores: Tensor, base: Base) -> Maximum:
        if self._is_softmax:
            return Shannon(self.temperature).maximize(scores, base)
        eps = self._eps(scores)
        alpha = 1 + eps
        tau = per_row(self.temperature, scores, "temperature")
        base, log_scale = _normalise(base)
        # nu = c nu' is the measure nu' at temperature tau c^(1 - alpha); masses of any size then
        # meet in one range. At alpha = 1 the scale only shifts the potential.
        scaled_tau = _finite_positive(tau * (-eps * log_scale).exp())
        rows = _Rows.of(scores, base, eps, scaled_tau, self._static_eps)
        weights, u = rows.weights()
        # <s, p> - tau Omega(p) = A + (1 - 1/alpha) tau <p, u>, u = (s - A)/tau (CLAIMS F-E3.7)
        mean = (1 - 1 / alpha) * scaled_tau * dot(weights, u).unsqueeze(-1)
        shift = log_scale * expm1_ratio(-eps * log_scale) * tau / alpha
        potential = (rows.normalizer() + mean + shift).squeeze(-1)
        return Maximum(weights, rows.threshold().squeeze(-1), potential, rows.dual())

    def curvature(self, weights: Tensor, base: Base) -> Curvature:
        eps = self._eps(weights)
        tau = per_row(self.temperature, weights, "temperature")
        on = weights > 0
        log_ratio = where(on, weights, 1.0).log() - base.safe_log()
        # nu / omega''(p / nu) = nu (p / nu)^(2 - alpha) = p (p / nu)^(1 - alpha)
        response = weights * (-eps * log_ratio).exp() / tau
        return Curvature.separable(where(on, response, 0.0))

    def gap(self, scores: Tensor, weights: Tensor, dual: Dual, base: Base) -> Tensor:
        """Sum over keys of omega(x) + omega*(y) - x y >= 0 at the answer's own multiplier."""
        if self._is_softmax:
            return Shannon(self.temperature).gap(scores, weights, dual, base)
        eps = exactly(self._eps(scores))
        tau = exactly(per_row(self.temperature, scores, "temperature"))
        base = Base(base.allowed, _maybe_exactly(base.mass), _maybe_exactly(base.log_mass))
        p = exactly(weights)
        base, log_scale = _normalise(base)
        scaled_tau = _finite_positive(tau * (-eps * log_scale).exp())
        u = (exactly(scores) - exactly(dual.offset).unsqueeze(-1)) / scaled_tau
        keys = scaled_tau.squeeze(-1) * _fenchel_young_terms(p, u, eps, base).sum(-1)
        return keys + tau.squeeze(-1) * mass_gap(p)

    def valid_rows(self, like: Tensor) -> Tensor:
        good = in_range(per_row(self.alpha, like, "alpha"), 1.0)
        return good & Shannon(self.temperature).valid_rows(like)

    @property
    def _is_softmax(self) -> bool:
        return not isinstance(self.alpha, Tensor) and self.alpha == 1

    @property
    def _static_eps(self) -> float | None:
        return None if isinstance(self.alpha, Tensor) else float(self.alpha) - 1

    def _eps(self, like: Tensor) -> Tensor:
        """alpha - 1 as a column, subtracted before rounding to the precision of `like`."""
        if self._static_eps is not None:
            return per_row(self._static_eps, like, "alpha")
        return per_row(self.alpha, like, "alpha") - 1


class _Rows(NamedTuple):
    """Prepared rows with their offset: y = 1 + eps (s - a)/tau, or eps (s - t)/tau where
    alpha > 2 (see kernels/tsallis.py for why); p = nu y^(1/eps) on y > 0."""

    scores: Tensor
    base: Base
    eps: Tensor
    tau: Tensor
    static_eps: float | None  # eps as a number where it is one: cheaper formulas
    centre: Tensor
    rest: Tensor

    @classmethod
    def of(
        cls, scores: Tensor, base: Base, eps: Tensor, tau: Tensor, static_eps: float | None
    ) -> _Rows:
        """Search the offset outside the graph, then take two Newton steps inside it.

        The steps change the value by rounding only. Each one doubles the order of the
        derivatives that are exact (Newton's error is quadratic), so that two give three orders,
        in reverse and forward mode and under every transform, without a formula for any.
        """
        live = base.keep(scores, -math.inf).detach()
        log_mass = base.log()
        log_mass = None if log_mass is None else log_mass.detach()
        centre, rest = tsallis_offset(live, log_mass, eps.detach(), tau.detach())
        rows = cls(scores, base, eps, tau, static_eps, centre, rest)
        return rows._newton()._newton()

    @property
    def steep(self) -> Tensor | bool:
        """Rows with alpha > 2, whose offset is the threshold itself."""
        return self.eps > 1 if self.static_eps is None else self.static_eps > 1

    def _newton(self) -> _Rows:
        p, y, _ = self._parts()
        alive = self.base.alive
        slope = where(alive, (p / y).sum(-1, keepdim=True), 1.0)
        step = where(alive, self.tau * (p.sum(-1, keepdim=True) - 1) / slope, 0.0)
        return self._replace(rest=self.rest + step)

    def weights(self) -> tuple[Tensor, Tensor]:
        """p, and u = (s - A)/tau on the support (0 elsewhere)."""
        p, _, u = self._parts()
        return p, u

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """p, y (1 off the support), u."""
        distance = clamp_scaled(((self.scores - self.centre) - self.rest) / self.tau)
        x = self.eps * distance
        steep = self.steep
        y = _choose(steep, x, 1 + x)
        on = y > 0 if self.base.whole else (y > 0) & self._reachable()
        y = where(on, y, 1.0)
        x, distance = where(on, x, 0.0), where(on, distance, 0.0)
        p = where(on, self._weigh(x, y, distance), 0.0)
        return p, y, _choose(steep, (y - 1) / where(self.eps > 0, self.eps, 1.0), distance)

    def _reachable(self) -> Tensor:
        if self.base.mass is None:
            return self.base.allowed
        # A key of zero mass gets no weight, but has a derivative in its mass.
        return self.base.allowed | (self.base.mass == 0)

    def _weigh(self, x: Tensor, y: Tensor, distance: Tensor) -> Tensor:
        """nu y^(1/eps), with x = y - 1 (not steep) or y (steep) and distance = x / eps."""
        if self.base.plain and self.static_eps == 1.0:
            return y
        if self.base.plain and self.static_eps == 0.5:
            return y * y
        exponent = self._log_power(x, y, distance)
        if self.base.mass is None:
            return (exponent + self.base.safe_log()).exp()
        masked = exponent.clamp(max=exponent_limit(exponent.dtype))
        exponent = torch.where(self.base.allowed, exponent, masked)
        return self.base.mass * exponent.exp()

    def _log_power(self, x: Tensor, y: Tensor, distance: Tensor) -> Tensor:
        """log(y) / eps, through alpha = 1 by series where alpha is a tensor."""
        if self.static_eps is not None:
            return (y.log() if self.static_eps > 1 else torch.log1p(x)) / self.static_eps
        steep = self.eps > 1
        gentle = distance * log1p_ratio(where(~steep, x, 0.0))
        return torch.where(steep, y.log() / where(steep, self.eps, 1.0), gentle)

    def normalizer(self) -> Tensor:
        """A, with p = nu exp_{2 - alpha}((s - A)/tau)."""
        offset = self.centre + self.rest
        return _choose(self.steep, offset + self._width(), offset)

    def threshold(self) -> Tensor:
        """A - tau/eps: keys at or below it get nothing. -inf at alpha = 1."""
        offset = self.centre + self.rest
        edge = _choose(self.steep, offset, offset - self._width())
        return where(self.eps > 0, edge, -math.inf)

    def dual(self) -> Dual:
        """A in the precision of certificates: there the sum of centre and rest keeps its digits."""
        exact = self._replace(
            eps=exactly(self.eps),
            tau=exactly(self.tau),
            centre=exactly(self.centre),
            rest=exactly(self.rest),
        )
        return Dual(exact.normalizer().squeeze(-1))

    def _width(self) -> Tensor:
        """From the threshold to A."""
        return self.tau / where(self.eps > 0, self.eps, 1.0)


def _choose(condition: Tensor | bool, yes: Tensor, no: Tensor) -> Tensor:
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


def _normalise(base: Base) -> tuple[Base, Tensor]:
    """The measure divided by its largest mass in the row, and the log of that mass (..., 1).

    The divisor is a constant for derivatives: the result does not depend on it.
    """
    log_mass = base.log()
    if log_mass is None:
        ones = (1,) * base.allowed.ndim
        return base, torch.zeros(ones, device=base.allowed.device)
    scale = where(base.alive, masked_max(log_mass.detach(), base.allowed), 0.0)
    if base.mass is not None:
        return Base(base.allowed, mass=base.mass / scale.exp()), scale
    return Base(base.allowed, log_mass=log_mass - scale), scale


def _finite_positive(tau: Tensor) -> Tensor:
    """Beyond these ends the scores do not matter at all, or nothing but the largest does."""
    limits = torch.finfo(tau.dtype)
    return tau.clamp(limits.tiny**0.5, limits.max**0.5)


def _maybe_exactly(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else exactly(tensor)


def _fenchel_young_terms(p: Tensor, u: Tensor, eps: Tensor, base: Base) -> Tensor:
    """nu (omega(x) + omega*(y) - x y) for x = p / nu, in units of the temperature."""
    alpha, log_mass = 1 + eps, base.safe_log()
    y = 1 + eps * u  # x^(alpha - 1) at the optimum
    inside = base.allowed & (y > 0)
    y_inside = where(inside, y, 1.0)
    log_y = torch.log1p(where(inside, eps * u, 0.0))
    log_x = torch.where(eps > 0, log_y / where(eps > 0, eps, 1.0), where(inside, u, 0.0))
    # Near the optimum the term is nu x^alpha bregman(p / optimum) = optimum * y * bregman.
    optimum = where(inside, (log_x + log_mass).exp(), 0.0)
    ratio = p / where(optimum > 0, optimum, 1.0)
    near = (optimum > 0) & (ratio < 1e30)
    close = optimum * y_inside * bregman_power(where(near, ratio, 1.0), eps)
    # Far from it nothing cancels: nu omega(p / nu) - p y' + nu omega*(y').
    power = (eps * (where(p > 0, p, 1.0).log() - log_mass)).exp()  # (p / nu)^(alpha - 1)
    far = where(p > 0, p * (power / alpha - y) / where(eps > 0, eps, 1.0), 0.0)
    terms = torch.where(near, close, far + optimum * y_inside / alpha)
    terms = torch.where(eps > 0, terms, kl_terms(p, u + log_mass, base.allowed))
    return where(base.allowed | (p == 0), terms, math.inf)
