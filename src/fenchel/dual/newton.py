"""The minimiser of reliability / 2 |target - sum_i w_i t_i|^2 + KL(w, u), to machine precision.

In l = log w, with h = sum_i w_i t_i, lam = reliability (target - h), p = softmax(log u + <t, lam>)
the weights are right where r = log p - l vanishes, and

    gap = objective(w) - dual(lam) = KL(w, p).

Newton's direction of the problem in w, taken in l, where no weight can leave its domain:

    (I / reliability + Cov_w t) dlam = -Cov_w(t, r),     dl = r + <t, dlam> - E_w[...],

with a step halved until the objective has fallen enough (Armijo).

Why it cannot fail, in exact arithmetic. The objective falls along dl at the rate sum_i w_i dl_i^2 +
reliability |sum_i w_i dl_i t_i|^2, which is zero at the minimiser only. Scores, dlam and E_w[...]
are bounded, since w r^2 is; so dl_i > 0 wherever l_i lies far enough below log p_i: weights stay
above a positive bound. On that compact set everything is smooth, so that Armijo's rule makes every
limit point stationary, and the strictly convex problem has one. Near it the steps are whole and the
error is squared each time.

What rounding changes. Where stiffness = reliability |t|^2 is large, a step from afar lands in a
corner: the other weights leave the range of floats, and nothing brings them back. So stiff rows
start at a smaller reliability, where weights are not yet small, and take it up by tens, each from
the solution of the last. And the scores carry stiffness times eps of noise: from some 1e9 on that
is more than the tolerance of the gap, from 1e16 on it is of size one, so that the weights are right
and the gap, which is that noise, says MAX_STEPS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status

_LINES = 50  # halvings of a step before it is given up as lost in rounding
_FALL = 1e-4  # of what the slope promises
_ENTRIES = 2**22  # numbers of the largest temporary
_CACHED = 2**17  # numbers of a temporary that is gone through again and again
_SHARED = 8  # rows from which on a product with shared templates is a matrix product
_ENOUGH, _MOST = 1e-12, 1e-2  # of the gap, relative to the scale of its terms, and itself
_LEAST = -800.0  # log-weights: their exponential is zero, and from below it is far to come back
_PATIENCE = 6  # steps without progress: rounding is all that is left
_STIFF, _EASY, _HEATING = 1e7, 1e4, 10.0  # stiffness from which on reliability starts smaller


@dataclass(frozen=True)
class Minimiser:
    """log-weights (g, m, n); gap, steps and status (g, m)."""

    log_weights: Tensor
    gap: Tensor
    steps: Tensor
    status: Tensor


@dataclass(frozen=True)
class EstimationRows:
    """Problems that share templates, m rows for each of g groups.

    templates (g, n, k), log_preference (g, m, n), target (g, m, k), reliability (g, m, 1)
    products: of the templates (g, n, n), where that is fewer numbers to go through
    """

    templates: Tensor
    log_preference: Tensor
    target: Tensor
    reliability: Tensor
    products: Tensor | None = None
    iterative: bool = False

    def gram(self, x: Tensor) -> Tensor:
        """(g, m, n) -> (g, m, n)"""
        if self.products is not None:
            return x @ self.products
        return (x @ self.templates) @ self.templates.mT

    def choose_method(self) -> EstimationRows:
        """With the way to Newton's direction chosen.

        Conjugate gradients take some sqrt(1 + reliability |t|^2) products, cheap where many rows
        share their templates; a factor takes n k^2 operations for each row.
        """
        n, k = self.templates.shape[1:]
        rows = self.log_preference.shape[1]
        if not self.log_preference.numel():
            return self
        lengths = self.templates.square().sum(-1).amax(-1)  # (g)
        steps = (1 + lengths[:, None, None] * self.reliability).amax().sqrt()
        iterative = bool(steps < (100 if rows >= _SHARED else k / 8)) and k > 8
        products = self.templates @ self.templates.mT if iterative and n <= 2 * k else None
        return replace(self, products=products, iterative=iterative)

    def rows(self, index: Tensor) -> EstimationRows:
        """These of the rows of the only group."""
        return replace(
            self,
            log_preference=self.log_preference[:, index],
            target=self.target[:, index],
            reliability=self.reliability[:, index],
        )

    def at_heat(self, heat: Tensor) -> EstimationRows:
        """With the reliability divided by heat (g, m)."""
        return replace(self, reliability=self.reliability / heat.unsqueeze(-1))

    def first_heat(self) -> Tensor:
        """1, except where the problem is stiff. (g, m)"""
        lengths = self.templates.square().sum(-1).unsqueeze(1)  # (g, 1, n)
        on = self.log_preference > -torch.inf
        longest = where(on, lengths.expand_as(self.log_preference), 0.0).amax(-1)
        stiffness = longest * self.reliability.squeeze(-1)
        return where(stiffness > _STIFF, stiffness / _EASY, 1.0)

    def part(self, groups: slice, rows: slice) -> EstimationRows:
        return replace(
            self,
            templates=self.templates[groups],
            log_preference=self.log_preference[groups, rows],
            target=self.target[groups, rows],
            reliability=self.reliability[groups, rows],
            products=None if self.products is None else self.products[groups],
        )


def minimise(problem: EstimationRows, tolerance: float, max_steps: int) -> Minimiser:
    """In parts of bounded memory, each to its own last step."""
    if not problem.log_preference.numel():
        return _minimise(problem, tolerance, 0)
    pieces = [_minimise(part, tolerance, max_steps) for part in split(problem.choose_method())]
    fields = zip(*(vars(piece).values() for piece in pieces), strict=True)
    return Minimiser(*(join(list(field), problem) for field in fields))


def split(problem: EstimationRows) -> Iterator[EstimationRows]:
    """Some groups with all their rows, or some rows of one group."""
    groups, rows, keys = problem.log_preference.shape
    each = keys if problem.iterative else keys * problem.templates.shape[-1]
    room = max(1, (_CACHED if problem.iterative else _ENTRIES) // each)
    some_groups, some_rows = max(1, room // max(1, rows)), max(1, min(rows, room))
    for g in range(0, groups, some_groups):
        for m in range(0, rows, some_rows):
            yield problem.part(slice(g, g + some_groups), slice(m, m + some_rows))


def join(pieces: list[Tensor], problem: EstimationRows) -> Tensor:
    """One tensor (g, m, ...) of those of the parts."""
    groups, rows = problem.log_preference.shape[:2]
    tail = pieces[0].shape[2:]
    flat = torch.cat([piece.reshape(-1, *tail) for piece in pieces])
    return flat.reshape(groups, rows, *tail)


class _Point:
    """Weights, and all that follows from them."""

    def __init__(self, problem: EstimationRows, log_weights: Tensor) -> None:
        self.log_weights = log_weights
        self.weights = log_weights.exp()
        self.mean = self.weights @ problem.templates
        self.apart = problem.target - self.mean
        self.multiplier = problem.reliability * self.apart
        on = log_weights > -torch.inf
        tilt = where(on, log_weights - problem.log_preference, 0.0)
        self.divergence = (self.weights * tilt).sum(-1)
        pull = 0.5 * (self.multiplier * self.apart).sum(-1)
        self.objective = pull + self.divergence

    def compare(self, problem: EstimationRows) -> None:
        """How far the weights are from those that their own multiplier asks for."""
        scores = self.multiplier @ problem.templates.mT + problem.log_preference
        potential = torch.logsumexp(scores, -1)
        log_target = scores - potential.unsqueeze(-1)
        on = self.log_weights > -torch.inf
        self.residual = where(on, log_target - self.log_weights, 0.0)
        self.gap = _divergence(self.weights, log_target.exp(), self.residual)
        inner = (self.multiplier * problem.target).sum(-1)
        self.scale = 1 + self.objective.abs() + inner.abs() + potential.abs()

    def rows(self, index: Tensor) -> None:
        """Keep these of the rows of the only group."""
        for name, value in vars(self).items():
            setattr(self, name, value[:, index])


def _divergence(weights: Tensor, target: Tensor, residual: Tensor) -> Tensor:
    """KL(weights, target), residual = log target - log weights: a sum of terms >= 0."""
    series = residual.square() * (0.5 + residual * (1 / 6 + residual / 24))
    whole = torch.where(
        residual.abs() < 1e-3, weights * series, target - weights - weights * residual
    )
    return whole.clamp_min(0).sum(-1)


def _minimise(problem: EstimationRows, tolerance: float, max_steps: int) -> Minimiser:
    point = _Point(problem, problem.log_preference)
    point.compare(problem)
    best = _Best(point)
    heat = problem.first_heat() if max_steps else torch.ones_like(point.gap)
    point = _reheat(problem, point, heat, heat > 1)
    index = torch.arange(point.gap.shape[1], device=point.gap.device)
    for _ in range(max_steps):
        live = (heat > 1) | best.live(index, tolerance)
        if not bool(live.any()):
            break
        if len(live) == 1 and 4 * int(live.sum()) <= 3 * len(index):  # rows that are done drop out
            rows = live[0].nonzero().squeeze(-1)
            index, live, problem = index[rows], live[:, rows], problem.rows(rows)
            point.rows(rows)
            heat = heat[:, rows]
        warm = problem.at_heat(heat)
        moved = _step(warm, point, live)
        moved.compare(warm)
        best.take(index, live, point, moved, heat)
        point, heat = _cool(problem, moved, heat, best, index)
    return best.minimiser(tolerance)


def _cool(
    problem: EstimationRows, point: _Point, heat: Tensor, best: _Best, index: Tensor
) -> tuple[_Point, Tensor]:
    """Take the reliability up wherever the problem is solved well enough, and note what is best."""
    while bool((heat > 1).any()):
        stuck = best.stalled[:, index] >= _PATIENCE
        ready = (heat > 1) & ((point.gap <= 1 + _ENOUGH * point.scale) | stuck)
        if not bool(ready.any()):
            break
        heat = torch.where(ready, (heat / _HEATING).clamp_min(1), heat)
        best.stalled[:, index] = best.stalled[:, index].masked_fill(ready, 0)
        point = _reheat(problem, point, heat, ready)
        best.note(index, ready & (heat == 1), point)
    return point, heat


def _reheat(problem: EstimationRows, point: _Point, heat: Tensor, changed: Tensor) -> _Point:
    """The same weights at the reliability of the heat."""
    if not bool(changed.any()):
        return point
    warm = problem.at_heat(heat)
    point = _Point(warm, point.log_weights)
    point.compare(warm)
    return point


class _Best:
    """Of every row the log-weights with the smallest gap so far."""

    def __init__(self, point: _Point) -> None:
        self.log_weights, self.gap, self.scale = point.log_weights.clone(), point.gap, point.scale
        self.first = point.gap.clamp(max=1.0)  # little evidence: what it moves is little too
        self.steps = torch.zeros_like(point.gap, dtype=torch.int64)
        self.stalled = torch.zeros_like(self.steps)  # steps with neither value nor gap smaller

    def live(self, index: Tensor, tolerance: float) -> Tensor:
        gap, scale = self.gap[:, index], self.scale[:, index]
        patience = torch.where((gap <= _ENOUGH * scale) & (gap <= _MOST), 1, _PATIENCE)
        return ~(gap <= tolerance * self.first[:, index]) & (self.stalled[:, index] < patience)

    def take(
        self, index: Tensor, live: Tensor, before: _Point, point: _Point, heat: Tensor
    ) -> None:
        self.steps[:, index] += live
        fell = before.objective - point.objective > 1e-13 * point.scale
        closer = (heat == 1) & (point.gap < 0.25 * self.gap[:, index])
        self.stalled[:, index] = (self.stalled[:, index] + 1).masked_fill(closer | fell, 0)
        self.note(index, live & (heat == 1), point)

    def note(self, index: Tensor, which: Tensor, point: _Point) -> None:
        """Of which rows (g, m') the weights are those of the problem itself."""
        better = which & ~(point.gap >= self.gap[:, index])
        group, row = better.nonzero(as_tuple=True)
        to = index[row]
        self.log_weights[group, to] = point.log_weights[group, row]
        self.gap[group, to], self.scale[group, to] = point.gap[group, row], point.scale[group, row]

    def minimiser(self, tolerance: float) -> Minimiser:
        status = torch.full_like(self.steps, int(Status.OK))
        enough = max(tolerance, _ENOUGH)  # rounding of the scores is what stays of the gap
        good = (self.gap <= enough * self.scale) & (self.gap <= max(tolerance, _MOST))
        status[~good] = int(Status.MAX_STEPS)
        status[~(self.gap + self.scale).isfinite()] = int(Status.NONFINITE)
        return Minimiser(self.log_weights, self.gap, self.steps, status)


def _step(problem: EstimationRows, point: _Point, live: Tensor) -> _Point:
    """Along Newton's direction, halved where the objective does not fall."""
    direction = _direction(problem, point, live)
    slope = (point.weights * point.residual * direction).sum(-1)
    size = torch.ones_like(slope)
    slack = 1e-14 * point.scale
    for _ in range(_LINES):
        trial = point.log_weights + size.unsqueeze(-1) * direction
        trial = where(point.log_weights > -torch.inf, trial.clamp_min(_LEAST), -torch.inf)
        moved = _Point(problem, torch.log_softmax(trial, -1))
        short = live & (moved.objective > point.objective - _FALL * size * slope + slack)
        if not bool(short.any()):
            break
        size = torch.where(short, size / 2, size)
    return moved


# ---- Newton's direction


def _direction(problem: EstimationRows, point: _Point, live: Tensor) -> Tensor:
    """dl, whose mean under the weights is zero. (g, m, n)"""
    residual = where(live.unsqueeze(-1), point.residual, 0.0)
    if problem.iterative:
        change = _by_gradients(problem, point.weights, residual, 1e-6)
        direction = residual - problem.reliability * problem.gram(change)
    else:  # dw would not do: reliability times its rounding may be larger than dl
        direction = _log_change(problem, point.weights, residual)
    direction = direction - (point.weights * direction).sum(-1, keepdim=True)
    return where(point.log_weights > -torch.inf, direction, 0.0)


def newton_change(
    problem: EstimationRows, weights: Tensor, residual: Tensor, loose: float
) -> Tensor:
    """dw with (1 / w + reliability G) dw = residual + a constant and sum dw = 0. (g, m, n)

    G: the products <t_i, t_j>.
    loose: the squared error allowed, relative to the squared right side.
    """
    if problem.iterative:
        return _by_gradients(problem, weights, residual, loose)
    change = _log_change(problem, weights, residual)
    return weights * (change - (weights * change).sum(-1, keepdim=True))


def _log_change(problem: EstimationRows, weights: Tensor, residual: Tensor) -> Tensor:
    """residual + <t, dlam>: dl up to a constant. (g, m, n)"""
    mean = (weights * residual).sum(-1, keepdim=True)
    right = -(weights * (residual - mean)) @ problem.templates
    return residual + _by_factor(problem, weights, right) @ problem.templates.mT


def _by_gradients(
    problem: EstimationRows, weights: Tensor, residual: Tensor, loose: float
) -> Tensor:
    """By conjugate gradients, in y = dw / sqrt(w), which is orthogonal to sqrt(w):

    (1 + reliability sqrt(w) G sqrt(w)) y = sqrt(w) residual.

    From zero, every iterate is a descent direction: a loose solution is as safe as an exact one.
    The closer the minimiser, the tighter it is, so that the error still falls superlinearly.
    """
    root = weights.sqrt()
    strength = problem.reliability * root

    def across(x: Tensor) -> Tensor:
        return x - root * (root * x).sum(-1, keepdim=True)

    remainder = across(root * residual)
    size = remainder.square().sum(-1, keepdim=True)
    goal = size * size.clamp(min(1e-14, loose), loose)
    solution, search = torch.zeros_like(remainder), remainder
    for _ in range(2 * remainder.shape[-1] + 20):
        image = across(search + strength * problem.gram(root * search))
        length = size / where(size > 0, (search * image).sum(-1, keepdim=True), 1.0)
        solution = solution + length * search
        remainder = remainder - length * image
        before, size = size, remainder.square().sum(-1, keepdim=True)
        size = where(size > goal, size, 0.0)  # rows that are done stand still
        if not bool(size.any()):
            break
        search = remainder + size / where(before > 0, before, 1.0) * search
        search = where(size > 0, search, 0.0)
    return root * solution


def _by_factor(problem: EstimationRows, weights: Tensor, right: Tensor) -> Tensor:
    """(I / reliability + Cov_w t)^-1 right. (g, m, k)"""
    reliability = problem.reliability
    mean = weights @ problem.templates
    centred = problem.templates.unsqueeze(1) - mean.unsqueeze(-2)  # (g, m, n, k)
    scaled = centred * (weights * reliability).unsqueeze(-1)
    matrix = centred.mT @ scaled
    matrix.diagonal(dim1=-2, dim2=-1).add_(1)
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool((info != 0).any()):  # what rounding may have taken away is given back
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        diagonal += where((info != 0).unsqueeze(-1), 1e-15 * diagonal, 0.0).sum(-1, True)
        factor, info = torch.linalg.cholesky_ex(matrix)
    return torch.cholesky_solve((right * reliability).unsqueeze(-1), factor).squeeze(-1)
