"""Derivatives. With w = dp/dx and g the gain <do, v> of a key (times dropout's factor),

    dx = w (g - delta),  delta = <do, U>,  U = sum w v / sum w,
    dq = sum_j dx k_j,   dk_j = sum_i dx q_i,   dv_j = sum_i p do_i,

the derivative in a log mass is p (g - delta), in eps sum p (d log p / d eps) (g - delta).
"""

import triton
import triton.language as tl

from fenchel._kernels.gpu.family import GENERAL, INF, log_slope, weigh
from fenchel._kernels.gpu.scores import (
    cap_slope,
    cleaned,
    expect,
    finish,
    head_base,
    is_odd,
    key_blocks,
    load_eps,
    load_head,
    load_limits,
    load_query,
    load_tokens,
    masses,
    products,
    sink_of,
    tile_survival,
    unit_rows,
    whole_blocks,
)


@triton.jit
def offsets(x, SAVED, bh, i):
    """(centre, rest) of the rows; one that does not exist carries nothing."""
    row = SAVED.offset + 2 * (bh.to(tl.int64) * x.queries + i)
    centre = tl.load(row, mask=i < x.queries, other=0.0).to(tl.float32)
    return centre, tl.load(row + 1, mask=i < x.queries, other=INF).to(tl.float32)


@triton.jit
def load_rows(x, SAVED, DELTA, GRADIENT, bh, start, ROWS: tl.constexpr, D: tl.constexpr,
              WIDTH: tl.constexpr, DV: tl.constexpr, VALUE_WIDTH: tl.constexpr,
              FAMILY: tl.constexpr):  # fmt: skip
    """Of ROWS rows from `start` on: numbers, limits, eps, offsets, delta, gradients, queries."""
    i = start + tl.arange(0, ROWS)
    first, last = load_limits(x, bh, i)
    centre, rest = offsets(x, SAVED, bh, i)
    row = bh.to(tl.int64) * x.queries + i
    delta = tl.load(DELTA + row, mask=i < x.queries, other=0.0)
    do = load_head(x, GRADIENT, bh, start, ROWS, DV, VALUE_WIDTH)
    q = load_query(x, bh, start, ROWS, D, WIDTH)
    return i, first, last, load_eps(x, bh, i, FAMILY), centre, rest, delta, do, q


@triton.jit
def tile_slopes(x, product, gain, delta, centre, rest, eps, bh, i, j, first, last, whole, odd,
                FAMILY: tl.constexpr):  # fmt: skip
    """Of a tile: p, dx, the derivative in a log mass and in eps of each pair, dx as the product
    sees it, and which pairs count. whole: as of `finish`. odd: some row has no answer; it makes
    NaN of all that it sees."""
    score = finish(x, product, bh, i, j, first, last, whole)
    d = score - centre - rest  # NaN carries nothing
    p, w = weigh(d, eps, FAMILY)
    on = p > 0
    if x.has_mass is not None:
        m = masses(x, bh, i, j)
        p, w = p * m, w * m
        on = on & (m > 0)
    if x.dropout is not None:
        kept = tile_survival(x, bh, i, j)
        gain = tl.where(kept > 0, gain * kept, 0.0)
    excess = gain - delta
    of_mass = tl.where(on, p * excess, 0.0)
    of_eps = of_mass
    if FAMILY == GENERAL:
        of_eps = of_mass * tl.where(on, log_slope(tl.where(on, d, 0.0), eps), 0.0)
    if x.dropout is not None:
        p = p * kept
    of_score = tl.where(on, w * excess, 0.0)
    of_product = of_score
    if x.softcap is not None:
        of_product = tl.where(on, of_score * cap_slope(x, product), 0.0)
    if odd != 0:
        spoilt = (rest != rest) & ((score > -INF) | (score != score))
        nan = float("nan")
        on, p = on | spoilt, tl.where(spoilt, nan, p)
        of_score, of_mass = tl.where(spoilt, nan, of_score), tl.where(spoilt, nan, of_mass)
        of_product = tl.where(spoilt, nan, of_product)
    return p, of_score, of_mass, of_eps, of_product, on


@triton.jit
def odd_units(x, SAVED, GRADIENT, FLAGS, D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr,
              VALUE_WIDTH: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """FLAGS (units): one where a row has no answer, or a query or gradient that is not finite."""
    unit = tl.program_id(0)
    bh, start, i = unit_rows(x, unit, BM)
    rest = offsets(x, SAVED, bh, i)[1]
    do = load_head(x, GRADIENT, bh, start, BM, DV, VALUE_WIDTH)
    odd = tl.maximum(is_odd(load_query(x, bh, start, BM, D, WIDTH)), is_odd(do))
    tl.store(FLAGS + unit, tl.maximum(odd, tl.max((rest != rest).to(tl.int32))))


@triton.jit
def put_rows(x, OUT, SAVED, bh, i, dq, of_eps, delta, centre, rest, eps, D: tl.constexpr,
             WIDTH: tl.constexpr, FAMILY: tl.constexpr):  # fmt: skip
    """What a row has a derivative of: its query, its eps, and its share of the sink."""
    there = i < x.queries
    row = bh.to(tl.int64) * x.queries + i
    put_share(OUT.query, row, there, dq * x.scale, D, WIDTH)
    sink, mass = sink_of(x, bh)
    distance = sink - centre - rest
    p, w = weigh(distance, eps, FAMILY)
    on = p > 0
    p, w = tl.where(on, -p * mass * delta, 0.0), tl.where(on, -w * mass * delta, 0.0)
    broken = rest != rest
    nan = float("nan")
    if OUT.eps is not None:
        of_eps += tl.where(on, p * log_slope(tl.where(on, distance, 0.0), eps), 0.0)
        tl.store(OUT.eps + row, tl.where(broken, nan, of_eps).to(tl.float64), mask=there)
    if OUT.sink is not None:
        tl.store(OUT.sink + row, tl.where(broken, nan, w).to(tl.float64), mask=there)
    if OUT.sink_mass is not None:
        tl.store(OUT.sink_mass + row, tl.where(broken, nan, p).to(tl.float64), mask=there)


@triton.jit
def rows(x, LIST, COUNT, ODD, SAVED, DELTA, GRADIENT, OUT, start, D: tl.constexpr,
         WIDTH: tl.constexpr, DV: tl.constexpr, VALUE_WIDTH: tl.constexpr, BM: tl.constexpr,
         BN: tl.constexpr, SPLIT: tl.constexpr, FAMILY: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Derivatives of a unit's rows, from its tiles in SPLIT pieces each."""
    place = tl.program_id(0)
    bh, start_row, i = unit_rows(x, start + place, BM)
    i, first, last, eps, centre, rest, delta, do, q = load_rows(
        x, SAVED, DELTA, GRADIENT, bh, start_row, BM, D, WIDTH, DV, VALUE_WIDTH, FAMILY
    )
    number_of_row = bh.to(tl.int64) * x.queries + i
    keys = head_base(x.key, bh, x.heads, x.repeats)
    values = head_base(x.value, bh, x.heads, x.repeats)
    dq, of_eps = tl.zeros((BM, WIDTH), tl.float32), tl.zeros((BM,), tl.float32)
    blocks = LIST + place.to(tl.int64) * tl.cdiv(x.keys, BN)
    begin, end = key_blocks(x, first, last, BN)
    whole, partial = whole_blocks(first, last, begin, end, BN)
    odd_keys = ODD + bh // x.repeats * tl.cdiv(x.keys, BN)
    odd = tl.max((rest != rest).to(tl.int32))
    PIECE: tl.constexpr = BN // SPLIT
    for c in range(tl.load(COUNT + place) * SPLIT):
        block = tl.load(blocks + c // SPLIT)
        inside = ((block >= whole) & (block < partial)).to(tl.int32)
        first_key = block * BN + c % SPLIT * PIECE
        j = first_key + tl.arange(0, PIECE)
        k = load_tokens(keys, x.key.strides[2], first_key, x.keys, PIECE, D, WIDTH)
        v = load_tokens(values, x.value.strides[2], first_key, x.keys, PIECE, DV, VALUE_WIDTH)
        product = products(x, q, k, PRECISION)
        gain = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        _, of_score, of_mass, eps_part, of_product, on = tile_slopes(
            x, product, gain, delta[:, None], centre[:, None], rest[:, None], eps[:, None], bh,
            i[:, None], j[None, :], first[:, None], last[:, None], inside, odd, FAMILY,
        )  # fmt: skip
        to = (number_of_row - OUT.first)[:, None] * x.keys + j[None, :]
        there = (i < x.queries)[:, None] & (j < x.keys)[None, :] & on
        if OUT.score is not None:
            tl.store(OUT.score + to, of_score, mask=there)
        if OUT.mass is not None:
            tl.store(OUT.mass + to, of_mass, mask=there)
        if OUT.eps is not None:
            of_eps += tl.sum(eps_part, 1)
        if tl.load(odd_keys + block) != 0:
            k = cleaned(k)[0]
        dq = expect(of_product, k, dq, PRECISION)
    put_rows(x, OUT, SAVED, bh, i, dq, of_eps, delta, centre, rest, eps, D, WIDTH, FAMILY)


@triton.jit
def column_listing(x, TILES, LIST, COUNT, start, stop, head, room, BM: tl.constexpr,
                   BN: tl.constexpr):  # fmt: skip
    """Row blocks of a chunk that are active in each block of keys: LIST (heads, blocks of keys,
    room) in order, COUNT (heads, blocks of keys). Heads of all batches from `head` on."""
    word, bh = tl.program_id(0), head + tl.program_id(1)
    lane = tl.arange(0, 32)
    column = word * 32 + lane
    columns = tl.cdiv(x.keys, BN)
    words = tl.cdiv(columns, 32)
    blocks = tl.cdiv(x.queries, BM)
    begin = tl.maximum(start - bh * blocks, 0)
    end = tl.minimum(stop - bh * blocks, blocks)
    to = tl.program_id(1).to(tl.int64) * columns + column
    found = tl.zeros((32,), tl.int32)
    for first in range(begin, end, 32):
        block = first + lane
        unit = (bh.to(tl.int64) * blocks + block) * words + word
        bits = tl.load(TILES + unit, mask=block < end, other=0)
        on = (bits[:, None] >> lane[None, :]) & 1
        slot = found[None, :] + tl.cumsum(on, 0) - on
        value = block[:, None] + tl.zeros_like(slot)
        tl.store(LIST + to[None, :] * room + slot, value, mask=on > 0)
        found += tl.sum(on, 0)
    tl.store(COUNT + to, found, mask=column < columns)


@triton.jit
def columns(x, LIST, COUNT, ODD, SAVED, DELTA, GRADIENT, OUT, heads, head, group, room,
            D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, VALUE_WIDTH: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
            FAMILY: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """A share of the derivatives of a block of keys and values: over all query heads that read
    them and every PARTS-th part of the row blocks listed there, each in SPLIT pieces. Its tiles
    stand on their side, (keys, rows), so that keys and values stay where they are.

    OUT.key (PARTS, groups, keys, D), OUT.value likewise; OUT.of_key, OUT.of_key_mass (PARTS, heads,
    keys). `heads` of the chunk begin at `head`, key heads of it at `group`.
    """
    block, part, kv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(2)
    j = block * BN + tl.arange(0, BN)
    begin = (group + kv) * x.repeats
    keys = head_base(x.key, begin, x.heads, x.repeats)
    values = head_base(x.value, begin, x.heads, x.repeats)
    k = load_tokens(keys, x.key.strides[2], block * BN, x.keys, BN, D, WIDTH)
    v = load_tokens(values, x.value.strides[2], block * BN, x.keys, BN, DV, VALUE_WIDTH)
    dk = tl.zeros((BN, WIDTH), tl.float32)
    dv = tl.zeros((BN, VALUE_WIDTH), tl.float32)
    last_head = tl.minimum(x.repeats, head + heads - begin)
    for repeat in range(tl.maximum(head - begin, 0), last_head):
        bh = begin + repeat
        place = (bh - head).to(tl.int64) * tl.cdiv(x.keys, BN) + block
        count = tl.load(COUNT + place)
        of_key, of_mass = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
        for c in range(count * part // PARTS * SPLIT, count * (part + 1) // PARTS * SPLIT):
            rows = tl.load(LIST + place * room + c // SPLIT)
            odd = tl.load(ODD + bh * tl.cdiv(x.queries, BM) + rows)
            start = rows * BM + c % SPLIT * (BM // SPLIT)
            i, first, last, eps, centre, rest, delta, do, q = load_rows(
                x, SAVED, DELTA, GRADIENT, bh, start, BM // SPLIT, D, WIDTH, DV, VALUE_WIDTH, FAMILY
            )
            inside = (tl.max(first) <= block * BN) & (tl.min(last) >= (block + 1) * BN)
            product = products(x, k, q, PRECISION)
            gain = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            p, dx, dm, _, of_product, on = tile_slopes(
                x, product, gain, delta[None, :], centre[None, :], rest[None, :], eps[None, :], bh,
                i[None, :], j[:, None], first[None, :], last[None, :], inside.to(tl.int32), odd,
                FAMILY,
            )  # fmt: skip
            if odd != 0:
                q = cleaned(q)[0]
                do, spoil = cleaned(do)
                p = tl.where(on, p + spoil[None, :], 0.0)
            dv = expect(p, do, dv, PRECISION)
            dk = expect(of_product, q, dk, PRECISION)
            if OUT.of_key is not None:
                of_key += tl.sum(dx, 1)
            if OUT.of_key_mass is not None:
                of_mass += tl.sum(dm, 1)
        to = (part * heads + bh - head).to(tl.int64) * x.keys + j
        if OUT.of_key is not None:
            tl.store(OUT.of_key + to, of_key, mask=j < x.keys)
        if OUT.of_key_mass is not None:
            tl.store(OUT.of_key_mass + to, of_mass, mask=j < x.keys)
    row, there = (part * groups + kv).to(tl.int64) * x.keys + j, j < x.keys
    put_share(OUT.key, row, there, dk * x.scale, D, WIDTH)
    put_share(OUT.value, row, there, dv, DV, VALUE_WIDTH)


@triton.jit
def put_share(OUT, row, there, rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a contiguous (..., D) tensor."""
    d = tl.arange(0, WIDTH)
    to = OUT + row[:, None] * D + d[None, :]
    tl.store(to, rows, mask=there[:, None] & (d < D)[None, :])


@triton.jit
def diagonals(x, SCORES, SUM, origin, begin, end, head, POSITIONS, BP: tl.constexpr):
    """Sums along relative positions of a chunk's rows begin .. end - 1, counted over all heads;
    SCORES holds those from `origin` on. SUM (heads, positions), heads of all batches, from `head`
    on."""
    place, bh = tl.program_id(0) * BP + tl.arange(0, BP), head + tl.program_id(1)
    limits = x.limits.data
    b, h = bh // x.heads, bh % x.heads
    limits += b.to(tl.int64) * x.limits.strides[0] + h.to(tl.int64) * x.limits.strides[1]
    before = bh.to(tl.int64) * x.queries
    total = tl.zeros((BP,), tl.float32)
    for i in range(tl.maximum(begin - before, 0), tl.minimum(end - before, x.queries)):
        row = before + i
        zero = tl.load(limits + 2 * x.queries + i)
        key = place - zero
        there = (key >= 0) & (key < x.keys) & (place < POSITIONS)
        total += tl.load(SCORES + (row - origin) * x.keys + key, mask=there, other=0.0)
    to = tl.program_id(1).to(tl.int64) * POSITIONS + place
    tl.store(SUM + to, total, mask=place < POSITIONS)
