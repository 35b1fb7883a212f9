"""Bounds of layers that keep them by construction: differentiable in the weights, so that a layer
can divide by its own bound and still be trained.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fenchel.certificates.certificate import Certificate, MapTrials
from fenchel.certificates.domain import Ball, Everywhere
from fenchel.certificates.self_attention import gaussian_constant


@dataclass(frozen=True, eq=False)
class Bounded:
    """A map (batch, n, d) -> (batch, n, d) and its constant, per sequence."""

    function: Callable[[Tensor], Tensor]
    constant: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def gaussian_bound(projection: Tensor, output: Tensor, tokens: Sequence[int]) -> Tensor:
    """projection (k, d) and output (e, k) of all heads; one bound for each of `tokens`."""
    norms = _spectral(projection) * _spectral(output)
    return norms * norms.new_tensor([gaussian_constant(n) for n in tokens])


def dot_bound(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    radius: float,
    temperature: float,
    tokens: Sequence[int],
) -> Tensor:
    """query, key, value (head, m, d), output (e, head * m); one bound for each of `tokens`.

    What `self_attention_lipschitz` gives, as a function of the weights.
    """
    reach = _product_spectral(key.mT, query) * radius**2 / temperature  # (head)
    many = reach.new_tensor(tokens).unsqueeze(-1)  # (count, 1)
    often = many / (1 + (many - 1) * (-2 * reach).exp())
    each = (often * (1 + reach.square())).sqrt() + reach  # (count, head): c_h
    together = (each * _spectral(value)).square().sum(-1).sqrt() * _spectral(output)
    parts = output.unflatten(1, value.shape[:2]).movedim(1, 0)  # (head, e, m)
    apart = (each * _product_spectral(parts, value)).sum(-1)
    return torch.minimum(together, apart)


def feed_forward_bound(inner: Tensor, outer: Tensor) -> Tensor:
    """inner (hidden, d), outer (e, hidden). ()"""
    return _spectral(inner) * _spectral(outer)


def shrinking(bounds: Tensor, constant: float) -> Tensor:
    """The factor that brings a map with this bound to the constant; one if it is there already,
    less what rounding could make of it."""
    # In float32 singular values are good to about 1e-6.
    slack = 1e-12 if bounds.dtype == torch.float64 else 1e-5
    return (1 - slack) * constant / bounds.clamp_min(constant)


def into_ball(x: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball, token by token. Shape of x."""
    size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / (size / radius).clamp_min(1.0)


def layer_certificate(
    name: str,
    layer: Bounded,
    shape: tuple[int, int],
    *,
    unit: float,
    given: tuple[str, ...],
    radius: float | None = None,
) -> Certificate:
    """Of a layer that takes float64: shape (tokens, d); radius: of a ball to look into first."""
    size = torch.Size(shape)
    guesses = None if radius is None else _in_ball(size, radius)
    trials = MapTrials(layer.function, size, Everywhere(), 2.0, unit, guesses)
    assumptions = ("all inputs", f"{shape[0]} tokens", *given)
    return Certificate(name, layer.constant, 2.0, assumptions, trials)


def mix(certificate: Certificate, share: float) -> Certificate:
    """Of x -> (1 - share) x + share f(x)."""
    trials = certificate.trials
    if not isinstance(trials, MapTrials):
        raise TypeError(f"certificate must certify a map of vectors, got {certificate.name}")
    function = trials.function
    mixed = replace(
        trials, function=lambda x: (1 - share) * x + share * function(x), reach=math.inf
    )
    bound = mixed_bound(certificate.bound, share)
    return replace(certificate, name=f"mixed {certificate.name}", bound=bound, trials=mixed)


def mixed_bound(bound: float, share: float) -> float:
    return (1 - share) + share * bound


def _in_ball(shape: torch.Size, radius: float) -> Callable[[int, torch.Generator], Tensor]:
    return lambda count, generator: Ball(radius).sample(count, shape, radius, generator)


def _spectral(matrix: Tensor) -> Tensor:
    """(..., a, b) -> (...)"""
    largest: Tensor = torch.linalg.matrix_norm(matrix, 2)
    return largest


def _product_spectral(left: Tensor, right: Tensor) -> Tensor:
    """|left right| for (..., a, m) and (..., m, b) with m small: the norm of (..., m, b) matrices.

    It is <u, left right v> at the best unit vectors, which for a derivative may stay as they are.
    """
    with torch.no_grad():
        basis, rest = torch.linalg.qr(left.detach())
        u, _, vh = torch.linalg.svd(rest @ right.detach(), full_matrices=False)
        u, v = basis @ u[..., :1], vh[..., :1, :].mT
    largest: Tensor = ((left.mT @ u) * (right @ v)).sum((-2, -1))
    return largest
