"""The multiplier of the transport problem, to machine precision: Newton's method on the dual.

With everything divided by gamma (see transport_problem.py), r the strength and b the target,

    D(v) = <b, v> - |v|^2 / (2 r) - sum_j u_j LSE_t(<t, v + shift_j> + logit_jt),
    grad D = b - h(v) - v / r =: off,     -Hess D = I / r + C,
    C = sum_t p_t t t' - sum_j u_j m_j m_j',   m_j the mean of column j, p the plan's row sums,

and the plan of v is off its optimum by no more than

    gap = r / 2 |off|^2 = objective(plan of v) - D(v)       (Fenchel and Young, no cancellation).

Where r |t|^2 is large, D is nearly piecewise quadratic and Newton's steps from afar are short. So
the problem is first solved roughly with gamma c times as large, c falling by tens down to 1: the
solution for one c lies within some Newton steps of that for the next.

Why it cannot fail. For each c the dual is smooth and strongly concave, with curvature between
1 / r and 1 / r + max |t|^2 / c; Newton's direction is one of ascent. Along it the derivative of D
falls monotonically, so the bracketed search ends with an ascent (Armijo) and with a derivative at
most half of what it was, or with the whole step: Wolfe's conditions, under which off -> 0. There
are finitely many c. Near the optimum steps are whole and errors are squared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status

_ENTRIES = 2**18  # numbers of the largest temporary
_CACHED = 2**17  # numbers of the plans that are gone through together
_EASY = 100.0  # r |t|^2 from which on gamma starts larger
_COOLING = 10.0
_LINES = 60  # trials along one direction
_RISE = 1e-4  # of what the slope promises
_FLAT = 0.5  # of the slope may remain
ENOUGH, MOST = 1e-12, 1e-2  # of the gap, relative to the scale of its terms, and itself
_PATIENCE = 6  # steps without progress: rounding is all that is left


@dataclass(frozen=True)
class TransportRows:
    """Problems that share templates, m rows for each of g groups.

    templates (g, N, k), preference (g, m, n), logits (g, m|1, n|1, N), shifts (g, m|1, n|1, k),
    target (g, m, k), strength (g, m, 1)
    """

    templates: Tensor
    preference: Tensor
    logits: Tensor
    shifts: Tensor
    target: Tensor
    strength: Tensor

    def scores(self, v: Tensor, columns: slice) -> Tensor:
        """<t, v + shift> + logit of some columns. (g, m, n', N), or with 1 for n'"""
        shifts = self.shifts if self.shifts.shape[2] == 1 else self.shifts[:, :, columns]
        logits = self.logits if self.logits.shape[2] == 1 else self.logits[:, :, columns]
        moved = v.unsqueeze(2) + shifts
        return moved @ self.templates.mT.unsqueeze(1) + logits

    def part(self, groups: slice, rows: slice) -> TransportRows:
        def cut(x: Tensor) -> Tensor:
            return x[groups] if x.shape[1] == 1 else x[groups, rows]

        return TransportRows(self.templates[groups], *(cut(x) for x in self._by_row()))

    def only(self, index: Tensor) -> TransportRows:
        """These of the g m rows, each as a group of its own."""
        group, row = index // self.preference.shape[1], index % self.preference.shape[1]

        def pick(x: Tensor) -> Tensor:
            return (x[group, 0] if x.shape[1] == 1 else x[group, row]).unsqueeze(1)

        return TransportRows(self.templates[group], *(pick(x) for x in self._by_row()))

    def _by_row(self) -> tuple[Tensor, ...]:
        return self.preference, self.logits, self.shifts, self.target, self.strength


@dataclass(frozen=True)
class Maximiser:
    """v (g, m, k); gap, steps and status (g, m)."""

    v: Tensor
    gap: Tensor
    steps: Tensor
    status: Tensor


def maximise(problem: TransportRows, tolerance: float, max_steps: int) -> Maximiser:
    """In parts of bounded memory, each to its own last step."""
    pieces = [_maximise(part, tolerance, max_steps) for part in _split(problem)]
    lead = problem.preference.shape[:2]
    if not pieces:
        gap = problem.strength.new_empty(lead)
        whole = torch.empty_like(gap, dtype=torch.int64)
        return Maximiser(torch.empty_like(problem.target), gap, whole, whole.clone())
    columns = (
        torch.cat([getattr(piece, f.name).flatten(0, 1) for piece in pieces])
        for f in fields(Maximiser)
    )
    return Maximiser(*(x.reshape(*lead, *x.shape[1:]) for x in columns))


def _split(problem: TransportRows) -> Iterator[TransportRows]:
    """Some groups with all their rows, or some rows of one group."""
    groups, rows, columns = problem.preference.shape
    room = max(1, _CACHED // (columns * problem.templates.shape[1]))
    some_groups, some_rows = max(1, room // max(1, rows)), max(1, min(rows, room))
    for g in range(0, groups, some_groups):
        for m in range(0, rows, some_rows):
            yield problem.part(slice(g, g + some_groups), slice(m, m + some_rows))


class _Point:
    """The plan of v with gamma c times as large, and all that follows from it."""

    def __init__(self, problem: TransportRows, v: Tensor, heat: Tensor) -> None:
        self.v, self.heat = v, heat
        weights, second, potential = _sums(problem, v, heat)
        templates, strength, target = problem.templates, problem.strength, problem.target
        mean = weights @ templates
        spread = templates.mT.unsqueeze(1) @ (weights.unsqueeze(-1) * templates.unsqueeze(1))
        self.curvature = (spread - second) / heat[..., None, None]  # (g, m, k, k)
        self.off = target - mean - v / strength
        self.gap = 0.5 * (strength * self.off.square()).sum(-1)
        inner = (v * target).sum(-1)
        self.value = inner - 0.5 * (v.square() / strength).sum(-1) - potential
        self.scale = 1 + self.value.abs() + inner.abs() + potential.abs()
        sizes = target.norm(dim=-1) + mean.norm(dim=-1) + v.norm(dim=-1) / strength.squeeze(-1)
        self.apart = self.off.norm(dim=-1) / where(sizes > 0, sizes, 1.0)

    def only(self, index: Tensor) -> None:
        """Keep these of the g m rows, each as a group of its own."""
        for name, value in vars(self).items():
            setattr(self, name, value.flatten(0, 1)[index].unsqueeze(1))


def _sums(problem: TransportRows, v: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row sums of the plan, sum_j u_j m_j m_j' and heat sum_j u_j LSE_j, some columns at a time."""
    templates, preference = problem.templates, problem.preference
    groups, rows, columns = preference.shape
    n, k = templates.shape[1:]
    weights, potential = v.new_zeros(groups, rows, n), v.new_zeros(groups, rows)
    second = v.new_zeros(groups, rows, k, k)
    some = max(1, _ENTRIES // max(1, groups * rows * n))
    for start in range(0, columns, some):
        part = slice(start, start + some)
        scores = problem.scores(v, part) / heat[..., None, None]
        lse = torch.logsumexp(scores, -1)  # (g, m, n')
        share = preference[..., part]
        plan = (scores - lse.unsqueeze(-1)).exp()  # (g, m, n', N), a column's weights
        means = plan @ templates.unsqueeze(1)  # (g, m, n', k)
        weights += (share.unsqueeze(-2) @ plan).squeeze(-2)
        second += (means * share.unsqueeze(-1)).mT @ means
        potential += heat * (share * lse).sum(-1)
    return weights, second, potential


def _maximise(problem: TransportRows, tolerance: float, max_steps: int) -> Maximiser:
    run = _Run(problem, tolerance)
    for _ in range(max_steps):
        if not run.step():
            break
    return run.maximiser(problem)


class _Run:
    """TransportRows on their way; `index` says which of the first rows are still here."""

    def __init__(self, problem: TransportRows, tolerance: float) -> None:
        self.problem, self.tolerance = problem, tolerance
        size = problem.templates.square().sum(-1).amax(-1)[:, None]  # (g, 1)
        heat = (problem.strength.squeeze(-1) * size / _EASY).clamp_min(1)
        nothing = torch.zeros_like(problem.target)
        self.point = _Point(problem, nothing, torch.ones_like(heat))
        first = self.point.gap.flatten().clamp(max=1.0)
        if bool((heat > 1).any()):
            self.point = _Point(problem, nothing, heat)
        rows = problem.target.flatten(0, 1)
        self.first = first
        self.best = torch.zeros_like(rows)
        self.best_gap = torch.full_like(rows[:, 0], torch.inf)
        self.steps = torch.zeros_like(self.best_gap, dtype=torch.int64)
        self.stalled = torch.zeros_like(self.steps)
        self.index = torch.arange(len(rows), device=rows.device)
        self._cool()

    def step(self) -> bool:
        """One step of Newton's for all rows that need it; False: none does."""
        live = self._live()
        count = int(live.sum())
        if not count:
            return False
        if 2 * count <= len(self.index):  # rows that are done drop out
            rows = live.flatten().nonzero().squeeze(-1)
            self.problem = self.problem.only(rows)
            self.point.only(rows)
            self.index, live = self.index[rows], live.flatten()[rows].unsqueeze(1)
        before = self.point
        self.point = _line(self.problem, before, live)
        self.steps[self.index] += live.flatten()
        rose = self.point.value - before.value > 1e-13 * self.point.scale
        closer = 0.25 * self.best_gap[self.index].view_as(rose)
        better = (before.heat == 1) & (self.point.gap < closer)
        stalled = self.stalled[self.index] + 1
        self.stalled[self.index] = stalled.masked_fill((rose | better).flatten(), 0)
        self._cool()
        return True

    def _live(self) -> Tensor:
        """(g, m). Small gaps say little of rows with a small strength: `apart` does, and how much
        of the first gap is left. Large terms say nothing: what is added to a row across its
        templates makes them large, and moves no weight."""
        point, stalled = self.point, self.stalled[self.index].view_as(self.point.gap)
        goal = self.tolerance * self.first[self.index].view_as(point.gap)
        right = (point.gap <= goal) & (point.apart <= 0.01 * self.tolerance**0.5)
        small = (point.gap <= ENOUGH * point.scale) & (point.gap <= MOST)
        over = right | (stalled >= torch.where(small, 1, _PATIENCE))
        is_done: Tensor = (point.heat == 1) & over
        return ~is_done & point.gap.isfinite()

    def _cool(self) -> None:
        """Lower the heat wherever its problem is solved well enough, and note the best v."""
        while True:
            point = self.point
            stuck = self.stalled[self.index].view_as(point.gap) >= _PATIENCE
            solved = point.gap <= torch.maximum(point.heat, ENOUGH * point.scale)
            ready = (point.heat > 1) & (solved | stuck)
            if not bool(ready.any()):
                break
            lower = (point.heat / _COOLING).clamp_min(1)
            self.stalled[self.index[ready.flatten()]] = 0
            self.point = _Point(self.problem, point.v, torch.where(ready, lower, point.heat))
        gap, v = self.point.gap.flatten(), self.point.v.flatten(0, 1)
        better = (self.point.heat.flatten() == 1) & (gap < self.best_gap[self.index])
        self.best_gap[self.index[better]] = gap[better]
        self.best[self.index[better]] = v[better]
        unsolved = self.best_gap[self.index] == torch.inf  # v as it is, should this be the end
        self.best[self.index[unsolved]] = v[unsolved]

    def maximiser(self, problem: TransportRows) -> Maximiser:
        """The best v, with the gap that it really has."""
        point = _Point(
            problem, self.best.view_as(problem.target), torch.ones_like(problem.strength[..., 0])
        )
        steps = self.steps.view_as(point.gap)
        status = torch.full_like(steps, int(Status.OK))
        enough = max(self.tolerance, ENOUGH)  # rounding of the scores is what stays of the gap
        good = (point.gap <= enough * point.scale) & (point.gap <= max(self.tolerance, MOST))
        status[~good] = int(Status.MAX_STEPS)
        status[~point.gap.isfinite()] = int(Status.NONFINITE)
        return Maximiser(point.v, point.gap, steps, status)


def _line(problem: TransportRows, point: _Point, live: Tensor) -> _Point:
    """Along Newton's direction, to where the dual has risen and its slope has fallen."""
    direction = where(live.unsqueeze(-1), _direction(problem, point), 0.0)
    slope = (point.off * direction).sum(-1)
    low, high = torch.zeros_like(slope), torch.ones_like(slope)
    at_low, at_high = slope, slope
    size = torch.ones_like(slope)
    for trial in range(_LINES):
        moved = _Point(problem, point.v + size.unsqueeze(-1) * direction, point.heat)
        after = (moved.off * direction).sum(-1)
        fell = moved.value < point.value + _RISE * size * slope - 1e-14 * point.scale
        long = (after < -_FLAT * slope) | ((after < 0) & fell) | ~moved.gap.isfinite()
        short = (after > _FLAT * slope) & (size < 1)
        wrong = live & (long | short)
        if not bool(wrong.any()):
            break
        high, at_high = torch.where(long, size, high), torch.where(long, after, at_high)
        low, at_low = torch.where(short, size, low), torch.where(short, after, at_low)
        share = at_low / (at_low - at_high)  # where a straight line would be zero
        inside = (share > 0) & (share < 1)
        if trial % 2:
            inside = torch.zeros_like(inside)
        middle = low + (high - low) * where(inside, share, 0.5)
        size = torch.where(wrong, middle, size)
    return moved


def _direction(problem: TransportRows, point: _Point) -> Tensor:
    """(I / r + C)^-1 off. (g, m, k)

    C is a difference: what rounding may have taken away is given back, so that a factor exists. A
    larger matrix still gives a direction of ascent.
    """
    matrix = problem.strength.unsqueeze(-1) * point.curvature
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += 1 + 1e-15 * diagonal.abs().sum(-1, keepdim=True)
    right = problem.strength * point.off
    factor, info = torch.linalg.cholesky_ex(matrix)
    solution = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)
    plain = right / diagonal.abs().sum(-1, keepdim=True)
    return torch.where((info == 0).unsqueeze(-1), solution, plain)
