"""The grid, iterated to a certified gap. See the package for the problem and the certificate."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.operators import register_vmap
from fenchel._kernels.total_variation.chain import (
    WORK,
    chain_dual,
    chain_solution,
    edges,
    first_of_run,
    group_means,
    or_everywhere,
    sanitise,
)


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
    allowed = or_everywhere(allowed, scores)
    labels, signs, *_ = tv_grid(scores.detach(), strength.detach(), allowed, tolerance, max_steps)
    shifted = (scores - strength * signs).flatten(-2)  # (..., h, w) -> (..., h*w)
    return group_means(shifted, labels.flatten(-2)).reshape(scores.shape)


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
        for target, source in zip(self, other, strict=True):
            target[rows] = source


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
    clean, lam, allowed = sanitise(scores, strength, allowed, axes=2)
    batch = math.prod(shape[:-2])
    lam = lam.expand(*shape[:-2], 1, 1).reshape(batch, 1, 1)
    clean, allowed = (v.reshape(batch, *shape[-2:]) for v in (clean, allowed))
    answer = _no_answer(clean)
    if scores.numel() > 0:
        grid, unit = _scale(clean, lam, allowed, tolerance)
        _ascend(grid, max_steps, answer)
        answer = answer._replace(dual=_unscale(answer.dual, grid, lam, unit))
    right, down = (w.to(scores.dtype).reshape(shape).clone() for w in answer.dual.unbind(1))
    signs = answer.signs.to(scores.dtype).view(shape)
    return answer.labels.view(shape), signs, right, down, answer.converged.view(shape[:-2])


def _no_answer(scores: Tensor) -> _Polished:
    """Room for the answers; it is the answer itself where there are no nodes."""
    return _Polished(
        torch.zeros_like(scores, dtype=torch.int64),
        torch.zeros_like(scores),
        torch.stack((scores, scores), 1).zero_(),
        torch.ones(scores.shape[0], dtype=torch.bool, device=scores.device),
    )


def _scale(
    scores: Tensor, strength: Tensor, allowed: Tensor, tolerance: float
) -> tuple[_Grid, Tensor]:
    """Shift and scale each problem to |scores| <= 1; also return the unit, (b, 1, 1)."""
    count = allowed.sum((-2, -1), keepdim=True).clamp(min=1)
    size = scores.abs().amax((-2, -1), keepdim=True)
    mean = (scores / count).sum((-2, -1), keepdim=True)  # divided first: the sum may overflow
    spread = torch.where(allowed, scores - mean, 0)
    # A spread below the rounding of the scores is none: do not blow it up.
    unit = spread.abs().amax((-2, -1), keepdim=True).maximum(size * torch.finfo(WORK).eps)
    unit = torch.where(unit > 0, unit, 1)
    spread = spread / unit
    # Supplies of size <= 2 a node never push more than this through an edge; so the bound is
    # idle beyond it, and a huge strength cannot overflow.
    enough = 2.0 * scores.shape[-2] * scores.shape[-1]
    edge = torch.stack((edges(allowed, -1), edges(allowed, -2)), 1)  # (b, 2, h, w)
    strength = (strength / unit).clamp(max=enough)
    bound = torch.where(edge, strength.unsqueeze(1), 0)
    accepted_gap = max(tolerance, torch.finfo(WORK).eps) * spread.square().sum((-2, -1))
    return _Grid(spread, strength, allowed, bound, edge, accepted_gap), unit


def _unscale(dual: Tensor, grid: _Grid, strength: Tensor, unit: Tensor) -> Tensor:
    """The dual in the caller's units; saturated edges sit exactly on +-lam."""
    limit = torch.where(grid.edge, strength.unsqueeze(1), 0)
    inside = (dual * unit.unsqueeze(1)).clamp(-limit, limit)
    return torch.where(dual.abs() < grid.bound, inside, limit * dual.sign())


def _ascend(grid: _Grid, max_steps: int, answer: _Polished) -> None:
    """Write into `answer` every problem's answer when it is certified, or the last one."""
    rows = torch.arange(grid.scores.shape[0], device=grid.scores.device)
    dual = _warm_dual(grid)
    state, steps = _Ascent(dual, dual, torch.ones_like(dual[:, :1, :1, :1])), 0
    while True:
        polished = _polish(grid, state.dual)
        answer.put(rows, polished)
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
def components(is_joined: Tensor, grid: bool) -> Tensor:
    """Label each node by the first node of its connected component, in reading order.

    >>> components(torch.tensor([[True, False, False]]), False)
    tensor([0, 0, 2])

    is_joined: bool, whether each node's edge to its successor joins the two: (..., 1, n) on a line,
    (..., 2, h, w) on a grid, to the right and downwards; False at the end.  Returns (..., n) int64
    with n = h*w on a grid.
    """
    if not grid:
        return first_of_run(is_joined.squeeze(-2))
    h, w = is_joined.shape[-2:]
    batch = is_joined.shape[:-3]
    return _components(is_joined.reshape(math.prod(batch), 2, h, w)).reshape(*batch, h * w).clone()


def _components(is_joined: Tensor) -> Tensor:
    """is_joined (b, 2, h, w) -> (b, h, w): the smallest index in each node's connected component.

    Every root hooks onto the smallest label next to its tree, then paths are halved.
    """
    b, _, h, w = is_joined.shape
    right, down = is_joined.unbind(1)
    labels = torch.arange(h * w, device=is_joined.device).expand(b, -1)  # (b, h*w)
    while True:
        lowest = labels.view(b, h, w)
        for edge, axis in ((right, -1), (down, -2)):
            low = torch.where(edge, lowest.minimum(lowest.roll(-1, axis)), lowest)
            onward = torch.where(edge, low, h * w).roll(1, axis)
            lowest = low.minimum(onward)
        hooked = labels.scatter_reduce(1, labels, lowest.view(b, -1), "amin")
        hooked = hooked.minimum(lowest.view(b, -1))
        hooked = hooked.gather(1, hooked)
        if torch.equal(hooked, labels):
            return labels.view(b, h, w)
        labels = hooked


@tv_grid.register_fake
def _(
    scores: Tensor, strength: Tensor, allowed: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    labels = scores.new_empty(scores.shape, dtype=torch.int64)
    signs, right, down = (scores.new_empty(scores.shape) for _ in range(3))
    return labels, signs, right, down, scores.new_empty(scores.shape[:-2], dtype=torch.bool)


@components.register_fake
def _(is_joined: Tensor, grid: bool) -> Tensor:
    nodes = is_joined.flatten(-2) if grid else is_joined  # (..., directions, n)
    return is_joined.new_empty(nodes[..., 0, :].shape, dtype=torch.int64)


register_vmap(tv_grid, outputs=5)
register_vmap(components, outputs=1)
