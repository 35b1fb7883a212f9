"""The contract of a regulariser: what it must know, and what follows from it.

A regulariser is a convex function Omega on distributions over keys. It knows its value, the
maximiser of <scores, p> - Omega(p), and the curvature of its conjugate at a solution; Fisher
matrices, advantages, losses and certificates are derived. Write your own by subclassing
`Regularizer`; `fenchel.testing` checks it.

What a regulariser is handed is already prepared: keys on the last axis, float32 or float64,
every number finite, the `anchor` of a row (its largest live score, unless a family says otherwise)
at zero, and `base.allowed` false on every key that may not carry weight (masked, at -inf, or in a
row that cannot be solved).
"""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from fenchel._kernels.route import against_rows
from fenchel._kernels.rows import FAMILIES, row_weights
from fenchel._kernels.tsallis import power_ratio
from fenchel._numerics import (
    NonFiniteError,
    certificate_dtype,
    dot,
    expands_to,
    has,
    masked_max,
    where,
)
from fenchel.priors.measure import Base


class Dual(NamedTuple):
    """What certifies an answer: the multiplier of the constraint sum p = total, measured from the
    row's anchor; (Tsallis) the score it is measured from instead, where an ulp of the anchor would
    be too coarse; (total variation) the multipliers of the edges."""

    offset: Tensor  # (...)
    centre: Tensor | None = None  # (...)
    edges: Tensor | None = None


class Maximum(NamedTuple):
    """The maximiser of <scores, p> - Omega(p), with scores less their anchor."""

    weights: Tensor  # (..., n), differentiable
    threshold: Tensor  # (...), the score at or below which a key gets nothing
    potential: Tensor  # (...), the value of the maximum: the conjugate at the scores
    dual: Dual
    feasible: Tensor | None = None  # (...), bool; None: always
    settled: Tensor | None = None  # (...), bool: reached its tolerance; None: always


@dataclass(frozen=True)
class Curvature:
    """Hessian of the conjugate at a solution: how weights answer to scores, dp = apply(ds).

    For Omega = sum nu omega(p / nu), stationarity omega'(p_i / nu_i) = s_i - lambda on the support
    gives dp_i = r_i (ds_i - dlambda) with r = nu / omega''(p / nu), and sum dp = 0 gives
    dlambda = <r, ds> / sum r. So dp = (diag(r) - r r^T / sum r) ds, and r / sum r is the escort.
    """

    response: Tensor  # r, zero off the support  (..., n)
    escort: Tensor  # d lambda / d scores, sums to one  (..., n)

    @classmethod
    def separable(cls, response: Tensor) -> Curvature:
        return cls(response, normalize(response))

    def apply(self, direction: Tensor) -> Tensor:
        """dp for ds = direction; equally the gradient in scores of <direction, p>."""
        return balance(self.response * self.advantage(direction), self.response)

    def advantage(self, utility: Tensor) -> Tensor:
        """Utility minus its mean under the escort distribution."""
        return utility - dot(self.escort, utility).unsqueeze(-1)


class Regularizer(ABC):
    """A convex Omega. Subclasses are frozen dataclasses: parameters in, no state."""

    #: True: any base measure. False: only masks (zeros and ones) have a meaning.
    takes_base: ClassVar[bool] = False
    #: True: p_i > 0 for every key of positive mass.
    full_support: ClassVar[bool] = False
    #: True: `gap` equals the Fenchel–Young loss of the weights, not only bounds it.
    gap_is_loss: ClassVar[bool] = False

    maximizer: ClassVar[type[Regularizer]]  # the class whose `maximize` it is

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "maximize" in vars(cls):
            cls.maximizer = cls
            if "weigh" not in vars(cls):  # an inherited one would solve another problem
                cls.weigh = Regularizer.weigh  # type: ignore[method-assign]

    @abstractmethod
    def value(self, weights: Tensor, base: Base) -> Tensor:
        """Omega(weights), temperature included; +inf outside its domain. (..., n) -> (...)"""

    @abstractmethod
    def maximize(self, scores: Tensor, base: Base) -> Maximum:
        """argmax_p <scores, p> - Omega(p), differentiable in the scores and every parameter."""

    @abstractmethod
    def curvature(self, weights: Tensor, base: Base) -> Curvature:
        """The Hessian of the conjugate at the scores that gave `weights`."""

    def tile(self, start: int, stop: int, rows: int) -> Self:
        """The regulariser of the queries start .. stop - 1 out of `rows`, for long attention.

        Parameters broadcast over the rows: those with one entry a query are cut, others kept.
        Override it if a tensor of yours means something else.
        """
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.ndim and value.shape[-1] == rows > 1:
                object.__setattr__(part, name, value[..., start:stop])
        return part

    def weigh(self, scores: Tensor) -> Tensor | None:
        """The weights of rows of scores as they are given, in one pass, where a kernel can.

        Without a base, keys last: NaN in a row that holds NaN or +inf, zeros in a row of -inf, and
        the derivatives that `maximize` has. None: `solve` prepares the rows and maximises.
        """
        return None

    def conjugate(self, scores: Tensor, base: Base) -> Tensor:
        """Omega*(scores) = max_p <scores, p> - Omega(p). (..., n) -> (...)"""
        return self.maximize(scores, base).potential

    def gap(self, scores: Tensor, weights: Tensor, dual: Dual, base: Base) -> Tensor:
        """Upper bound on how far `weights` are from optimal; zero only at the optimum.

        Derived from `value` alone, so that a wrong `maximize` cannot hide: with g = s - grad
        Omega(p), convexity gives <g, q - p> as a bound for any other q, and the largest is
        sum (max g - g) p (Frank and Wolfe, 1956). It is of first order in the error and infinite
        where Omega has infinite slope at a weight of zero; on a domain smaller than the simplex
        (a box) it is valid but loose. Our families override it with sums of Fenchel–Young terms.
        """
        p, s, base = exactly(weights), exactly(scores), base.to(certificate_dtype(scores.device))
        slope = torch.func.grad(lambda q: self.value(q, base).sum())(p)
        slope = where(~slope.isnan(), slope, -torch.inf)  # 0/0 at zero weight certifies nothing
        gain = where(base.allowed, s - slope, 0.0)
        best = where(base.alive, masked_max(gain, base.allowed), 0.0)
        missed = where(p > 0, (best - gain) * p, 0.0).sum(-1)
        outside = ((p > 0) & ~base.allowed).any(-1)
        total = exactly(self.total(s)).expand(missed.shape)
        return where(~outside, missed + mass_gap(p, total), torch.inf)

    def total(self, like: Tensor) -> Tensor:
        """What the weights of a row sum to. (...) or broadcastable"""
        return torch.ones((), dtype=like.dtype, device=like.device)

    def anchor(self, scores: Tensor, base: Base) -> Tensor:
        """The score that becomes zero: near the keys whose weight is decided, because differences
        from it are exact only for them. (..., n) -> (..., 1); -inf for a row without live keys"""
        return masked_max(scores, base.allowed)

    def scale(self, like: Tensor, base: Base) -> Tensor:
        """The size of Omega in a row, which its gap is compared with. (...) or broadcastable"""
        return torch.ones((), dtype=like.dtype, device=like.device)

    def valid_rows(self, like: Tensor) -> Tensor:
        """Rows whose parameters are in range, where Python could not look at them. (...)"""
        return torch.ones((), dtype=torch.bool, device=like.device)


def resolve_regularizer(choice: object) -> Regularizer:
    """The regulariser itself, or the one that a module such as `nn.LearnedTsallis` makes now.

    Refuses a class, a name, a number or a mask where a regulariser is meant.
    """
    if isinstance(choice, Tensor):
        raise TypeError(
            "regularizer must be a Regularizer such as Tsallis(1.5), got a tensor of shape "
            f"{tuple(choice.shape)}; if it is a mask, pass attn_mask=mask"
        )
    regularizer = choice() if isinstance(choice, Module) else choice
    if isinstance(regularizer, Regularizer):
        return regularizer
    whence = f" from {type(choice).__name__}" if isinstance(choice, Module) else ""
    raise TypeError(
        "regularizer must be a Regularizer such as Tsallis(1.5), or a module whose forward() "
        f"returns one, got {regularizer!r}{whence}"
    )


def leading_score(scores: Tensor, rank: Tensor, allowed: Tensor) -> Tensor:
    """The score of the allowed key that ranks highest; -inf for a row without any. (..., 1)"""
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    best = where(allowed, rank, -torch.inf).argmax(-1, keepdim=True)
    return where(allowed.any(-1, keepdim=True), scores.gather(-1, best), -torch.inf)


def weigh_natively(scores: Tensor, family: str, parameter: float) -> Tensor | None:
    """`Regularizer.weigh` by a kernel, where there is one for these rows and this parameter."""
    low, high = FAMILIES[family]
    if not low <= parameter <= high or against_rows(scores, family) is not None:
        return None
    flat = scores.reshape(-1, scores.shape[-1])
    weights: Tensor = row_weights(flat, family, float(parameter))
    return weights.reshape(scores.shape)


def balance(moves: Tensor, slopes: Tensor) -> Tensor:
    """Moves that sum to zero: the key of steepest slope takes what the others leave.

    Its own move is slope times a difference that rounds to zero where its slope dominates.
    """
    if moves.shape[-1] == 0:
        return moves
    steepest = one_hot(slopes.detach().argmax(-1, keepdim=True), moves.shape[-1])
    return torch.where(steepest, -where(~steepest, moves, 0.0).sum(-1, keepdim=True), moves)


def one_hot(index: Tensor, n: int) -> Tensor:
    """(..., 1) -> bool (..., n)"""
    return torch.arange(n, device=index.device) == index


def normalize(response: Tensor) -> Tensor:
    """Divide by the row's sum; a row of zeros stays zero."""
    total = response.sum(-1, keepdim=True)
    return response / where(total > 0, total, 1.0)


def per_row(parameter: float | Tensor, like: Tensor, name: str) -> Tensor:
    """A parameter as a column that broadcasts against the rows of `like`. (..., 1)"""
    if not isinstance(parameter, Tensor):
        if parameter > torch.finfo(like.dtype).max:
            raise ValueError(f"{name}={parameter:g} does not fit {like.dtype}; use float64 scores")
        return torch.full((1,) * like.ndim, parameter, dtype=like.dtype, device=like.device)
    if parameter.device != like.device:
        raise ValueError(
            f"{name} is on {parameter.device} and the scores on {like.device}; move one of them"
        )
    if not expands_to(parameter.shape, like.shape[:-1]):
        raise ValueError(
            f"{name} of shape {tuple(parameter.shape)} does not broadcast over the rows of the "
            f"scores, {tuple(like.shape[:-1])}; one per head is shape (heads, 1) for scores "
            "(batch, head, query, key)"
        )
    lead = (1,) * (like.ndim - 1 - parameter.ndim)
    return parameter.to(like.dtype).reshape(*lead, *parameter.shape, 1)


def check_parameter(
    value: float | Tensor, name: str, low: float, *, strict: bool = False, remedy: str = ""
) -> None:
    """Refuse a parameter outside [low, inf) (or (low, inf)), naming the value and the way out."""
    sign = ">" if strict else ">="
    expected = f"{name} must be finite and {sign} {low:g}, got"
    if isinstance(value, Tensor):
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} must be real, got {value.dtype}")
        wrong = ~((value > low) if strict else (value >= low)) | value.isinf()
        if has(wrong):
            shown = value.detach()[wrong].flatten()[0].item()
            kind = ValueError if math.isfinite(shown) else NonFiniteError
            raise kind(f"{expected} {shown:g}{remedy if shown <= low else ''}")
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    inside = value > low if strict else value >= low
    if not inside or value > sys.float_info.max:
        raise ValueError(f"{expected} {value}{remedy if value <= low else ''}")


def in_range(column: Tensor, low: float, *, strict: bool = False) -> Tensor:
    """The check of `check_parameter`, row by row, for where Python may not look."""
    above = column > low if strict else column >= low
    return (above & column.isfinite()).squeeze(-1)


def exactly(tensor: Tensor) -> Tensor:
    """Detached, in the precision of certificates."""
    return tensor.detach().to(certificate_dtype(tensor.device))


def mass_gap(weights: Tensor, total: Tensor | None = None) -> Tensor:
    """Fenchel–Young term of the constraint sum p = total: m log(m / total) - m + total >= 0."""
    mass = weights.sum(-1)
    total = torch.ones_like(mass) if total is None else total
    return total * bregman_power(mass / total, 0.0)


def bregman_power(ratio: Tensor, eps: Tensor | float) -> Tensor:
    """(r^alpha - 1 - alpha (r - 1)) / (alpha eps) >= 0, alpha = 1 + eps, r >= 0; zero at one only.

    Far from one: (r L - (r - 1)) / alpha with L = (r^eps - 1)/eps, smooth through eps = 0. Near
    one that difference is all rounding, so there Taylor's remainder
    (r - 1)^2 int_0^1 (1 - t) (1 + t (r - 1))^(alpha - 2) dt is summed: every term is positive.
    """
    excess = ratio - 1
    log_ratio = torch.log1p(where(ratio > 0, excess, 0.0))
    far = (where(ratio > 0, ratio * power_ratio(log_ratio, eps), 0.0) - excess) / (1 + eps)
    near = excess.abs() < 0.05
    step = where(near, excess, 0.0)
    remainder = sum(w * (1 - t) * (1 + t * step) ** (eps - 1) for t, w in _NODES)
    return torch.where(near, step * step * remainder, far)


def _gauss_legendre(count: int) -> list[tuple[float, float]]:
    """Nodes and weights on [0, 1]; seven reach 1e-16 for |r - 1| < 0.05."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return [((t + 1) / 2, w / 2) for t, w in zip(nodes.tolist(), weights.tolist(), strict=True)]


_NODES = _gauss_legendre(7)
