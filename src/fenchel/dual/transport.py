"""Estimation with transport in place of the divergence: a preference u over templates, a cost
M[t, j] of moving what j prefers to t, and

    W(p, u) = min over plans X with row sums p and column sums u of  <M, X> - gamma H(X)
    min over p of  reliability / 2 |b - sum_t p_t t|^2 + W(p, u)
    max over lam of  <b, lam> - |lam|^2 / (2 reliability)
                     - gamma (H(u) + sum_j u_j LSE_t((<t, lam> - M[t, j]) / gamma)).

The two are equal, p = sum_j u_j softmax_t((<t, lam> - M[t, j]) / gamma), and sum_t p_t t =
b - lam / reliability. The target b is the evidence plus the mean of the true preference, which is
p at lam = 0. Where similar templates are cheap to reach they share the preference, whether
they have any of their own or not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._implicit import Solve, attach
from fenchel._kernels.operators import register_vmap
from fenchel._numerics import check_whole, where
from fenchel._solution import Status
from fenchel.continuous import matrices
from fenchel.dual.problem import empty_search
from fenchel.dual.result import Estimate, Unrounded
from fenchel.dual.transport_attention import dot_product_transport
from fenchel.dual.transport_newton import ENOUGH, MOST, Maximiser, TransportRows, maximise
from fenchel.dual.transport_problem import TransportProblem, make_transport

__all__ = [
    "TruePreference",
    "dot_product_transport",
    "transport",
    "transport_first_order",
    "true_preference",
]

# Deciphering Attention, eqs. 21 and 35; the true preference: proposition 1 and eq. 38.
TOLERANCE = 1e-22  # of the gap; its root, of the conditions of optimality (transport_newton.py)
_ENTRIES = 2**18  # numbers of the largest temporary, where nothing is recorded
_Operands = tuple[Tensor, Tensor, Tensor, Tensor]  # templates, preference, logits, shifts


class TruePreference(NamedTuple):
    """weights (..., N) over the templates, and their mean (..., d)."""

    weights: Tensor
    mean: Tensor


def transport(
    templates: Tensor,
    preference: Tensor | None,
    cost: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    gamma: float | Tensor,
    *,
    mask: Tensor | None = None,
    tolerance: float = TOLERANCE,
    max_steps: int = 200,
) -> Estimate:
    """The exact solution, by Newton's method; derivatives by the implicit function theorem, twice.

    min over p of reliability / 2 |b - sum_t p_t t|^2 + W(p, u): the target b is the evidence plus
    the mean of the `true_preference`, W(p, u) the least <M, X> - gamma H(X) over the plans X with
    row sums p and column sums u, M the cost and H the entropy.

    templates (..., N, d), preference (..., n) >= 0 or None for an even one, cost (..., N, n) >= 0,
    evidence (..., d), reliability and gamma > 0, numbers or (...); leading axes broadcast. What
    many rows share (size 1 along those axes) is not copied.

    cost: row t, column j: from the j-th entry of the preference to template t; +inf forbids. It
    need not be symmetric. A constant added to column j moves the objective by u_j times it, and no
    weight, so that what rounding leaves below zero is taken as it is; more below zero is refused,
    being a similarity more often than a cost. Its columns are the templates themselves, or only
    those that have any preference (n < N). None: the dot-product cost C - <t, t_j>, whose constant
    C moves no weight (objectives are those of C = 0) and whose matrix is never formed.
    preference: divided by its sum.
    mask (..., N): True = takes part; with n = N it holds for the preference as well. A row in which
    nothing does gives zeros and status EMPTY.
    tolerance: a row is solved when gap / gamma is below tolerance * min(1, gap / gamma at the
    start), where the start is the true preference. What rounding leaves above that passes, up to
    1e-12 of the sizes of the problem's terms and 1e-2; beyond it, which begins near
    reliability |t|^2 / gamma = 1e10, the status is MAX_STEPS. max_steps: of Newton's method.

    >>> templates = torch.tensor([[0.0, 0.0], [0.0, 0.1], [1.0, 0.0]], dtype=torch.float64)
    >>> cost = torch.cdist(templates, templates)
    >>> evidence = torch.tensor([0.3, 0.0], dtype=torch.float64)
    >>> only_first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    >>> e = transport(templates, only_first, cost, evidence, 2.0, gamma=0.1)
    >>> torch.allclose(e.mean, e.prior_mean + evidence - e.multiplier / 2)
    True
    >>> bool(e.weights[1] > 0.2)  # as similar as it is, the second template shares
    True
    """
    check_whole(max_steps, "max_steps", 0)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
    problem = make_transport(templates, preference, cost, evidence, reliability, gamma, mask)
    prior = sum_plan(_operands(problem), torch.zeros_like(problem.evidence))[0]
    target = prior @ problem.templates + problem.evidence
    operands = (*_operands(problem), target, problem.strength)
    best = Maximiser(*_maximise(*(x.detach() for x in operands), tolerance, max_steps))
    best = _keep_true_preference(problem, best)
    v = attach(best.v, _linearise, *operands)
    return _assemble(problem, prior, target, v, (best.steps, best.status, tolerance))


def transport_first_order(
    templates: Tensor,
    preference: Tensor | None,
    cost: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    gamma: float | Tensor,
    *,
    mask: Tensor | None = None,
) -> Estimate:
    """lam = reliability evidence; arguments as for `transport`.

    Off by reliability^2 / gamma |Cov evidence| to leading order, in the multiplier. With the
    dot-product cost it is an average of attentions: `dot_product_transport`.
    """
    problem = make_transport(templates, preference, cost, evidence, reliability, gamma, mask)
    prior = sum_plan(_operands(problem), torch.zeros_like(problem.evidence))[0]
    target = prior @ problem.templates + problem.evidence
    return _assemble(problem, prior, target, problem.strength * problem.evidence)  # eq. 22


def _keep_true_preference(problem: TransportProblem, best: Maximiser) -> Maximiser:
    """Without evidence the true preference is the answer: no rounding of a search."""
    has_evidence = (problem.evidence.detach() != 0).any(-1)
    steps = torch.where(has_evidence, best.steps, torch.zeros_like(best.steps))
    return replace(best, v=where(has_evidence.unsqueeze(-1), best.v, 0.0), steps=steps)


def true_preference(
    templates: Tensor,
    preference: Tensor | None,
    cost: Tensor | None,
    gamma: float | Tensor,
    *,
    mask: Tensor | None = None,
) -> TruePreference:
    """argmin over p of W(p, u) = sum_j u_j softmax_t(-M[t, j] / gamma), and its mean.

    Arguments as for `transport`. It is what no evidence would give, and tends to the preference as
    gamma -> 0 if M[t, t] < M[s, t] for all s other than t.

    >>> templates = torch.tensor([[0.0], [1.0], [3.0]])
    >>> true_preference(templates, None, torch.cdist(templates, templates), 0.01).weights
    tensor([0.3333, 0.3333, 0.3333])
    """
    nothing = templates.new_zeros(templates.shape[-1:])
    problem = make_transport(templates, preference, cost, nothing, 1.0, gamma, mask)
    weights = sum_plan(_operands(problem), torch.zeros_like(problem.evidence))[0]
    mean = weights @ problem.templates + problem.centre
    return TruePreference(
        problem.out(weights).to(problem.dtype), problem.out(mean).to(problem.dtype)
    )


def _operands(problem: TransportProblem) -> _Operands:
    return problem.templates, problem.preference, problem.logits, problem.shifts


def _assemble(
    problem: TransportProblem,
    prior: Tensor,
    target: Tensor,
    v: Tensor,
    exact: tuple[Tensor, Tensor, float] | None = None,
) -> Estimate:
    """All that follows from v = lam / gamma (g, m, d) and the true preference (g, m, N).

    exact: steps and status (g, m), and the tolerance of the gap.
    """
    weights, potential = sum_plan(_operands(problem), v)
    gamma, strength = problem.gamma.squeeze(-1), problem.strength
    mean = weights @ problem.templates
    apart = target - mean
    pull = 0.5 * (strength * apart.square()).sum(-1)
    price = 0.5 * (v.square() / strength).sum(-1)
    preference = problem.preference
    entropy = -(preference * where(preference > 0, preference, 1.0).log()).sum(-1)
    offset = potential + problem.constant + entropy
    inner = (v * target).sum(-1)
    gap = 0.5 * (strength * (apart - v / strength).square()).sum(-1)
    steps = torch.zeros_like(gap, dtype=torch.int64)
    status = torch.full_like(steps, int(Status.OK))
    if exact is not None:
        steps, status, tolerance = exact
        scale = 1 + pull + inner.abs() + potential.abs()
        enough = (max(tolerance, ENOUGH) * scale).clamp(max=max(tolerance, MOST))
        off = (status == Status.OK.value) & (gap > enough)  # of these weights, as returned
        status = torch.where(off, torch.full_like(status, int(Status.MAX_STEPS)), status)
    status = torch.where(problem.wrong, torch.full_like(status, int(Status.NONFINITE)), status)
    status = torch.where(problem.empty, torch.full_like(status, int(Status.EMPTY)), status)
    before = prior @ problem.templates
    return Estimate(
        multiplier=problem.out(problem.gamma * v).to(problem.dtype),
        weights=problem.out(weights).to(problem.dtype),
        mean=problem.out(mean + problem.centre).to(problem.dtype),
        objective=problem.out(gamma * (pull + (v * mean).sum(-1) - offset)),
        dual_value=problem.out(gamma * (inner - price - offset)),
        gap=problem.out((gamma * gap).detach()),
        steps=problem.out(steps),
        status=problem.layout.unpack(status),
        prior_mean=problem.out(before + problem.centre).to(problem.dtype),
        unrounded=_unrounded(problem, v, (mean, before), weights + prior),
    )


def _unrounded(
    problem: TransportProblem, v: Tensor, means: tuple[Tensor, Tensor], weights: Tensor
) -> Unrounded:
    lengths = problem.templates.detach().norm(dim=-1).unsqueeze(-1)  # (g, N, 1)
    size = (weights.detach() @ lengths).squeeze(-1)
    mean, before = (problem.out(x) for x in means)
    centre = problem.out(problem.centre.expand_as(means[0]))
    strength = problem.layout.unpack(problem.gamma * problem.strength)
    return Unrounded.of(
        problem.out(problem.gamma * v),
        (mean, before, centre),
        problem.out(size),
        problem.out(problem.evidence),
        strength,
    )


# ---- the plan of a multiplier


def sum_plan(operands: _Operands, v: Tensor) -> tuple[Tensor, Tensor]:
    """Row sums of the plan (g, m, N) and sum_j u_j LSE_j (g, m)."""
    templates, preference, logits, shifts = operands
    groups, rows, columns = preference.shape
    some = columns
    if not torch.is_grad_enabled():
        some = max(1, _ENTRIES // max(1, groups * rows * templates.shape[1]))
    problem = TransportRows(templates, preference, logits, shifts, v, v)
    weights, potential = v.new_zeros(()), v.new_zeros(())
    for start in range(0, columns, some):
        share = preference[..., start : start + some]
        scores = problem.scores(v, slice(start, start + some))  # (g, m, n', N)
        weights = weights + (share.unsqueeze(-2) @ scores.softmax(-1)).squeeze(-2)
        potential = potential + (share * torch.logsumexp(scores, -1)).sum(-1)
    return weights, potential


def solve_curvature(operands: _Operands, strength: Tensor, v: Tensor, right: Tensor) -> Tensor:
    """(I / strength + sum_j u_j Cov_j)^-1 right, differentiable. (g, m, d)

    With S = diag(p) - sum_j u_j q_j q_j', q_j the weights of column j, the sum is T' S T.
    """
    templates, preference, logits, shifts = operands
    n, d = templates.shape[-2:]
    scores = TransportRows(templates, preference, logits, shifts, v, v).scores(v, slice(None))
    plan, share = scores.softmax(-1), preference.unsqueeze(-1)  # (g, m, n, N), (g, m, n, 1)
    weights = (share.mT @ plan).mT  # (g, m, N, 1)
    across = templates.unsqueeze(1)  # (g, 1, N, d)
    eye = torch.eye(min(n, d), dtype=right.dtype, device=right.device)
    if d <= n:
        means = plan @ across  # (g, m, n, d)
        spread = across.mT @ (weights * across) - means.mT @ (share * means)
        return matrices.solve(eye + strength.unsqueeze(-1) * spread, strength * right)
    inner = torch.diag_embed(weights.squeeze(-1)) - plan.mT @ (share * plan)  # S, (g, m, N, N)
    inner = strength.unsqueeze(-1) * inner
    image = inner @ (across @ right.unsqueeze(-1))  # (g, m, N, 1)
    change = matrices.solve(eye + inner @ (across @ across.mT), image.squeeze(-1))
    return strength * (right - change @ templates)


def _linearise(
    v: Tensor,
    templates: Tensor,
    preference: Tensor,
    logits: Tensor,
    shifts: Tensor,
    target: Tensor,
    strength: Tensor,
) -> tuple[Tensor, Solve]:
    """target - h(v) - v / strength, (g, m, d), whose negative slope is the curvature."""
    operands = (templates, preference, logits, shifts)
    residual = target - sum_plan(operands, v)[0] @ templates - v / strength
    return residual, partial(solve_curvature, operands, strength, v)


# ---- numbers


@torch.library.custom_op("fenchel::transport_maximise", mutates_args=())
def _maximise(
    templates: Tensor,
    preference: Tensor,
    logits: Tensor,
    shifts: Tensor,
    target: Tensor,
    strength: Tensor,
    tolerance: float,
    max_steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v (..., m, d); gap, steps and status (..., m). Leading axes are all groups."""
    lead = templates.shape[:-2]
    groups = lead.numel()
    flat = [x.reshape(groups, *x.shape[-2:]) for x in (templates, preference, target, strength)]
    templates, preference, target, strength = flat
    logits, shifts = (x.reshape(groups, *x.shape[-3:]) for x in (logits, shifts))
    axes = None
    n, d = templates.shape[1:]
    whole = target
    if n < d:  # in the templates' own coordinates
        axes, lower = torch.linalg.qr(templates.mT)  # (g, d, n), (g, n, n)
        templates, target, shifts = lower.mT, target @ axes, shifts @ axes.unsqueeze(1)
    best = maximise(
        TransportRows(templates, preference, logits, shifts, target, strength), tolerance, max_steps
    )
    v = best.v
    if axes is not None:  # beside them the mean is zero, so that v = strength target
        v = v @ axes.mT + strength * (whole - target @ axes.mT)
    v, gap, steps, status = (
        x.reshape(*lead, *x.shape[1:]).clone() for x in (v, best.gap, best.steps, best.status)
    )
    return v, gap, steps, status


@_maximise.register_fake
def _(
    templates: Tensor, preference: Tensor, logits: Tensor, shifts: Tensor, target: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return empty_search(target)


register_vmap(_maximise, 4)
