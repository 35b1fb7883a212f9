"""Small estimation problems, and what is known of them without the library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel import dual
from papers.claims.evidence import Evidence

F64 = torch.float64
_STEPS = 5_000


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=F64)


def numbers(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=F64)


def worst(values: Sequence[Tensor]) -> Tensor:
    """The largest entry of all, in absolute value."""
    return torch.stack([value.abs().max() for value in values]).max()


def weights_of(estimate: dual.Estimate) -> Tensor:
    assert estimate.weights is not None  # there are templates
    return estimate.weights


def halvings(first: int, last: int) -> Tensor:
    """2^-first, ..., 2^-last"""
    return numbers([2.0**-k for k in range(first, last + 1)])


def divergence(p: Tensor, u: Tensor) -> Tensor:
    """KL(p, u) where u > 0; 0 log 0 = 0."""
    on = u > 0
    ratio = torch.where(on, p, 1.0) / torch.where(on, u, 1.0)
    total: Tensor = torch.special.xlogy(p, ratio).sum(-1)
    return total


@dataclass(frozen=True, eq=False)
class Drawn:
    """templates (n, d), preference (n,) summing to one, evidence (d,)."""

    templates: Tensor
    preference: Tensor
    evidence: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """As the functions of `fenchel.dual` take them."""
        return self.templates, self.preference, self.evidence

    @property
    def mean(self) -> Tensor:
        return self.preference @ self.templates

    @property
    def covariance(self) -> Tensor:
        centred = self.templates - self.mean
        return centred.mT @ (self.preference.unsqueeze(-1) * centred)

    @property
    def target(self) -> Tensor:
        """b"""
        return self.mean + self.evidence

    @property
    def diameter(self) -> float:
        """Of the templates in use."""
        live = self.templates[self.preference > 0]
        return float(torch.cdist(live, live).max())

    def scores(self, multiplier: Tensor) -> Tensor:
        """log u_i + <t_i, λ>, from multipliers (..., d). (..., n)"""
        return multiplier @ self.templates.mT + self.preference.log()

    def weights(self, multiplier: Tensor) -> Tensor:
        """w(λ)"""
        return torch.softmax(self.scores(multiplier), -1)

    def potential(self, multiplier: Tensor) -> Tensor:
        """K(λ)"""
        return torch.logsumexp(self.scores(multiplier), -1)

    def primal(self, p: Tensor, alpha: float | Tensor) -> Tensor:
        """α/2 |b - Σ p_i t_i|² + KL(p, u), of weights (..., n)."""
        apart = (self.target - p @ self.templates).square().sum(-1)
        return 0.5 * alpha * apart + divergence(p, self.preference)

    def dual(self, multiplier: Tensor, alpha: float | Tensor) -> Tensor:
        """<λ, b> - |λ|²/(2α) - K(λ)"""
        price = multiplier.square().sum(-1) / (2 * alpha)
        return multiplier @ self.target - price - self.potential(multiplier)


def draw(
    generator: torch.Generator, n: int = 7, d: int = 3, size: float = 0.7, hidden: int = 0
) -> Drawn:
    """Templates of that size about a middle that is not zero; the first `hidden` have u = 0."""
    templates = size * normal(generator, n, d) + 0.5 * normal(generator, d)
    preference = torch.rand(n, generator=generator, dtype=F64) + 0.1
    preference[:hidden] = 0.0
    return Drawn(templates, preference / preference.sum(), normal(generator, d))


def draw_symmetric(generator: torch.Generator, pairs: int = 4, d: int = 3) -> Drawn:
    """For every template another, mirrored at the mean, that is as likely."""
    half = draw(generator, pairs, d)
    middle = normal(generator, d)
    templates = torch.cat([middle + half.templates, middle - half.templates])
    return Drawn(templates, torch.cat([half.preference, half.preference]) / 2, half.evidence)


def distributions(generator: torch.Generator, preference: Tensor, count: int) -> Tensor:
    """At random where the preference is not zero. (count, n)"""
    logits = 1.5 * normal(generator, count, len(preference))
    return torch.softmax(logits.masked_fill(preference == 0, -math.inf), -1)


def order(sizes: Tensor, errors: Tensor, last: int = 4) -> float:
    """Slope of log error over log size, at the last, smallest sizes."""
    x, y = sizes[-last:].log(), errors[-last:].log()
    centred = x - x.mean()
    return float((centred @ y) / centred.square().sum())


def descend(
    problem: Drawn, weight: Tensor, starts: Tensor, *, strength: float = 1.0, power: int = 2
) -> Tensor:
    """argmin over p of weight |b - Σ p_i t_i|^power + strength KL(p, u), by mirror descent in p.

    weight (a,), starts (s, n) > 0 where u is. (a, s, n). The penalty is L-smooth relative to the
    entropy, L = power weight R², R the radius of the templates; for power 1 where b is at least 1
    from their hull.
    """
    live = problem.preference > 0
    templates, logs_u = problem.templates[live], problem.preference[live].log()
    radius = (templates - templates.mean(0)).norm(dim=-1).max()
    weight = weight[:, None, None]
    step = 1 / (strength + power * weight * radius.square())
    logs = starts[:, live].log().expand(len(weight), -1, -1)
    for _ in range(_STEPS):
        apart = problem.target - logs.exp() @ templates
        pull = power * weight * apart.norm(dim=-1, keepdim=True) ** (power - 2)
        slope = strength * (logs - logs_u) - pull * (apart @ templates.mT)
        moved = torch.log_softmax(logs - step * slope, -1)
        change = (moved - logs).abs().max()
        logs = moved
        if change < 1e-13:
            break
    weights = torch.zeros(*logs.shape[:-1], len(live), dtype=F64)
    weights[..., live] = logs.exp()
    return weights


def compare_by_hand(evidence: Evidence) -> None:
    """Checks `Estimate.compare`, on which claims about relative errors rest."""
    shift, multiplier, alphas = [], [], numbers([0.25, 1.0, 4.0])
    for generator in evidence.generators():
        problem = draw(generator)
        rough, exact = (f(*problem.operands, alphas) for f in (dual.first_order, dual.estimate))
        said = rough.compare(exact)
        apart, moved = (rough.mean - exact.mean, exact.mean - problem.mean)
        shift.append((said.mean_shift - apart.norm(dim=-1) / moved.norm(dim=-1)).abs())
        apart, whole = (alphas[:, None] * problem.evidence - exact.multiplier, exact.multiplier)
        multiplier.append((said.multiplier - apart.norm(dim=-1) / whole.norm(dim=-1)).abs())
    evidence.below("|compare's mean_shift - |h - ĥ| / |ĥ - μ||, by hand", shift)
    evidence.below("|compare's multiplier - |α z - λ*| / |λ*||, by hand", multiplier)
