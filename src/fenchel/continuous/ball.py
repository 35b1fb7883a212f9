"""Integrals over the unit ball of a Gaussian times something smooth.

Turned to the Gaussian's principal axes the ball stays a ball, so that with u_d = sin a_d,
u_(d-1) = cos a_d sin a_(d-1), ... every axis is an angle and the integrand is smooth to the ends.
Along an axis the Gaussian is negligible outside a window of a few of its deviations; Gauss–Legendre
nodes in that window resolve it with a number of nodes that depends on the tolerance alone, never on
how narrow the Gaussian is. The widest axis comes last, and is integrated in closed form where it
can be. (Polar coordinates with equal angles, the usual way, need more angles the narrower it is.)
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2PI = math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class Rule:
    """Nodes along an axis, and half the window in deviations of the Gaussian."""

    nodes: int
    reach: float

    @staticmethod
    def closed(tolerance: float) -> Rule:
        """Where the last axis is in closed form: the rest is a Gaussian times a smooth function."""
        digits = -math.log10(tolerance)
        return Rule(math.ceil(8 + 3.3 * digits), math.sqrt(2 * math.log(1 / tolerance)) + 0.4)

    @staticmethod
    def pulled_back(tolerance: float) -> Rule:
        """For derivatives of any order, which widen the Gaussian by powers of the distance."""
        digits = -math.log10(tolerance)
        return Rule(math.ceil(11 + 4.3 * digits), math.sqrt(2 * math.log(1 / tolerance)) + 1.8)


@lru_cache(maxsize=64)
def _legendre(n: int) -> tuple[list[float], list[float]]:
    nodes, weights = numpy.polynomial.legendre.leggauss(n)
    return nodes.tolist(), weights.tolist()


def legendre(n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1]. (n,), (n,)"""
    nodes, weights = _legendre(n)
    return like.new_tensor(nodes), like.new_tensor(weights)


@dataclass(frozen=True)
class Moments:
    """Integrals over the unit ball of N, u N and u u' N. (...), (..., d), (..., d, d)"""

    zeroth: Tensor
    first: Tensor
    second: Tensor

    def reshape(self, batch: torch.Size) -> Moments:
        d = self.first.shape[-1]
        return Moments(
            self.zeroth.reshape(batch),
            self.first.reshape(*batch, d),
            self.second.reshape(*batch, d, d),
        )


_CHUNK = 2**10  # pairs at a time: their nodes stay in the cache


def gaussian_moments(centre: Tensor, deviation: Tensor, rule: Rule) -> Moments:
    """Of N(u; centre, diag(deviation^2)); both (..., d), the widest axis first."""
    batch, d = centre.shape[:-1], centre.shape[-1]
    parts = zip(
        centre.reshape(-1, d).split(_CHUNK), deviation.reshape(-1, d).split(_CHUNK), strict=True
    )
    chunks = [_moments(a, m, rule) for a, m in parts]
    names = ("zeroth", "first", "second")
    moments = (torch.cat([getattr(chunk, name) for chunk in chunks]) for name in names)
    return Moments(*moments).reshape(batch)


def _moments(a: Tensor, m: Tensor, rule: Rule) -> Moments:
    """Of pairs (P, d)."""
    d = a.shape[1]
    pair = torch.arange(len(a), device=a.device)
    # (pieces, nodes): every piece of a pair's window is a row of its own; empty ones are left out.
    radius = torch.ones_like(a[:, :1])
    weight: Tensor = radius
    outer: list[Tensor] = []
    for axis in range(d - 1, 0, -1):
        row = pair.repeat_interleave(radius.shape[1])
        radius, weight, outer = radius.flatten(), weight.flatten(), [y.flatten() for y in outer]
        low, high = _window(a[row, axis], m[row, axis], radius, rule.reach)
        inner = a[row, :axis].square().sum(-1).sqrt(), m[row, 0]
        ends = _pieces(low, high, radius, *inner, rule.reach)
        first, last = torch.cat(ends[:-1]), torch.cat(ends[1:])
        piece = (last > first).nonzero().squeeze(-1)
        source = piece % len(row)
        angle, w = _in_pieces([first[piece, None], last[piece, None]], legendre(rule.nodes, a), 0)
        pair, left = row[source], radius[source, None]
        y, radius = left * angle.sin(), left * angle.cos()
        across, size = a[pair, axis, None], m[pair, axis, None]
        normal = ((y - across) / size).square_().mul_(-0.5).exp_()
        weight = normal.mul_(w).mul_(radius).mul_(weight[source, None] / (size * _SQRT_2PI))
        outer = [y, *(other[source, None].expand_as(y) for other in outer)]
    inner_moments = interval_moments(a[pair, 0, None], m[pair, 0, None], radius)
    return _assemble(weight, inner_moments, outer, pair, len(a))


def _window(
    centre: Tensor, deviation: Tensor, radius: Tensor, reach: float
) -> tuple[Tensor, Tensor]:
    """Angles between which the Gaussian matters, also where its centre lies outside the ball."""
    outside = (centre.abs() - radius).clamp_min(0)
    half = torch.hypot(outside, reach * deviation)
    bounds = ((centre - half) / radius, (centre + half) / radius)
    low, high = (bound.clamp(-1, 1).asin() for bound in bounds)
    return low, high


def _pieces(
    low: Tensor, high: Tensor, radius: Tensor, inner: Tensor, deviation: Tensor, reach: float
) -> list[Tensor]:
    """The window's ends and where to cut it.

    What is left to the other axes is a ball of radius r = radius cos(angle). Their Gaussian lies at
    the distance `inner`, so that it is all inside for r > inner + reach deviation and all
    outside for r < inner - reach deviation: between those the integrand has a bend of its own.
    """
    half = torch.hypot((inner - radius).clamp_min(0), reach * deviation)
    stop = ((inner - half) / radius).clamp(0, 1).acos()
    start = ((inner + half) / radius).clamp(0, 1).acos()
    low, high = torch.maximum(low, -stop), torch.minimum(high, stop)
    high = torch.maximum(low, high)
    cuts = [torch.minimum(torch.maximum(cut, low), high) for cut in (-start, start)]
    return [low, *cuts, high]


def _in_pieces(
    ends: list[Tensor], rule: tuple[Tensor, Tensor], others: int
) -> tuple[Tensor, Tensor]:
    """Nodes and weights of all pieces, along the axis in front of `others` more."""
    x, w = (t.reshape(-1, *(1,) * others) for t in rule)
    angles, weights = [], []
    for low, high in itertools.pairwise(ends):
        angles.append((low + high) / 2 + (high - low) / 2 * x)
        weights.append((high - low) / 2 * w)
    axis = -1 - others
    return torch.cat(angles, axis), torch.cat(weights, axis)


def interval_moments(
    centre: Tensor, deviation: Tensor, radius: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Integrals of N, x N, x^2 N over [-radius, radius] (Farinhas, 2021, eqs. A.18 to A.20).

    radius (P, n), the others (P, 1) -> (P, n) each
    """
    b = centre.abs()  # turned so that the tail is an erfc
    low, high = (b - radius) / deviation, (b + radius) / deviation
    mass = (torch.erfc(low * _SQRT_HALF) - torch.erfc(high * _SQRT_HALF)).mul_(0.5)
    size = deviation / _SQRT_2PI
    at_low, at_high = (
        low.square().mul_(-0.5).exp_().mul_(size),
        high.square().mul_(-0.5).exp_().mul_(size),
    )
    first = (at_low - at_high).sub_(b * mass)
    second = (
        (b.square() + deviation.square()) * mass - (b + radius) * at_low + (b - radius) * at_high
    )
    # Over a short piece of a wide Gaussian those are differences of equal numbers; nine nodes do.
    short = (high - low) * (1 + high) < 1
    if bool(short.any()):
        few = _short_moments(
            b.expand_as(radius)[short], deviation.expand_as(radius)[short], radius[short]
        )
        mass[short], first[short], second[short] = few
    return mass, torch.where(centre > 0, -first, first), second


def _short_moments(b: Tensor, deviation: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a centre at -b, by Gauss's rule."""
    x, w = legendre(9, b)
    y = radius.unsqueeze(-1) * x
    z = (y + b.unsqueeze(-1)) / deviation.unsqueeze(-1)
    value = (-z.square() / 2).exp() * w * (radius / (deviation * _SQRT_2PI)).unsqueeze(-1)
    return value.sum(-1), (value * y).sum(-1), (value * y.square()).sum(-1)


def _assemble(
    weight: Tensor,
    inner: tuple[Tensor, Tensor, Tensor],
    outer: list[Tensor],
    pair: Tensor,
    pairs: int,
) -> Moments:
    """Sum over the nodes, then over the pieces of a pair; axis 0 is the one in closed form."""
    j0, j1, j2 = (weight * j for j in inner)

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(pairs).index_add(0, pair, x.sum(-1))

    first = [total(j1), *(total(j0 * y) for y in outer)]
    rows: list[list[Tensor]] = [[total(j2), *(total(j1 * y) for y in outer)]]
    for i, y in enumerate(outer):
        row = [rows[0][i + 1], *(rows[k + 1][i + 1] for k in range(i))]
        rows.append([*row, *(total(j0 * y * z) for z in outer[i:])])
    second = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return Moments(total(j0), torch.stack(first, -1), second)


def nodes(
    centre: Tensor, deviation: Tensor, power: Tensor, rule: Rule, kinked: bool
) -> tuple[Tensor, Tensor]:
    """Points of the unit ball and weights for (1 - |u|^2)^power N(u; centre, diag(deviation^2)).

    centre, deviation (..., d), power (...) -> (..., K, d), (..., K). The product is log-concave,
    its curvature at least 2 power + 1 / deviation^2 along each axis, so that a box of so many
    deviations around its mode holds it. `kinked`: the power is no multiple of 1/2, and leaves a
    kink at the ends, which a substitution with a double zero there takes away.
    """
    d = centre.shape[-1]
    middle = _mode(centre, deviation, power)
    spread = 1 / (2 * power.unsqueeze(-1) + deviation.square().reciprocal()).sqrt()
    x, w = legendre(rule.nodes, centre)
    if kinked:  # half as many again, since it thins them out in the middle
        x, w = legendre(math.ceil(1.5 * rule.nodes), centre)
        x, w = 1.5 * x - 0.5 * x**3, w * 1.5 * (1 - x.square())
    batch = centre.shape[:-1]
    middle, spread = (t.reshape(*batch, *(1,) * d, d) for t in (middle, spread))
    radius = centre.new_ones((*batch, *(1,) * d))
    weight = radius
    points: list[Tensor] = []
    for axis in range(d - 1, -1, -1):
        low, high = _window(middle[..., axis], spread[..., axis], radius, rule.reach)
        ends = [low, high]
        if axis:
            inner = middle[..., :axis].square().sum(-1).sqrt(), spread[..., 0]
            ends = _pieces(low, high, radius, *inner, rule.reach)
        angle, w_angle = _in_pieces(ends, (x, w), axis)
        points.insert(0, radius * angle.sin())
        radius = radius * angle.cos()
        weight = weight * w_angle * radius
    u = torch.stack([point.expand(weight.shape).flatten(-d) for point in points], -1)
    return u, weight.flatten(-d)


def _mode(centre: Tensor, deviation: Tensor, power: Tensor) -> Tensor:
    """Of power log(1 - |u|^2) - |(u - centre) / deviation|^2 / 2. (..., d)

    u = centre / (1 + x deviation^2) with x (1 - |u|^2) = 2 power, whose left side grows with x.
    """
    variance = deviation.square()
    length = centre.square().sum(-1).sqrt()
    low = (2 * power).expand(length.shape).log()
    high = torch.maximum(
        low + math.log(2.0), (math.sqrt(2.0) * length / variance.amin(-1)).clamp_min(1e-300).log()
    )
    for _ in range(60):
        trial = (low + high) / 2
        u = centre / (1 + trial.exp().unsqueeze(-1) * variance)
        below = trial.exp() * (1 - u.square().sum(-1)) < 2 * power
        low, high = torch.where(below, trial, low), torch.where(below, high, trial)
    return centre / (1 + high.exp().unsqueeze(-1) * variance)
