"""solve: scores and a regulariser in, weights and their certificate out."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._numerics import (
    at_hand,
    certificate_dtype,
    check_local,
    check_tensor,
    compute_dtype,
    has,
    readable,
    where,
)
from fenchel._solution import (
    CHANGED,
    Answer,
    Problem,
    Solution,
    SolveError,
    Status,
    subtract_anchor,
)
from fenchel._unchanged import Unchanged
from fenchel.priors.contract import Prior
from fenchel.priors.measure import Base, expand_to, resolve
from fenchel.regularizers.contract import Maximum, Regularizer, resolve_regularizer

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def solve(
    scores: Tensor,
    regularizer: Regularizer | Module,
    *,
    base: Tensor | Prior | None = None,
    dim: int = -1,
    throw: bool = False,
) -> Solution:
    """argmax_p <scores, p> - Omega(p) over the distributions p on the axis `dim`.

    >>> sol = fl.solve(torch.randn(2, 8), fl.Tsallis(1.5))
    >>> sol.weights, sol.gap

    scores: real, any shape; -inf masks a key. float16 and bfloat16 are computed in float32.
    regularizer: or a module whose `forward()` returns one, such as `nn.LearnedTsallis`.
    base: how much room each key has: a non-negative tensor that broadcasts to the scores (zero
        masks a key; a bool tensor masks where False), or a prior. Shannon and Tsallis take any
        base and differentiate it; the others take masks.
    throw: raise `SolveError` if any row is not OK. By default read `status`.
    """
    check_scores(scores, dim)
    regularizer = resolve_regularizer(regularizer)
    weights = _weigh_rows(scores, regularizer, base, dim)
    if weights is None:
        solution = solve_fully(scores, regularizer, base=base, dim=dim)
    else:
        regularizer = _snapshot(regularizer)
        solution = Solution(weights, regularizer, _Later(scores, regularizer, base, dim), dim)
    if throw:
        _raise_on_trouble(solution.status)
    return solution


def solve_fully(
    scores: Tensor, regularizer: Regularizer, *, base: Tensor | Prior | None = None, dim: int = -1
) -> Solution:
    """`solve` for callers who want more than the weights: everything is computed at once."""
    problem, status = _prepare(scores, base, dim, regularizer)
    # A view sums its own gradient first: in a loss, weights and target then cancel to exactly zero.
    maximum = regularizer.maximize(problem.scores.view_as(problem.scores), problem.base)
    outcome = _final_status(status, maximum)
    threshold = _threshold(maximum.threshold + problem.shift, outcome)
    answer = Answer(problem, outcome, threshold, maximum.dual, maximum.potential)
    weights = _finish(maximum.weights, outcome).to(scores.dtype).movedim(-1, problem.axis)
    return Solution(weights, _snapshot(regularizer), partial(_identity, answer), dim)


def _identity(answer: Answer) -> Answer:
    """A function with a name, so that solutions can be copied and saved."""
    return answer


def _weigh_rows(
    scores: Tensor, regularizer: Regularizer, base: Tensor | Prior | None, dim: int
) -> Tensor | None:
    """The weights alone, in one pass, where the regulariser knows how."""
    if scores.numel() == 0:
        return None
    if base is not None:
        if not isinstance(base, Tensor) or base.dtype != torch.bool:
            return None
        scores = where(expand_to(base, scores.shape, "base"), scores, -math.inf)
    rows = scores.movedim(dim, -1).to(compute_dtype(scores.dtype))
    weights = regularizer.weigh(rows)
    return None if weights is None else weights.to(scores.dtype).movedim(-1, dim)


class _Later:
    """The answer to scores whose weights are known, computed when it is first asked for."""

    def __init__(
        self, scores: Tensor, regularizer: Regularizer, base: Tensor | Prior | None, dim: int
    ) -> None:
        self._arguments = (scores, regularizer, base, dim)
        self._unchanged: Unchanged | None = None
        self._modes: tuple[bool, bool] | None = None
        if not torch.compiler.is_compiling():
            self._unchanged = Unchanged(scores=scores, base=base)
            # Of the call: who first asks for the gap may do so without gradients.
            self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._answer: Answer | None = None

    def _compute(self) -> Answer:
        scores, regularizer, base, dim = self._arguments
        if self._modes is None:  # compiled
            return solve_fully(scores, regularizer, base=base, dim=dim).answer()
        inference, follow = self._modes
        with torch.inference_mode(inference), torch.set_grad_enabled(follow):
            return solve_fully(scores, regularizer, base=base, dim=dim).answer()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, whose versions say nothing: the answer goes with it."""
        return {"_answer": self()}

    def __call__(self) -> Answer:
        if self._answer is None:
            if self._unchanged is not None:
                self._unchanged.check(CHANGED, "the certificate of a solution")
            self._answer = self._compute()
        return self._answer


def _snapshot(regularizer: Regularizer) -> Regularizer:
    """A copy with its own tensors: an optimiser's step on alpha must not change past answers."""
    if torch.compiler.is_compiling():  # traced tensors do not change behind our back
        return regularizer
    snapshot = copy.copy(regularizer)
    for name, value in vars(regularizer).items():
        if isinstance(value, Tensor):
            object.__setattr__(snapshot, name, value.clone())
    return snapshot


def check_scores(scores: Tensor, dim: int) -> None:
    """Refuse what is no scores, or no axis of them."""
    check_tensor(scores, "scores")
    check_local(scores, "scores")
    if scores.dtype not in _DTYPES or scores.layout != torch.strided:
        remedy = "take its real part" if scores.is_complex() else "call .float() and .to_dense()"
        raise TypeError(
            "scores must be a dense tensor of float16, bfloat16, float32 or float64, got "
            f"{scores.layout} of {scores.dtype}; {remedy} first"
        )
    if scores.ndim == 0:
        raise ValueError("scores must have at least one axis, got a single number")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be one whole number, got {dim!r}")
    if not -scores.ndim <= dim < scores.ndim:
        raise IndexError(
            f"dim must be between {-scores.ndim} and {scores.ndim - 1}, got {dim} "
            f"for scores of shape {tuple(scores.shape)}"
        )


def _prepare(
    scores: Tensor, base: Tensor | Prior | None, dim: int, regularizer: Regularizer
) -> tuple[Problem, Tensor]:
    axis = dim if dim < 0 else dim - scores.ndim
    if isinstance(base, Prior) and axis != -1:
        raise ValueError(f"a prior needs the keys on the last axis, got dim={dim}; move them there")
    precision = compute_dtype(scores.dtype)
    if regularizer.takes_base and _has_masses(base):
        # A large score and a small mass may cancel: float32 would round what remains of the two.
        precision = certificate_dtype(scores.device)
    raw_scores = scores.movedim(axis, -1)
    x = raw_scores.to(precision)
    valid = regularizer.valid_rows(x)
    if base is None and _is_ordinary(x, valid):
        everything = Base.everything(x)
        shift = regularizer.anchor(x, everything).detach()
        raw = raw_scores.detach()
        ready = Problem(x - shift, everything, shift.squeeze(-1), axis, raw, _watch(raw))
        return ready, torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    if isinstance(base, Tensor) and axis != -1:
        base = expand_to(base, scores.shape, "base").movedim(axis, -1)
    measure = resolve(base, x.shape, x)
    unfit = _unfit_base(measure, regularizer)
    strange = measure.allowed & (x.isnan() | (x == math.inf))
    broken = (strange | unfit).any(-1) | ~valid
    live = measure.allowed & (x > -math.inf) & ~broken.unsqueeze(-1)
    empty = ~live.any(-1)
    status = where(~empty, torch.zeros_like(broken, dtype=torch.long), Status.EMPTY.value)
    status = where(~broken, status, Status.NONFINITE.value)
    cleaned = _clean(measure, live) if regularizer.takes_base else Base(live)
    anchor = regularizer.anchor(where(live, x, 0.0), cleaned)
    shift = where(~empty.unsqueeze(-1), anchor, 0.0).detach()
    usable = live | (x.isfinite() & ~broken.unsqueeze(-1))
    centred = subtract_anchor(x, shift, usable)
    raw = raw_scores.detach()
    return Problem(centred, cleaned, shift.squeeze(-1), axis, raw, _watch(raw)), status


def _watch(scores: Tensor) -> Unchanged | None:
    return Unchanged(scores=scores) if readable(scores) else None


def _has_masses(base: Tensor | Prior | None) -> bool:
    """Whether some allowed key may have another mass than one."""
    if isinstance(base, Prior):
        return not base.is_mask
    return isinstance(base, Tensor) and base.dtype != torch.bool


def _is_ordinary(x: Tensor, valid: Tensor) -> bool:
    """Seen to be finite everywhere, with room for differences: nothing to mask, nothing to mend."""
    if x.numel() == 0 or not at_hand(x, valid):
        return False
    low, high = x.detach().aminmax()
    return bool(valid.all() & (high - low < torch.finfo(x.dtype).max / 4))  # False for NaN too


def _unfit_base(measure: Base, regularizer: Regularizer) -> Tensor:
    """Masses that cannot be used, key by key; raises where Python may look."""
    mass = measure.mass if measure.mass is not None else measure.log_mass
    if mass is None:
        return torch.zeros((), dtype=torch.bool, device=measure.allowed.device)
    if measure.mass is not None:
        unfit = ~((mass >= 0) & (mass < math.inf))
    else:
        unfit = mass.isnan() | (mass == math.inf)
    if regularizer.takes_base:
        return unfit
    name = type(regularizer).__name__
    if mass.requires_grad:
        raise ValueError(f"{name} takes a mask, which has no derivative; detach the base")
    whole = (mass == 0) | (mass == (1 if measure.mass is not None else -math.inf))
    if has(~whole & ~unfit):
        raise ValueError(
            f"{name} takes only masks as base (zeros and ones), got other masses; "
            "use Shannon or Tsallis for a base measure, or base=(mass > 0)"
        )
    return unfit | ~whole


def _clean(measure: Base, live: Tensor) -> Base:
    """Only finite masses, and zero for the keys of rows that cannot be solved."""
    if measure.mass is not None:
        keep = live | (measure.mass == 0)
        return Base(live, mass=where(keep, measure.mass, 0.0))
    if measure.log_mass is not None:
        return Base(live, log_mass=where(live, measure.log_mass, 0.0))
    return Base(live)


def _final_status(status: Tensor, maximum: Maximum) -> Tensor:
    solved = status == Status.OK.value
    if maximum.feasible is not None:
        status = where(~solved | maximum.feasible, status, Status.INFEASIBLE.value)
        solved = status == Status.OK.value
    if maximum.settled is not None:
        status = where(~solved | maximum.settled, status, Status.MAX_STEPS.value)
    return status


def _finish(weights: Tensor, status: Tensor) -> Tensor:
    """Zeros in empty rows, NaN in rows without an answer."""
    if at_hand(status) and not status.any():  # the common case, without two passes over the keys
        return weights
    status = status.unsqueeze(-1)
    failed = (status == Status.NONFINITE.value) | (status == Status.INFEASIBLE.value)
    return where(~failed, where(status != Status.EMPTY.value, weights, 0.0), math.nan)


def _threshold(threshold: Tensor, status: Tensor) -> Tensor:
    """An empty row gives no key anything, whatever its score: threshold +inf."""
    failed = (status == Status.NONFINITE.value) | (status == Status.INFEASIBLE.value)
    return where(~failed, where(status != Status.EMPTY.value, threshold, math.inf), math.nan)


def _raise_on_trouble(status: Tensor) -> None:
    if not readable(status):
        raise ValueError(
            "throw=True reads the status, which vmap, compile and meta forbid; drop it"
        )
    lines = []
    for kind in list(Status)[1:]:
        rows = (status == kind.value).nonzero().tolist()
        if rows:
            shown = (
                ", ".join(str(tuple(row)) for row in rows[:5]) if status.ndim else "(the only one)"
            )
            more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
            lines.append(f"{kind.name} in rows {shown}{more}: {kind.remedy}")
    if lines:
        raise SolveError("; ".join(lines))
