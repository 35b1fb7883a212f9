"""Where the estimate goes as the reliability tends to nothing, and to certainty."""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from fenchel import dual
from papers.claims.deciphering._problems import F64, Drawn, draw
from papers.claims.evidence import SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict


def _projection(point: Tensor, templates: Tensor) -> Tensor:
    """Nearest point of the hull: over all simplices of templates, that of their affine hulls."""
    best, distance = templates[0], math.inf
    for size in range(1, templates.shape[1] + 2):
        for chosen in combinations(range(len(templates)), size):
            first, others = templates[chosen[0]], templates[list(chosen[1:])]
            edges = others - first
            share = torch.linalg.pinv(edges.mT) @ (point - first)
            if share.sum() > 1 or (share < 0).any():
                continue
            near = first + share @ edges
            if (point - near).norm() < distance:
                best, distance = near, float((point - near).norm())
    return best


@claim(
    "D-LIM",
    "ĥ → μ as α → 0, and → the projection of b on conv{t_i : u_i > 0} as α → ∞",
    Verdict.CONFIRMED,
)
def limits(evidence: Evidence) -> None:
    """|ĥ - μ| ≤ α |z| diam² / 4, and |ĥ - projection|² ≤ 2 log(1 / min u) / α; near the ends
    ĥ = μ + αΣz + O(α²) and, templates being finitely many, ĥ = projection + O(1/α)."""
    alphas = torch.logspace(-4, 6, 21, dtype=F64)
    low, high, start, end, missed = [], [], [], [], []
    for generator in evidence.generators():
        drawn = draw(generator, hidden=1)
        away = torch.nn.functional.normalize(drawn.evidence, dim=0) * (drawn.diameter + 1)
        templates = drawn.templates.clone()
        templates[0] = drawn.mean + away  # the hidden template is b itself
        problem = Drawn(templates, drawn.preference, away)
        estimate = dual.estimate(*problem.operands, alphas)
        near = _projection(problem.target, templates[1:])
        least = problem.preference[1:].min()
        from_mean, to_near = ((estimate.mean - x).norm(dim=-1) for x in (problem.mean, near))
        low.append(from_mean / (alphas * away.norm() * problem.diameter**2 / 4))
        high.append(to_near / (-2 * least.log() / alphas).sqrt())
        step = alphas[0] * problem.covariance @ away
        start.append((estimate.mean[0] - problem.mean - step).norm() / step.norm())
        end.append(to_near[-1])
        missed.append((estimate.mean[-1] - problem.target).norm())
        lines = {"from μ": from_mean, "from the projection": to_near}
    evidence.below("|ĥ - μ - αΣz| over |αΣz| at α = 1e-4", start, 2e-3)
    evidence.below("|ĥ - projection| at α = 1e6", end, 2e-5)
    evidence.below("|ĥ - μ| over α |z| diam² / 4", torch.stack(low), 1 + SLACK)
    evidence.below("|ĥ - projection| over √(2 log(1 / min u) / α)", torch.stack(high), 1 + SLACK)
    evidence.above("distance from b, where a template with u = 0 is", torch.stack(missed), 1.0)
    curves = {name: (alphas.tolist(), line.tolist()) for name, line in lines.items()}
    evidence.draw(Curves("Where the estimate goes", "α", "distance of ĥ", curves, "xy"))
