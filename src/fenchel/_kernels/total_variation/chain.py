"""The chain, exactly: divide and conquer over levels. See the package for the problem."""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.operators import register_vmap
from fenchel._numerics import traced

# Labels and signs are discrete: rounding in the caller's dtype would turn near ties into wrong
# groups, not into small errors. So they are always decided in float64.
WORK = torch.float64


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
    allowed = or_everywhere(allowed, scores)
    labels, signs = tv_chain(scores.detach(), strength.detach(), allowed)
    return group_means(scores - strength * signs, labels)


def chain_dual(
    scores: Tensor,
    x: Tensor,
    strength: Tensor,
    allowed: Tensor | None = None,
    signs: Tensor | None = None,
) -> Tensor:
    """The dual of `x`: w with |w| <= lam and D^T w as near s - x as a walk along the chain allows.

    D^T w = s - x reads w_{i-1} - w_i = s_i - x_i, so w_i is the running sum of x - s within each
    run of allowed nodes; it is clamped on the way, so it is feasible even when x is wrong.

    >>> chain_dual(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0]))
    tensor([1., 0.])

    scores, x: (..., n).  strength: (..., 1).  allowed: bool (..., n) or None.
    signs: those of `tv_chain`, where x comes from it; the jumps they stand for are then not lost in
    the rounding of towering scores.
    Returns (..., n): w_i on the edge (i, i+1), zero where there is no edge (so always at n-1).
    """
    allowed = or_everywhere(allowed, scores)
    x, scores = (torch.where(allowed, v, 0) for v in (x, scores))
    bound = torch.where(edges(allowed, -1), strength, 0)
    jumps = strength * torch.where(allowed, signs, 0) if signs is not None else 0.0
    step = (x - (scores - jumps)) - jumps
    hidden = torch.compiler.is_compiling() or traced()
    walk = clamped_walk(step, bound) if hidden else _clamped_walk(step, -bound, bound)
    # Where x jumps the gap is linear in the rounding of w, elsewhere quadratic: so w is put on
    # its bound exactly where only rounding keeps it away.
    slope = x.roll(-1, -1) - x
    saturated = bound * slope.sign()
    rounding = torch.finfo(walk.dtype).eps * (x.abs() + scores.abs()).sum(-1, keepdim=True)
    snaps = (saturated != 0) & ((saturated - walk).abs() <= rounding)
    return torch.where(snaps, saturated, walk)


def or_everywhere(allowed: Tensor | None, scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed


def edges(allowed: Tensor, axis: int) -> Tensor:
    """Whether the edge from each node to its successor along `axis` exists; False at the end."""
    is_last = torch.arange(allowed.shape[axis], device=allowed.device) == allowed.shape[axis] - 1
    is_last = is_last if axis == -1 else is_last.unsqueeze(-1)  # (n,) or (h, 1)
    return allowed & allowed.roll(-1, axis) & ~is_last


@torch.library.custom_op("fenchel::clamped_walk", mutates_args=())
def clamped_walk(step: Tensor, bound: Tensor) -> Tensor:
    """m_i = clamp(m_{i-1} + step_i, -bound_i, bound_i), for compilers: how often the length is
    halved would fix it. step, bound: (..., n); no derivative."""
    return _clamped_walk(step, -bound, bound).contiguous()


@clamped_walk.register_fake
def _(step: Tensor, bound: Tensor) -> Tensor:
    return step.new_empty(step.shape)


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


class _Line(NamedTuple):
    """All rows end to end on one line; each tensor is (nodes,)."""

    scores: Tensor
    strength: Tensor  # of the edge to the next node
    is_joined: Tensor  # bool: this node and the next are in one segment
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
    clean, lam, allowed = sanitise(scores, strength, allowed, axes=1)
    edge = edges(allowed, -1)
    is_joined, signs = edge.flatten().clone(), clean.new_zeros(clean.numel())
    place = torch.arange(clean.numel(), device=clean.device)
    line = _Line(clean.flatten(), lam.expand_as(clean).flatten(), is_joined, signs, place)
    while line.place.numel() > 0:
        line, is_open = _cut_once(line)
        is_joined[line.place], signs[line.place] = line.is_joined, line.signs
        line = line.take(is_open.nonzero().squeeze(-1))
    labels = first_of_run(is_joined.view(scores.shape))
    return labels, signs.view(scores.shape).to(scores.dtype)


def sanitise(
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
    lam = strength.to(WORK).nan_to_num(nan=0.0)
    return torch.where(fine & allowed, scores, 0).to(WORK), lam, allowed


def _cut_once(line: _Line) -> tuple[_Line, Tensor]:
    """Cut every segment at its mean level; also tell which nodes are in segments still open."""
    scores, strength, is_joined, signs, _ = line
    segment = _segment_index(is_joined)
    count = _sums(torch.ones_like(scores), segment)
    shifted = scores - strength * signs
    level = _sums(shifted, segment) / count
    above = shifted - level[segment]
    upper = _upper_side(above, torch.where(is_joined, strength, 0), is_joined)
    cut = is_joined & (upper != upper.roll(-1))
    gain = _sums(torch.where(upper, above, 0) - strength * cut, segment)
    # The gain of a part is its size times its distance from the level, so a split missed or made
    # within rounding moves x by rounding only. `cut` keeps whole segments from splitting.
    size = _sums(scores.abs() + strength * signs.abs(), segment) + count * level.abs()
    # Without an edge to cut the gain is rounding only, and the segment is done.
    divided = _sums(cut.to(scores), segment) > 0
    splits = (divided & (gain > 4 * torch.finfo(WORK).eps * size))[segment]
    cut = cut & splits
    toward_next = torch.where(cut, torch.where(upper, 1.0, -1.0).to(scores), 0)
    signs = signs + toward_next - toward_next.roll(1)  # the last node has no edge: nothing wraps
    is_joined = is_joined & ~cut
    alone = ~is_joined & ~is_joined.roll(1)
    return line._replace(is_joined=is_joined, signs=signs), splits & ~alone


def _segment_index(is_joined: Tensor) -> Tensor:
    starts = ~is_joined.roll(1)  # the last node is never joined onward, so node 0 starts a segment
    return starts.cumsum(0) - 1


def _sums(values: Tensor, segment: Tensor) -> Tensor:
    """(nodes,) -> (segments,)"""
    return values.new_zeros(int(segment[-1]) + 1).index_add_(0, segment, values)


def _upper_side(above: Tensor, weight: Tensor, is_joined: Tensor) -> Tensor:
    """argmax_{z in {0,1}^n} sum_i above_i z_i - sum_i weight_i |z_i - z_{i+1}|, per segment.

    Dynamic programme: the advantage of z_i = 1 over 0, given the best left part, is
    d_i = above_i + clamp(d_{i-1}, +-weight_{i-1}). Looking back from the right, z_i is free of
    z_{i+1} iff |d_i| > weight_i, else it copies it; ends of segments are always free.
    """
    message = _clamped_walk(above, -weight, weight)
    advantage = above + message.roll(1)  # the last node's weight is 0, so its message is too
    free = (advantage.abs() > weight) | ~is_joined
    next_free = free.cumsum(0) - free.long()
    return (advantage > 0)[free][next_free]


def first_of_run(is_joined: Tensor) -> Tensor:
    """is_joined (..., n), edge to the next -> (..., n), index of the first node of its run."""
    n = is_joined.shape[-1]
    if is_joined.numel() == 0:
        return torch.zeros_like(is_joined, dtype=torch.int64)
    index = torch.arange(n, device=is_joined.device)
    return torch.where(is_joined.roll(1, -1), 0, index).cummax(-1).values


@tv_chain.register_fake
def _(scores: Tensor, strength: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape, dtype=torch.int64), scores.new_empty(scores.shape)


register_vmap(tv_chain, outputs=2)
register_vmap(clamped_walk, outputs=1)
