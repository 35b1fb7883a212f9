"""Weights of rows under a budget: clip(s - t, 0, 1) with sum k.

The threshold lies within one below the ceil(k)-th largest score, which is found bit by bit: exact,
whatever the range of the scores. Measured from it the scores of free keys are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fenchel._kernels.gpu.rows_search import survey

_STEPS = tl.constexpr(60)
_ROUNDING = tl.constexpr(2.4e-7)
_MARGIN = tl.constexpr(1e-6)  # so that the ends of the bracket may be tried, each once
_SIGN = tl.constexpr(-(2**31))
_LOWEST_LIVE = tl.constexpr(-0x7F800000)  # `_ordered` of the lowest finite number, 0xFF7FFFFF


@triton.jit
def _ordered(scores):
    """Whole numbers in the order of the scores."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count_from(z, row, keys, bound, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Keys whose whole number is at least the bound."""
    if WHOLE:
        count = tl.where(_ordered(z) >= bound, 1, 0)
    else:
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, keys, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = tl.load(row + at, mask=at < keys, other=-float("inf"))
            count += tl.where(_ordered(s) >= bound, 1, 0)
    return tl.sum(count, 0)


@triton.jit
def _ranked(z, row, keys, rank, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """The score of this rank, the largest having rank one: the highest bound with so many keys."""
    positive = _count_from(z, row, keys, 0, BLOCK, WHOLE) >= rank
    bound = tl.where(positive, 0, _SIGN)
    bit = 1 << 30
    while bit > 0:
        trial = bound | bit
        enough = _count_from(z, row, keys, trial, BLOCK, WHOLE) >= rank
        bound = tl.where(enough, trial, bound)
        bit = bit >> 1
    return (bound ^ ((bound >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _piece(z, row, keys, centre, t, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """At threshold t: how many keys are free, how many full; sums of free scores and weights."""
    if WHOLE:
        y = (z - centre) - t
        loose = (y > 0) & (y < 1)
        free = tl.where(loose, 1, 0)
        full = tl.where(y >= 1, 1, 0)
        inside = tl.where(loose, z - centre, 0.0)
        filled = tl.where(loose, y, 0.0)
    else:
        free = tl.zeros([BLOCK], tl.int32)
        full = tl.zeros([BLOCK], tl.int32)
        inside = tl.zeros([BLOCK], tl.float32)
        filled = tl.zeros([BLOCK], tl.float32)
        for start in range(0, keys, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = tl.load(row + at, mask=at < keys, other=-float("inf"))
            y = (s - centre) - t
            loose = (y > 0) & (y < 1)
            free += tl.where(loose, 1, 0)
            full += tl.where(y >= 1, 1, 0)
            inside += tl.where(loose, s - centre, 0.0)
            filled += tl.where(loose, y, 0.0)
    return tl.sum(free, 0), tl.sum(full, 0), tl.sum(inside, 0), tl.sum(filled, 0)


@triton.jit
def _threshold(z, row, keys, centre, whole, part, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Newton's method on the pieces, from the middle of a bracket that is halved where a step would
    leave it. It ends where a step stays in place."""
    low = centre * 0 - 1.0 - _MARGIN
    high = centre * 0 + _MARGIN
    t = centre * 0 - 0.5
    step = 0
    while step < _STEPS:
        free, full, inside, filled = _piece(z, row, keys, centre, t, BLOCK, WHOLE)
        missing = (full - whole).to(tl.float32) - part
        excess = filled + missing
        low = tl.where(excess >= 0, t, low)
        high = tl.where(excess >= 0, high, t)
        following = (inside + missing) / tl.maximum(free, 1).to(tl.float32)
        inner = (following > low) & (following < high)
        fits = (free > 0) & (inner | (following == t))  # a fixed point is the end
        following = tl.where(fits, following, low + (high - low) * 0.5)
        done = (excess == 0) | (tl.abs(following - t) <= _ROUNDING)
        t = tl.where(excess == 0, t, following)
        step = tl.where(done, _STEPS, step + 1)
    return t


@triton.jit
def _clip(scores, centre, t, solved, strange):
    p = tl.minimum(tl.maximum((scores - centre) - t, 0.0), 1.0)
    p = tl.where(solved, p, 0.0)
    return tl.where(strange, float("nan"), p)


@triton.jit
def _count_live(z, row, keys, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Keys above -inf."""
    return _count_from(z, row, keys, _LOWEST_LIVE, BLOCK, WHOLE)


@triton.jit
def weigh_budget_rows(
    scores,
    weights,
    keys,
    rank,
    whole,
    part,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program per row. k = whole + part; rank is k rounded up: a row with fewer keys is NaN."""
    first = tl.program_id(0).to(tl.int64) * keys
    row = scores + first
    best, odd = survey(row, keys, BLOCK)
    live = _count_live(best, row, keys, BLOCK, WHOLE)
    strange = (odd != 0) | ((live > 0) & (live < rank))
    solved = (odd == 0) & (live >= rank)
    centre = tl.max(best, 0)
    if solved:
        centre = _ranked(best, row, keys, rank, BLOCK, WHOLE)
        t = _threshold(best, row, keys, centre, whole, part, BLOCK, WHOLE)
    else:
        t = centre * 0
    if WHOLE:
        at = tl.arange(0, BLOCK)
        tl.store(weights + first + at, _clip(best, centre, t, solved, strange), mask=at < keys)
    else:
        for start in range(0, keys, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = tl.load(row + at, mask=at < keys, other=-float("inf"))
            tl.store(weights + first + at, _clip(s, centre, t, solved, strange), mask=at < keys)
