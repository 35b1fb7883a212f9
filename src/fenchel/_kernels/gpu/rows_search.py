"""Weights of rows by a search of what normalises them: Tsallis' families and normmax.

The offset of a row is found by Newton's method on a norm of the weights, which is convex, from the
left of the root, where the largest key alone carries all. A row that fits is read once and stays in
registers. Of a longer one the largest score of each lane comes first: these keys alone bound the
offset from below, closely, and a few passes over all keys do the rest.

A distance from the offset is (score - top) - high - low: exact where keys are near the top, with
the offset in two parts so that its rounding does not add up over many keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fenchel._kernels.gpu.elementary import (
    LEAST,
    LN_2,
    LOG2_E,
    expm1_ratio,
    log2,
    log2_1p,
    power,
)

# Families. ANY: Tsallis with an eps that differs from row to row.
SQUARE = tl.constexpr(0)  # alpha = 1.5
RAMP = tl.constexpr(1)  # alpha = 2
GENTLE = tl.constexpr(2)  # eps <= 1/4, by offset
EDGE = tl.constexpr(3)  # beyond, by threshold
ANY = tl.constexpr(4)
NORM = tl.constexpr(5)
NORM_2 = tl.constexpr(6)  # alpha = 2

USUAL, EMPTY, STRANGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of rows

_STEPS = tl.constexpr(40)
_ROUNDING = tl.constexpr(2.4e-7)  # two ulps of one
_LOWEST = tl.constexpr(-1e30)  # distances are cut here: products with them stay finite
_EDGE_ABOVE = tl.constexpr(0.25)  # as in `_kernels/tsallis.py`


@triton.jit
def _gentle(distance, eps):
    """(p, p / y), y = 1 + eps distance, p = y^(1/eps); the exponential at eps = 0."""
    x = eps * distance
    on = 1.0 + x > LEAST
    x = tl.where(on, x, 0.0)
    some = tl.where(eps > 0, eps, 1.0)
    exponent = tl.where(eps > 0, log2_1p(x) / some, distance * LOG2_E)
    p = tl.where(on, tl.exp2(exponent), 0.0)
    return p, p / (1.0 + x)


@triton.jit
def _edge(distance, eps):
    """(p, p / y), y = eps distance, p = y^(1/eps)."""
    y = eps * distance
    on = y > LEAST
    y = tl.where(on, y, 1.0)
    p = tl.where(on, power(y, 1.0 / eps), 0.0)
    return p, p / y


@triton.jit
def terms(distance, eps, FAMILY: tl.constexpr):
    """What sums to the mass and to the slope of a row, key by key."""
    if FAMILY == SQUARE:
        y = tl.maximum(0.5 * distance, 0.0)
        return y * y, y
    elif FAMILY == RAMP:
        y = tl.maximum(distance, 0.0)
        return y, tl.where(y > 0, 1.0, 0.0)
    elif FAMILY == GENTLE:
        return _gentle(distance, eps)
    elif FAMILY == EDGE:
        return _edge(distance, eps)
    elif FAMILY == ANY:
        p, slope = _gentle(distance, tl.minimum(eps, _EDGE_ABOVE))
        q, steep = _edge(distance, tl.maximum(eps, _EDGE_ABOVE))
        gentle = eps <= _EDGE_ABOVE
        return tl.where(gentle, p, q), tl.where(gentle, slope, steep)
    else:
        y = tl.maximum(distance, 0.0)
        r = y
        if FAMILY == NORM:
            on = y > LEAST
            r = tl.where(on, power(tl.where(on, y, 1.0), 1.0 / eps), 0.0)
        return r * y, r


@triton.jit
def first_offset(eps, FAMILY: tl.constexpr):
    """Below the top: where a key there carries all."""
    if FAMILY == SQUARE:
        return eps * 0 - 2.0
    elif FAMILY == GENTLE:
        return eps * 0
    elif FAMILY == EDGE:
        return -1.0 / eps
    elif FAMILY == ANY:
        return tl.where(eps <= _EDGE_ABOVE, 0.0, -1.0 / eps)
    else:
        return eps * 0 - 1.0


@triton.jit
def newton_step(mass, slope, eps, FAMILY: tl.constexpr):
    """Of a norm of y that is to be one: (1 - norm^-1) times what the family makes of it."""
    log_mass = log2(mass) * LN_2
    if FAMILY == RAMP:
        return (mass - 1.0) / slope
    elif FAMILY == SQUARE:
        return mass * log_mass * expm1_ratio(-0.5 * log_mass) / slope
    elif FAMILY == NORM or FAMILY == NORM_2:
        share = eps / (1.0 + eps)  # 1 / q, and sum y^q is the mass
        return mass * share * log_mass * expm1_ratio(-share * log_mass) / slope
    else:
        return mass * log_mass * expm1_ratio(-eps * log_mass) / slope


@triton.jit
def distances(scores, top):
    """From the top; keys that are not there are far below."""
    return tl.maximum(scores - top, _LOWEST)


@triton.jit
def _sums(
    z, row, keys, top, high, low, eps, FAMILY: tl.constexpr, BLOCK: tl.constexpr, HERE: tl.constexpr
):
    """Mass, slope and number of keys above the offset: of z, or of the row in memory."""
    if HERE:
        mass, slope = terms((z - high) - low, eps, FAMILY)
        count = tl.where(slope > 0, 1.0, 0.0)
    else:
        mass = tl.zeros([BLOCK], tl.float32)
        slope = tl.zeros([BLOCK], tl.float32)
        count = tl.zeros([BLOCK], tl.float32)
        for start in range(0, keys, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = tl.load(row + at, mask=at < keys, other=-float("inf"))
            m, d = terms((distances(s, top) - high) - low, eps, FAMILY)
            mass += m
            slope += d
            count += tl.where(d > 0, 1.0, 0.0)
    return tl.sum(mass, 0), tl.sum(slope, 0), tl.sum(count, 0)


@triton.jit
def search(
    z, row, keys, top, start, eps, FAMILY: tl.constexpr, BLOCK: tl.constexpr, HERE: tl.constexpr
):
    """(high, low, slope, count) of the offset high + low.

    From the left of the root every step stays there; a step back is rounding. The first one is
    taken, since it may mend a long step; the second one ends the search.
    """
    high = start
    low = start * 0
    mass, slope, count = _sums(z, row, keys, top, high, low, eps, FAMILY, BLOCK, HERE)
    backs = 0
    step = 0
    while (tl.abs(mass - 1.0) > _ROUNDING) & (backs < 2) & (step < _STEPS):
        move = newton_step(mass, slope, eps, FAMILY)
        backs += tl.where(move > 0, 0, 1)
        following = high + (low + move)
        low = (high - following) + (low + move)  # what the sum lost
        high = following
        mass, slope, count = _sums(z, row, keys, top, high, low, eps, FAMILY, BLOCK, HERE)
        step += 1
    # A last step, of the order of rounding, is taken without looking at the keys again.
    return high, low + newton_step(mass, slope, eps, FAMILY), slope, count


@triton.jit
def survey(row, keys, BLOCK: tl.constexpr):
    """The largest score of each lane, and whether a score is NaN or +inf."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    strange = tl.zeros([BLOCK], tl.int32)
    for start in range(0, keys, BLOCK):
        at = start + tl.arange(0, BLOCK)
        s = tl.load(row + at, mask=at < keys, other=-float("inf"))
        best = tl.maximum(best, s)
        strange = tl.where(s < float("inf"), strange, 1)
    return best, tl.max(strange, 0)


@triton.jit
def solve_row(row, keys, eps, FAMILY: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Distances of the row or of its lanes, top, offset, slope, count; what kind of row it is."""
    best, strange = survey(row, keys, BLOCK)
    top = tl.max(best, 0)
    kind = tl.where(strange != 0, STRANGE, tl.where(top > -float("inf"), USUAL, EMPTY))
    top = tl.where(kind == EMPTY, 0.0, top)
    z = distances(best, top)
    start = first_offset(eps, FAMILY)
    high, low, slope, count = search(z, row, keys, top, start, eps, FAMILY, BLOCK, True)
    if not WHOLE:
        high, low, slope, count = search(z, row, keys, top, high + low, eps, FAMILY, BLOCK, False)
    return z, top, high, low, slope, count, kind


@triton.jit
def _weights(z, high, low, slope, count, kind, eps, FAMILY: tl.constexpr):
    """Of keys at these distances from the top."""
    p, r = terms((z - high) - low, eps, FAMILY)
    if FAMILY == NORM or FAMILY == NORM_2:
        p = r / slope
    p = tl.where((count == 1) & (p > 0), 1.0, p)  # not 1 - 1e-7: a loss there is zero
    p = tl.where(kind == EMPTY, 0.0, p)
    return tl.where(kind == STRANGE, float("nan"), p)


@triton.jit
def weigh_rows(
    scores, weights, keys, eps, FAMILY: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    """One program per row. scores, weights: (rows, keys)"""
    first = tl.program_id(0).to(tl.int64) * keys
    row = scores + first
    z, top, high, low, slope, count, kind = solve_row(row, keys, eps, FAMILY, BLOCK, WHOLE)
    if WHOLE:
        at = tl.arange(0, BLOCK)
        p = _weights(z, high, low, slope, count, kind, eps, FAMILY)
        tl.store(weights + first + at, p, mask=at < keys)
    else:
        for start in range(0, keys, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = tl.load(row + at, mask=at < keys, other=-float("inf"))
            p = _weights(distances(s, top), high, low, slope, count, kind, eps, FAMILY)
            tl.store(weights + first + at, p, mask=at < keys)


@triton.jit
def offset_rows(scores, eps, offsets, keys, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Top and rest of each row's offset (threshold where eps > 1/4) in float64.

    scores (rows, keys), eps float64 (rows), offsets float64 (rows, 2). A row without keys has +inf.
    """
    number = tl.program_id(0)
    row = scores + number.to(tl.int64) * keys
    e = tl.load(eps + number).to(tl.float32)
    _z, top, high, low, _slope, _count, kind = solve_row(row, keys, e, ANY, BLOCK, WHOLE)
    rest = high.to(tl.float64) + low.to(tl.float64)
    rest = tl.where(kind == EMPTY, float("inf"), rest)
    rest = tl.where(kind == STRANGE, float("nan"), rest)
    tl.store(offsets + 2 * number, top.to(tl.float64))
    tl.store(offsets + 2 * number + 1, rest)
