"""One query and its keys, drawn at random, and the objective that its weights minimise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from papers.claims._numerical import entropy, normal, uniform

N, D = 7, 3


@dataclass(frozen=True, eq=False)
class Row:
    """query (d,), keys and values (n, d), the temperature, and the gradient of a loss in the output
    (d,)."""

    query: Tensor
    keys: Tensor
    values: Tensor
    tau: float
    slope: Tensor

    @property
    def scores(self) -> Tensor:
        return self.keys @ self.query

    @property
    def losses(self) -> Tensor:
        """l_j, the derivative of the loss in weight j."""
        return self.values @ self.slope


def draw(generator: torch.Generator) -> Row:
    query, keys, values = normal(generator, D), normal(generator, N, D), normal(generator, N, D)
    tau = 0.4 + 1.2 * float(uniform(generator, 1))
    return Row(query, keys, values, tau, normal(generator, D))


def objective(scores: Tensor, tau: float, p: Tensor) -> Tensor:
    """−⟨s, p⟩ − τ H(p)"""
    return -(scores * p).sum(-1) - tau * entropy(p)
