"""What the claims of this paper share: random measures, and textbook formulas to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from fenchel import measures
from fenchel.measures import Empirical, Measure

F64 = torch.float64


def number(*values: float) -> Tensor:
    """A vector of these."""
    return torch.tensor(values, dtype=F64)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=F64)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    """In [-1, 1]."""
    return 2 * torch.rand(*shape, generator=generator, dtype=F64) - 1


def shares(generator: torch.Generator, *shape: int) -> Tensor:
    """Positive, with sum one along the last axis."""
    masses = torch.rand(*shape, generator=generator, dtype=F64) + 0.05
    return masses / masses.sum(-1, keepdim=True)


def measure(generator: torch.Generator, n: int, d: int, *batch: int) -> Empirical:
    """Normal points with uneven weights."""
    return measures.Empirical(normal(generator, *batch, n, d), shares(generator, *batch, n))


def atoms(measure: Measure) -> Empirical:
    """What is known to sit on finitely many points."""
    return cast(Empirical, measure)


def softmax(scores: Tensor) -> Tensor:
    """From the formula, along the last axis."""
    mass = (scores - scores.amax(-1, keepdim=True)).exp()
    return mass / mass.sum(-1, keepdim=True)


def attended(scores: Tensor, values: Tensor) -> Tensor:
    """Attention as linear algebra has it."""
    return softmax(scores) @ values


def largest(differences: Iterable[Tensor]) -> Tensor:
    """The largest size of all entries; NaN if there is one."""
    return torch.stack([difference.detach().abs().max() for difference in differences]).max()


def smallest(figures: Iterable[Tensor]) -> Tensor:
    return torch.stack([figure.detach().min() for figure in figures]).min()


def earth_movers(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """W1 in the l1 norm, by the network simplex of POT; points (n, d) and (m, d)."""
    import ot

    cost = (x.unsqueeze(1) - y.unsqueeze(0)).abs().sum(-1)
    distance: Any = ot.emd2((a / a.sum()).numpy(), (b / b.sum()).numpy(), cost.numpy())
    return torch.as_tensor(distance, dtype=F64)


def by_pot(mu: Empirical, nu: Empirical) -> Tensor:
    """W1 of each pair of a batch (count), in the l1 norm."""
    each = zip(mu.points, mu.weights, nu.points, nu.weights, strict=True)
    return torch.stack([earth_movers(*pair) for pair in each])


def on_the_line(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W1 of weights a and b (..., n) on the same points (..., n, 1): ∫ |F − G|."""
    places, order = x.squeeze(-1).expand(a.shape).sort(-1)
    apart = (a - b).gather(-1, order).cumsum(-1).abs()
    return (apart[..., :-1] * places.diff(dim=-1)).sum(-1)
