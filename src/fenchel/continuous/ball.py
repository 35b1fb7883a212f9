"""Integrals over the unit ball of a Gaussian times something smooth.

Turned to the Gaussian's principal axes the ball stays a ball, so that with u_d = sin a_d,
u_(d-1) = cos a_d sin a_(d-1), ... every axis is an angle and the integrand is smooth to the ends. Along
an axis the Gaussian is negligible outside a window of a few of its deviations; Gauss–Legendre nodes
in that window resolve it with a number of nodes that depends on the tolerance alone, never on how
narrow the Gaussian is. The widest axis comes last, and is integrated in closed form where it can be.
"""

from __future__ import annotations

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
        return Rule(math.ceil(6 + 2.6 * digits), math.sqrt(2 * math.log(1 / tolerance)) + 1)

    @staticmethod
    def pulled_back(tolerance: float) -> Rule:
        """For derivatives of any order, which widen the Gaussian by powers of the distance."""
        digits = -math.log10(tolerance)
        return Rule(math.ceil(10 + 3.2 * digits), math.sqrt(2 * math.log(1 / tolerance)) + 2.5)


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


def gaussian_moments(centre: Tensor, deviation: Tensor, rule: Rule) -> Moments:
    """Of N(u; centre, diag(deviation^2)); both (..., d), the widest axis first."""
    d = centre.shape[-1]
    ones = (1,) * (d - 1)
    batch = centre.shape[:-1]
    a = centre.reshape(*batch, *ones, d)
    m = deviation.reshape(*batch, *ones, d)
    radius = torch.ones_like(a[..., 0])
    weight = radius
    coordinates: list[Tensor] = []
    for level, axis in enumerate(range(d - 1, 0, -1)):
        x, w = legendre(rule.nodes, centre)
        shape = (rule.nodes, *(1,) * (d - 2 - level))
        y, w, radius = _window_nodes(
            a[..., axis], m[..., axis], radius, rule.reach, (x.reshape(shape), w.reshape(shape))
        )
        z = (y - a[..., axis]) / m[..., axis]
        weight = weight * w * (-z.square() / 2).exp() / (m[..., axis] * _SQRT_2PI)
        coordinates.insert(0, y)
    inner = interval_moments(a[..., 0], m[..., 0], radius)
    return _assemble(weight, inner, coordinates, d)


def _window_nodes(
    centre: Tensor, deviation: Tensor, radius: Tensor, reach: float, rule: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Points of [-radius, radius], weights, and the radius that each point leaves to other axes.

    The window holds what matters, also where the Gaussian's centre lies outside.
    """
    x, w = rule
    outside = (centre.abs() - radius).clamp_min(0)
    half = torch.hypot(outside, reach * deviation)
    low = ((centre - half) / radius).clamp(-1, 1).asin()
    high = ((centre + half) / radius).clamp(-1, 1).asin()
    angle = (low + high) / 2 + (high - low) / 2 * x
    left = radius * angle.cos()
    return radius * angle.sin(), (high - low) / 2 * w * left, left


def interval_moments(centre: Tensor, deviation: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrals of N, x N, x^2 N over [-radius, radius] (CLAIMS F-A.18..20)."""
    turned = torch.where(centre > 0, -1.0, 1.0).to(centre.dtype)  # so that the tail is an erfc
    b = centre.abs()
    low, high = (b - radius) / deviation, (b + radius) / deviation
    mass = 0.5 * (torch.erfc(low * _SQRT_HALF) - torch.erfc(high * _SQRT_HALF))
    at_low = (-low.square() / 2).exp() * (deviation / _SQRT_2PI)
    at_high = (-high.square() / 2).exp() * (deviation / _SQRT_2PI)
    first = at_low - at_high - b * mass
    second = (b.square() + deviation.square()) * mass - (b + radius) * at_low + (b - radius) * at_high
    # Over a short piece of a wide Gaussian those are differences of equal numbers; six nodes do.
    short = (high - low) * (1 + high) < 1
    x, w = legendre(6, centre)
    few = [torch.zeros_like(mass) for _ in range(3)]
    for node, share in zip(x, w, strict=True):
        y = radius * node
        value = share * radius * (-((y + b) / deviation).square() / 2).exp() / (deviation * _SQRT_2PI)
        few = [few[0] + value, few[1] + value * y, few[2] + value * y.square()]
    mass, first, second = (torch.where(short, x, y) for x, y in zip(few, (mass, first, second), strict=True))
    return mass, turned * first, second


def _assemble(
    weight: Tensor, inner: tuple[Tensor, Tensor, Tensor], outer: list[Tensor], d: int
) -> Moments:
    """Sum over the nodes; coordinate 0 is the one in closed form."""
    axes = tuple(range(-(d - 1), 0))
    j0, j1, j2 = (weight * j for j in inner)

    def total(x: Tensor) -> Tensor:
        return x.sum(axes) if axes else x

    first = [total(j1), *(total(j0 * y) for y in outer)]
    rows: list[list[Tensor]] = [[total(j2), *(total(j1 * y) for y in outer)]]
    for i, y in enumerate(outer):
        row = [rows[0][i + 1], *(rows[k + 1][i + 1] for k in range(i))]
        rows.append([*row, *(total(j0 * y * z) for z in outer[i:])])
    second = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return Moments(total(j0), torch.stack(first, -1), second)


def nodes(
    centre: Tensor, deviation: Tensor, power: Tensor, rule: Rule, smooth: bool
) -> tuple[Tensor, Tensor]:
    """Points of the unit ball and weights for (1 - |u|^2)^power N(u; centre, diag(deviation^2)).

    centre, deviation (..., d), power (...) -> (..., K, d), (..., K). The product is log-concave with
    curvature at least 2 power + 1 / deviation^2 along each axis, so that a box of so many
    deviations around its mode holds it. `smooth`: the power is no multiple of 1/2, and leaves a
    kink at the ends, which a substitution with a double zero there takes away.
    """
    d = centre.shape[-1]
    middle = _mode(centre, deviation, power)
    half = rule.reach / (2 * power.unsqueeze(-1) + deviation.square().reciprocal()).sqrt()
    low, high = middle - half, middle + half
    x, w = legendre(rule.nodes, centre)
    if smooth:
        x, w = 1.5 * x - 0.5 * x**3, w * 1.5 * (1 - x.square())
    batch = centre.shape[:-1]
    radius = centre.new_ones((*batch, *(1,) * d))
    weight = radius
    points: list[Tensor] = []
    for number, axis in enumerate(range(d - 1, -1, -1)):
        shape = (rule.nodes, *(1,) * (d - 1 - number))
        bounds = (end[..., axis].reshape(*batch, *(1,) * d) / radius for end in (low, high))
        first, last = (bound.clamp(-1, 1).asin() for bound in bounds)
        angle = (first + last) / 2 + (last - first) / 2 * x.reshape(shape)
        weight = weight * (last - first) / 2 * w.reshape(shape) * radius * angle.cos()
        points.insert(0, radius * angle.sin())
        radius = radius * angle.cos()
    whole = (*batch, *(rule.nodes,) * d)
    u = torch.stack([point.expand(whole).flatten(-d) for point in points], -1)
    return u, weight.expand(whole).flatten(-d)


def _mode(centre: Tensor, deviation: Tensor, power: Tensor) -> Tensor:
    """Of power log(1 - |u|^2) - |(u - centre) / deviation|^2 / 2. (..., d)

    u = centre / (1 + x deviation^2) with x (1 - |u|^2) = 2 power, whose left side grows with x.
    """
    variance = deviation.square()
    length = centre.square().sum(-1).sqrt()
    low = (2 * power).expand(length.shape).log()
    high = torch.maximum(low + math.log(2.0), (math.sqrt(2.0) * length / variance.amin(-1)).clamp_min(1e-300).log())
    for _ in range(60):
        trial = (low + high) / 2
        u = centre / (1 + trial.exp().unsqueeze(-1) * variance)
        below = trial.exp() * (1 - u.square().sum(-1)) < 2 * power
        low, high = torch.where(below, trial, low), torch.where(below, high, trial)
    return centre / (1 + high.exp().unsqueeze(-1) * variance)
