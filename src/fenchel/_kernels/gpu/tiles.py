"""Large supports: the active tiles, with tensor cores, for the units whose lists overflow."""

import triton
import triton.language as tl

from fenchel._kernels.gpu.family import advance, weigh
from fenchel._kernels.gpu.lists import keep, put
from fenchel._kernels.gpu.scores import (
    cleaned,
    expect,
    head_base,
    key_blocks,
    load_eps,
    load_limits,
    load_query,
    load_tokens,
    sink_of,
    tile,
    tile_survival,
    unit_rows,
    whole_blocks,
)


@triton.jit
def weigh_piece(x, q, keys, blocks, c, bh, i, first, last, whole, partial, eps, centre, rest,
                D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
                FAMILY: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Of piece c of the listed tiles: weights, their slopes, masses; its block, its first key."""
    PIECE: tl.constexpr = BN // SPLIT
    block = tl.load(blocks + c // SPLIT)
    key = block * BN + c % SPLIT * PIECE
    inside = ((block >= whole) & (block < partial)).to(tl.int32)
    s, m = tile(x, q, keys, bh, i, key, first, last, inside, PIECE, D, WIDTH, PRECISION)
    p, w = weigh(s - centre[:, None] - rest[:, None], eps[:, None], FAMILY)
    return p, w, m, block, key


@triton.jit
def search_tiles(x, q, keys, blocks, count, bh, i, first, last, whole, partial, eps, centre, rest,
                 broken, D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
                 SPLIT: tl.constexpr, STEPS: tl.constexpr, FAMILY: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Newton's steps from `rest`, a pass over the listed tiles each."""
    sink, sink_mass = sink_of(x, bh)
    of_sink = sink - centre
    k, going = 0, 1
    while (k < STEPS) & (going > 0):
        sink_p, sink_w = weigh(of_sink - rest, eps, FAMILY)
        total, slope = sink_p * sink_mass, sink_w * sink_mass
        for c in range(count * SPLIT):
            p, w, m, _, _ = weigh_piece(
                x, q, keys, blocks, c, bh, i, first, last, whole, partial, eps, centre, rest,
                D, WIDTH, BN, SPLIT, FAMILY, PRECISION,
            )  # fmt: skip
            total += tl.sum(p * m, 1)
            slope += tl.sum(w * m, 1)
        rest, going = advance(rest, total, slope, eps, broken, FAMILY)
        k += 1
    return rest


@triton.jit
def attend_tiles(x, ROWS, LIST, COUNT, CROWDED, ODD, OUTPUT, SAVED, start,
                 D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr,
                 VALUE_WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 SPLIT: tl.constexpr, STEPS: tl.constexpr, FAMILY: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Offset and output of a unit's rows: Newton's steps over its tiles, then their values.
    A tile is worked on in SPLIT pieces, which fit the registers."""
    place = tl.program_id(0)
    if tl.load(CROWDED + place) == 0:
        return
    bh, start_row, i = unit_rows(x, start + place, BM)
    first, last = load_limits(x, bh, i)
    eps = load_eps(x, bh, i, FAMILY)
    rows = ROWS + place.to(tl.int64) * 3 * BM + tl.arange(0, BM)
    centre, rest = tl.load(rows), tl.load(rows + BM)
    broken, rest = rest != rest, tl.where(rest == rest, rest, 0.0)
    sink, sink_mass = sink_of(x, bh)
    q = load_query(x, bh, start_row, BM, D, WIDTH)
    keys = head_base(x.key, bh, x.heads, x.repeats)
    blocks = LIST + place.to(tl.int64) * tl.cdiv(x.keys, BN)
    count = tl.load(COUNT + place)
    begin, end = key_blocks(x, first, last, BN)
    whole, partial = whole_blocks(first, last, begin, end, BN)
    odd = ODD + bh // x.repeats * tl.cdiv(x.keys, BN)
    rest = search_tiles(
        x, q, keys, blocks, count, bh, i, first, last, whole, partial, eps, centre, rest, broken,
        D, WIDTH, BN, SPLIT, STEPS, FAMILY, PRECISION,
    )  # fmt: skip
    o, u = tl.zeros((BM, VALUE_WIDTH), tl.float32), tl.zeros((BM, VALUE_WIDTH), tl.float32)
    sink_p, sink_w = weigh(sink - centre - rest, eps, FAMILY)
    size, slope = (sink_p > 0).to(tl.int32), sink_w * sink_mass
    values = head_base(x.value, bh, x.heads, x.repeats)
    for c in range(count * SPLIT):
        p, w, m, block, key = weigh_piece(
            x, q, keys, blocks, c, bh, i, first, last, whole, partial, eps, centre, rest,
            D, WIDTH, BN, SPLIT, FAMILY, PRECISION,
        )  # fmt: skip
        on = p > 0
        size += tl.sum(on.to(tl.int32), 1)
        p, w = p * m, w * m
        slope += tl.sum(w, 1)
        if x.dropout is not None:
            kept = tile_survival(x, bh, i[:, None], (key + tl.arange(0, BN // SPLIT))[None, :])
            p, w = p * kept, w * kept
        v = load_tokens(values, x.value.strides[2], key, x.keys, BN // SPLIT, DV, VALUE_WIDTH)
        if tl.load(odd + block) != 0:
            v, spoil = cleaned(v)
            p, w = tl.where(on, p + spoil[None, :], 0.0), tl.where(on, w + spoil[None, :], 0.0)
        o = expect(p, v, o, PRECISION)
        if SAVED is not None:
            u = expect(w, v, u, PRECISION)
            if v.dtype != tl.float32:  # what rounding took, for every derivative goes by u
                u = expect(w - w.to(v.dtype).to(tl.float32), v, u, PRECISION)
    nan = float("nan")
    put(OUTPUT, bh, x.heads, i, i < x.queries, tl.where(broken[:, None], nan, o), DV, VALUE_WIDTH)
    if SAVED is not None:
        u = u / tl.where(slope > 0, slope, 1.0)[:, None]
        rest = tl.where(broken, nan, rest)
        size = tl.where(broken, 1, size)
        keep(SAVED, bh, i, i < x.queries, centre, rest, u, size, x.queries, DV, VALUE_WIDTH)
