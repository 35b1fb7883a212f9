"""Bounds of the Wasserstein distance from both sides, by Sinkhorn's iteration.

With potentials f, g and a regularisation eps the iteration's plan is
a_i b_j exp((f_i + g_j - cost_ij) / eps). It has neither the right margins nor feasible potentials,
but both can be made from it, after any number of steps: a plan by Algorithm 2 of Altschuler, Weed
and Rigollet, Near-linear time approximation algorithms for optimal transport (2017), whose cost is
above W1; potentials by two c-transforms, whose dual value is below. Rounding of float64 aside, no
step has to converge for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.measures.distances import Atoms, Norm, make_pair

_BLOCK = 20  # steps with one kernel, between two looks at the bounds
_START = 0.5  # of the mean cost: the first regularisation, from which it falls
_FALL = 0.25  # of the regularisation from block to block


class EntropicDistance(NamedTuple):
    """lower <= W1 <= upper, each (...), without derivatives.

    In float64 whatever the operands are: rounded to less, they would be no bounds.
    converged: bool (...), whether upper - lower <= tolerance * upper. Where it is False the steps
        ran out before; the bounds hold all the same.
    steps: of Sinkhorn's iteration. regularization (...): the last one, in units of the cost.
    """

    upper: Tensor
    lower: Tensor
    steps: int
    regularization: Tensor
    converged: Tensor

    @property
    def error(self) -> Tensor:
        """How far either bound may be from W1, in units of the cost."""
        return self.upper - self.lower


@torch.no_grad()
def entropic_wasserstein1(
    mu: Atoms,
    nu: Atoms,
    norm: Norm = 1,
    *,
    regularization: float = 2e-3,
    max_steps: int = 1000,
    tolerance: float = 1e-2,
) -> EntropicDistance:
    """W1 between two bounds, in plain torch: on the operands' device, batched, without POT.

        found = entropic_wasserstein1(mu, nu)
        found.lower, found.upper, found.error, found.converged

    mu, nu, norm: as for `wasserstein1`.
    regularization: relative to the mean cost under independence. It starts large and falls
    to this; the smaller, the nearer the bounds can come, in more steps.
    max_steps: at most so many; the bounds hold after one.
    tolerance: relative; stop when upper - lower <= tolerance * upper in the whole batch. Read
    `converged` for whether that was reached: the nearer the measures are, beside their spread, the
    more steps it takes, and between equal ones no number is enough.
    """
    _check_positive(regularization, "regularization")
    _check_positive(tolerance, "tolerance", least=0.0)
    check_whole(max_steps, "max_steps", 1)
    pair = make_pair(mu, nu, norm)
    state = _State.of(pair.costs(), pair.a, pair.b)
    steps, share = 0, max(_START, regularization)
    while True:
        size = min(_BLOCK, max_steps - steps)
        state.advance(share, size)
        steps += size
        upper, lower = state.upper(), state.lower()
        converged = upper - lower <= tolerance * upper
        if steps == max_steps or bool(converged.all()):
            break
        share = max(share * _FALL, regularization)
    return EntropicDistance(upper, lower, steps, state.eps.squeeze(-1), converged)


def _check_positive(value: object, name: str, least: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    fine = value > 0 if least is None else value >= least
    if not (fine and math.isfinite(value)):
        condition = "> 0" if least is None else f">= {least:g}"
        raise ValueError(f"{name} must be finite and {condition}, got {value}")


@dataclass(eq=False)
class _State:
    """Potentials f (..., n), g (..., m) that move; cost (..., n, m), a (..., n), b (..., m)."""

    cost: Tensor
    a: Tensor
    b: Tensor
    scale: Tensor  # (...): the mean cost
    # (...) each, of regularisations: costs divided by less overflow, and are lost beside more
    edges: tuple[Tensor, Tensor]
    eps: Tensor  # (..., 1): the last regularisation
    f: Tensor
    g: Tensor

    @classmethod
    def of(cls, cost: Tensor, a: Tensor, b: Tensor) -> _State:
        *batch, n, m = cost.shape
        a, b = a.expand(*batch, n), b.expand(*batch, m)
        mean = _row_sums(cost.abs(), b).mul(a).sum(-1)
        scale = torch.where(mean > 0, mean, 1.0)
        eps = scale.unsqueeze(-1)
        most = cost.abs().amax((-2, -1))
        tiny = torch.finfo(cost.dtype).tiny
        edges = tuple((share * most).clamp_min(tiny) for share in (1e-250, 1e6))
        return cls(
            cost, a, b, scale, (edges[0], edges[1]), eps, torch.zeros_like(a), torch.zeros_like(b)
        )

    def advance(self, share: float, steps: int) -> None:
        """One step in logarithms, which cannot overflow; the others with the kernel it leaves."""
        eps = self.eps = torch.clamp(share * self.scale, *self.edges).unsqueeze(-1)
        log_a, log_b = self.a.log(), self.b.log()
        scores = -self.cost / eps.unsqueeze(-1)
        self.f = -eps * torch.logsumexp(scores + (self.g / eps + log_b).unsqueeze(-2), -1)
        self.g = -eps * torch.logsumexp(scores + (self.f / eps + log_a).unsqueeze(-1), -2)
        if steps == 1:
            return
        kernel = scores.add_((self.f / eps).unsqueeze(-1)).add_((self.g / eps).unsqueeze(-2))
        kernel = kernel.exp_()
        v = torch.ones_like(self.g)
        for _ in range(steps - 1):
            u = 1 / _row_sums(kernel, self.b * v)
            v = 1 / _row_sums(kernel.mT, self.a * u)
        f, g = self.f + eps * u.log(), self.g + eps * v.log()
        # Where the kernel lost a row below the smallest number, the step in logarithms stays.
        fine = (f.isfinite().all(-1) & g.isfinite().all(-1)).unsqueeze(-1)
        self.f, self.g = torch.where(fine, f, self.f), torch.where(fine, g, self.g)

    def lower(self) -> Tensor:
        """<f, a> + <g, b> for the largest f and g around this g that are feasible where mass is."""
        g = torch.where(self.b > 0, self.g, -torch.inf)
        f = (self.cost - g.unsqueeze(-2)).amin(-1)
        below = torch.where(self.a > 0, f, -torch.inf)
        g = (self.cost - below.unsqueeze(-1)).amin(-2)
        return (f * self.a).sum(-1) + (g * self.b).sum(-1)

    def upper(self) -> Tensor:
        """Scale rows, then columns, down to their margins, and spread evenly what is missing."""
        exponent = (self.f.unsqueeze(-1) + self.g.unsqueeze(-2)).sub_(self.cost)
        exponent.div_(self.eps.unsqueeze(-1))
        # with the masses: without, what is infinite where there is none would be NaN with them
        exponent.add_(self.a.log().unsqueeze(-1)).add_(self.b.log().unsqueeze(-2))
        plan = exponent.clamp_max_(0.0).exp_()  # no plan has more than one; any plan will do
        plan.mul_(_shrink(self.a, plan.sum(-1)).unsqueeze(-1))
        plan.mul_(_shrink(self.b, plan.sum(-2)).unsqueeze(-2))
        left = (self.a - plan.sum(-1)).clamp_min(0)
        right = (self.b - plan.sum(-2)).clamp_min(0)
        missing = left.sum(-1)
        spread = (left * _row_sums(self.cost, right)).sum(-1)
        rest = spread / torch.where(missing > 0, missing, 1.0)
        return plan.mul_(self.cost).sum((-2, -1)) + rest


def _shrink(target: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > target, target / total, 1.0)


def _row_sums(matrix: Tensor, weights: Tensor) -> Tensor:
    """sum_j matrix_ij weights_j: (..., n, m), (..., m) -> (..., n)"""
    return (matrix @ weights.unsqueeze(-1)).squeeze(-1)
