"""Lower bounds of the offsets, and the tiles that hold a score above them.

Some keys of a row alone bound its offset from below: more keys only raise it. The best key of each
lane of a key block are a good choice, and cost one pass over all keys.
"""

import triton
import triton.language as tl

from fenchel._kernels.gpu.family import INF, is_strange, reach, room, step, weigh
from fenchel._kernels.gpu.scores import (
    head_base,
    key_blocks,
    load_eps,
    load_limits,
    load_query,
    sink_of,
    tile,
    unit_rows,
    whole_blocks,
)

MARGIN = tl.constexpr(4e-6)  # of rounding, relative to the distances
FARTHEST = tl.constexpr(30.0)  # that rounding of large scores moves a bound: e^30 is a number


@triton.jit
def keep_better(x, score, alone, mass, s, m, eps, FAMILY: tl.constexpr):
    """Of each lane the key that has the highest offset alone: its score, that offset, its mass. NaN
    and +inf stay once they are there."""
    if x.has_mass is not None:
        offset = s - room(tl.where(m > 0, m, 1.0), eps[:, None], FAMILY)
        offset = tl.where(s < INF, offset, INF)
        better = offset > alone
        alone = tl.where(better, offset, alone)
        return tl.where(better, s, score), alone, tl.where(better, m, mass)
    else:
        return tl.maximum(score, s, propagate_nan=tl.PropagateNan.ALL), alone, mass


@triton.jit
def lower_bound(score, mass, sink, sink_mass, eps, STEPS: tl.constexpr, FAMILY: tl.constexpr):
    """From some keys (rows, lanes) and the sink: a centre, a lower bound of the offset from there,
    and of the score that a key needs; and whether there is any of them."""
    top = tl.maximum(tl.max(score, 1), sink)
    centre = tl.where(top > -INF, top, 0.0)
    d = score - centre[:, None]
    of_sink = sink - centre
    rooms = room(mass, eps[:, None], FAMILY)
    rest = tl.max(d - rooms, 1)
    rest = tl.maximum(rest, of_sink - room(sink_mass + tl.zeros_like(eps), eps, FAMILY))
    seen = rest > -INF
    rest = tl.where(seen, rest, 0.0)
    for _ in range(STEPS):
        p, w = weigh(d - rest[:, None], eps[:, None], FAMILY)
        sink_p, sink_w = weigh(of_sink - rest, eps, FAMILY)
        total = tl.sum(p * mass, 1) + sink_p * sink_mass
        slope = tl.sum(w * mass, 1) + sink_w * sink_mass
        rest += tl.maximum(step(total, slope, eps, FAMILY), 0.0)
    of_centre = tl.abs(centre) * MARGIN
    rest -= MARGIN * (1.0 + tl.abs(rest)) + tl.minimum(of_centre, FARTHEST)
    low = rest - reach(eps, FAMILY)
    low -= MARGIN * tl.abs(low)
    return centre, rest, low, seen


@triton.jit
def bound(x, ROWS, TOPS, start, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, STEPS: tl.constexpr, FAMILY: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """Of each row: a centre, a lower bound of its offset from there, and of the score that a key
    needs; NaN where it has no answer. TOPS: its largest score in every block of keys.

    ROWS (units, 3, BM), TOPS (units, blocks, BM)
    """
    place = tl.program_id(0)
    bh, start_row, i = unit_rows(x, start + place, BM)
    first, last = load_limits(x, bh, i)
    eps = load_eps(x, bh, i, FAMILY)
    q = load_query(x, bh, start_row, BM, D, WIDTH)
    keys = head_base(x.key, bh, x.heads, x.repeats)
    row = tl.arange(0, BM)
    tops = TOPS + place.to(tl.int64) * tl.cdiv(x.keys, BN) * BM + row
    score = tl.full((BM, BN), -INF, tl.float32)  # of the best key of each lane
    alone = tl.full((BM, BN), -INF, tl.float32)  # the offset that it would have alone
    mass = tl.full((BM, BN), 1.0, tl.float32)
    begin, end = key_blocks(x, first, last, BN)
    whole, partial = whole_blocks(first, last, begin, end, BN)
    for block in range(begin, whole):
        s, m = tile(x, q, keys, bh, i, block * BN, first, last, 0, BN, D, WIDTH, PRECISION)
        tl.store(tops + block * BM, tl.max(s, 1))
        score, alone, mass = keep_better(x, score, alone, mass, s, m, eps, FAMILY)
    for block in range(whole, partial):
        s, m = tile(x, q, keys, bh, i, block * BN, first, last, 1, BN, D, WIDTH, PRECISION)
        tl.store(tops + block * BM, tl.max(s, 1))
        score, alone, mass = keep_better(x, score, alone, mass, s, m, eps, FAMILY)
    for block in range(partial, end):
        s, m = tile(x, q, keys, bh, i, block * BN, first, last, 0, BN, D, WIDTH, PRECISION)
        tl.store(tops + block * BM, tl.max(s, 1))
        score, alone, mass = keep_better(x, score, alone, mass, s, m, eps, FAMILY)
    broken = tl.max(tl.where(score < INF, 0, 1), 1)  # NaN or +inf
    score = tl.where(score < INF, score, -INF)
    sink, sink_mass = sink_of(x, bh)
    centre, rest, low, seen = lower_bound(score, mass, sink, sink_mass, eps, STEPS, FAMILY)
    broken = (broken + tl.where(sink < INF, 0, 1) > 0) | is_strange(eps, FAMILY)
    rest = tl.where(seen, rest, INF)
    rest = tl.where(broken, float("nan"), rest)
    rows = ROWS + place.to(tl.int64) * 3 * BM + row
    tl.store(rows, centre)
    tl.store(rows + BM, rest)
    tl.store(rows + 2 * BM, tl.where(seen, low, INF))


@triton.jit
def listing(x, ROWS, TOPS, LIST, COUNT, TILES, start, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """Blocks of keys in which some row has a score above its bound: LIST (units, blocks) in order,
    COUNT (units), and as bits TILES (all units, words) if there. Of a unit with a row that has no
    answer all blocks that it sees: every key there meets that row."""
    place = tl.program_id(0)
    bh, _, i = unit_rows(x, start + place, BM)
    first, last = load_limits(x, bh, i)
    begin, end = key_blocks(x, first, last, BN)
    row, lane = tl.arange(0, BM), tl.arange(0, 32)
    rows = ROWS + place.to(tl.int64) * 3 * BM + row
    centre, rest, low = tl.load(rows), tl.load(rows + BM), tl.load(rows + 2 * BM)
    broken = tl.max((rest != rest).to(tl.int32)) > 0
    blocks = tl.cdiv(x.keys, BN)
    words = tl.cdiv(blocks, 32)
    found = 0
    for word in range(words):
        block = word * 32 + lane
        inside = (block >= begin) & (block < end)
        at = (place.to(tl.int64) * blocks + block[:, None]) * BM + row[None, :]
        top = tl.load(TOPS + at, mask=inside[:, None], other=-INF)
        above = tl.max((top - centre[None, :] > low[None, :]).to(tl.int32), 1) > 0
        on = (inside & (above | broken)).to(tl.int32)
        to = LIST + place.to(tl.int64) * blocks + found + tl.cumsum(on, 0) - on
        tl.store(to, block, mask=on > 0)
        found += tl.sum(on)
        if TILES is not None:
            tl.store(TILES + (start + place).to(tl.int64) * words + word, tl.sum(on << lane))
    tl.store(COUNT + place, found)


@triton.jit
def unfold(x, TILES, LIST, COUNT, start, BN: tl.constexpr):
    """LIST and COUNT of the units again, from TILES."""
    place = tl.program_id(0)
    lane = tl.arange(0, 32)
    blocks = tl.cdiv(x.keys, BN)
    words = tl.cdiv(blocks, 32)
    found = 0
    for word in range(words):
        bits = tl.load(TILES + (start + place).to(tl.int64) * words + word)
        on = (bits >> lane) & 1
        to = LIST + place.to(tl.int64) * blocks + found + tl.cumsum(on, 0) - on
        tl.store(to, word * 32 + lane, mask=on > 0)
        found += tl.sum(on)
    tl.store(COUNT + place, found)
