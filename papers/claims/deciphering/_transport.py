"""Transport problems drawn at random, and the formulas of the plan, written out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel import dual
from papers.claims._numerical import distributions, normal, uniform


@dataclass(frozen=True, eq=False)
class Drawn:
    """templates (N, d), preference (N,) that sums to one, cost (N, N), evidence (d,)."""

    templates: Tensor
    preference: Tensor
    cost: Tensor
    evidence: Tensor


def draw(generator: torch.Generator, n: int = 6, d: int = 3, symmetric: bool = True) -> Drawn:
    """The cost of staying is zero, of moving between 0.2 and 1.2."""
    cost = 0.2 + uniform(generator, n, n)
    if symmetric:
        cost = (cost + cost.T) / 2
    cost.fill_diagonal_(0.0)
    templates, preference = normal(generator, n, d), distributions(generator, n)
    return Drawn(templates, preference, cost, normal(generator, d))


def columns(cost: Tensor, gamma: float, potential: Tensor | None = None) -> Tensor:
    """softmax over the rows t of (g_t - M[t, j]) / gamma: (N, n), each column a distribution."""
    raised = -cost if potential is None else potential.unsqueeze(-1) - cost
    return (raised / gamma).softmax(0)


def conjugate(x: Drawn, potential: Tensor, gamma: float) -> Tensor:
    """gamma (H(u) + sum_j u_j LSE_t((g_t - M[t, j]) / gamma)), D-E33 as corrected."""
    u = x.preference
    raised = torch.logsumexp((potential.unsqueeze(-1) - x.cost) / gamma, 0)
    return gamma * (u * (raised - u.log())).sum()


def spread(x: Drawn, gamma: float) -> Tensor:
    """sum_j u_j Cov of the templates under column j at no potential. (d, d)"""
    within = columns(x.cost, gamma)
    means = within.T @ x.templates  # (n, d)
    second = x.templates.T @ ((within @ x.preference).unsqueeze(-1) * x.templates)
    return second - means.T @ (x.preference.unsqueeze(-1) * means)


def solved(x: Drawn, alpha: float | Tensor, gamma: float | Tensor) -> dual.Estimate:
    return dual.transport(x.templates, x.preference, x.cost, x.evidence, alpha, gamma)


def weights_of(e: dual.Estimate) -> Tensor:
    assert e.weights is not None  # the preference is discrete
    return e.weights


def together(drawn: list[Drawn]) -> Drawn:
    """Stacked along a first axis, with a second one for reliabilities, or for gammas."""
    parts = zip(*((x.templates, x.preference, x.cost, x.evidence) for x in drawn), strict=True)
    return Drawn(*(torch.stack(part).unsqueeze(1) for part in parts))
