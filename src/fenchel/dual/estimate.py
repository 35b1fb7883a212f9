"""The estimation problem: a preference over templates, evidence about the shift of its mean, and
how reliable that evidence is. With the target b = mean_u + evidence:

    min over p of  reliability / 2 |b - sum_i p_i t_i|^2 + KL(p, u)
    max over lam of  <lam, b> - |lam|^2 / (2 reliability) - log sum_i u_i e^<t_i, lam>

The two are equal, p = softmax(log u + <t, lam>), and sum_i p_i t_i = b - lam / reliability.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fenchel._implicit import Solve, attach, tilt
from fenchel._kernels.operators import register_vmap
from fenchel._numerics import check_whole, transformed, where
from fenchel._solution import Status
from fenchel.continuous import matrices
from fenchel.dual import newton
from fenchel.dual.problem import EstimationProblem, empty_search, make_problem
from fenchel.dual.result import Estimate, Unrounded

# Deciphering Attention, eq. 3 and theorem 1.
TOLERANCE = 1e-26  # of the gap, which is the square of what the weights are off by


def estimate(
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    *,
    mask: Tensor | None = None,
    tolerance: float = TOLERANCE,
    max_steps: int = 200,
) -> Estimate:
    """The exact solution, by Newton's method; derivatives by the implicit function theorem, twice.

    templates (..., n, d), preference (..., n) >= 0 or None for an even one, evidence (..., d),
    reliability > 0, a number or (...); leading axes broadcast. Templates that many rows share are
    never copied: give them size 1 along those axes.

    preference: divided by its sum. Where it is zero the weight is zero, and derivatives one-sided.
    mask (..., n): True = takes part. A row in which nothing does gives zeros and status EMPTY.
    tolerance: a row is solved when its gap is below tolerance * min(1, gap at the start), where the
    start is the preference itself. What rounding leaves above that passes, up to a gap of 1e-12 of
    the sizes of the problem's terms and 1e-2; beyond it the status is MAX_STEPS.
    max_steps: of Newton's method.

    >>> templates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> evidence = torch.tensor([0.3, 0.0], dtype=torch.float64)
    >>> e = estimate(templates, None, evidence, 2.0)
    >>> torch.allclose(e.mean, e.prior_mean + evidence - e.multiplier / 2)
    True
    """
    check_whole(max_steps, "max_steps", 0)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
    problem = make_problem(templates, preference, evidence, reliability, mask)
    operands = (problem.templates, problem.preference, problem.target, problem.reliability)
    best = newton.Minimiser(*_minimise(*_search_operands(*operands), tolerance, max_steps))
    best = _keep_preference(problem, best)
    root = _multiplier(problem, best.log_weights)
    multiplier = attach(root, partial(_linearise, best.log_weights), *operands)
    return assemble(problem, multiplier, exact=best)


def first_order(
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    *,
    mask: Tensor | None = None,
) -> Estimate:
    """lam = reliability evidence: ordinary attention, whose query is the evidence.

    Arguments as for `estimate`. To leading order the multiplier is off by
    reliability^2 |Cov evidence|, Cov the covariance of the templates under the preference.
    """
    problem = make_problem(templates, preference, evidence, reliability, mask)
    return assemble(problem, problem.reliability * problem.evidence)  # eqs. 14 and 16


def second_order(
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    *,
    mask: Tensor | None = None,
) -> Estimate:
    """lam = (I / reliability + Cov)^-1 evidence: one Newton step of the dual from 0.

    Arguments as for `estimate`. Off by O(reliability^3) in the multiplier, or its fourth power
    where the preference is symmetric.
    """
    problem = make_problem(templates, preference, evidence, reliability, mask)
    operands = (problem.templates, problem.preference, problem.reliability)
    return assemble(problem, solve_curvature(*operands, problem.evidence))  # eq. 13


def _keep_preference(problem: EstimationProblem, best: newton.Minimiser) -> newton.Minimiser:
    """Without evidence the preference is the answer: no rounding of a search."""
    has_evidence = (problem.evidence.detach() != 0).any(-1)
    log_preference = problem.preference.detach().log()
    return replace(
        best,
        log_weights=torch.where(has_evidence.unsqueeze(-1), best.log_weights, log_preference),
        gap=where(has_evidence, best.gap, 0.0),
        steps=torch.where(has_evidence, best.steps, torch.zeros_like(best.steps)),
    )


def _multiplier(problem: EstimationProblem, log_weights: Tensor) -> Tensor:
    """reliability (target - mean), from the change of the weights: little evidence moves them
    little, and the templates' own size would be lost in the difference. (g, m, d)"""
    preference = problem.preference.detach()
    tilt = where(preference > 0, log_weights - preference.log(), 0.0)
    near = tilt.abs() < 1
    change = torch.where(
        near, preference * where(near, tilt, 0.0).expm1(), log_weights.exp() - preference
    )
    apart = problem.evidence.detach() - change @ problem.templates.detach()
    return problem.reliability.detach() * apart


def assemble(
    problem: EstimationProblem, multiplier: Tensor, exact: newton.Minimiser | None = None
) -> Estimate:
    """All that follows from a multiplier (g, m, d)."""
    scores = multiplier @ problem.templates.mT
    weights, log_total = tilt(scores, problem.preference)
    potential = log_total.squeeze(-1)
    target, reliability = problem.target, problem.reliability
    steps = torch.zeros_like(potential, dtype=torch.int64)
    status = torch.full_like(steps, int(Status.OK))
    if exact is not None:
        gap, steps, status = exact.gap, exact.steps, exact.status
        weights = weights + (exact.log_weights.exp() - weights).detach()  # whose gap was measured
    about = weights @ problem.templates
    apart = target - about
    divergence = (weights * (scores - potential.unsqueeze(-1))).sum(-1)  # of w(lam) from u
    pull = 0.5 * (reliability * apart.square()).sum(-1)
    price = 0.5 * (multiplier.square() / reliability).sum(-1)
    if exact is None:
        gap = 0.5 * (reliability * (apart - multiplier / reliability).square()).sum(-1).detach()
    else:
        divergence = divergence + gap  # KL(w, w(lam)): the solved weights are not quite w(lam)
    value = pull + divergence - gap
    wrong = torch.full_like(status, int(Status.NONFINITE))
    status = torch.where(value.detach().isfinite(), status, wrong)
    status = torch.where(problem.empty, torch.full_like(status, int(Status.EMPTY)), status)
    prior = problem.preference @ problem.templates
    return Estimate(
        multiplier=problem.out(multiplier).to(problem.dtype),
        weights=problem.out(weights).to(problem.dtype),
        mean=problem.out(about + problem.centre).to(problem.dtype),
        objective=problem.out(pull + divergence),
        dual_value=problem.out((multiplier * target).sum(-1) - price - potential),
        gap=problem.out(gap),
        steps=problem.out(steps),
        status=problem.layout.unpack(status),
        prior_mean=problem.out(prior + problem.centre).to(problem.dtype),
        unrounded=_unrounded(problem, multiplier, about, prior, weights),
    )


def _unrounded(
    problem: EstimationProblem, multiplier: Tensor, about: Tensor, prior: Tensor, weights: Tensor
) -> Unrounded:
    lengths = problem.templates.detach().norm(dim=-1).unsqueeze(-1)  # (g, n, 1)
    size = ((weights + problem.preference).detach() @ lengths).squeeze(-1)
    mean, before, centre = (problem.out(x) for x in (about, prior, problem.centre.expand_as(about)))
    return Unrounded.of(
        problem.out(multiplier),
        (mean, before, centre),
        problem.out(size),
        problem.out(problem.evidence),
        problem.layout.unpack(problem.reliability),
    )


# ---- numbers


def _search_operands(
    templates: Tensor, preference: Tensor, target: Tensor, reliability: Tensor
) -> tuple[Tensor, ...]:
    fixed = [x.detach() for x in (templates, preference, target, reliability)]
    return fixed[0], fixed[1].log(), fixed[2], fixed[3].expand(*fixed[1].shape[:2], 1)


@torch.library.custom_op("fenchel::dual_minimise", mutates_args=())
def _minimise(
    templates: Tensor,
    log_preference: Tensor,
    target: Tensor,
    reliability: Tensor,
    tolerance: float,
    max_steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-weights (..., m, n); gap, steps and status (..., m). Leading axes are all groups."""
    operands = (templates, log_preference, target, reliability)
    lead = templates.shape[:-2]
    templates, log_preference, target, reliability = (
        x.reshape(lead.numel(), *x.shape[-2:]) for x in operands
    )
    rows = reduce_dimension(templates, log_preference, target, reliability)
    best = newton.minimise(rows, tolerance, max_steps)
    log_weights, gap, steps, status = (
        x.reshape(*lead, *x.shape[1:]).clone() for x in vars(best).values()
    )
    return log_weights, gap, steps, status


@_minimise.register_fake
def _(templates: Tensor, log_preference: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return empty_search(log_preference)


register_vmap(_minimise, 4)


def reduce_dimension(
    templates: Tensor, log_preference: Tensor, target: Tensor, reliability: Tensor
) -> newton.EstimationRows:
    """In the templates' own coordinates, where they are fewer than their dimension."""
    n, d = templates.shape[1:]
    if n < d:
        axes, lower = torch.linalg.qr(templates.mT)  # (g, d, n), (g, n, n)
        templates, target = lower.mT, target @ axes
    return newton.EstimationRows(templates, log_preference, target, reliability)


# ---- derivatives


def _linearise(
    log_weights: Tensor,
    multiplier: Tensor,
    templates: Tensor,
    preference: Tensor,
    target: Tensor,
    reliability: Tensor,
) -> tuple[Tensor, Solve]:
    """target - h(lam) - lam / reliability, (g, m, d), whose negative slope is the curvature."""
    weights = tilt(multiplier @ templates.mT, preference)[0]

    def solve(right: Tensor) -> Tensor:
        if torch.is_grad_enabled() or transformed() or torch.compiler.is_compiling():
            return solve_curvature(templates, weights, reliability, right)
        return _solve_curvature_in_parts(templates, log_weights.exp(), reliability, right)

    return target - weights @ templates - multiplier / reliability, solve


def solve_curvature(
    templates: Tensor, weights: Tensor, reliability: Tensor, right: Tensor
) -> Tensor:
    """(I / reliability + Cov_w t)^-1 right, in differentiable operations. (g, m, d)"""
    n, d = templates.shape[-2:]
    mean = weights @ templates
    centred = templates.unsqueeze(-3) - mean.unsqueeze(-2)  # (g, m, n, d)
    scaled = centred * (weights * reliability).unsqueeze(-1)
    if d <= n:
        eye = torch.eye(d, dtype=right.dtype, device=right.device)
        return matrices.solve(eye + centred.mT @ scaled, right * reliability)
    eye = torch.eye(n, dtype=right.dtype, device=right.device)
    image = (scaled @ right.unsqueeze(-1)).squeeze(-1)  # reliability w <t - h, right>
    change = matrices.solve(eye + scaled @ centred.mT, image)
    return reliability * (right - (change.unsqueeze(-2) @ centred).squeeze(-2))


def _solve_curvature_in_parts(
    templates: Tensor, weights: Tensor, reliability: Tensor, right: Tensor
) -> Tensor:
    """The same in bounded memory: dw of newton.py with residual reliability <t, right>."""
    reliability = reliability.expand(*weights.shape[:2], 1)
    if not weights.numel():
        return torch.zeros_like(right)
    rows = reduce_dimension(templates, weights, right, reliability).choose_method()
    parts = []
    for part in newton.split(rows):  # its preference holds the weights, its target the right side
        residual = part.reliability * (part.target @ part.templates.mT)
        parts.append(newton.newton_change(part, part.log_preference, residual, 1e-28))
    change = newton.join(parts, rows)
    return reliability * (right - change @ templates)
