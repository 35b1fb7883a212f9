"""Few candidates in a row: they are gathered into lists, and the rest never looked at again."""

import triton
import triton.language as tl

from fenchel._kernels.gpu.family import INF, moves_on, step, weigh
from fenchel._kernels.gpu.scores import (
    first_keys,
    head_base,
    load_eps,
    load_limits,
    load_query,
    row_words,
    sink_of,
    survival,
    tile,
    unit_rows,
)


@triton.jit
def pack(x, ROWS, LIST, COUNT, KEY, DISTANCE, MASS, NUMBER, CROWDED, start,
         D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         CAPACITY: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Keys of each row whose scores lie above its bound: KEY, DISTANCE from the centre and MASS
    (units, BM, CAPACITY) in the order of keys, NUMBER (units, BM) of them. CROWDED (units): one
    where a list overflows or a row has no answer, and the tiles are to be used."""
    place = tl.program_id(0)
    bh, start_row, i = unit_rows(x, start + place, BM)
    first, last = load_limits(x, bh, i)
    row = tl.arange(0, BM)
    rows = ROWS + place.to(tl.int64) * 3 * BM + row
    centre, rest, low = tl.load(rows), tl.load(rows + BM), tl.load(rows + 2 * BM)
    q = load_query(x, bh, start_row, BM, D, WIDTH)
    keys = head_base(x.key, bh, x.heads, x.repeats)
    room = place.to(tl.int64) * BM * CAPACITY
    KEY, DISTANCE = KEY + room, DISTANCE + room
    if x.has_mass is not None:
        MASS += room
    number, lane = tl.zeros((BM,), tl.int32), tl.arange(0, BN)
    for c in range(tl.load(COUNT + place)):
        block = tl.load(LIST + place.to(tl.int64) * tl.cdiv(x.keys, BN) + c)
        j = block * BN
        s, m = tile(x, q, keys, bh, i, j, first, last, BN, D, WIDTH, PRECISION)
        d = s - centre[:, None]
        on = (d > low[:, None]).to(tl.int32)
        slot = number[:, None] + tl.cumsum(on, 1) - on
        fits = (on > 0) & (slot < CAPACITY)
        slot += row[:, None] * CAPACITY
        tl.store(KEY + slot, (j + lane)[None, :] + tl.zeros_like(slot), mask=fits)
        tl.store(DISTANCE + slot, d, mask=fits)
        if x.has_mass is not None:
            tl.store(MASS + slot, m, mask=fits)
        number += tl.sum(on, 1)
    tl.store(NUMBER + place.to(tl.int64) * BM + row, number)
    crowded = tl.max(((number > CAPACITY) | (rest != rest)).to(tl.int32))
    tl.store(CROWDED + place, crowded)


@triton.jit
def load_list(x, DISTANCE, MASS, at, there):
    """(distance from the centre, mass) of entries; others carry nothing."""
    d = tl.load(DISTANCE + at, mask=there, other=-INF)
    if x.has_mass is not None:
        return d, tl.load(MASS + at, mask=there, other=1.0)
    else:
        return d, 1.0


@triton.jit
def keep(SAVED, bh, i, there, centre, rest, u, size, queries, D: tl.constexpr,
         WIDTH: tl.constexpr):  # fmt: skip
    """What the backward pass reads: offset, size of the support, mean of values by slope."""
    row = bh.to(tl.int64) * queries + i
    tl.store(SAVED.offset + 2 * row, centre.to(tl.float64), mask=there)
    tl.store(SAVED.offset + 2 * row + 1, rest.to(tl.float64), mask=there)
    tl.store(SAVED.support_size + row, size, mask=there)
    d = tl.arange(0, WIDTH)
    tl.store(SAVED.mean + row[:, None] * D + d[None, :], u, mask=there[:, None] & (d < D)[None, :])


@triton.jit
def put(OUTPUT, bh, heads, i, there, rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of an operand."""
    d = tl.arange(0, WIDTH)
    base = head_base(OUTPUT, bh, heads, 1)
    to = base + i.to(tl.int64)[:, None] * OUTPUT.strides[2] + d[None, :]
    kind = OUTPUT.data.dtype.element_ty
    tl.store(to, rows.to(kind), mask=there[:, None] & (d < D)[None, :])


@triton.jit
def attend(x, ROWS, KEY, DISTANCE, MASS, NUMBER, CROWDED, OUTPUT, SAVED, start,
           DV: tl.constexpr, VALUE_WIDTH: tl.constexpr, BM: tl.constexpr, R: tl.constexpr,
           CAPACITY: tl.constexpr, STEPS: tl.constexpr, FAMILY: tl.constexpr):  # fmt: skip
    """Offset and output of R rows from their lists."""
    place, part = tl.program_id(0), tl.program_id(1)
    if tl.load(CROWDED + place) != 0:
        return
    bh, start_row, _ = unit_rows(x, start + place, BM)
    row = part * R + tl.arange(0, R)
    i = start_row + row
    eps = load_eps(x, bh, i, FAMILY)
    at = place.to(tl.int64) * BM + row
    number = tl.load(NUMBER + at)
    rows = ROWS + place.to(tl.int64) * 3 * BM + row
    centre, rest = tl.load(rows), tl.load(rows + BM)
    sink, sink_mass = sink_of(x, bh)
    of_sink = sink - centre
    slot = tl.arange(0, CAPACITY)
    there = slot[None, :] < number[:, None]
    d, m = load_list(x, DISTANCE, MASS, at[:, None] * CAPACITY + slot[None, :], there)
    k, going = 0, 1
    while (k < STEPS) & (going > 0):
        p, w = weigh(d - rest[:, None], eps[:, None], FAMILY)
        sink_p, sink_w = weigh(of_sink - rest, eps, FAMILY)
        total = tl.sum(p * m, 1) + sink_p * sink_mass
        slope = tl.sum(w * m, 1) + sink_w * sink_mass
        change = step(total, slope, eps, FAMILY)
        going = tl.max(moves_on(change, total, slope, eps, FAMILY).to(tl.int32))
        rest += change
        k += 1
    sink_p, sink_w = weigh(of_sink - rest, eps, FAMILY)
    size = (sink_p > 0).to(tl.int32)
    slope = sink_w * sink_mass
    o = tl.zeros((R, VALUE_WIDTH), tl.float32)
    u = tl.zeros((R, VALUE_WIDTH), tl.float32)
    values = head_base(x.value, bh, x.heads, x.repeats)
    column = tl.arange(0, VALUE_WIDTH)
    for c in range(tl.max(number)):
        entry = at * CAPACITY + c
        far, nu = load_list(x, DISTANCE, MASS, entry, c < number)
        of_value, of_slope = weigh(far - rest, eps, FAMILY)
        key = tl.load(KEY + entry, mask=c < number, other=0)
        wanted = (of_value > 0)[:, None] & (column < DV)[None, :]
        place_of = key.to(tl.int64)[:, None] * x.value.strides[2] + column[None, :]
        v = tl.load(values + place_of, mask=wanted, other=0.0).to(tl.float32)
        size += (of_value > 0).to(tl.int32)
        of_value, of_slope = of_value * nu, of_slope * nu
        slope += of_slope
        if x.dropout is not None:
            kept = survival(x, row_words(x, bh, i), key - first_keys(x, bh, i))
            of_value, of_slope = of_value * kept, of_slope * kept
        o += of_value[:, None] * v
        u += of_slope[:, None] * v
    put(OUTPUT, bh, x.heads, i, i < x.queries, o, DV, VALUE_WIDTH)
    if SAVED is not None:
        u = u / tl.where(slope > 0, slope, 1.0)[:, None]
        keep(SAVED, bh, i, i < x.queries, centre, rest, u, size, x.queries, DV, VALUE_WIDTH)
