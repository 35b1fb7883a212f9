"""Finite sets with a potential, and the constants of a potential by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel import measures
from fenchel.bounds import Setting
from fenchel.measures import Empirical
from papers.claims.theory._draws import atoms, normal, uniform


@dataclass(frozen=True, eq=False)
class Spaces:
    """Random sets of n points on the line, each with a table log G and two measures.

    points (count, n, 1), table (count, n, n), weights mu and nu (count, n).
    """

    points: Tensor
    table: Tensor
    mu: Tensor
    nu: Tensor

    @classmethod
    def draw(cls, generator: torch.Generator, count: int, n: int) -> Spaces:
        """Tables from nearly constant to steep."""
        size = 10 ** (2.25 * uniform(generator, count, 1, 1) - 1.75)
        mu, nu = (normal(generator, count, n).mul(3).softmax(-1) for _ in range(2))
        points = uniform(generator, count, n, 1)
        return cls(points, size * normal(generator, count, n, n), mu, nu)

    def softmatched(self, weights: Tensor) -> Empirical:
        """Ψ_{G(x,·)} of the measure with these weights, at every x of its set. (count, n)"""
        kernel = measures.Softmatch(measures.Potential(lambda x, y: self.table))
        return atoms(kernel(measures.Empirical(self.points, weights)).at(self.points))

    @property
    def apart(self) -> Tensor:
        return (self.points - self.points.mT).abs()

    def slope(self, axis: int) -> Tensor:
        """The Lipschitz constant of G in one of its arguments. (count)"""
        g = self.table.exp() if axis == 0 else self.table.exp().mT
        rise = (g.unsqueeze(-2) - g.unsqueeze(-3)).abs().amax(-1)  # of x and y, over z
        return torch.where(self.apart > 0, rise / self.apart, 0.0).amax((-2, -1))

    @property
    def term(self) -> Tensor:
        """diam / eps. (count)"""
        return self.apart.amax((-2, -1)) / self.table.exp().amin((-2, -1))

    def splitting(self, one: Empirical, other: Empirical, f: Tensor) -> Tensor:
        """How far Ψμ(f) − Ψν(f) = (μ − ν)(G(f − Ψν(f))) / μ(G) is from holding."""
        g, mu = self.table.exp(), self.mu.unsqueeze(1)
        level = (other.weights @ f).unsqueeze(-1)  # Ψ_G ν(f), for every x
        signed = ((mu - self.nu.unsqueeze(1)) * g * (f - level)).sum(-1) / (mu * g).sum(-1)
        return (one.weights - other.weights) @ f - signed


def by_hand(setting: Setting) -> tuple[float, float, float, float]:
    """eps, top, slope and diameter of G = exp(<x, y> / t) on [-1, 1]^d."""
    assert isinstance(setting.potential, measures.potentials.Dot)
    d, t = setting.dim, setting.potential.temperature
    return math.exp(-d / t), math.exp(d / t), math.exp(d / t) / t, 2.0 * d
