"""Random measures and kernels, each fixed by its seed, and textbook formulas to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel.measures import Empirical, Lookup

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


def shares(*shape: int, seed: int = 0) -> Tensor:
    masses = torch.rand(*shape, generator=generator(seed), dtype=F64) + 0.05
    return masses / masses.sum(-1, keepdim=True)


def measure(n: int = 6, d: int = 3, seed: int = 0, batch: tuple[int, ...] = ()) -> Empirical:
    return Empirical(normal(*batch, n, d, seed=seed), shares(*batch, n, seed=seed + 1))


def chain(points: Tensor, seed: int = 0) -> Lookup:
    n = len(points)
    return Lookup.stochastic(points, shares(n, n, seed=seed))


def attention(scores: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """softmax(scores + log weights) values, as linear algebra has it."""
    return torch.softmax(scores + weights.log().unsqueeze(-2), -1) @ values


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> bool:
    """Same shape, and within the tolerance."""
    return left.shape == right.shape and float((left - right).detach().abs().max()) <= tolerance
