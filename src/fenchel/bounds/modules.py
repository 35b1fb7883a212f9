"""Bounds of layers that keep them by construction: differentiable in the weights, so that a layer
can divide by its bound and still be trained.

**Gaussian heads.** z_h = W_h x, g_h = softmax(-|z_hi - z_hj|^2 / tau_h) z_h, Y = sum_h M_h g_h.
Every head has |dg_h| <= c(n) |W_h dX|, whatever tau_h (`self_attention`). With all heads stacked,

    sum_h |dg_h|^2 <= c(n)^2 sum_h |W_h dX|^2 = c(n)^2 |W dX|^2,   |dY| <= c(n) |M| |W| |dX|,

so heads that look at orthogonal parts of a token cost no more than one.

**Dot products.** `Head.bound` for every head, c_h |V_h|, and Y = sum_h O_h (head h): at most
|O| sqrt(sum_h c_h^2 |V_h|^2), and at most sum_h c_h |O_h V_h|. The tokens are projected onto a ball
first; projections onto convex sets do not increase distances.

**Feed-forward**, token by token: |W_2| |W_1|, with an activation of slope at most one.

**Mixing** (1 - a) x + a f(x), 0 <= a <= 1: at most (1 - a) + a times the bound of f.

**Ignored tokens.** They give no keys, and their outputs are zero: what remains is the map of the
n' <= n other tokens, and all bounds grow with n. Their outputs must not count: n queries that all
see the same single key have the constant sqrt(n), whatever the scores.

**Precision.** Norms are computed in float64 whatever the layer computes in. Where factors cancel,
|O V| is exact up to the rounding of the products, which is added: of those here, and of those that
a layer makes in the dtype it computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, check_finite
from fenchel.bounds.bound import Bound
from fenchel.bounds.domain import Ball, Everywhere
from fenchel.bounds.maps import Guesses, MapTrials, TrialStart, VectorMap, trials_of
from fenchel.bounds.self_attention import gaussian_constant

_LEAST = 1e-290  # below it a product of norms has lost digits, or is zero where no factor is


@dataclass(frozen=True, eq=False)
class BoundedMap:
    """A map (batch, n, d) -> (batch, n, d) and its constant, per sequence."""

    function: Callable[[Tensor], Tensor]
    constant: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def gaussian_bound(projection: Tensor, output: Tensor, tokens: Sequence[int]) -> Tensor:
    """projection (k, d) and output (e, k) of all heads; one bound for each of `tokens`."""
    one, other = _spectral(projection), _spectral(output)
    norms = one * other
    bounds = norms * norms.new_tensor([gaussian_constant(n) for n in tokens])
    return _keep_positive(bounds, one, other)


@dataclass(frozen=True, eq=False)
class DotWeights:
    """query, key, value (head, m, d) of all heads, and output (e, head * m)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def dot_bound(
    weights: DotWeights, radius: float, temperature: float, tokens: Sequence[int]
) -> Tensor:
    """One bound for each of `tokens`, of tokens within the radius.

    What `self_attention_lipschitz` gives, as a function of the weights. The layer is taken to
    multiply in the dtype of `output`.
    """
    value, output = weights.value, weights.output
    eps = torch.finfo(output.dtype).eps
    reach = (
        _product_spectral(weights.key.mT, weights.query, eps) * radius**2 / temperature
    )  # (head)
    many = reach.new_tensor(tokens).unsqueeze(-1)  # (count, 1)
    often = many / (1 + (many - 1) * (-2 * reach).exp())
    each = often.sqrt() * torch.hypot(reach, torch.ones_like(reach)) + reach  # (count, head): c_h
    values, whole = _spectral(value), _spectral(output)
    together = _length(each * values) * whole
    parts = output.unflatten(1, value.shape[:2]).movedim(1, 0)  # (head, e, m)
    apart = (each * _product_spectral(parts, value, eps)).sum(-1)
    return _keep_positive(torch.minimum(together, apart), values.amax(), whole)


def feed_forward_bound(inner: Tensor, outer: Tensor) -> Tensor:
    """inner (hidden, d), outer (e, hidden). ()"""
    one, other = _spectral(inner), _spectral(outer)
    return _keep_positive(one * other, one, other)


def shrinking(bounds: Tensor, constant: float) -> Tensor:
    """The factor that brings a map with this bound to the constant; one if it is there already,
    less what rounding could make of it."""
    return (1 - 1e-12) * constant / bounds.clamp_min(constant)


def _keep_positive(bounds: Tensor, *factors: Tensor) -> Tensor:
    """Not zero, nor of few digits, unless a factor is zero."""
    some = torch.stack([factor.detach() > 0 for factor in factors]).all()
    return torch.where(some, bounds.clamp_min(_LEAST), bounds)


# ---- numbers of any size


def power_of_two(x: Tensor) -> Tensor:
    """Of the size of x >= 0, without derivative: to divide by, exactly. One for 0, inf and NaN."""
    x = x.detach()
    exponent = torch.frexp(x).exponent.clamp(-1000, 1000) - 1
    exponent = torch.where(x.isfinite() & (x > 0), exponent, 0)
    return torch.ldexp(torch.ones_like(x), exponent)


def of_size_one(matrix: Tensor, dims: tuple[int, ...] = (-2, -1)) -> tuple[Tensor, Tensor]:
    """matrix / unit and the unit, a power of two with the axes `dims` kept; both in float64."""
    wide = matrix.to(certificate_dtype(matrix.device))
    unit = power_of_two(wide.detach().abs().amax(dims, keepdim=True))
    return wide / unit, unit


def into_ball(x: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """p / unit and the unit (batch, 1, 1), in float64: p the nearest points of the ball, token by
    token, the unit a power of two of their size. x (batch, n, d)."""
    unit = size_of_sequence(x)
    ratio = unit / radius
    x = x / unit.to(x.dtype)
    size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # p = x / max(1, |x| / radius), divided by the least of the unit and the radius
    one = (1 / ratio).clamp_max(1.0).to(x.dtype)
    inside = x / torch.maximum(size * ratio.clamp_max(1.0).to(x.dtype), one)
    return inside, unit.clamp_max(radius)


def size_of_sequence(x: Tensor) -> Tensor:
    """A power of two of the largest number of each sequence. (batch, n, d) -> (batch, 1, 1)"""
    if x.shape[1] == 0:
        return x.new_ones(len(x), 1, 1, dtype=certificate_dtype(x.device))
    most = x.detach().abs().amax((1, 2), keepdim=True)
    return power_of_two(most.to(certificate_dtype(x.device))).clamp_min(2.0**-120)


def layer_lipschitz(
    name: str,
    layer: BoundedMap,
    shape: tuple[int, int],
    *,
    unit: float,
    conditions: tuple[str, ...],
    radius: float | None = None,
) -> Bound:
    """Of a layer that takes float64: shape (tokens, d); radius: of a ball to look into first."""
    guesses = None if radius is None else _in_ball(shape, radius)
    trials = MapTrials(VectorMap(layer.function, shape, Everywhere()), TrialStart(unit, guesses))
    assumptions = ("all inputs", f"{shape[0]} tokens", *conditions)
    return Bound(name, layer.constant, 2.0, assumptions, trials)


def mix(bound: Bound, share: float) -> Bound:
    """Of x -> (1 - share) x + share f(x)."""
    trials = trials_of(bound, "bound")
    function = trials.map.function
    mixed = replace(
        trials.map, function=lambda x: (1 - share) * x + share * function(x), reach=math.inf
    )
    return replace(
        bound,
        name=f"mixed {bound.name}",
        value=mixed_constant(bound.value, share),
        trials=replace(trials, map=mixed),
    )


def mixed_constant(constant: float, share: float) -> float:
    """Of x -> (1 - share) x + share f(x), at most, for an f with this constant."""
    return (1 - share) + share * constant


def _in_ball(shape: tuple[int, int], radius: float) -> Guesses:
    size = torch.Size(shape)
    return lambda count, generator: Ball(radius).sample(count, size, radius, generator)


# ---- norms


def _spectral(matrix: Tensor) -> Tensor:
    """The largest singular value, in float64. (..., a, b) -> (...)"""
    matrix, unit = of_size_one(matrix)
    small = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    with torch.no_grad():
        side = _Side.of(small.detach())
    return _top(side, lambda v: small.mT @ v, lambda v: small @ v) * unit[..., 0, 0]


def _product_spectral(left: Tensor, right: Tensor, eps: float) -> Tensor:
    """At least |left right|, in float64, for (..., a, m) and (..., m, b) with m small.

    Where the factors cancel what is left is rounding. With |.|_F, the length of all entries, it is
    at most m eps / 2 |left|_F |right|_F for a product in float64, twice more for the decomposition;
    in a layer of another precision of the size of its eps |left|_F |right|_F.
    """
    (left, one), (right, other) = of_size_one(left), of_size_one(right)
    slack = _length(left.flatten(-2)) * _length(right.flatten(-2))
    slack = slack * max(eps, 4 * left.shape[-1] * torch.finfo(left.dtype).eps)
    with torch.no_grad():
        basis, rest = torch.linalg.qr(left.detach())
        side = _Side.of(rest @ right.detach(), basis)
    largest = _top(side, lambda v: right.mT @ (left.mT @ v), lambda v: left @ (right @ v))
    return (largest + slack) * (one * other)[..., 0, 0]


@dataclass(frozen=True, eq=False)
class _Side:
    """Left singular vectors (..., a, k) of A, their squared values (..., k, 1), ascending; without
    derivatives."""

    vectors: Tensor
    squares: Tensor

    @classmethod
    def of(cls, matrix: Tensor, basis: Tensor | None = None) -> _Side:
        """Of `matrix` (..., k, b), or of basis @ matrix. A square root of the Gram matrix's largest
        eigenvalue is as good as a singular value; small ones are not needed."""
        check_finite(matrix, "the weights of the layer")
        squares, vectors = torch.linalg.eigh(matrix @ matrix.mT)
        return cls(vectors if basis is None else basis @ vectors, squares.unsqueeze(-1))

    def turn(self, moved: Tensor) -> Tensor:
        """How the first vector turns if A A' u becomes `moved`: (top - A A')^+ moved."""
        top = self.squares[..., -1:, :]
        gaps = top - self.squares
        apart = gaps > 64 * torch.finfo(gaps.dtype).eps * top  # of equal values one is followed
        share = torch.where(apart, 1 / torch.where(apart, gaps, 1.0), 0.0)
        along = self.vectors.mT @ moved
        rest = moved - self.vectors @ along
        return self.vectors @ (share * along) + rest / torch.where(top > 0, top, 1.0)


def _top(
    side: _Side, transposed: Callable[[Tensor], Tensor], matrix: Callable[[Tensor], Tensor]
) -> Tensor:
    """|A' u| / |u| at the best u, which follows A to first order.

    At u the quotient is stationary, so derivatives up to the third are those of |A|, wherever its
    largest singular value is alone. (...)
    """
    u = side.vectors[..., -1:]
    turn = side.turn(matrix(transposed(u)))
    u = u + (turn - turn.detach())
    return _length(transposed(u).squeeze(-1)) / _length(u.squeeze(-1))


def _length(x: Tensor) -> Tensor:
    """Of the last axis; at zero all derivatives are zero."""
    some = (x.detach() != 0).any(-1, keepdim=True)
    size: Tensor = torch.linalg.vector_norm(torch.where(some, x, 1.0), dim=-1)
    return torch.where(some.squeeze(-1), size, 0.0)
