"""What the reliability means: a radius around the target, or the noise of the evidence.

Maximum entropy on the mean: KL(p, u) is smallest among the p whose mean is within a radius of the
target. It is the estimate whose reliability makes |lam| / reliability that radius; the papers'
fixed radius, 1 / (2 reliability), is not equivalent.

Penalised likelihood, and Bayes with the prior e^(-strength KL): the estimate at
reliability = 1 / (strength noise^2), where noise is the deviation of the evidence.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._implicit import Solve, attach
from fenchel._numerics import where
from fenchel._solution import Status
from fenchel.dual.estimate import estimate, solve_curvature
from fenchel.dual.problem import (
    EstimationProblem,
    broadcast,
    check_operands,
    make_problem,
    read_positive,
)
from fenchel.dual.result import Estimate

# Deciphering Attention, eqs. 27 to 30; its radius 1 / (2 alpha) is not the right one.
_SEARCH = 80  # steps for the reliability; bisection alone halves its logarithm's bracket each time
_LEAST, _TENS = 1e-12, 14  # reliability |t|^2 is searched up to ten to that power
_SURE = 8  # that of rows which are proven to be out of reach
_ROUNDINGS = 16  # of the terms of a distance that may add up


class WithinRadius(NamedTuple):
    """The estimate, the reliability (...) whose solution it is, and KL(p, u) (...).

    Reliability 0 where the radius asks nothing, or nothing takes part.
    """

    estimate: Estimate
    reliability: Tensor
    divergence: Tensor


def reliability_of(noise: float | Tensor, strength: float | Tensor = 1.0) -> float | Tensor:
    """1 / (strength noise^2), with which `estimate` has two other meanings.

    Penalised likelihood: the evidence is the true shift of the mean plus Gaussian noise, whose
    standard deviation in every coordinate is `noise`, and `strength` is the factor of the penalty:
    min over p of |b - mean_p|^2 / (2 noise^2) + strength KL(p, u).
    Bayes: the same noise, and the prior exp(-strength KL(p, u)) of p; the estimate is the most
    probable p.

    >>> reliability_of(0.5)
    4.0
    """
    for name, value in (("noise", noise), ("strength", strength)):
        read_positive(value, name, torch.empty(()))
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

    Operands as for `estimate`; radius > 0, a number or (...). The preference itself, and
    reliability 0, where the evidence is no longer than the radius.

    Status INFEASIBLE where the templates' hull is proven to be farther than the radius, by a plane
    between the two; the row then holds what a reliability of 1e8 over the squared size of the
    templates gives, near the hull's nearest point. Status MAX_STEPS where rounding decides: the
    radius is not reached at 1e14 over that size, or the estimate there is not solved; so with
    radii from some 1e-10 of the size of the templates down, and targets that leave the mean hardly
    any room. Derivatives follow the reliability in solved rows; in the others it is a constant.

    >>> templates = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> nearest = within_radius(templates, None, torch.tensor([0.4], dtype=torch.float64), 0.1)
    >>> round(float(nearest.estimate.mean), 12)
    0.8
    """
    check_operands(templates, preference, evidence, mask)
    goal = read_positive(radius, "radius", evidence).to(torch.float64)
    named = {"evidence": evidence, "preference": preference, "mask": mask}
    shapes = {name: x.shape[:-1] for name, x in named.items() if x is not None}
    batch = broadcast(templates=templates.shape[:-2], radius=goal.shape, **shapes)
    problem = _Problem(templates, preference, evidence, goal.expand(batch), mask)
    with torch.no_grad():
        end = _search(problem)
    settled = end.free | end.infeasible | end.unreached
    linearise = partial(_linearise, mask, settled)
    operands = (templates, preference, evidence, problem.goal)
    strength = attach(end.log_reliability, linearise, *operands).exp()
    evidence_used = where(~end.free.unsqueeze(-1), evidence.expand(*batch, -1), 0.0)
    nearest = estimate(templates, preference, evidence_used, strength, mask=mask)
    status = nearest.status
    for rows, code in ((end.infeasible, Status.INFEASIBLE), (end.unreached, Status.MAX_STEPS)):
        status = torch.where(rows, torch.full_like(status, int(code)), status)
    nearest = replace(nearest, status=status)
    return WithinRadius(nearest, where(~end.free, strength, 0.0), _divergence(problem, nearest))


def _divergence(problem: _Problem, nearest: Estimate) -> Tensor:
    """KL(weights, preference), from the weights: the objective's other term may be far larger."""
    assert nearest.weights is not None
    weights = nearest.weights.to(torch.float64)
    ones = torch.ones_like(weights)
    share = ones if problem.preference is None else problem.preference.to(torch.float64) * ones
    if problem.mask is not None:
        share = where(problem.mask, share, 0.0)
    share = share / where(share.sum(-1, keepdim=True) > 0, share.sum(-1, keepdim=True), 1.0)
    on = weights > 0
    ratio = where(on, weights, 1.0) / where(on, share, 1.0)
    divergence: Tensor = (weights * ratio.log()).sum(-1).clamp_min(0)  # below it is rounding
    return divergence


def _linearise(
    mask: Tensor | None,
    settled: Tensor,
    log_reliability: Tensor,
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    goal: Tensor,
) -> tuple[Tensor, Solve]:
    """log(distance / radius), which falls as the logarithm of the reliability grows."""
    problem = _Problem(templates, preference, evidence, goal, mask)
    step = problem.correction(log_reliability.exp(), settled)
    return step.off, lambda right: right / step.fall


class _Step(NamedTuple):
    """off: log(distance / radius). fall: of that with the logarithm of the reliability. margin: the
    hull is at least that far from the target. noise: of distances, by rounding. Each (...)"""

    off: Tensor
    fall: Tensor
    margin: Tensor
    noise: Tensor


class _SearchEnd(NamedTuple):
    """log reliability; rows that the radius does not bind, cannot, or may: rounding hides it."""

    log_reliability: Tensor
    free: Tensor
    infeasible: Tensor
    unreached: Tensor


class _Problem(NamedTuple):
    templates: Tensor
    preference: Tensor | None
    evidence: Tensor
    goal: Tensor
    mask: Tensor | None

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Squared size of the templates in use, about their middle, or one where they are all the
        same; and whether there are none. (...)"""
        operands = (self.templates.detach(), self.preference, self.evidence.detach())
        problem = make_problem(*operands, torch.ones_like(self.goal), self.mask)
        lengths = problem.templates.square().sum(-1).unsqueeze(1)  # (g, 1, n)
        size = where(problem.preference > 0, lengths.expand_as(problem.preference), 0.0).amax(-1)
        unpack = problem.layout.unpack
        return unpack(where(size > 0, size, 1.0)), unpack(problem.empty)

    def correction(self, strength: Tensor, settled: Tensor) -> _Step:
        """Of the reliability a. With r = lam / a, d log|r| / d log a = <r, H^-1 r> / (a |r|^2) - 1.

        Settled rows take none: off 0, fall 1, and no derivative.
        """
        operands = (self.templates.double(), self.preference, self.evidence.double(), strength)
        solved = estimate(*operands, mask=self.mask)
        problem = make_problem(*operands, self.mask)
        apart = problem.layout.pack(solved.multiplier, 1) / problem.reliability
        assert solved.weights is not None
        weights = problem.layout.pack(solved.weights, 1)
        turned = solve_curvature(problem.templates, weights, problem.reliability, apart)
        square = apart.square().sum(-1)
        open_ = ~problem.layout.pack(settled, 0) & (square.detach() > 0)
        square = where(open_, square, 1.0)
        rate = (apart * turned).sum(-1) / (square * problem.reliability.squeeze(-1))
        rate = where(open_ & (rate.detach() < 1), rate, 0.0)
        off = 0.5 * square.log() - where(open_, problem.layout.pack(self.goal, 0), 1.0).log()
        step = (off, 1 - rate, *_plane(problem, apart.detach()))
        return _Step(*(problem.layout.unpack(x) for x in step))


def _plane(problem: EstimationProblem, apart: Tensor) -> tuple[Tensor, Tensor]:
    """How far a plane across `apart` shows the hull to be, and such distances' rounding. (g, m)"""
    used, target = problem.preference.detach() > 0, problem.target.detach()
    reach = where(used, apart @ problem.templates.detach().mT, -torch.inf).amax(-1)
    length = apart.norm(dim=-1)
    margin = ((apart * target).sum(-1) - reach) / where(length > 0, length, 1.0)
    sizes = where(used, problem.templates.detach().norm(dim=-1).unsqueeze(1), 0.0).amax(-1)
    eps = _ROUNDINGS * torch.finfo(apart.dtype).eps
    return margin, eps * (sizes + target.norm(dim=-1))


def _search(problem: _Problem) -> _SearchEnd:
    """The distance falls as the reliability grows: Newton's method for the logarithm of one in that
    of the other, and bisection where it leaves the bracket.
    """
    goal, (size, empty) = problem.goal, problem.sizes()
    length = problem.evidence.detach().double().norm(dim=-1).expand(goal.shape)
    free = (length <= goal) | empty
    unit = -size.log()  # where reliability |t|^2 is one
    low, high, beyond = unit + math.log(_LEAST), unit, ~free
    infeasible = torch.zeros_like(free)
    for _ in range(_TENS):  # farther out by tens, until the radius is reached or proven out of it
        if not bool(beyond.any()):
            break
        high = torch.where(beyond, high + math.log(10.0), high)
        step = problem.correction(torch.where(beyond, high, unit).exp(), ~beyond)
        infeasible = infeasible | (beyond & (step.margin - step.noise > goal))
        low = torch.where(beyond & (step.off > 0), high, low)
        beyond = beyond & (step.off > 0) & ~infeasible
    settled = free | beyond | infeasible
    now = torch.where(settled, unit, high)
    for _ in range(_SEARCH):
        step = problem.correction(now.exp(), settled)
        low, high = torch.where(step.off > 0, now, low), torch.where(step.off <= 0, now, high)
        close = step.off.abs() <= 1e-14 + step.noise / goal
        is_done = settled | close | (high - low <= 1e-13)
        if bool(is_done.all()):
            break
        newton = now + step.off / step.fall
        inside = (newton > low) & (newton < high)
        now = torch.where(is_done, now, torch.where(inside, newton, (low + high) / 2))
    for rows, tens in ((infeasible, _SURE), (beyond, _TENS)):
        now = torch.where(rows, unit + tens * math.log(10.0), now)
    return _SearchEnd(now, free, infeasible, beyond)
