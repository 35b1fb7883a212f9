"""What integrals cost: calls of the integrand, and seconds."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

import fenchel.continuous as fc
from benchmarks import integrals_methods, machine
from papers.claims.evidence import smallest
from papers.claims.thesis._disc import Pair, legendre
from papers.claims.thesis._expectations import problem

_REPETITIONS = 3
_LOOSE = {"epsabs": 1e-5, "epsrel": 1e-5}
Work = Callable[[], object]


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., float]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *at: float) -> float:
        self.calls += 1
        return self.function(*at)


@dataclass(frozen=True)
class Cost:
    """Of one integral; seconds: the least of a few repetitions."""

    value: float
    calls: int
    seconds: float


def measured(pair: Pair) -> list[Cost]:
    """Adaptive quadrature of E[psi]: on a box around the disc, in polar coordinates, in the angle
    alone."""
    from scipy.integrate import dblquad, quad

    disc, polar, angular = _integrands(pair)
    return [
        _cost(disc, lambda f: dblquad(f, -1, 1, -1, 1, **_LOOSE)),
        _cost(polar, lambda f: dblquad(f, 0, 2 * math.pi, 0, 1, **_LOOSE)),
        _cost(angular, lambda f: quad(f, 0, 2 * math.pi, **_LOOSE)),
    ]


def _cost(
    function: Callable[..., float], integrate: Callable[[Counted], tuple[float, ...]]
) -> Cost:
    counted = Counted(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its doubts at the edge of the disc
        value = float(integrate(counted)[0])
        return Cost(value, counted.calls, _seconds(lambda: integrate(counted), _REPETITIONS))


def _integrands(pair: Pair) -> list[Callable[..., float]]:
    """On the disc, in polar coordinates, and along the circle, of plain numbers."""
    mean, covariance = pair.on_disc()
    (m1, m2), ((p11, p12), (_, p22)) = mean.tolist(), torch.linalg.inv(covariance).tolist()
    size = pair.level * math.sqrt(p11 * p22 - p12 * p12) / (2 * math.pi)

    def disc(y: float, x: float) -> float:
        if x * x + y * y >= 1:
            return 0.0
        e, f = x - m1, y - m2
        squared = p11 * e * e + 2 * p12 * e * f + p22 * f * f
        return float((1 - x * x - y * y) * size * math.exp(-squared / 2))

    def polar(r: float, angle: float) -> float:
        return r * disc(r * math.sin(angle), r * math.cos(angle))

    one = next(integrals_methods.Disc.of(problem(pair)).each())
    return [disc, polar, lambda angle: float(integrals_methods.ray(one, angle, math))]


def quadrature_over_sum(seed: int, repetitions: int) -> float:
    """Of the seconds for 10 densities and 10 functions, the least; both in one thread."""
    pairs = [Pair.draw(torch.Generator().manual_seed(seed + k)) for k in range(10)]
    means, scales, centres, covariances = (
        torch.stack([getattr(pair, name) for pair in pairs])
        for name in ("mean", "scale", "centre", "covariance")
    )
    density, basis = fc.Paraboloid(means, scales), fc.GaussianBasis(centres, covariances)
    all_of_them = integrals_methods.Problem(density, basis)
    with machine.one_thread():
        one_by_one = _seconds(lambda: integrals_methods.quadrature(all_of_them), repetitions)
        together = _seconds(lambda: integrals_methods.trapezoid(all_of_them), repetitions)
    return one_by_one / together


def _seconds(work: Work, repetitions: int) -> float:
    """The least: other work on the machine only adds to it."""
    taken = []
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return smallest(taken)


def area(side: float) -> float:
    """Of the unit disc inside a box of that side around its centre, line by line."""
    x, w = legendre(100)
    widest = math.asin(side / 2)
    angle = x * widest
    height = angle.cos().clamp_max(side / 2)
    return float((w * widest * angle.cos() * 2 * height).sum())
