"""What `solve` returns: weights, the certificate that they are right, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, check_tensor, dot, full_precision, where
from fenchel._unchanged import Unchanged
from fenchel.priors.measure import Base
from fenchel.regularizers.contract import Curvature, Dual, Regularizer


class Status(IntEnum):
    """How a row ended. `Status(code).remedy` says what to do about it."""

    OK = 0
    EMPTY = 1
    NONFINITE = 2
    INFEASIBLE = 3
    MAX_STEPS = 4
    INEXACT = 5

    @property
    def remedy(self) -> str:
        return _REMEDIES[self]


_REMEDIES = {
    Status.OK: "nothing to do: the row is solved",
    Status.EMPTY: "no key carries mass, so weights are zero; unmask a key, or expect zero output",
    Status.NONFINITE: "a score is NaN or +inf, the base is negative, NaN or infinite, or a "
    "parameter is out of range; mask with -inf or base = 0, and check what made the scores",
    Status.INFEASIBLE: "the budget k exceeds the number of unmasked keys; lower k for this row "
    "(k may be a tensor, one per row) or unmask keys",
    Status.MAX_STEPS: "the search stopped before its tolerance; read the gap for how far off the "
    "row may be. Fused on a grid: raise max_steps or the tolerance. Tsallis: alpha or the range of "
    "the base is too large for this precision; lower it or use float64",
    Status.INEXACT: "the gap is above what rounding explains; read it for how far off the row may "
    "be. With a regulariser of your own, check its maximize and value. With a base, scores and log "
    "masses are too far apart for this precision: bring them closer together, or use float64",
}


def explain_statuses(statuses: Tensor, remedies: Mapping[Status, str]) -> str:
    """One line for each status that occurs: its name, the number of rows, its remedy."""
    counts = [(status, int((statuses == status).sum())) for status in Status]
    rows = statuses.numel()
    lines = [f"{x.name}: {count} of {rows} rows; {remedies[x]}" for x, count in counts if count]
    return "\n".join(lines) or "no rows"


class SolveError(ValueError):
    """Raised by `solve(..., throw=True)` for rows that are not OK."""


CHANGED = "scores or base were changed in place after `solve`"


@dataclass(frozen=True, eq=False)
class Problem:
    """Scores made ready: keys last, anchor at zero, everything finite, dead keys not allowed."""

    scores: Tensor  # (..., n), float32 or float64
    base: Base
    shift: Tensor  # (...), the row's anchor: a score near which the weights are decided
    axis: int  # where the keys were, counted from the end
    raw_scores: Tensor  # the scores before anything was done to them, keys last; detached
    unchanged: Unchanged | None  # whether they still are; None where nobody can tell

    def exact_scores(self) -> Tensor:
        """The raw scores less the anchor in the precision of certificates. (..., n)"""
        exact = certificate_dtype(self.raw_scores.device)
        if self.raw_scores.dtype == exact:
            return self.scores.detach()
        if self.unchanged is not None:
            self.unchanged.check(CHANGED, "the certificate of a solution")
        shift = self.shift.unsqueeze(-1).to(exact)
        return subtract_anchor(self.raw_scores.to(exact), shift, self.base.allowed)


def subtract_anchor(scores: Tensor, anchor: Tensor, usable: Tensor) -> Tensor:
    """Usable scores less the row's anchor, zero elsewhere.

    Differences may overflow; a quarter of the range keeps later sums finite.
    """
    limit = torch.finfo(scores.dtype).max / 4
    anchor = where(usable, anchor.expand_as(scores), 0.0)
    return (where(usable, scores, 0.0) - anchor).clamp(-limit, limit)


def gap_tolerance(dtype: torch.dtype) -> float:
    """Largest gap, relative to the size of Omega, that an exact answer may show."""
    return {torch.float64: 1e-12, torch.float32: 1e-9}.get(dtype, torch.finfo(dtype).eps ** 2 * 8)


class Answer(NamedTuple):
    """What stands behind the weights: the problem, and what certifies them."""

    problem: Problem
    outcome: Tensor  # (...), codes of `Status` as the search left them
    threshold: Tensor  # (...)
    dual: Dual
    conjugate: Tensor  # (...), on the shifted scores


@dataclass(frozen=True, eq=False)
class Solution:
    """The maximiser of <scores, p> - Omega(p), row by row.

    weights: in the shape and dtype of the scores, zero on keys that get nothing.

    Numbers other than the weights come in float32 at least. Row tensors have the shape of the
    scores without the key axis.
    """

    weights: Tensor
    regularizer: Regularizer
    answer: Callable[[], Answer]  # computed when first asked for: most callers want the weights
    dim: int = -1  # the axis of the keys

    @property
    def problem(self) -> Problem:
        """The scores made ready."""
        return self.answer().problem

    @property
    def threshold(self) -> Tensor:
        """The score at or below which a key gets nothing; -inf for Shannon. (...)

        For `Fused` it applies to the smoothed scores.
        """
        return self.answer().threshold

    @property
    def outcome(self) -> Tensor:
        """Codes of `Status` as the search left them; `status` reads the gap too. (...)"""
        return self.answer().outcome

    @property
    def dual(self) -> Dual:
        """The multipliers that certify the weights."""
        return self.answer().dual

    @property
    def conjugate(self) -> Tensor:
        """The conjugate at the scores less their anchor; see `potential`. (...)"""
        return self.answer().conjugate

    @property
    def support(self) -> Tensor:
        """Which keys carry weight. bool, shape of the scores."""
        return self.weights > 0

    @property
    def support_size(self) -> Tensor:
        """How many keys carry weight. int64, (...)"""
        return self.support.sum(self.dim)

    @property
    def potential(self) -> Tensor:
        """The conjugate at the scores; its gradient in the scores is the weights."""
        return self._row(self.conjugate + self._shifted_total())

    @property
    def objective(self) -> Tensor:
        """<scores, weights> - Omega(weights): equal to the potential, up to the gap.

        Its derivative is the potential's, since at the optimum the weights do not matter.
        """
        p = self._rows().detach()
        linear = dot(self.problem.scores.detach(), p)
        primal = linear - self.regularizer.value(p, self.problem.base).detach()
        primal = primal + (self.conjugate - self.conjugate.detach())
        return self._row(primal + self._shifted_total())

    @property
    def gap(self) -> Tensor:
        """Certified distance from the optimum: the objective falls short by at most this.

        A sum of non-negative terms, one per key, evaluated in float64 from the given scores, the
        weights and the threshold alone; not differentiable, never clipped. Zero for an empty row.
        """
        if torch.compiler.is_compiling():
            return self._certify()
        memory = vars(self)  # `status` and `explain` ask again
        if "_gap" not in memory:
            memory["_gap"] = self._certify()
        gap: Tensor = memory["_gap"]
        return gap

    def _certify(self) -> Tensor:
        p = self._rows().detach()
        gap = self.gap_of(p) + self._rounding(p)
        return where(self.outcome != Status.EMPTY.value, where(~self._failed, gap, math.nan), 0.0)

    @property
    def status(self) -> Tensor:
        """Codes of `Status`, one per row. OK means that the gap is within its tolerance."""
        ok = self.outcome == Status.OK.value
        return where(~ok | (self.gap <= self.tolerance), self.outcome, Status.INEXACT.value)

    @property
    def tolerance(self) -> Tensor:
        """The largest gap that rounding explains, row by row."""
        dtype, problem = self.weights.dtype, self.problem
        scores = problem.exact_scores()
        scale = self.regularizer.scale(scores, problem.base.detach().to(scores.dtype)).detach()
        if self.regularizer.gap_is_loss:
            return gap_tolerance(dtype) * scale
        # A gap of first order in the error is as large as the rounding of the scores themselves.
        size = problem.base.keep(scores).abs().amax(-1) if scores.shape[-1] else scale
        return scale * gap_tolerance(dtype) + 64 * torch.finfo(dtype).eps * (1 + size)

    def gap_of(self, weights: Tensor) -> Tensor:
        """The gap of other weights of the same rows, keys last, as an answer to this problem."""
        scores = self.problem.exact_scores()
        return self.regularizer.gap(scores, weights, self.dual, self.problem.base.detach())

    def _rounding(self, p: Tensor) -> Tensor | float:
        """What the gap cannot see: scores less their anchor are rounded, by half an ulp each.

        A score that is off by d_i leaves weights short of the optimum by sum r_i d_i^2 / 2, r the
        response. It matters where a large score meets a small mass: only a base can do that.
        """
        if self.problem.base.plain:
            return 0.0
        scores = self.problem.exact_scores()
        base = self.problem.base.detach().to(scores.dtype)
        response = self.regularizer.curvature(p.to(scores.dtype), base).response
        ulp = torch.finfo(scores.dtype).eps / 2 * scores.abs()
        return where(response > 0, response * ulp.square(), 0.0).sum(-1) / 2

    def hessian(self) -> Tensor:
        """dp/ds, (..., n, n): entry (i, j) is the change of weight i with score j."""
        curvature = self._curvature()
        like = curvature.response
        n = like.shape[-1]
        if n == 0:
            return like.new_zeros((*like.shape, 0))
        eye = torch.eye(n, dtype=like.dtype, device=like.device)
        columns = torch.func.vmap(lambda unit: curvature.apply(unit.expand_as(like)))(eye)
        # (key of the score, ..., key of the weight) -> (..., n, n)
        return columns.movedim(0, -1).to(self.problem.scores.dtype)

    def fisher(self) -> Tensor:
        """E[score score^T] on the support, score_j = d log p_j / d scores. (..., n, n)

        For Shannon hessian() = temperature * fisher().
        """
        hessian, p = self.hessian(), self._rows()
        score = hessian / where(p > 0, p, 1.0).unsqueeze(-1)  # row j: d log p_j / d scores
        total = self.regularizer.total(p).unsqueeze(-1)
        weighted = where(p > 0, p / total, 0.0).unsqueeze(-1) * score
        with full_precision(p):  # which would round the product
            return score.mT @ weighted

    def escort(self) -> Tensor:
        """The distribution that averages utilities: d threshold / d scores. Shape of the scores."""
        return self._keys(self._curvature().escort)

    def advantage(self, utility: Tensor) -> Tensor:
        """Utility of each key minus its escort mean: which keys a gradient step would favour.

        Times the response nu / omega''(p / nu) this is the gradient in the scores of
        <utility, weights>. utility: shape of the scores.
        """
        return self._keys(self._curvature().advantage(self._utility(utility)))

    def gradient(self, utility: Tensor) -> Tensor:
        """Gradient in the scores of <utility, weights>, from the curvature. Shape of the scores."""
        return self._keys(self._curvature().apply(self._utility(utility)))

    def __repr__(self) -> str:
        shape = tuple(self.weights.shape)
        return f"Solution({self.regularizer}, weights of shape {shape} in {self.weights.dtype})"

    def explain(self) -> str:
        """One line for each status that occurs, with what to do about it."""
        return explain_statuses(self.status, _REMEDIES)

    @property
    def _failed(self) -> Tensor:
        return (self.outcome == Status.NONFINITE.value) | (self.outcome == Status.INFEASIBLE.value)

    def _row(self, values: Tensor) -> Tensor:
        values = where(self.outcome != Status.EMPTY.value, values, -math.inf)
        return where(~self._failed, values, math.nan)

    def _shifted_total(self) -> Tensor:
        return self.problem.shift * self.regularizer.total(self.problem.scores)

    def _rows(self) -> Tensor:
        """Weights with keys last, in the precision they were computed in; zero in failed rows."""
        p = self.weights.movedim(self.problem.axis, -1).to(self.problem.scores.dtype)
        return where(~self._failed.unsqueeze(-1), p, 0.0)

    def _keys(self, rows: Tensor) -> Tensor:
        """Back to the shape of the scores, in the precision they were computed in."""
        return rows.movedim(-1, self.problem.axis).to(self.problem.scores.dtype)

    def _utility(self, utility: Tensor) -> Tensor:
        check_tensor(utility, "utility")
        if utility.shape != self.weights.shape:
            raise ValueError(
                f"utility has shape {tuple(utility.shape)}, the weights "
                f"{tuple(self.weights.shape)}; give one number for each key of each row"
            )
        return utility.movedim(self.problem.axis, -1).to(certificate_dtype(utility.device))

    def _curvature(self) -> Curvature:
        """In the precision of certificates: p^(2 - alpha) leaves the range of float32."""
        exact = certificate_dtype(self.weights.device)
        return self.regularizer.curvature(self._rows().to(exact), self.problem.base.to(exact))
