"""Total variation on a chain and on a grid: the partition behind the solution.

    x* = argmin_x  1/2 |x - s|^2 + lam * sum_{edges (i, j)} |x_i - x_j|

The solution is constant on connected groups g, and there it is linear in the data:

    x_i = mean over g(i) of (s - lam * t),    t_i = sum_{edges (i, j)} sign(x_i - x_j).

So the solvers below return the discrete part only (group labels and signs t); `group_means`
recomputes x from it with plain differentiable operations, and derivatives of every order follow.

Certificate, used by both shapes: with (D x)_e = x_j - x_i on the edge e = (i, j), i before j,
and any dual w with |w| <= lam,

    gap(x, w) = sum_e (lam |Dx|_e - w_e (Dx)_e) + 1/2 |x - (s - D^T w)|^2  >=  1/2 |x - x*|^2,

and at the solution s - x = D^T w.

A node that is not `allowed` has no edges: it is a group of its own and influences nobody.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Labels and signs are discrete: rounding in the caller's dtype would turn near ties into wrong
# groups, not into small errors. So they are always decided in float64.
_WORK = torch.float64


# ---------------------------------------------------------------- differentiable, plain torch


def group_means(values: Tensor, labels: Tensor) -> Tensor:
    """Replace each entry by the mean of its group: the projection onto {x : x constant on groups}.

    >>> group_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2]))
    tensor([2., 2., 5.])

    values: (..., n).  labels: (..., n) int64 in [0, n).  Returns (..., n).
    """
    zeros = torch.zeros_like(values)
    total = zeros.scatter_add(-1, labels, values)
    count = zeros.scatter_add(-1, labels, torch.ones_like(values))
    return (total / count.clamp(min=1)).gather(-1, labels)


def chain_solution(scores: Tensor, strength: Tensor, allowed: Tensor | None = None) -> Tensor:
    """argmin_x 1/2 |x - s|^2 + lam * sum_i |x_{i+1} - x_i|, differentiable to every order.

    >>> chain_solution(torch.tensor([0.0, 4.0]), torch.tensor([1.0]))
    tensor([1., 3.])

    scores: (..., n).  strength: (..., 1), >= 0.  allowed: bool (..., n) or None.
    """
    allowed = _or_everywhere(allowed, scores)
    labels, signs = tv_chain(scores.detach(), strength.detach(), allowed)
    return group_means(scores - strength * signs, labels)


def grid_solution(
    scores: Tensor,
    strength: Tensor,
    allowed: Tensor | None = None,
    tolerance: float = 1e-12,
    max_steps: int = 20_000,
) -> Tensor:
    """argmin_x 1/2 |x - s|^2 + lam * (sum of |differences| over the 4-neighbour edges of a grid).

    >>> grid_solution(torch.tensor([[0.0, 4.0]]), torch.tensor([[1.0]]))
    tensor([[1., 3.]])

    scores: (..., h, w).  strength: (..., 1, 1), >= 0.  allowed: bool (..., h, w) or None.
    tolerance, max_steps: see `tv_grid`, which also reports which rows reached the tolerance.
    """
    allowed = _or_everywhere(allowed, scores)
    labels, signs, *_ = tv_grid(scores.detach(), strength.detach(), allowed, tolerance, max_steps)
    shifted = (scores - strength * signs).flatten(-2)  # (..., h, w) -> (..., h*w)
    return group_means(shifted, labels.flatten(-2)).reshape(scores.shape)


def chain_dual(
    scores: Tensor, x: Tensor, strength: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """The dual of `x`: w with |w| <= lam and D^T w as near s - x as a walk along the chain allows.

    D^T w = s - x reads w_{i-1} - w_i = s_i - x_i, so w_i is the running sum of x - s within each
    run of allowed nodes; it is clamped on the way, so it is feasible even when x is wrong.

    >>> chain_dual(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0]))
    tensor([1., 0.])

    scores, x: (..., n).  strength: (..., 1).  allowed: bool (..., n) or None.
    Returns (..., n): w_i on the edge (i, i+1), zero where there is no edge (so always at n-1).
    """
    allowed = _or_everywhere(allowed, scores)
    x, scores = (torch.where(allowed, v, 0) for v in (x, scores))
    bound = torch.where(_edges(allowed, -1), strength, 0)
    walk = _clamped_walk(x - scores, -bound, bound)
    # Where x jumps the gap is linear in the rounding of w, elsewhere quadratic: so w is put on
    # its bound exactly where only rounding keeps it away.
    slope = x.roll(-1, -1) - x
    saturated = bound * slope.sign()
    rounding = torch.finfo(walk.dtype).eps * (x.abs() + scores.abs()).sum(-1, keepdim=True)
    snaps = (saturated != 0) & ((saturated - walk).abs() <= rounding)
    return torch.where(snaps, saturated, walk)


def _or_everywhere(allowed: Tensor | None, scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed


def _edges(allowed: Tensor, axis: int) -> Tensor:
    """Whether the edge from each node to its successor along `axis` exists; False at the end."""
    is_last = torch.arange(allowed.shape[axis], device=allowed.device) == allowed.shape[axis] - 1
    is_last = is_last if axis == -1 else is_last.unsqueeze(-1)  # (n,) or (h, 1)
    return allowed & allowed.roll(-1, axis) & ~is_last


def _clamped_walk(step: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """m_i = clamp(m_{i-1} + step_i, low_i, high_i) from m_{-1} = 0, along the last axis.

    Maps m -> clamp(m + a, l, h) are closed under composition, so neighbours are composed in pairs,
    the half-length walk is solved, and the skipped places filled in: O(n) work, O(log n) depth.
    """
    n = step.shape[-1]
    if n <= 1:
        return torch.clamp(step, low, high)
    if n % 2:
        head = _clamped_walk(step[..., :-1], low[..., :-1], high[..., :-1])
        last = torch.clamp(head[..., -1:] + step[..., -1:], low[..., -1:], high[..., -1:])
        return torch.cat((head, last), -1)
    a, b = step[..., 0::2], step[..., 1::2]
    low_b, high_b = low[..., 1::2], high[..., 1::2]
    low_ab = torch.clamp(low[..., 0::2] + b, low_b, high_b)
    high_ab = torch.clamp(high[..., 0::2] + b, low_b, high_b)
    odd = _clamped_walk(a + b, low_ab, high_ab)
    before = torch.cat((torch.zeros_like(odd[..., :1]), odd[..., :-1]), -1)
    even = torch.clamp(before + a, low[..., 0::2], high[..., 0::2])
    return torch.stack((even, odd), -1).flatten(-2)  # (..., n/2, 2) -> (..., n)


# ---------------------------------------------------------------- the chain, exactly


class _Line(NamedTuple):
    """All rows end to end on one line; each tensor is (nodes,)."""

    scores: Tensor
    strength: Tensor  # of the edge to the next node
    joined: Tensor  # bool: this node and the next are in one segment
    signs: Tensor  # t, from the edges cut so far
    place: Tensor  # where the node stood on the line at the start

    def take(self, index: Tensor) -> "_Line":
        return _Line(*(field[index] for field in self))


@torch.library.custom_op("fenchel::tv_chain", mutates_args=())
def tv_chain(scores: Tensor, strength: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Groups and signs of argmin_x 1/2 |x - s|^2 + lam * sum_i |x_{i+1} - x_i|; exact and finite.

    Divide and conquer over levels (Hochbaum 2001; Darbon and Sigelle 2006): where the minimum cut
    at a segment's own mean level is not trivial, x is above that level on one side and below on
    the other, so the cut edges are decided and the parts are independent; where it is trivial the
    segment is a group. All segments of all rows are cut together, at most n rounds, usually ~log n.

    >>> tv_chain(torch.tensor([0.0, 4.0]), torch.tensor([1.0]), torch.tensor([True, True]))
    (tensor([0, 1]), tensor([-1.,  1.]))

    scores: (..., n).  strength: (..., 1), >= 0.  allowed: bool (..., n).
    Returns labels (..., n) int64, the index of the group's first node; signs t (..., n).
    A run that holds a non-finite allowed score is returned as one group.
    """
    clean, lam, allowed = _clean(scores, strength, allowed, axes=1)
    edge = _edges(allowed, -1)
    joined, signs = edge.flatten().clone(), clean.new_zeros(clean.numel())
    place = torch.arange(clean.numel(), device=clean.device)
    line = _Line(clean.flatten(), lam.expand_as(clean).flatten(), joined, signs, place)
    while line.place.numel() > 0:
        line, is_open = _cut_once(line)
        joined[line.place], signs[line.place] = line.joined, line.signs
        line = line.take(is_open.nonzero().squeeze(-1))
    labels = _first_of_run(joined.view(scores.shape))
    return labels, signs.view(scores.shape).to(scores.dtype)


def _clean(
    scores: Tensor, strength: Tensor, allowed: Tensor, axes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Finite float64 scores and strength; `axes` trailing axes form one problem.

    A problem with a non-finite allowed score is solved as all zeros: one group a run, so that the
    caller's group mean is non-finite there, rather than plausible.
    """
    allowed = allowed.expand_as(scores)
    fine = scores.isfinite() | ~allowed
    for axis in range(axes):
        fine = fine.all(-1 - axis, keepdim=True)
    lam = strength.to(_WORK).nan_to_num(nan=0.0)
    return torch.where(fine & allowed, scores, 0).to(_WORK), lam, allowed


def _cut_once(line: _Line) -> tuple[_Line, Tensor]:
    """Cut every segment at its mean level; also tell which nodes are in segments still open."""
    scores, strength, joined, signs, _ = line
    segment = _segment_index(joined)
    count = _sums(torch.ones_like(scores), segment)
    shifted = scores - strength * signs
    level = _sums(shifted, segment) / count
    above = shifted - level[segment]
    upper = _upper_side(above, torch.where(joined, strength, 0), joined)
    cut = joined & (upper != upper.roll(-1))
    gain = _sums(torch.where(upper, above, 0) - strength * cut, segment)
    # The gain of a part is its size times its distance from the level, so a split missed or made
    # within rounding moves x by rounding only. `cut` keeps whole segments from splitting.
    size = _sums(scores.abs() + strength * signs.abs(), segment) + count * level.abs()
    splits = (gain > 4 * torch.finfo(_WORK).eps * size)[segment]
    cut = cut & splits
    toward_next = torch.where(cut, torch.where(upper, 1.0, -1.0).to(scores), 0)
    signs = signs + toward_next - toward_next.roll(1)  # the last node has no edge: nothing wraps
    joined = joined & ~cut
    alone = ~joined & ~joined.roll(1)
    return line._replace(joined=joined, signs=signs), splits & ~alone


def _segment_index(joined: Tensor) -> Tensor:
    starts = ~joined.roll(1)  # the last node is never joined onward, so node 0 starts a segment
    return starts.cumsum(0) - 1


def _sums(values: Tensor, segment: Tensor) -> Tensor:
    """(nodes,) -> (segments,)"""
    return values.new_zeros(int(segment[-1]) + 1).index_add_(0, segment, values)


def _upper_side(above: Tensor, weight: Tensor, joined: Tensor) -> Tensor:
    """argmax_{z in {0,1}^n} sum_i above_i z_i - sum_i weight_i |z_i - z_{i+1}|, per segment.

    Dynamic programme: the advantage of z_i = 1 over 0, given the best left part, is
    d_i = above_i + clamp(d_{i-1}, +-weight_{i-1}). Looking back from the right, z_i is free of
    z_{i+1} iff |d_i| > weight_i, else it copies it; ends of segments are always free.
    """
    message = _clamped_walk(above, -weight, weight)
    advantage = above + message.roll(1)  # the last node's weight is 0, so its message is too
    free = (advantage.abs() > weight) | ~joined
    next_free = free.cumsum(0) - free.long()
    return (advantage > 0)[free][next_free]


def _first_of_run(joined: Tensor) -> Tensor:
    """joined (..., n), edge to the next -> (..., n), index of the first node of its run."""
    n = joined.shape[-1]
    if joined.numel() == 0:
        return torch.zeros_like(joined, dtype=torch.int64)
    index = torch.arange(n, device=joined.device)
    return torch.where(joined.roll(1, -1), 0, index).cummax(-1).values


# ---------------------------------------------------------------- the grid, to a certified gap


class _Grid(NamedTuple):
    """Problems scaled to |scores| <= 1. Edges are (b, 2, h, w): to the right, then downwards."""

    scores: Tensor  # (b, h, w)
    strength: Tensor  # (b, 1, 1)
    allowed: Tensor  # (b, h, w) bool
    bound: Tensor  # (b, 2, h, w): lam on edges, 0 where there is no edge
    edge: Tensor  # (b, 2, h, w) bool
    accepted_gap: Tensor  # (b,)

    def take(self, index: Tensor) -> "_Grid":
        return _Grid(*(field[index] for field in self))


class _Ascent(NamedTuple):
    """Where the accelerated projected gradient stands."""

    dual: Tensor  # (b, 2, h, w)
    ahead: Tensor  # (b, 2, h, w): the extrapolated point
    pace: Tensor  # (b, 1, 1, 1): Nesterov's t

    def take(self, index: Tensor) -> "_Ascent":
        return _Ascent(*(field[index] for field in self))


class _Polished(NamedTuple):
    labels: Tensor  # (b, h, w)
    signs: Tensor  # (b, h, w)
    dual: Tensor  # (b, 2, h, w)
    converged: Tensor  # (b,) bool

    def put(self, rows: Tensor, other: "_Polished") -> None:
        for mine, theirs in zip(self, other, strict=True):
            mine[rows] = theirs


@torch.library.custom_op("fenchel::tv_grid", mutates_args=())
def tv_grid(
    scores: Tensor, strength: Tensor, allowed: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Groups and signs of argmin_x 1/2 |x - s|^2 + lam * sum_{4-neighbour edges} |x_i - x_j|.

    Accelerated projected gradient on the dual, min_{|w| <= lam} 1/2 |s - D^T w|^2, restarted
    when momentum points uphill (Beck and Teboulle 2009; O'Donoghue and Candes 2015), from a warm
    start by exact chains along rows, then columns. From time to time the groups are read off as
    the components joined by edges with |w| < lam, and the means over them are certified.

    A problem is `converged` when gap(x, w) <= tolerance * sum_i (s_i - mean s)^2, the sum and mean
    over its allowed nodes; both sides are 2-homogeneous, so units do not matter. At ties the gap
    is linear in rounding, so a tolerance below float64's epsilon counts as that epsilon.

    >>> scores, everywhere = torch.tensor([[0.0, 4.0]]), torch.tensor([[True, True]])
    >>> tv_grid(scores, torch.tensor([[1.0]]), everywhere, 1e-9, 100)[1]
    tensor([[-1.,  1.]])

    scores: (..., h, w).  strength: (..., 1, 1), >= 0.  allowed: bool (..., h, w).
    max_steps: gradient steps after which a problem is returned as it is, with converged False.
    Returns labels (..., h, w) int64 in [0, h*w), the first node of the group in reading order;
    signs t (..., h, w); the duals of the edges to the right and downwards, (..., h, w) each, 0
    where there is no edge and never beyond +-lam; converged (...) bool.
    """
    shape = scores.shape
    clean, lam, allowed = _clean(scores, strength, allowed, axes=2)
    batch = math.prod(shape[:-2])
    lam = lam.expand(*shape[:-2], 1, 1).reshape(batch, 1, 1)
    clean, allowed = (v.reshape(batch, *shape[-2:]) for v in (clean, allowed))
    found = _no_answer(clean)
    if scores.numel() > 0:
        grid, unit = _scaled(clean, lam, allowed, tolerance)
        _ascend(grid, max_steps, found)
        found = found._replace(dual=_unscaled(found.dual, grid, lam, unit))
    right, down = (w.to(scores.dtype).reshape(shape).clone() for w in found.dual.unbind(1))
    signs = found.signs.to(scores.dtype).view(shape)
    return found.labels.view(shape), signs, right, down, found.converged.view(shape[:-2])


def _no_answer(scores: Tensor) -> _Polished:
    """Room for the answers; it is the answer itself where there are no nodes."""
    return _Polished(
        torch.zeros_like(scores, dtype=torch.int64),
        torch.zeros_like(scores),
        torch.stack((scores, scores), 1).zero_(),
        torch.ones(scores.shape[0], dtype=torch.bool, device=scores.device),
    )


def _scaled(
    scores: Tensor, strength: Tensor, allowed: Tensor, tolerance: float
) -> tuple[_Grid, Tensor]:
    """Shift and scale each problem to |scores| <= 1; also return the unit, (b, 1, 1)."""
    count = allowed.sum((-2, -1), keepdim=True).clamp(min=1)
    size = scores.abs().amax((-2, -1), keepdim=True)
    mean = (scores / count).sum((-2, -1), keepdim=True)  # divided first: the sum may overflow
    spread = torch.where(allowed, scores - mean, 0)
    # A spread below the rounding of the scores is none: do not blow it up.
    unit = spread.abs().amax((-2, -1), keepdim=True).maximum(size * torch.finfo(_WORK).eps)
    unit = torch.where(unit > 0, unit, 1)
    spread = spread / unit
    # Supplies of size <= 2 a node never push more than this through an edge; so the bound is
    # idle beyond it, and a huge strength cannot overflow.
    enough = 2.0 * scores.shape[-2] * scores.shape[-1]
    edge = torch.stack((_edges(allowed, -1), _edges(allowed, -2)), 1)  # (b, 2, h, w)
    strength = (strength / unit).clamp(max=enough)
    bound = torch.where(edge, strength.unsqueeze(1), 0)
    accepted_gap = max(tolerance, torch.finfo(_WORK).eps) * spread.square().sum((-2, -1))
    return _Grid(spread, strength, allowed, bound, edge, accepted_gap), unit


def _unscaled(dual: Tensor, grid: _Grid, strength: Tensor, unit: Tensor) -> Tensor:
    """The dual in the caller's units; saturated edges sit exactly on +-lam."""
    limit = torch.where(grid.edge, strength.unsqueeze(1), 0)
    inside = (dual * unit.unsqueeze(1)).clamp(-limit, limit)
    return torch.where(dual.abs() < grid.bound, inside, limit * dual.sign())


def _ascend(grid: _Grid, max_steps: int, found: _Polished) -> None:
    """Write into `found` every problem's answer when it is certified, or the last one."""
    rows = torch.arange(grid.scores.shape[0], device=grid.scores.device)
    dual = _warm_dual(grid)
    state, steps = _Ascent(dual, dual, torch.ones_like(dual[:, :1, :1, :1])), 0
    while True:
        polished = _polish(grid, state.dual)
        found.put(rows, polished)
        still = (~polished.converged).nonzero().squeeze(-1)
        if still.numel() == 0 or steps >= max_steps:
            return
        rows, grid, state = rows[still], grid.take(still), state.take(still)
        # Polishing costs some ten steps, so it is tried ever more rarely.
        for _ in range(chunk := min(max(16, steps // 4), max_steps - steps)):
            state = _step(grid, state)
        steps += chunk


def _differences(x: Tensor) -> Tensor:
    """D: (b, h, w) -> (b, 2, h, w). Wraps round at the border, where every bound is 0."""
    return torch.stack((x.roll(-1, -1) - x, x.roll(-1, -2) - x), 1)


def _divergence(w: Tensor) -> Tensor:
    """D^T: (b, 2, h, w) -> (b, h, w)."""
    right, down = w.unbind(1)
    return right.roll(1, -1) - right + down.roll(1, -2) - down


def _warm_dual(grid: _Grid) -> Tensor:
    """Chains along the rows, then along the columns of the result; exact for a huge strength."""
    rows, rows_dual = _chain_with_dual(grid.scores, grid.strength, grid.allowed)
    _, columns_dual = _chain_with_dual(rows.mT, grid.strength, grid.allowed.mT)
    return torch.stack((rows_dual, columns_dual.mT), 1)  # (b, 2, h, w)


def _chain_with_dual(scores: Tensor, strength: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    x = chain_solution(scores, strength, allowed)
    return x, chain_dual(scores, x, strength, allowed)


def _step(grid: _Grid, state: _Ascent) -> _Ascent:
    x = grid.scores - _divergence(state.ahead)
    # 1/8 is one over the largest possible eigenvalue of D D^T on a grid.
    dual = torch.clamp(state.ahead + _differences(x) / 8, -grid.bound, grid.bound)
    move = dual - state.dual
    uphill = ((state.ahead - dual) * move).sum((1, 2, 3), keepdim=True) > 0
    pace = torch.where(uphill, 1.0, state.pace)
    faster = 0.5 + (0.25 + pace.square()).sqrt()
    return _Ascent(dual, torch.addcmul(dual, (pace - 1) / faster, move), faster)


def _polish(grid: _Grid, dual: Tensor) -> _Polished:
    """Read the groups off the dual, take the means over them, and certify these."""
    labels = _components(grid.edge & (dual.abs() < grid.bound))
    flat = labels.flatten(1)  # (b, h, w) -> (b, h*w)

    def means(values: Tensor) -> Tensor:
        return group_means(values.flatten(1), flat).view_as(values)

    across = grid.edge & (_differences(labels) != 0)
    # Between groups the dual is saturated and its sign is that of Dx, or a valid choice at a tie;
    # at strength 0 there is no dual to ask.
    pull = torch.where(grid.bound > 0, dual, _differences(grid.scores))
    ascent = torch.where(across, pull.sign(), 0)
    x = means(grid.scores - _divergence(grid.bound * ascent))
    gap = _gap(grid, x, dual)
    return _Polished(labels, _divergence(ascent), dual, gap <= grid.accepted_gap)


def _gap(grid: _Grid, x: Tensor, dual: Tensor) -> Tensor:
    """The certificate of the module's docstring, (b,)."""
    slope = _differences(x)
    edges = (grid.bound * slope.abs() - dual * slope).sum((1, 2, 3))
    nodes = (x - grid.scores + _divergence(dual)).square().sum((1, 2))
    return edges + nodes / 2


@torch.library.custom_op("fenchel::tv_components", mutates_args=())
def components(joined: Tensor, grid: bool) -> Tensor:
    """Label each node by the first node of its connected component, in reading order.

    >>> components(torch.tensor([[True, False, False]]), False)
    tensor([0, 0, 2])

    joined: bool, whether each node's edge to its successor joins the two: (..., 1, n) on a line,
    (..., 2, h, w) on a grid, to the right and downwards; False at the end.  Returns (..., n) int64
    with n = h*w on a grid.
    """
    if not grid:
        return _first_of_run(joined.squeeze(-2))
    h, w = joined.shape[-2:]
    batch = joined.shape[:-3]
    return _components(joined.reshape(math.prod(batch), 2, h, w)).reshape(*batch, h * w).clone()


def _components(joined: Tensor) -> Tensor:
    """joined (b, 2, h, w) -> (b, h, w): the smallest index in each node's connected component.

    Every root hooks onto the smallest label seen by its tree, then paths are halved.
    """
    b, _, h, w = joined.shape
    right, down = joined.unbind(1)
    labels = torch.arange(h * w, device=joined.device).expand(b, -1)  # (b, h*w)
    while True:
        seen = labels.view(b, h, w)
        for edge, axis in ((right, -1), (down, -2)):
            low = torch.where(edge, seen.minimum(seen.roll(-1, axis)), seen)
            onward = torch.where(edge, low, h * w).roll(1, axis)
            seen = low.minimum(onward)
        hooked = labels.scatter_reduce(1, labels, seen.view(b, -1), "amin")
        hooked = hooked.minimum(seen.view(b, -1))
        hooked = hooked.gather(1, hooked)
        if torch.equal(hooked, labels):
            return labels.view(b, h, w)
        labels = hooked


# ---------------------------------------------------------------- registrations


@tv_chain.register_fake
def _(scores: Tensor, strength: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape, dtype=torch.int64), scores.new_empty(scores.shape)


@tv_grid.register_fake
def _(
    scores: Tensor, strength: Tensor, allowed: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    labels = scores.new_empty(scores.shape, dtype=torch.int64)
    signs, right, down = (scores.new_empty(scores.shape) for _ in range(3))
    return labels, signs, right, down, scores.new_empty(scores.shape[:-2], dtype=torch.bool)


@components.register_fake
def _(joined: Tensor, grid: bool) -> Tensor:
    nodes = joined.flatten(-2) if grid else joined  # (..., directions, n)
    return joined.new_empty(nodes[..., 0, :].shape, dtype=torch.int64)


def _batch_first(operand: Any, dim: int | None, size: int, rank: int) -> Any:
    """Move or make a leading batch axis, and give the rest `rank` axes so that it stays leading."""
    if not isinstance(operand, Tensor):
        return operand
    moved = operand.expand(size, *operand.shape) if dim is None else operand.movedim(dim, 0)
    missing = rank + 1 - moved.ndim
    return moved.reshape(size, *[1] * missing, *moved.shape[1:])


def _vmap_rule(op: Callable[..., Any], out_dims: int | tuple[int, ...]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[int | None, ...], *operands: Any) -> Any:
        rank = operands[0].ndim - (in_dims[0] is not None)
        pairs = zip(operands, in_dims, strict=True)
        batched = (_batch_first(x, dim, info.batch_size, rank) for x, dim in pairs)
        return op(*batched), out_dims

    return rule


tv_chain.register_vmap(_vmap_rule(tv_chain, (0, 0)))
tv_grid.register_vmap(_vmap_rule(tv_grid, (0, 0, 0, 0, 0)))
components.register_vmap(_vmap_rule(components, 0))
