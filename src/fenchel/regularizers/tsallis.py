"""Tsallis: Omega(p) = tau * sum nu omega(p / nu), omega(x) = (x^alpha - x)/(alpha (alpha - 1)).

Its map is alpha-entmax (Peters, Niculae and Martins, 2019): softmax at alpha = 1, sparsemax at 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fenchel._implicit import Solve, attach
from fenchel._kernels.route import against_rows
from fenchel._kernels.rows import row_offsets
from fenchel._kernels.tsallis import EDGE_ABOVE, threshold_room, tsallis_offset, unrolled_offset
from fenchel._numerics import (
    at_hand,
    dot,
    expm1_ratio,
    exponent_limit,
    exported_to_onnx,
    has,
    log1p_ratio,
    masked_max,
    readable,
    where,
)
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
    one_hot,
    per_row,
    weigh_natively,
)
from fenchel.regularizers.shannon import Shannon, clamp_scaled, kl_terms


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
    gap_is_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        remedy = "; for alpha < 1 the map has full support and is not implemented"
        check_parameter(self.alpha, "alpha", 1.0, remedy=remedy)
        Shannon(self.temperature)  # the same check, once

    def value(self, weights: Tensor, base: Base) -> Tensor:
        eps = self._eps(weights)
        tau = per_row(self.temperature, weights, "temperature").squeeze(-1)
        on = weights > 0
        log_ratio = where(on, weights, 1.0).log() - base.safe_log()
        # nu omega(p / nu) = p ((p / nu)^eps - 1) / (alpha eps); at zero its slope is -1/(alpha eps)
        power = log_ratio * expm1_ratio(eps * log_ratio)
        at_zero = where(eps > 0, -1 / where(eps > 0, eps, 1.0), 0.0)
        total = (weights * torch.where(on, power, at_zero) / (1 + eps)).sum(-1)
        outside = (on & ~base.allowed).any(-1)
        return where(~outside, tau * total, math.inf)

    def weigh(self, scores: Tensor) -> Tensor | None:
        if self._is_softmax:
            return Shannon(self.temperature).weigh(scores)
        eps = self._static_eps
        if eps is None or eps > 1 or isinstance(self.temperature, Tensor) or self.temperature != 1:
            return None
        return weigh_natively(scores, "tsallis", eps)

    def maximize(self, scores: Tensor, base: Base) -> Maximum:
        if self._is_softmax:
            return Shannon(self.temperature).maximize(scores, base)
        eps = self._eps(scores)
        tau = per_row(self.temperature, scores, "temperature")
        scaled, log_scale, scaled_tau, fits = self._scale(scores, base)
        if scores.dtype == torch.float32 and self._may_be_steep:
            return self._in_double(scores, base)
        rows = _Rows.of(scores, scaled, eps, scaled_tau, self._static_eps)
        weights, potential = rows.solution(tau, log_scale)
        # A threshold that no float holds (a tie at huge alpha) leaves a sum far from one.
        off = (weights.sum(-1) - 1).abs()
        settled = (off <= torch.finfo(scores.dtype).eps ** 0.5) & fits.squeeze(-1)
        return Maximum(weights, rows.threshold(), potential, rows.dual(), settled=settled)

    def _in_double(self, scores: Tensor, base: Base) -> Maximum:
        """Slopes p^(2 - alpha) leave the range of float32; the answer does not."""
        exact = self.maximize(scores.double(), base.to(torch.float64))
        return exact._replace(
            weights=exact.weights.float(),
            threshold=exact.threshold.float(),
            potential=exact.potential.float(),
        )

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
        assert dual.centre is not None
        p, s = exactly(weights), exactly(scores)
        eps, tau = self._eps(s).detach(), per_row(self.temperature, s, "temperature").detach()
        base, _, scaled_tau, fits = self._scale(s, base.to(s.dtype))
        scaled_tau = scaled_tau.detach()
        centre, rest = (exactly(x).unsqueeze(-1) for x in (dual.centre, dual.offset))
        rows = _Rows(s, base, eps, scaled_tau, self._static_eps, centre, rest)
        keys = scaled_tau.squeeze(-1) * rows.fenchel_young_sum(p)
        total = keys + torch.maximum(scaled_tau, tau).squeeze(-1) * mass_gap(p)
        return where(fits.squeeze(-1), total, math.inf)

    def anchor(self, scores: Tensor, base: Base) -> Tensor:
        """The score of the key that, alone, would put the threshold highest."""
        if self._is_softmax:
            return Shannon(self.temperature).anchor(scores, base)
        if base.plain:
            return super().anchor(scores, base)
        scaled, _, tau, _ = self._scale(scores, base)
        log_mass = torch.as_tensor(scaled.safe_log())
        room = threshold_room(log_mass, self._eps(scores), tau)
        return leading_score(scores, scores - room, base.allowed)

    def scale(self, like: Tensor, base: Base) -> Tensor:
        """The temperature, or the larger one that small masses amount to."""
        tau = per_row(self.temperature, like, "temperature")
        return torch.maximum(tau, self._scale(like, base)[2]).squeeze(-1)

    def _scale(self, like: Tensor, base: Base) -> tuple[Base, Tensor, Tensor, Tensor]:
        """(nu', log c, tau', where tau' is in range): nu' has largest mass one.

        nu = c nu' is the measure nu' at temperature tau' = tau c^(1 - alpha), so that masses of any
        size meet in one range. At alpha = 1 the scale only shifts the potential.
        """
        tau = per_row(self.temperature, like, "temperature")
        scaled, log_scale = _normalise(base, like)
        return scaled, log_scale, *_in_range(tau * (-self._eps(like) * log_scale).exp(), base.plain)

    def valid_rows(self, like: Tensor) -> Tensor:
        return in_range(self._eps(like), 0.0) & Shannon(self.temperature).valid_rows(like)

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
        return per_row(self.alpha - 1, like, "alpha")

    @property
    def _may_be_steep(self) -> bool:
        """Where the values cannot be read they may."""
        if not isinstance(self.alpha, Tensor):
            return self.alpha > 2
        return not readable(self.alpha) or has(self.alpha > 2)


class _Parts(NamedTuple):
    p: Tensor
    y: Tensor  # off the support without meaning
    on: Tensor  # the support, and keys of zero mass that would be in it
    log_power: Tensor | None  # log(y) / eps, where it was needed


class _Rows(NamedTuple):
    """Prepared rows with their offset: y = 1 + eps (s - a)/tau, or y = eps (s - t)/tau in edge form
    (see kernels/tsallis.py for why); p = nu y^(1/eps) on y > 0."""

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
        """Search the offset outside the graph, and give it the derivative of sum p = 1."""
        live = base.keep(scores, -math.inf).detach()
        log_mass = base.log()
        log_mass = None if log_mass is None else log_mass.detach()
        columns = (eps.detach(), tau.detach())
        if exported_to_onnx():
            centre, rest = unrolled_offset(live, log_mass, *columns, static_eps)
        else:
            centre, rest = _search(live, log_mass, *columns)
        allowed, whole = base.allowed, base.whole  # not the masses, which are operands

        def linearise(
            rest: Tensor, scores: Tensor, mass: Tensor, log_mass: Tensor, eps: Tensor, tau: Tensor
        ) -> tuple[Tensor, Solve]:
            base = Base(allowed, mass, log_mass, whole)
            return cls(scores, base, eps, tau, static_eps, centre, rest)._linearise()

        rest = attach(rest, linearise, scores, base.mass, base.log_mass, eps, tau)
        return cls(scores, base, eps, tau, static_eps, centre, rest)

    def _linearise(self) -> tuple[Tensor, Solve]:
        """tau (sum p - 1), which falls by the slope where the offset grows by one."""
        parts, alive = self._parts(), self.base.alive

        def solve(right: Tensor) -> Tensor:
            slope = where(alive, self._slope(parts).sum(-1, keepdim=True), 1.0)
            return where(alive, right / slope, 0.0)

        return self.tau * (parts.p.sum(-1, keepdim=True) - 1), solve

    def solution(self, tau: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the potential at the unscaled temperature tau.

        <s, p> - tau Omega(p) with the stationarity s = A + tau u = t + (tau/eps) y put in is
        A + (1 - 1/alpha) tau <p, u> (Farinhas, 2021, eq. 3.7), or t + (tau/alpha)(1/eps + <p, y>)
        in edge form; the scale of the base adds (tau - scaled tau)/(alpha eps), smooth at eps = 0.
        """
        parts = self._parts()
        p, y = self._answering(parts), parts.y
        alpha, offset = 1 + self.eps, self.centre + self.rest
        mean_y = dot(p, y).unsqueeze(-1)
        constant = tau / where(self.eps > 0, self.eps, 1.0)
        edge = offset + (constant + self.tau * mean_y) / alpha
        if self.edge_form is True:
            return p, edge.squeeze(-1)
        mean = dot(p, self._distance()).unsqueeze(-1)
        shift = log_scale * expm1_ratio(-self.eps * log_scale) * tau / alpha
        gentle = offset + (1 - 1 / alpha) * self.tau * mean + shift
        return p, _choose(self.edge_form, edge, gentle).squeeze(-1)

    def _answering(self, parts: _Parts) -> Tensor:
        """For alpha > 2 the key of steepest slope gets its derivative from sum p = 1: its own is
        slope times a difference that rounds to zero, as in `balance`."""
        p, n = parts.p, parts.p.shape[-1]
        if n == 0 or (self.static_eps is not None and self.static_eps <= 1):
            return p
        steepest = one_hot(self._slope(parts).detach().argmax(-1, keepdim=True), n)
        steepest = steepest & parts.on & (self.eps > 1)
        others = where(~steepest, p, 0.0).sum(-1, keepdim=True)
        return torch.where(steepest, p.detach() - (others - others.detach()), p)

    @property
    def edge_form(self) -> Tensor | bool:
        if self.static_eps is None:
            return self.eps > EDGE_ABOVE
        return self.static_eps > EDGE_ABOVE

    def _distance(self) -> Tensor:
        return clamp_scaled(((self.scores - self.centre) - self.rest) / self.tau)

    def _y(self, x: Tensor) -> Tensor:
        """Positive on the support, negative off it; x = eps times the distance."""
        return _choose(self.edge_form, x, 1 + x)

    def _parts(self) -> _Parts:
        distance = self._distance()
        x = self.eps * distance
        if self.base.plain and self.static_eps in (0.5, 1.0):
            y = torch.relu(self.base.keep(x, -1.0))
            return _Parts(y if self.static_eps == 1.0 else y * y, y, y > 0, None)
        y = self._y(x)
        on = y > 0 if self.base.whole else (y > 0) & self._reachable()
        y = where(on, y, 1.0)
        log_power = self._log_power(where(on, x, 0.0), y, where(on, distance, 0.0))
        return _Parts(where(on, self._weigh(log_power), 0.0), y, on, log_power)

    def _slope(self, parts: _Parts) -> Tensor:
        """-tau dp/da = nu y^(1/eps - 1) = p / y, without a quotient whose derivative overflows."""
        if parts.log_power is None:  # eps is 1/2 or 1
            return where(
                parts.on, parts.y if self.static_eps == 0.5 else torch.ones_like(parts.y), 0.0
            )
        return where(parts.on, self._weigh((1 - self.eps) * parts.log_power), 0.0)

    def _reachable(self) -> Tensor:
        if self.base.mass is None:
            return self.base.allowed
        # A key of zero mass gets no weight, but has a derivative in its mass.
        return self.base.allowed | (self.base.mass == 0)

    def _weigh(self, log_power: Tensor) -> Tensor:
        """nu exp(log_power)."""
        if self.base.mass is None:
            return (log_power + self.base.safe_log()).exp()
        limited = log_power.clamp(max=exponent_limit(log_power.dtype))
        return self.base.mass * torch.where(self.base.allowed, log_power, limited).exp()

    def _log_power(self, x: Tensor, y: Tensor, distance: Tensor) -> Tensor:
        """log(y) / eps, through alpha = 1 by series where alpha is a tensor."""
        if self.static_eps is not None:
            return (y.log() if self.edge_form else torch.log1p(x)) / self.static_eps
        edge = self.eps > EDGE_ABOVE
        gentle = distance * log1p_ratio(where(~edge, x, 0.0))
        return torch.where(edge, y.log() / where(edge, self.eps, 1.0), gentle)

    def threshold(self) -> Tensor:
        """Keys at or below it get nothing; -inf at alpha = 1. (...)"""
        offset = self.centre + self.rest
        below = offset - self.tau / where(self.eps > 0, self.eps, 1.0)
        edge = _choose(self.edge_form, offset, below)
        return where(self.eps > 0, edge, -math.inf).squeeze(-1)

    def dual(self) -> Dual:
        """The offset in the precision of certificates."""
        return Dual(exactly(self.rest).squeeze(-1), exactly(self.centre).squeeze(-1))

    def fenchel_young_sum(self, p: Tensor) -> Tensor:
        """Sum over keys of nu (omega(x) + omega*(y) - x y), x = p / nu, in units of tau. (...)

        Keys below the threshold without weight add nothing. Where most keys are such, the others
        become rows of one key each.
        """
        above = self.base.allowed & (self._y(self.eps * self._distance()) > 0)
        active = above | (p != 0)
        if not at_hand(active) or 4 * int(active.sum()) >= active.numel():
            return self._fenchel_young_terms(p).sum(-1)
        terms = self._entries(active)._fenchel_young_terms(p[active].unsqueeze(-1))
        rows = active.shape[:-1]
        row = active.reshape(rows.numel(), -1).nonzero()[:, 0]
        return p.new_zeros(rows.numel()).index_add_(0, row, terms.squeeze(-1)).reshape(rows)

    def _entries(self, chosen: Tensor) -> _Rows:
        """The chosen keys as rows of one key each."""

        def pick(x: Tensor) -> Tensor:
            return x.expand(chosen.shape)[chosen].unsqueeze(-1)

        mass, log_mass = (
            None if x is None else pick(x) for x in (self.base.mass, self.base.log_mass)
        )
        base = Base(pick(self.base.allowed), mass, log_mass, self.base.whole)
        scores, eps, tau, centre, rest = (
            pick(x) for x in (self.scores, self.eps, self.tau, self.centre, self.rest)
        )
        return _Rows(scores, base, eps, tau, self.static_eps, centre, rest)

    def _fenchel_young_terms(self, p: Tensor) -> Tensor:
        """Key by key."""
        eps, alpha, log_mass = self.eps, 1 + self.eps, self.base.safe_log()
        distance = self._distance()
        y = self._y(eps * distance)  # (optimum / nu)^eps
        inside = self.base.allowed & (y > 0)
        y_inside = where(inside, y, 1.0)
        log_power = self._log_power(
            where(inside, eps * distance, 0.0), y_inside, where(inside, distance, 0.0)
        )
        # Near the optimum the term is nu x^alpha bregman(p / optimum) = optimum * y * bregman.
        optimum = where(inside, (log_power + log_mass).exp(), 0.0)
        ratio = p / where(optimum > 0, optimum, 1.0)
        near = (optimum > 0) & (ratio < 1e30)
        power = eps if self.static_eps is None else self.static_eps
        close = optimum * y_inside * bregman_power(where(near, ratio, 1.0), power)
        # Far from it nothing cancels: nu omega(p / nu) - p y' + nu omega*(y').
        lifted = (eps * (where(p > 0, p, 1.0).log() - log_mass)).exp()  # (p / nu)^eps
        far = where(p > 0, p * (lifted / alpha - y) / where(eps > 0, eps, 1.0), 0.0)
        terms = torch.where(near, close, far + optimum * y_inside / alpha)
        if self.static_eps is None:  # rows at alpha = 1 may be among them
            softmax_rows = kl_terms(p, distance + log_mass, self.base.allowed)
            terms = torch.where(eps > 0, terms, softmax_rows)
        return where((self.base.allowed & (p >= 0)) | (p == 0), terms, math.inf)


def _choose(condition: Tensor | bool, yes: Tensor, no: Tensor) -> Tensor:
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


def _search(
    live: Tensor, log_mass: Tensor | None, eps: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """(centre, rest) of the offset, by the kernel of the rows where it can."""
    plain = log_mass is None and readable(eps, tau) and not has((eps > 1) | (tau != 1))
    if not plain or against_rows(live) is not None:
        centre, rest = tsallis_offset(live, log_mass, eps, tau)
        return centre, rest
    rows = torch.broadcast_shapes(live.shape[:-1], eps.shape[:-1])
    flat = live.expand(*rows, -1).reshape(-1, live.shape[-1])
    pair = row_offsets(flat, eps.double().expand(*rows, 1).reshape(-1))
    centre, rest = pair.to(live.dtype).reshape(*rows, 2).split(1, -1)
    return centre, where(rest < math.inf, rest, 0.0)  # +inf: no key is alive


def _normalise(base: Base, like: Tensor) -> tuple[Base, Tensor]:
    """The measure divided by its largest mass in the row, and the log of that mass (..., 1).

    The divisor is a constant for derivatives: the result does not depend on it.
    """
    log_mass = base.log()
    if log_mass is None:
        return base, like.new_zeros((1,) * like.ndim)
    scale = where(base.alive, masked_max(log_mass.detach(), base.allowed), 0.0)
    if base.mass is not None:
        return Base(base.allowed, mass=base.mass / scale.exp()), scale
    return Base(base.allowed, log_mass=log_mass - scale), scale


def _in_range(tau: Tensor, plain: bool) -> tuple[Tensor, Tensor]:
    """A scaled temperature whose square is a number, and where it did not have to be changed."""
    if plain:
        return tau, torch.ones_like(tau, dtype=torch.bool)
    limits = torch.finfo(tau.dtype)
    clamped = tau.clamp(limits.tiny**0.5, limits.max**0.5)
    return clamped, clamped == tau
