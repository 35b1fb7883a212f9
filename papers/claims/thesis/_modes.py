"""Mixtures of Gaussians in plain formulas: their density, one step of EM, data with two clumps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import fenchel.continuous as fc
from papers.claims.evidence import largest
from papers.claims.thesis._disc import ellipse, normal, uniform


class Modes(NamedTuple):
    """(K,), (K, d), (K, d, d)"""

    mixing: Tensor
    mean: Tensor
    covariance: Tensor

    @staticmethod
    def draw(generator: torch.Generator, count: int) -> Modes:
        mixing = uniform(generator, 0.5, 1.5, count)
        covariance = torch.stack([ellipse(generator, 0.1, 0.4) for _ in range(count)])
        return Modes(mixing / mixing.sum(), uniform(generator, -1, 1, count, 2), covariance)

    @staticmethod
    def of(mixture: fc.Mixture) -> Modes:
        components = mixture.components
        return Modes(mixture.mixing, components.mean, components.covariance_matrix)

    def mixture(self) -> fc.Mixture:
        return fc.Mixture(self.mixing, fc.Gaussian(self.mean, self.covariance))

    def each(self, points: Tensor) -> Tensor:
        """mixing_k N(x; mean_k, covariance_k) at points (..., d). (..., K)"""
        densities = [normal(points, m, c) for m, c in zip(self.mean, self.covariance, strict=True)]
        return self.mixing * torch.stack(densities, -1)

    def log_likelihood(self, weights: Tensor, points: Tensor) -> Tensor:
        """sum_n w_n ln sum_k mixing_k N(x_n; ...) (5.16), and (5.6) where all weights are one."""
        return weights @ self.each(points).sum(-1).log()

    def step(self, weights: Tensor, points: Tensor) -> Modes:
        """(5.7), then (5.12) to (5.15), for weights of sum one."""
        each = self.each(points)
        share = weights.unsqueeze(1) * each / each.sum(-1, keepdim=True)  # (N, K)
        mass = share.sum(0)
        mean = share.T @ points / mass.unsqueeze(1)
        apart = points - mean.unsqueeze(1)  # (K, N, d)
        covariance = torch.einsum("nk,kni,knj->kij", share, apart, apart) / mass[:, None, None]
        return Modes(mass, mean, covariance)

    def off(self, other: Modes) -> float:
        """The largest difference of any parameter, NaN if one is."""
        return largest((a - b).abs() for a, b in zip(self, other, strict=True))


def clumps(generator: torch.Generator, count: int = 40) -> Tensor:
    """Two, of so many points each, about (±1.2, ±0.8). (2 count, 2)"""
    middle = torch.tensor([1.2, 0.8], dtype=torch.float64)
    draw = 0.35 * torch.randn(2, count, 2, generator=generator, dtype=torch.float64)
    return torch.cat([draw[0] - middle, draw[1] + middle])


def start() -> Modes:
    """Of two modes, far from any fit to the clumps, and on the way to one for each."""
    mixing = torch.tensor([0.4, 0.6], dtype=torch.float64)
    mean = torch.tensor([[-0.5, 0.1], [0.5, -0.1]], dtype=torch.float64)
    return Modes(mixing, mean, torch.eye(2, dtype=torch.float64).expand(2, 2, 2))


def even(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)
