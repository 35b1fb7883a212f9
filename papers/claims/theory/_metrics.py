"""Constants and distances computed apart from the library, by linear programs and from pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel import measures
from fenchel.measures import Empirical
from papers.claims.evidence import SLACK
from papers.claims.theory._draws import F64, earth_movers, normal


def kantorovich(mu: Empirical, nu: Empirical) -> Tensor:
    """The largest μ(f) − ν(f): a linear program in the values of f at all points, f_0 = 0."""
    from scipy.optimize import linprog

    points, gain = torch.cat([mu.points, nu.points]), torch.cat([mu.weights, -nu.weights])
    n = len(points)
    i, j = torch.cartesian_prod(torch.arange(n), torch.arange(n)).mT
    one = torch.eye(n, dtype=F64)
    apart = (points[i] - points[j]).abs().sum(-1)
    free = [(0, 0), *[(None, None)] * (n - 1)]
    program = linprog(-gain.numpy(), (one[i] - one[j]).numpy(), apart.numpy(), bounds=free)
    return torch.as_tensor(-program.fun, dtype=F64)


def product(mu: Empirical, nu: Empirical) -> Empirical:
    """μ ⊗ ν: all pairs of points, weights multiplied."""
    n, m = mu.size, nu.size
    points = torch.cat([mu.points.repeat_interleave(m, 0), nu.points.repeat(n, 1)], -1)
    return measures.Empirical(points, (mu.weights.unsqueeze(1) * nu.weights).flatten())


def normal_cells(count: int) -> Tensor:
    """The standard normal law in cells of equal mass, each at its mean; E|x| stays, count even."""
    from scipy.special import ndtri

    edges = torch.as_tensor(ndtri(torch.linspace(0, 1, count + 1, dtype=F64).numpy()))
    density = (-0.5 * edges.square()).exp() / math.sqrt(2 * math.pi)
    return -density.diff() * count


def steepest(states: Tensor, matrices: Tensor) -> Tensor:
    """The largest W1(K(x, .), K(y, .)) / |x - y|, for matrices (count, n, n); by POT."""
    pairs = torch.combinations(torch.arange(len(states))).tolist()
    quotients = torch.zeros(len(matrices), len(pairs), dtype=F64)
    for index, matrix in enumerate(matrices):
        for place, (i, j) in enumerate(pairs):
            moved = earth_movers(states, matrix[i], states, matrix[j])
            quotients[index, place] = moved / (states[i] - states[j]).abs().sum()
    return quotients.amax(-1)


def zigzag(generator: torch.Generator) -> Tensor:
    """Of a random piecewise linear function on [0, 10]: constant of all pairs less of near ones."""
    import numpy as np

    knots = torch.rand(8, generator=generator, dtype=F64).mul(10).sort().values
    x = torch.linspace(0, 10, 401, dtype=F64)
    y = torch.from_numpy(np.interp(x.numpy(), knots.numpy(), normal(generator, 8).numpy()))
    every, near = of_pairs(x, y)
    return every - near


def of_pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The largest |y_i - y_j| / |x_i - x_j| of all pairs, and of those within 1."""
    apart = (x.unsqueeze(1) - x).abs()
    quotients = torch.where(apart > 0, (y.unsqueeze(1) - y).abs() / apart, 0.0)
    return quotients.max(), quotients[apart <= 1 + SLACK].max()
