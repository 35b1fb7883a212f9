"""Random inputs, rules of quadrature and plain formulas, none of them from the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Generator, Tensor

from papers.claims.evidence import Evidence

Rule = tuple[Tensor, Tensor]  # nodes (P, d), weights (P,)
EXACT = torch.float64


# ---- inputs


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=EXACT)


def uniform(generator: Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=EXACT)


def definite(generator: Generator, d: int, *batch: int) -> Tensor:
    """Random axes, eigenvalues between 0.3 and 1.5. (..., d, d)"""
    axes: Tensor = torch.linalg.qr(normal(generator, *batch, d, d)).Q
    values = 0.3 + 1.2 * uniform(generator, *batch, d)
    matrix = (axes * values.unsqueeze(-2)) @ axes.mT
    return (matrix + matrix.mT) / 2


def distributions(generator: Generator, *shape: int, floor: float = 0.0) -> Tensor:
    """Evenly from the simplex, then no weight below `floor`. (..., n)"""
    weights = -uniform(generator, *shape).clamp_min(1e-300).log()
    return floor + (1 - shape[-1] * floor) * weights / weights.sum(-1, keepdim=True)


def spread(generator: Generator, alpha: float, n: int = 5, outside: int = 2) -> Tensor:
    """Scores whose weights are 0.1 or more on n keys and zero on others, well below the threshold:
    derivatives by differences then meet no kink. The normaliser A is zero."""
    inside = log_b(distributions(generator, n, floor=0.1), 2 - alpha)
    if alpha == 1:
        return inside
    below = -1 / (alpha - 1) - 0.5 - uniform(generator, outside)
    return torch.cat([inside, below])


# ---- figures


def worst(evidence: Evidence, one: Callable[[Generator], Iterable[Tensor]]) -> list[Tensor]:
    """Each of the errors that `one` gives, largest over its entries and over the seeds."""
    rows = [
        torch.stack([x.detach().abs().max() for x in one(each)]) for each in evidence.generators()
    ]
    return list(torch.stack(rows).amax(0))


def least(evidence: Evidence, one: Callable[[Generator], Tensor]) -> Tensor:
    """The smallest entry over the seeds."""
    return torch.stack([one(each).min() for each in evidence.generators()]).amin()


def differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Central: row i is the derivative in at_i. `function` maps (2 n, n) to (2 n, ...)."""
    moves = step * torch.eye(at.numel(), dtype=EXACT)
    up, down = function(torch.cat([at + moves, at - moves])).chunk(2)
    return (up - down) / (2 * step)


# ---- formulas


def exp_b(u: Tensor, b: float) -> Tensor:
    """(3.3)"""
    return u.exp() if b == 1 else (1 + (1 - b) * u).clamp_min(0) ** (1 / (1 - b))


def log_b(u: Tensor, b: float) -> Tensor:
    """(3.4)"""
    return u.log() if b == 1 else (u ** (1 - b) - 1) / (1 - b)


def simplex_map(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """p = exp_{2-α}(scores - A) and A, by bisection of sum p = 1. (n,), ()"""
    size = torch.tensor(1.0 / scores.numel(), dtype=EXACT)
    low, high = scores.max(), scores.max() - log_b(size, 2 - alpha)
    for _ in range(100):
        middle = (low + high) / 2
        if exp_b(scores - middle, 2 - alpha).sum() > 1:
            low = middle
        else:
            high = middle
    return exp_b(scores - low, 2 - alpha), low


def negentropy(p: Tensor, alpha: float) -> Tensor:
    """(3.5) on the last axis, which must sum to one."""
    if alpha == 1:
        return torch.where(p > 0, p * p.log(), 0.0).sum(-1)
    return ((p**alpha).sum(-1) - 1) / (alpha * (alpha - 1))


def normal_density(t: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """By torch's own class. t (..., d) -> (...)"""
    log: Tensor = torch.distributions.MultivariateNormal(mean, covariance).log_prob(t)
    return log.exp()


def level(scale: Tensor) -> Tensor:
    """(3.15): c = -λ. (..., d, d) -> (...)"""
    d = scale.shape[-1]
    root: Tensor = (2 * math.pi) ** (d / 2) * scale.det().sqrt()
    return (math.gamma(d / 2 + 2) / root) ** (2 / (2 + d))


def half_width(alpha: float, variance: float) -> float:
    """Of the support on a line, from ∫ ((α-1)(R² - z²)/(2σ²))^s dz = 1, s = 1/(α-1)."""
    s = 1 / (alpha - 1)
    beta = math.gamma(0.5) * math.gamma(s + 1) / math.gamma(s + 1.5)
    return float(((2 * variance / (alpha - 1)) ** s / beta) ** (1 / (2 * s + 1)))


# ---- rules


def gauss_legendre(count: int, low: float = -1.0, high: float = 1.0) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    half = (high - low) / 2
    return low + half * (torch.from_numpy(nodes) + 1), half * torch.from_numpy(weights)


def lattice(d: int, count: int = 33, reach: float = 8.0) -> Rule:
    """Equal steps over [-reach, reach]^d: for what falls as a Gaussian, exact to rounding."""
    line = torch.linspace(-reach, reach, count, dtype=EXACT)
    nodes = torch.cartesian_prod(*[line] * d).reshape(-1, d)
    return nodes, torch.full((len(nodes),), float((line[1] - line[0]) ** d), dtype=EXACT)


def moved(rule: Rule, mean: Tensor, scale: Tensor, radius: Tensor | float = 1.0) -> Rule:
    """From u to t = mean + radius L u, L L' = scale."""
    factor = radius * torch.linalg.cholesky(scale)
    nodes, weights = rule
    return mean + nodes @ factor.mT, weights * factor.det()


def ball(d: int, count: int = 24) -> Rule:
    """The unit ball of 1, 2 or 3 dimensions: radius by Gauss–Legendre, angles in equal steps."""
    if d == 1:
        line, weights = gauss_legendre(count)
        return line.unsqueeze(-1), weights
    radius, along = gauss_legendre(count, 0.0, 1.0)
    angle = torch.arange(2 * count, dtype=EXACT) * math.pi / count
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    turn = torch.full((2 * count,), math.pi / count, dtype=EXACT)
    if d == 3:
        height, steps = gauss_legendre(count)
        ring = (1 - height**2).sqrt()[:, None, None] * circle
        top = height[:, None, None].expand(-1, 2 * count, 1)
        circle = torch.cat([ring, top], -1).flatten(0, 1)
        turn = torch.outer(steps, turn).flatten()
    nodes = radius[:, None, None] * circle
    return nodes.flatten(0, 1), torch.outer(along * radius ** (d - 1), turn).flatten()


def ellipsoid(mean: Tensor, scale: Tensor, count: int = 24) -> Rule:
    """The support of TP(mean, scale), its size by (3.15)."""
    return moved(ball(mean.shape[-1], count), mean, scale, (2 * level(scale)).sqrt())


def segment(mean: float, reach: float, count: int = 120) -> tuple[Tensor, Tensor, Tensor]:
    """t = mean + reach sin φ: nodes, weights in t, and cos φ, whose powers are then smooth."""
    angle, steps = gauss_legendre(count, -math.pi / 2, math.pi / 2)
    return mean + reach * angle.sin(), reach * steps * angle.cos(), angle.cos()
