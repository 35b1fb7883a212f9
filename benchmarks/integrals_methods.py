"""Six ways to the expectations of Gaussians under truncated paraboloids in the plane.

With t = mean + radius L u the support is the unit disc, and along a ray of angle a the Gaussian is
one of the distance r alone, s(a) N(r; r0(a), sigma(a)^2) (CLAIMS F-A.15..17):

    E = level * integral over a of s * integral over 0 < r < 1 of (r - r^3) N(r; r0, sigma^2),

whose inner integral has a closed form. The outer one is that of a smooth periodic function, for
which equal steps are the best rule, as long as 0 and 2 pi, the same point, are not both counted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

import fenchel.continuous as fc
from benchmarks import extras
from fenchel.continuous.ball import Rule
from fenchel.continuous.expectations import by_moments

ANGLES = 100  # as many as the thesis takes

_SQRT_2 = math.sqrt(2)
_SQRT_2PI = math.sqrt(2 * math.pi)
_AT_A_TIME = 2**20  # integrands


@dataclass(frozen=True)
class Problem:
    """Densities of batch shape (B,) and N functions: B times N integrals."""

    density: fc.Paraboloid
    basis: fc.GaussianBasis

    @property
    def integrals(self) -> int:
        return self.density.batch_shape.numel() * len(self.basis)

    def one(self, number: int) -> Problem:
        """A single integral, counted along the functions first."""
        row, column = divmod(number, len(self.basis))
        function = slice(column, column + 1)
        basis = fc.GaussianBasis(self.basis.centers[function], self.basis.covariances[function])
        return Problem(self.density[row : row + 1], basis)


@dataclass(frozen=True)
class Setting:
    """How wide the functions are, and how long the densities are for their width."""

    name: str
    variance: float  # of every function, in each direction
    ratio: tuple[float, float]  # of a density's eigenvalues, between these

    def problem(self, densities: int, functions: int, seed: int) -> Problem:
        """functions: along each axis of the unit square."""
        generator = torch.Generator().manual_seed(seed)
        draw = torch.rand(5, densities, generator=generator, dtype=torch.float64)
        larger = 0.01 + 0.03 * draw[0]
        ratio = self.ratio[0] + (self.ratio[1] - self.ratio[0]) * draw[1]
        x, y = (math.pi * draw[2]).cos(), (math.pi * draw[2]).sin()
        axes = torch.stack([torch.stack([x, -y], -1), torch.stack([y, x], -1)], -2)
        values = torch.stack([larger, larger / ratio], -1)
        covariance = axes @ values.diag_embed() @ axes.mT
        density = fc.Paraboloid.from_covariance(0.25 + 0.5 * draw[3:].mT, covariance)
        centers = fc.cell_centers(functions, functions).to(torch.float64)
        square = self.variance * torch.eye(2, dtype=torch.float64)
        return Problem(density, fc.GaussianBasis(centers, square))


class Method(NamedTuple):
    """call: all integrals of a problem, (B, N); batched: whether it does them at once."""

    name: str
    call: Callable[[Problem], Tensor]
    batched: bool


# ---- the radius in closed form


class Disc(NamedTuple):
    """The Gaussian in the disc's coordinates: numbers, or tensors (B, N)."""

    level: Any
    centre: tuple[Any, Any]
    precision: tuple[Any, Any, Any]  # p11, p12, p22

    @classmethod
    def of(cls, problem: Problem) -> Self:
        density, basis = problem.density, problem.basis
        level = (math.pi * torch.linalg.det(density.scale).sqrt()).rsqrt()  # CLAIMS F-A.14
        radius = (2 * level).sqrt()[:, None, None]
        to_disc = torch.linalg.inv(torch.linalg.cholesky(density.scale)) / radius  # (B, 2, 2)
        apart = basis.centers - density.mean.unsqueeze(1)  # (B, N, 2)
        centre = apart @ to_disc.mT
        covariance = to_disc.unsqueeze(1) @ basis.covariances @ to_disc.mT.unsqueeze(1)
        precision = torch.linalg.inv(covariance)  # (B, N, 2, 2)
        entries = (precision[..., 0, 0], precision[..., 0, 1], precision[..., 1, 1])
        return cls(
            level.unsqueeze(1).expand_as(entries[0]), (centre[..., 0], centre[..., 1]), entries
        )

    def each(self) -> Iterator[Disc]:
        """One at a time, as plain numbers."""
        columns = (self.level, *self.centre, *self.precision)
        for level, m1, m2, *precision in zip(*(x.flatten().tolist() for x in columns), strict=True):
            yield Disc(level, (m1, m2), tuple(precision))


def ray(disc: Disc, angle: Any, on: Any) -> Any:
    """The integral over the radius at an angle. on: `math` for numbers, `torch` for tensors."""
    (m1, m2), (p11, p12, p22) = disc.centre, disc.precision
    x, y = on.cos(angle), on.sin(angle)
    sigma = 1 / on.sqrt(p11 * x * x + 2 * p12 * x * y + p22 * y * y)
    r0 = sigma * sigma * (x * (p11 * m1 + p12 * m2) + y * (p12 * m1 + p22 * m2))
    # m' P m - r0^2 / sigma^2 of F-A.17 is det P sigma^2 (x m2 - y m1)^2, which does not cancel.
    det, across = p11 * p22 - p12 * p12, x * m2 - y * m1
    off = det * (sigma * across) ** 2
    s = sigma * on.sqrt(det) / _SQRT_2PI * on.exp(-off / 2)
    return disc.level * s * radial(r0, sigma, on)


def radial(r0: Any, sigma: Any, on: Any) -> Any:
    """Integral over 0 < r < 1 of (r - r^3) N(r; r0, sigma^2).

    r = r0 + sigma z, and the moments of z between u and v are those of F-A.18..21.
    """
    u, v = -r0 / sigma, (1 - r0) / sigma
    at_u, at_v = on.exp(-u * u / 2) / _SQRT_2PI, on.exp(-v * v / 2) / _SQRT_2PI
    middle, half = abs(u + v) / 2, (v - u) / 2  # turned to the right, where erfc keeps its digits
    zeroth = (on.erfc((middle - half) / _SQRT_2) - on.erfc((middle + half) / _SQRT_2)) / 2
    first = at_u - at_v
    second = zeroth + u * at_u - v * at_v
    third = (2 + u * u) * at_u - (2 + v * v) * at_v
    of_r = r0 * zeroth + sigma * first
    of_cube = (
        r0**3 * zeroth + 3 * r0**2 * sigma * first + 3 * r0 * sigma**2 * second + sigma**3 * third
    )
    return of_r - of_cube


# ---- the methods


def cubature(problem: Problem) -> Tensor:
    """Adaptive in both coordinates, between the ends of the ellipse."""
    integrate = extras.load("scipy.integrate")
    shape = (problem.density.batch_shape.numel(), len(problem.basis))
    values = [_cubature(integrate, problem.one(k)) for k in range(problem.integrals)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def _cubature(integrate: Any, problem: Problem) -> float:
    (m1, m2), ((s11, s12), (_, s22)) = (
        problem.density.mean[0].tolist(),
        problem.density.scale[0].tolist(),
    )
    c1, c2 = problem.basis.centers[0].tolist()
    (k11, k12), (_, k22) = torch.linalg.inv(problem.basis.covariances[0]).tolist()
    det = s11 * s22 - s12 * s12
    level = 1 / math.sqrt(math.pi * math.sqrt(det))
    peak = math.sqrt(k11 * k22 - k12 * k12) / (2 * math.pi)

    def integrand(y: float, x: float) -> float:
        a, b = x - m1, y - m2
        score = (s22 * a * a - 2 * s12 * a * b + s11 * b * b) / (2 * det)
        e, f = x - c1, y - c2
        squared = k11 * e * e + 2 * k12 * e * f + k22 * f * f
        return float((level - score) * peak * math.exp(-squared / 2))

    def end(x: float, side: float) -> float:
        """Where the ellipse cuts the line at x."""
        a = x - m1
        left = max(0.0, 2 * level - a * a / s11)
        return float(m2 + s12 / s11 * a + side * math.sqrt(left * det / s11))

    reach = math.sqrt(2 * level * s11)
    bounds = (m1 - reach, m1 + reach, lambda x: end(x, -1), lambda x: end(x, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of doubts about its accuracy: the error is measured here
        return float(integrate.dblquad(integrand, *bounds)[0])


def quadrature(problem: Problem) -> Tensor:
    """Adaptive in the angle."""
    integrate = extras.load("scipy.integrate")
    disc = Disc.of(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [
            integrate.quad(lambda angle, one=one: ray(one, angle, math), 0, 2 * math.pi)[0]
            for one in disc.each()
        ]
    return torch.tensor(values, dtype=torch.float64).reshape(disc.level.shape)


def loop(problem: Problem, angles: int = ANGLES) -> Tensor:
    """Algorithm 4: one angle after the other, all integrals at once (CLAIMS F-A4, F-NAIVE)."""
    disc = Disc.of(problem)
    total = torch.zeros_like(disc.level)
    for angle in _circle(angles):
        total = total + ray(disc, angle, torch)
    return total * (2 * math.pi / angles)


def trapezoid(problem: Problem, angles: int = ANGLES) -> Tensor:
    """The same sum as one expression, in parts where it would not fit into memory."""
    return _sum(problem, _circle(angles))


def both_ends(problem: Problem, angles: int = ANGLES) -> Tensor:
    """The thesis' wording: as many angles, but from 0 to 2 pi with both of them (F-NAIVE)."""
    return _sum(problem, torch.linspace(0, 2 * math.pi, angles, dtype=torch.float64))


def _sum(problem: Problem, angles: Tensor) -> Tensor:
    disc = Disc.of(problem)
    parts = angles[:, None, None].split(max(1, _AT_A_TIME // problem.integrals))  # (angles, 1, 1)
    total = torch.stack([ray(disc, part, torch).sum(0) for part in parts]).sum(0)
    return total * (2 * math.pi / len(angles))


def _circle(angles: int) -> Tensor:
    return torch.arange(angles, dtype=torch.float64) * (2 * math.pi / angles)


def ours(problem: Problem, tolerance: float | None = None) -> Tensor:
    return problem.density.expect(problem.basis, tolerance)


def by_rule(problem: Problem, rule: Rule) -> Tensor:
    """Ours with so many nodes in every piece; native code takes fewer where few are enough."""
    density, basis = problem.density, problem.basis
    centre = basis.centers.expand(len(density.mean), -1, -1)
    mean = density.mean.unsqueeze(1).expand_as(centre)
    square = (*centre.shape, centre.shape[-1])
    scale = density.scale.unsqueeze(1).expand(square)
    return by_moments(mean, scale, centre, basis.covariances.expand(square), rule)[0]


OURS = "fl expect"
BOTH_ENDS = f"{ANGLES} angles, both ends"
METHODS = (
    Method("scipy dblquad", cubature, batched=False),
    Method("scipy quad, radius closed", quadrature, batched=False),
    Method(f"{ANGLES} angles, loop", loop, batched=True),
    Method(f"{ANGLES} angles, batched", trapezoid, batched=True),
    Method(BOTH_ENDS, both_ends, batched=True),
    Method(OURS, ours, batched=True),
)
