"""Few queries, many keys: the keys of a row are split over programs.

The rows of a unit are all queries of all heads that share a key head, so that `x.repeats` is one
(`folding.py`). A split is a run of SPLIT keys. What is found about a row stands in a `Found`
(`split.py`), the rows of a unit one after another:

    upper (rows, keys)            no score is above it; without a shadow it is the score
    key, score (rows, splits, CAPACITY)   candidates of each split, in the order of keys
    number (rows, splits)         how many; more than CAPACITY: the split is used whole
    whole (rows, keys)            scores in splits that are used whole
    weight, whole_weight          of both, from `decode_search.py`
    broken (rows)                 one where the row has no answer

A split that no row of the unit sees is left alone by every kernel.
"""

import triton
import triton.language as tl

from fenchel._kernels.gpu.bound import keep_better, lower_bound
from fenchel._kernels.gpu.family import INF
from fenchel._kernels.gpu.lists import put
from fenchel._kernels.gpu.paging import run_base, token_bases
from fenchel._kernels.gpu.scores import (
    cleaned,
    expect,
    finish,
    key_blocks,
    load_eps,
    load_limits,
    load_query,
    load_tokens,
    masses,
    products,
    unit_rows,
)


@triton.jit
def split_blocks(x, first, last, split, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Blocks of keys of this split, from .. to - 1, that some row sees."""
    begin, end = key_blocks(x, first, last, BN)
    each = SPLIT // BN
    return tl.maximum(begin, split * each), tl.minimum(end, (split + 1) * each)


@triton.jit
def sinks_of(x, bh, i):
    """(score, mass) of the null key of each row; a score that is no number carries nothing here."""
    nothing = tl.full(i.shape, -INF, tl.float32)
    if x.sink is not None:
        row = bh.to(tl.int64) * x.queries + i
        score = tl.load(x.sink.score + row, mask=i < x.queries, other=-INF)
        mass = tl.full(i.shape, 1.0, tl.float32)
        if x.sink.mass is not None:
            mass = tl.load(x.sink.mass + row, mask=i < x.queries, other=1.0)
        return score, mass
    else:
        return nothing, tl.full(i.shape, 1.0, tl.float32)


@triton.jit
def exact_block(x, q, base, bh, i, split, block, first, last, D: tl.constexpr,
                WIDTH: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """(keys, scores, masses) of a block; a key without mass is hidden."""
    rest = x.keys - split * SPLIT
    k = load_tokens(base, x.key.strides[2], block * BN - split * SPLIT, rest, BN, D, WIDTH)
    j = (block * BN + tl.arange(0, BN))[None, :]
    s = finish(x, products(x, q, k, "ieee"), bh, i[:, None], j, first[:, None], last[:, None], 0)
    if x.has_mass is not None:
        m = masses(x, bh, i[:, None], j)
        return j, tl.where(m > 0, s, -INF), m
    else:
        return j, s, 1.0


@triton.jit
def put_lanes(x, found, rows, split, score, mass, BN: tl.constexpr):
    lane = tl.arange(0, BN)
    at = (rows[:, None] * tl.num_programs(1) + split) * BN + lane[None, :]
    tl.store(found.lane_score + at, score)
    if x.has_mass is not None:
        tl.store(found.lane_mass + at, mass)


@triton.jit
def scan(x, pages, found, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
         BN: tl.constexpr, SPLIT: tl.constexpr, FAMILY: tl.constexpr):  # fmt: skip
    """Scores of a split, as `upper`, and the best key of each lane."""
    unit, split = tl.program_id(0), tl.program_id(1)
    bh, start, i = unit_rows(x, unit, BM)
    first, last = load_limits(x, bh, i)
    eps = load_eps(x, bh, i, FAMILY)
    q = load_query(x, bh, start, BM, D, WIDTH)
    rows = unit.to(tl.int64) * BM + tl.arange(0, BM)
    upper = found.upper + rows[:, None] * tl.num_programs(1) * SPLIT
    score = tl.full((BM, BN), -INF, tl.float32)
    alone = tl.full((BM, BN), -INF, tl.float32)
    mass = tl.full((BM, BN), 1.0, tl.float32)
    begin, end = split_blocks(x, first, last, split, BN, SPLIT)
    if begin < end:
        base = run_base(x.key, pages, bh, x.heads, split * SPLIT)
        for block in range(begin, end):
            j, s, m = exact_block(x, q, base, bh, i, split, block, first, last, D, WIDTH, BN, SPLIT)
            tl.store(upper + j, s, mask=(i < x.queries)[:, None])
            s = tl.where(s < INF, s, -INF)
            score, alone, mass = keep_better(x, score, alone, mass, s, m, eps, FAMILY)
    put_lanes(x, found, rows, split, score, mass, BN)


@triton.jit
def row_of(x, unit, row, BM: tl.constexpr):
    """(batch and head, the row as a block of one, its place among those of all units)"""
    blocks = tl.cdiv(x.queries, BM)
    i = unit % blocks * BM + row + tl.arange(0, 1)
    return unit // blocks, i, unit.to(tl.int64) * BM + row


@triton.jit
def bound_lanes(x, found, lanes, BM: tl.constexpr, LB: tl.constexpr, STEPS: tl.constexpr,
                FAMILY: tl.constexpr):  # fmt: skip
    """Of each row, from its lanes in all splits: `bounds` (rows, 3), as `lower_bound` has them.
    Where it knows no key, every key may matter: -inf."""
    unit, row = tl.program_id(0), tl.program_id(1)
    bh, i, place = row_of(x, unit, row, BM)
    if tl.max(i) >= x.queries:
        return
    eps = load_eps(x, bh, i, FAMILY)
    score = tl.full((1, LB), -INF, tl.float32)
    alone = tl.full((1, LB), -INF, tl.float32)
    mass = tl.full((1, LB), 1.0, tl.float32)
    m = mass
    for part in range(tl.cdiv(lanes, LB)):
        lane = part * LB + tl.arange(0, LB)[None, :]
        s = tl.load(found.lane_score + place * lanes + lane, mask=lane < lanes, other=-INF)
        if x.has_mass is not None:
            m = tl.load(found.lane_mass + place * lanes + lane, mask=lane < lanes, other=1.0)
        score, alone, mass = keep_better(x, score, alone, mass, s, m, eps, FAMILY)
    sink, sink_mass = sinks_of(x, bh, i)
    sink = tl.where(sink < INF, sink, -INF)
    centre, rest, low, seen = lower_bound(score, mass, sink, sink_mass, eps, STEPS, FAMILY)
    at = place * 3 + tl.arange(0, 1)
    tl.store(found.bounds + at, centre)
    tl.store(found.bounds + at + 1, tl.where(seen, rest, -INF))
    tl.store(found.bounds + at + 2, tl.where(seen, low, -INF))


@triton.jit
def collect(x, found, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
            CAPACITY: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Keys of a split that may lie above the threshold, and their scores where `upper` has them."""
    unit, split = tl.program_id(0), tl.program_id(1)
    bh, _, i = unit_rows(x, unit, BM)
    there = i < x.queries
    first, last = load_limits(x, bh, i)
    rows = unit.to(tl.int64) * BM + tl.arange(0, BM)
    centre = tl.load(found.bounds + rows * 3, mask=there, other=0.0)
    low = tl.load(found.bounds + rows * 3 + 2, mask=there, other=INF)
    splits = tl.num_programs(1)
    upper = found.upper + rows[:, None] * splits * SPLIT
    entries = (rows[:, None] * splits + split) * CAPACITY
    number = tl.zeros((BM,), tl.int32)
    begin, end = split_blocks(x, first, last, split, BN, SPLIT)
    for block in range(begin, end):
        j = block * BN + tl.arange(0, BN)
        u = tl.load(upper + j[None, :], mask=there[:, None], other=-INF)
        below = (u - centre[:, None] <= low[:, None]) | (u == -INF)
        on = tl.where(below, 0, 1)  # NaN is not below
        slot = number[:, None] + tl.cumsum(on, 1) - on
        fits = (on > 0) & (slot < CAPACITY)
        tl.store(found.key + entries + slot, j[None, :] + tl.zeros_like(slot), mask=fits)
        if EXACT:
            tl.store(found.score + entries + slot, u, mask=fits)
        number += tl.sum(on, 1)
    tl.store(found.number + rows * splits + split, number)


@triton.jit
def score_whole(x, pages, found, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, SPLIT: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """Scores of all keys of a split, for the rows whose list overflows."""
    unit, split = tl.program_id(0), tl.program_id(1)
    rows = unit.to(tl.int64) * BM + tl.arange(0, BM)
    crowded = tl.load(found.number + rows * tl.num_programs(1) + split) > CAPACITY
    if tl.max(crowded.to(tl.int32)) == 0:
        return
    bh, start, i = unit_rows(x, unit, BM)
    first, last = load_limits(x, bh, i)
    q = load_query(x, bh, start, BM, D, WIDTH)
    base = run_base(x.key, pages, bh, x.heads, split * SPLIT)
    whole = found.whole + rows[:, None] * tl.num_programs(1) * SPLIT
    begin, end = split_blocks(x, first, last, split, BN, SPLIT)
    for block in range(begin, end):
        j, s, _ = exact_block(x, q, base, bh, i, split, block, first, last, D, WIDTH, BN, SPLIT)
        tl.store(whole + j, s, mask=crowded[:, None])


@triton.jit
def entry_of(found, place, at, splits, CAPACITY: tl.constexpr):
    """Whether there is a candidate at these places of a row's lists, and which key it is."""
    split = at // CAPACITY
    number = tl.load(found.number + place * splits + split, mask=split < splits, other=0)
    there = (at % CAPACITY < number) & (number <= CAPACITY)
    return there, tl.load(found.key + place * splits * CAPACITY + at, mask=there, other=0)


@triton.jit
def rescore(x, pages, found, splits, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
            CAPACITY: tl.constexpr, EB: tl.constexpr):  # fmt: skip
    """Scores of EB entries of a row's lists."""
    unit, row = tl.program_id(0), tl.program_id(1)
    bh, i, place = row_of(x, unit, row, BM)
    if tl.max(i) >= x.queries:
        return
    at = tl.program_id(2) * EB + tl.arange(0, EB)
    there, key = entry_of(found, place, at, splits, CAPACITY)
    if tl.max(there.to(tl.int32)) == 0:
        return
    first, last = load_limits(x, bh, i)
    q = load_query(x, bh, tl.min(i), 1, D, WIDTH)
    d = tl.arange(0, WIDTH)
    to = token_bases(x.key, pages, bh, x.heads, key, there)[:, None] + d[None, :]
    k = tl.load(to, mask=there[:, None] & (d < D)[None, :], other=0.0)
    product = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * x.scale
    s = finish(x, product, bh, i, key, first, last, 0)
    if x.has_mass is not None:
        s = tl.where(masses(x, bh, i, key) > 0, s, -INF)
    tl.store(found.score + place * splits * CAPACITY + at, s, mask=there)


@triton.jit
def gather(x, pages, found, DV: tl.constexpr, VALUE_WIDTH: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr, SPLIT: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """The share of a split in the output: `share` (rows, splits, VALUE_WIDTH) where `support`
    (rows, splits), the keys that carry weight, is not zero."""
    unit, split = tl.program_id(0), tl.program_id(1)
    bh, start, i = unit_rows(x, unit, BM)
    first, last = load_limits(x, bh, i)
    splits = tl.num_programs(1)
    rows = unit.to(tl.int64) * BM + tl.arange(0, BM)
    place = rows * splits + split
    number = tl.load(found.number + place)
    size = tl.zeros((BM,), tl.int32)
    o = tl.zeros((BM, VALUE_WIDTH), tl.float32)
    column = tl.arange(0, VALUE_WIDTH)
    listed = tl.where(number <= CAPACITY, number, 0)
    most = tl.max(number)
    if most > 0:
        base = run_base(x.value, pages, bh, x.heads, split * SPLIT)
        for c in range(tl.max(listed)):
            entry = place * CAPACITY + c
            w = tl.load(found.weight + entry, mask=c < listed, other=0.0)
            key = tl.load(found.key + entry, mask=w > 0, other=0) - split * SPLIT
            to = base + key.to(tl.int64)[:, None] * x.value.strides[2] + column[None, :]
            wanted = (w > 0)[:, None] & (column < DV)[None, :]
            o += w[:, None] * tl.load(to, mask=wanted, other=0.0).to(tl.float32)
            size += (w > 0).to(tl.int32)
        if most > CAPACITY:
            begin, end = split_blocks(x, first, last, split, BN, SPLIT)
            weights = found.whole_weight + rows[:, None] * splits * SPLIT
            for block in range(begin, end):
                j = block * BN + tl.arange(0, BN)
                seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
                seen = seen & (number > CAPACITY)[:, None]
                w = tl.load(weights + j[None, :], mask=seen, other=0.0)
                start, stop = (block * BN - split * SPLIT), x.keys - split * SPLIT
                v = load_tokens(base, x.value.strides[2], start, stop, BN, DV, VALUE_WIDTH)
                v, spoil = cleaned(v)
                o = expect(tl.where(w > 0, w + spoil[None, :], 0.0), v, o, "ieee")
                size += tl.sum((w > 0).to(tl.int32), 1)
    tl.store(found.support + place, size)
    to = found.share + place[:, None] * VALUE_WIDTH + column[None, :]
    tl.store(to, o, mask=(size > 0)[:, None])


@triton.jit
def join(x, found, OUTPUT, COUNTS, splits, DV: tl.constexpr, VALUE_WIDTH: tl.constexpr,
         BM: tl.constexpr, SPLIT: tl.constexpr, CAPACITY: tl.constexpr, SB: tl.constexpr,
         EXACT: tl.constexpr):  # fmt: skip
    """The output of a row, from the shares of its splits in their order, and if asked for what was
    read: COUNTS (batch, head, row, 5), as in `cache_read.py`."""
    unit, row = tl.program_id(0), tl.program_id(1)
    bh, i, place = row_of(x, unit, row, BM)
    if tl.max(i) >= x.queries:
        return
    first, last = load_limits(x, bh, i)
    column = tl.arange(0, VALUE_WIDTH)
    o = tl.zeros((VALUE_WIDTH,), tl.float32)
    support = tl.zeros((1,), tl.int64)
    picked = tl.zeros((1,), tl.int64)
    whole = tl.zeros((1,), tl.int64)
    for part in range(tl.cdiv(splits, SB)):
        split = part * SB + tl.arange(0, SB)
        at = place * splits + split
        size = tl.load(found.support + at, mask=split < splits, other=0)
        to = found.share + at[:, None] * VALUE_WIDTH + column[None, :]
        o += tl.sum(tl.load(to, mask=(size > 0)[:, None], other=0.0), 0)
        if COUNTS is not None:
            number = tl.load(found.number + at, mask=split < splits, other=0)
            seen = tl.minimum(last, (split + 1) * SPLIT) - tl.maximum(first, split * SPLIT)
            crowded = number > CAPACITY
            support += tl.sum(size.to(tl.int64), 0)
            picked += tl.sum(tl.where(crowded, 0, number).to(tl.int64), 0)
            whole += tl.sum(tl.where(crowded, seen, 0).to(tl.int64), 0)
    broken = tl.load(found.broken + place)
    o = tl.where(broken > 0, float("nan"), o)
    put(OUTPUT, bh, x.heads, i, i < x.queries, o[None, :], DV, VALUE_WIDTH)
    if COUNTS is not None:
        to = COUNTS + (bh.to(tl.int64) * x.queries + i) * 5
        visible = (last - first).to(tl.int64)
        if EXACT:  # every key was scored, and none bounded
            bounded, whole, picked = visible * 0, visible, visible * 0
        else:
            bounded = visible
        tl.store(to, visible)
        tl.store(to + 1, bounded)
        tl.store(to + 2, whole)
        tl.store(to + 3, picked)
        tl.store(to + 4, support)
