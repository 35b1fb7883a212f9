"""Appendix A.2 of the thesis in plain formulas.

A truncated paraboloid TP(m, S) and a function psi = N(.; m_j, S_j) in the plane, and what becomes
of them on the unit disc, t = m + R u, R = (2 c)^(1/2) S^(1/2), and along its rays u = r a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy
import torch
from torch import Tensor

_SQRT_2PI = math.sqrt(2 * math.pi)


def legendre(nodes: int) -> tuple[Tensor, Tensor]:
    """Gauss–Legendre nodes and weights on [-1, 1]. (n,), (n,)"""
    x, w = numpy.polynomial.legendre.leggauss(nodes)
    return torch.from_numpy(x), torch.from_numpy(w)


def normal(points: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """N(t; mean, covariance) at points (..., d). (...)"""
    apart = points - mean
    inverse = torch.linalg.inv(covariance)
    squared = torch.einsum("...i,ij,...j->...", apart, inverse, apart)
    size: Tensor = torch.linalg.det(2 * math.pi * covariance).sqrt()
    return (-squared / 2).exp() / size


def standard_normal(x: Tensor) -> Tensor:
    return (-x.square() / 2).exp() / _SQRT_2PI


def closed_moments(u: float, v: float) -> list[float]:
    """Of the standard normal between u and v, 0 to 3 (A.18..A.21)."""
    at_u, at_v = (math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (u, v))
    zeroth = (math.erf(v / math.sqrt(2)) - math.erf(u / math.sqrt(2))) / 2
    third = -at_v * (2 + v * v) + at_u * (2 + u * u)
    return [zeroth, at_u - at_v, zeroth - v * at_v + u * at_u, third]


def uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    draw = torch.rand(*shape, generator=generator, dtype=torch.float64)
    return low + (high - low) * draw


def ellipse(generator: torch.Generator, low: float, high: float) -> Tensor:
    """A positive definite matrix with eigenvalues between low and high. (2, 2)"""
    angle, *values = (float(x) for x in torch.rand(3, generator=generator, dtype=torch.float64))
    x, y = math.cos(math.pi * angle), math.sin(math.pi * angle)
    axes = torch.tensor([[x, -y], [y, x]], dtype=torch.float64)
    lengths = torch.tensor([low + (high - low) * value for value in values], dtype=torch.float64)
    return axes @ lengths.diag() @ axes.T


def inside(shape: Tensor, nodes: int = 60) -> tuple[Tensor, Tensor]:
    """Points of {t : t' shape^-1 t <= 1} and their weights, line after line. (n^2, 2), (n^2,)"""
    x, w = legendre(nodes)
    (s11, s12), (_, s22) = shape.tolist()
    angle = x * math.pi / 2  # t_1 = reach sin(angle): smooth at the ends
    reach = math.sqrt(s11)
    first = reach * angle.sin()
    half = math.sqrt(s22 - s12**2 / s11) * angle.cos()
    second = s12 / s11 * first.unsqueeze(1) + half.unsqueeze(1) * x
    points = torch.stack([first.unsqueeze(1).expand_as(second), second], -1)
    weights = (w * math.pi / 2 * reach * angle.cos() * half).unsqueeze(1) * w
    return points.flatten(0, 1), weights.flatten()


@dataclass(frozen=True)
class Pair:
    """mean m and scale S of the paraboloid, centre m_j and covariance S_j of the function."""

    mean: Tensor  # (2,)
    scale: Tensor  # (2, 2)
    centre: Tensor  # (2,)
    covariance: Tensor  # (2, 2)

    @classmethod
    def draw(cls, generator: torch.Generator) -> Self:
        """About as wide as each other, and overlapping: rules of quadrature converge fast."""
        mean = uniform(generator, -0.4, 0.4, 2)
        centre = mean + uniform(generator, -0.5, 0.5, 2)
        return cls(mean, ellipse(generator, 0.1, 0.4), centre, ellipse(generator, 0.05, 0.2))

    @classmethod
    def narrow(cls, variance: float, distance: float) -> Self:
        """The functions of the thesis' Table 6.1, S_j = 0.001 I, at angle 0 from the middle of a
        round density of that variance."""
        eye = torch.eye(2, dtype=torch.float64)
        mean = torch.full((2,), 0.5, dtype=torch.float64)
        scale = 9 * math.pi * variance**2 * eye  # S = 9 pi |V|^(1/2) V (4.6)
        return cls(mean, scale, mean + distance * eye[0], 0.001 * eye)

    @property
    def level(self) -> float:
        """c = -lambda (A.14)."""
        return 1 / math.sqrt(math.pi * math.sqrt(float(torch.linalg.det(self.scale))))

    @property
    def area(self) -> float:
        """|E| (A.27)."""
        return 2 * math.pi * self.level * math.sqrt(float(torch.linalg.det(self.scale)))

    @property
    def root(self) -> Tensor:
        """R, the symmetric root of 2 c S. (2, 2)"""
        values, axes = torch.linalg.eigh(2 * self.level * self.scale)
        root: Tensor = axes @ values.sqrt().diag() @ axes.T
        return root

    def on_disc(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of psi in the disc's coordinates, below (A.15)."""
        inverse = torch.linalg.inv(self.root)
        return inverse @ (self.centre - self.mean), inverse @ self.covariance @ inverse.T

    def density(self, points: Tensor) -> Tensor:
        apart = points - self.mean
        inverse = torch.linalg.inv(self.scale)
        score = torch.einsum("...i,ij,...j->...", apart, inverse, apart) / 2
        return (self.level - score).clamp_min(0)

    def psi(self, points: Tensor) -> Tensor:
        return normal(points, self.centre, self.covariance)

    def on_support(self, nodes: int = 60) -> tuple[Tensor, Tensor]:
        """Points of the ellipse E and their weights. (n^2, 2), (n^2,)"""
        points, weights = inside(2 * self.level * self.scale, nodes)
        return points + self.mean, weights

    def rays(self, angles: Tensor) -> Rays:
        """(A.17)"""
        mean, covariance = self.on_disc()
        inverse = torch.linalg.inv(covariance)
        a = torch.stack([angles.cos(), angles.sin()], -1)  # (n, 2)
        variance = 1 / torch.einsum("ni,ij,nj->n", a, inverse, a)
        r0 = variance * (a @ inverse @ mean)
        p = inverse - variance[:, None, None] * _outer(a @ inverse, a @ inverse)
        size = variance.sqrt() / torch.linalg.det(covariance).sqrt() / _SQRT_2PI
        s = size * (-(torch.einsum("i,nij,j->n", mean, p, mean)) / 2).exp()
        return Rays(variance.sqrt(), r0, s, a @ self.root.T, self.mean)


@dataclass(frozen=True)
class Rays:
    """Along each: N(a r; ~m, ~S) = s N(r; r0, sigma^2), t = mean + r step. (n,), step (n, 2)"""

    sigma: Tensor
    r0: Tensor
    s: Tensor
    step: Tensor
    mean: Tensor

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Of the ray in deviations from r0, -r0 / sigma and (1 - r0) / sigma."""
        return -self.r0 / self.sigma, (1 - self.r0) / self.sigma

    @property
    def bracket(self) -> Tensor:
        """erf((1 - r0) / (sqrt 2 sigma)) - erf(-r0 / (sqrt 2 sigma))"""
        low, high = self.ends
        return torch.erf(high / math.sqrt(2)) - torch.erf(low / math.sqrt(2))

    def forward(self) -> Tensor:
        """F, the integral of r (1 - r^2) N(r; r0, sigma^2) (A.22). (n,)"""
        sigma, r0 = self.sigma, self.r0
        low, high = map(standard_normal, self.ends)
        return (
            (2 * sigma**3 + r0**2 * sigma + r0 * sigma) * high
            - (2 * sigma**3 + r0**2 * sigma - sigma) * low
            - (r0**3 + (3 * sigma**2 - 1) * r0) / 2 * self.bracket
        )

    def zeroth(self) -> Tensor:
        """H, of r N (A.34). (n,)"""
        low, high = map(standard_normal, self.ends)
        return self.sigma * (low - high) + self.r0 / 2 * self.bracket

    def first(self) -> Tensor:
        """G, of r t N (A.31). (n, 2)"""
        sigma, r0 = self.sigma.unsqueeze(1), self.r0.unsqueeze(1)
        low, high = (standard_normal(end).unsqueeze(1) for end in self.ends)
        return (
            (self.step * sigma * r0 + self.mean * sigma) * low
            - (self.step * sigma * (1 + r0) + self.mean * sigma) * high
            + (self.step * (sigma**2 + r0**2) + self.mean * r0) / 2 * self.bracket.unsqueeze(1)
        )

    def second(self) -> Tensor:
        """M, of r t t' N (A.36..A.41). (n, 2, 2)"""
        sigma, r0 = self.sigma[:, None, None], self.r0[:, None, None]
        low, high = (end[:, None, None] for end in self.ends)
        mean = self.mean.expand_as(self.step)
        a = _outer(self.step, self.step)
        b = _outer(self.step, mean) + _outer(mean, self.step)
        c = _outer(mean, mean)
        cubic, square = sigma**3 * a, sigma**2 * (3 * r0 * a + b)
        linear = sigma * (3 * r0**2 * a + 2 * r0 * b + c)
        constant = r0**3 * a + r0**2 * b + r0 * c
        return (
            ((2 + low**2) * cubic + low * square + linear) * standard_normal(low)
            - ((2 + high**2) * cubic + high * square + linear) * standard_normal(high)
            + (square + constant) / 2 * self.bracket[:, None, None]
        )

    def along(self, nodes: int = 80) -> tuple[Tensor, Tensor, Tensor]:
        """By quadrature: r (k,), points (n, k, 2), and r N(r; r0, sigma^2) dr (n, k)."""
        x, w = legendre(nodes)
        r = (1 + x) / 2
        points = self.mean + r.unsqueeze(1) * self.step.unsqueeze(1)
        return r, points, r * w / 2 * self.normal(r)

    def in_deviations(self, nodes: int = 80) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes in s = (r - r0) / sigma (n, k), points (n, k, 2), and ds (n, k)."""
        x, w = legendre(nodes)
        low, high = (end.unsqueeze(1) for end in self.ends)
        s = low + (high - low) * (1 + x) / 2
        r = s * self.sigma.unsqueeze(1) + self.r0.unsqueeze(1)
        points = self.mean + r.unsqueeze(-1) * self.step.unsqueeze(1)
        return s, points, (high - low) * w / 2

    def normal(self, r: Tensor) -> Tensor:
        """N(r; r0, sigma^2) at r (k,) or (n, k). (n, k)"""
        sigma = self.sigma.unsqueeze(1)
        return standard_normal((r - self.r0.unsqueeze(1)) / sigma) / sigma


def circle(count: int) -> Tensor:
    """Equal angles, 2 pi left out: it is 0 again. (n,)"""
    return torch.arange(count, dtype=torch.float64) * (2 * math.pi / count)


def around(rays: Rays, each: Tensor) -> Tensor:
    """The integral over all angles of s times each (n, ...), from equal angles. (...)"""
    total: Tensor = torch.tensordot(rays.s, each, 1)
    return total * (2 * math.pi / len(rays.s))


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left.unsqueeze(-1) * right.unsqueeze(-2)
