"""Three readings of the estimation problem.

Maximum entropy on the mean: KL(p, u) is smallest among the p whose mean is within a radius of the
target. It is the estimate whose reliability makes |lam| / reliability that radius; the papers'
fixed radius, 1 / (2 reliability), is not equivalent (CLAIMS D-MEM).

Penalised likelihood, and Bayes with the prior e^(-strength KL): the estimate at
reliability = 1 / (strength noise^2), where noise is the deviation of the evidence (D-E27..30).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel.dual.estimate import Estimate, curvature_solve, estimate
from fenchel.dual.problem import broadcast, check_operands, checked_reliability, make_problem
from fenchel.solution import Status

_SEARCH = 80  # steps for the reliability; bisection alone halves its logarithm's bracket each time
_LEAST, _TENS = 1e-12, 8  # reliability |t|^2 is searched up to ten to that power


class WithinRadius(NamedTuple):
    """The estimate, the reliability (...) whose solution it is, and KL(p, u) (...).

    Reliability 0 where the radius asks nothing.
    """

    estimate: Estimate
    reliability: Tensor
    divergence: Tensor


def reliability_of(noise: float | Tensor, strength: float | Tensor = 1.0) -> float | Tensor:
    """1 / (strength noise^2): of evidence with that deviation, KL weighing `strength`.

    >>> reliability_of(0.5)
    4.0
    """
    for name, value in (("noise", noise), ("strength", strength)):
        checked_reliability(value, name, torch.empty(()))
    return 1 / (strength * noise**2)


def within_radius(
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    radius: float | Tensor,
    *,
    mask: Tensor | None = None,
) -> WithinRadius:
    """min KL(p, u) over the p with |mean_u + evidence - sum_i p_i t_i| <= radius.

    Operands as for `estimate`; radius > 0, a number or (...). The preference itself where the
    evidence is no longer than the radius. Status INFEASIBLE, and what the largest reliability tried
    gives (1e8 over the squared size of the templates), where that does not come within the radius:
    the templates' hull is farther, or so little farther in that rounding decides.

    >>> templates = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> found = within_radius(templates, None, torch.tensor([0.4], dtype=torch.float64), 0.1)
    >>> round(float(found.estimate.mean), 12)
    0.8
    """
    check_operands(templates, preference, evidence, mask)
    goal = checked_reliability(radius, "radius", evidence).to(torch.float64)
    named = {"evidence": evidence, "preference": preference, "mask": mask}
    shapes = {name: x.shape[:-1] for name, x in named.items() if x is not None}
    batch = broadcast(templates=templates.shape[:-2], radius=goal.shape, **shapes)
    problem = _Problem(templates, preference, evidence, goal.expand(batch), mask)
    with torch.no_grad():
        start, free, out_of_reach = _search(problem)
    strength = start
    followed = (x for x in (templates, preference, evidence, goal) if x is not None)
    if torch.is_grad_enabled() and any(x.requires_grad for x in followed):
        for _ in range(2):  # Newton's steps in plain operations: right to the second derivative
            strength = strength * problem.correction(strength)[0]
        strength = torch.where(free | out_of_reach, start, strength)
    asked = where(~free.unsqueeze(-1), evidence.expand(*batch, -1), 0.0)
    made = estimate(templates, preference, asked, strength, mask=mask)
    infeasible = torch.full_like(made.status, int(Status.INFEASIBLE))
    made = replace(made, status=torch.where(out_of_reach, infeasible, made.status))
    return WithinRadius(made, where(~free, strength, 0.0), _divergence(problem, made))


def _divergence(problem: _Problem, made: Estimate) -> Tensor:
    """KL(weights, preference), from the weights: the objective's other term may be far larger."""
    assert made.weights is not None
    weights = made.weights.to(torch.float64)
    ones = torch.ones_like(weights)
    share = ones if problem.preference is None else problem.preference.to(torch.float64) * ones
    if problem.mask is not None:
        share = where(problem.mask, share, 0.0)
    share = share / where(share.sum(-1, keepdim=True) > 0, share.sum(-1, keepdim=True), 1.0)
    on = weights > 0
    ratio = where(on, weights, 1.0) / where(on, share, 1.0)
    return (weights * ratio.log()).sum(-1)


class _Problem(NamedTuple):
    templates: Tensor
    preference: Tensor | None
    evidence: Tensor
    goal: Tensor
    mask: Tensor | None

    def squared_size(self) -> Tensor:
        """Of the templates in use, about their middle; one where they are all the same. (...)"""
        operands = (self.templates.detach(), self.preference, self.evidence.detach())
        problem = make_problem(*operands, torch.ones_like(self.goal), self.mask)
        lengths = problem.templates.square().sum(-1).unsqueeze(1)  # (g, 1, n)
        size = where(problem.preference > 0, lengths.expand_as(problem.preference), 0.0).amax(-1)
        return problem.layout.unpack(where(size > 0, size, 1.0))

    def correction(self, strength: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of Newton's step for the reliability, and log(distance / goal).

        With r = lam / a, a the reliability, d log|r| / d log a = <r, H^-1 r> / (a |r|^2) - 1.
        """
        operands = (self.templates.double(), self.preference, self.evidence.double(), strength)
        solved = estimate(*operands, mask=self.mask)
        problem = make_problem(*operands, self.mask)
        apart = problem.layout.pack(solved.multiplier, 1) / problem.reliability
        assert solved.weights is not None
        weights = problem.layout.pack(solved.weights, 1)
        turned = curvature_solve(problem.templates, weights, problem.reliability, apart)
        squared = apart.square().sum(-1)
        slope = (apart * turned).sum(-1) / (squared * problem.reliability.squeeze(-1)) - 1
        off = 0.5 * problem.layout.unpack(squared).log() - self.goal.log()
        return (-off / problem.layout.unpack(slope)).exp(), off


def _search(problem: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The reliability of every row; rows that the radius does not bind; rows out of reach.

    The distance falls as the reliability grows: Newton's method for the logarithm of one in that
    of the other, and bisection where it leaves the bracket.
    """
    goal = problem.goal
    free = problem.evidence.detach().double().norm(dim=-1).expand(goal.shape) <= goal
    unit = -problem.squared_size().log()  # where reliability |t|^2 is one
    low, high, beyond = unit + math.log(_LEAST), unit, ~free
    for _ in range(_TENS):  # farther out by tens, until the radius is reached
        if not bool(beyond.any()):
            break
        high = torch.where(beyond, high + math.log(10.0), high)
        off = problem.correction(torch.where(beyond, high, unit).exp())[1]
        low = torch.where(beyond & (off > 0), high, low)
        beyond = beyond & (off > 0)
    settled, now = free | beyond, torch.where(free | beyond, unit, high)
    for _ in range(_SEARCH):
        factor, off = problem.correction(now.exp())
        low, high = torch.where(off > 0, now, low), torch.where(off <= 0, now, high)
        done = settled | (off.abs() <= 1e-14) | (high - low <= 1e-13)
        if bool(done.all()):
            break
        newton = now + factor.log()
        inside = (newton > low) & (newton < high)
        now = torch.where(done, now, torch.where(inside, newton, (low + high) / 2))
    return torch.where(beyond, unit + _TENS * math.log(10.0), now).exp(), free, beyond
