"""The threshold of a row from its candidates in all splits, and the weights that follow.

Candidates are read in parts of EB: entries of lists first, then keys of splits that are used whole,
where there are any. See `decode.py` for what stands in a `Found`.
"""

import triton
import triton.language as tl

from fenchel._kernels.gpu.bound import MARGIN
from fenchel._kernels.gpu.decode import entry_of, row_of, sinks_of
from fenchel._kernels.gpu.family import INF, advance, is_strange, room, weigh
from fenchel._kernels.gpu.scores import load_eps, load_limits, masses


@triton.jit
def load_part(x, found, bh, i, place, part, first, last, splits, SPLIT: tl.constexpr,
              CAPACITY: tl.constexpr, EB: tl.constexpr):  # fmt: skip
    """(whether it is of a list, place there, whether there is one, score, mass) of a row's
    candidates: those of its lists first, then those of splits that are used whole."""
    lists = tl.cdiv(splits * CAPACITY, EB)
    of_list = part < lists
    at = tl.where(of_list, part, part - lists) * EB + tl.arange(0, EB)
    key = at
    s = tl.full((EB,), -INF, tl.float32)
    if of_list:
        there, key = entry_of(found, place, at, splits, CAPACITY)
        s = tl.load(found.score + place * splits * CAPACITY + at, mask=there, other=-INF)
    else:
        split = at // SPLIT
        number = tl.load(found.number + place * splits + split, mask=split < splits, other=0)
        there = (number > CAPACITY) & (at >= first) & (at < last)
        s = tl.load(found.whole + place * splits * SPLIT + at, mask=there, other=-INF)
    m = tl.full((EB,), 1.0, tl.float32)
    if x.has_mass is not None:
        m = masses(x, bh, i, key)
    return of_list, at, there, s[None, :], m[None, :]


@triton.jit
def count_parts(found, place, splits, SPLIT: tl.constexpr, CAPACITY: tl.constexpr,
                EB: tl.constexpr):  # fmt: skip
    """How many parts of a row's candidates there are: keys count where some split is used whole."""
    most = 0
    for part in range(tl.cdiv(splits, EB)):
        split = part * EB + tl.arange(0, EB)
        number = tl.load(found.number + place * splits + split, mask=split < splits, other=0)
        most = tl.maximum(most, tl.max(number))
    keys = tl.where(most > CAPACITY, tl.cdiv(splits * SPLIT, EB), 0)
    return tl.cdiv(splits * CAPACITY, EB) + keys


@triton.jit
def begin_search(x, found, bh, i, place, eps, parts, first, last, splits, SPLIT: tl.constexpr,
                 CAPACITY: tl.constexpr, EB: tl.constexpr, FAMILY: tl.constexpr):  # fmt: skip
    """(largest score, an offset from there that is not too high, the sink's distance and mass,
    whether the row has no answer)"""
    top = tl.full((1,), -INF, tl.float32)
    strange = tl.zeros((1,), tl.int32)
    for part in range(parts):
        _, _, _, s, _ = load_part(
            x, found, bh, i, place, part, first, last, splits, SPLIT, CAPACITY, EB
        )
        strange = tl.maximum(strange, tl.max(tl.where(s < INF, 0, 1), 1))
        top = tl.maximum(top, tl.max(tl.where(s < INF, s, -INF), 1))
    sink, sink_mass = sinks_of(x, bh, i)
    broken = (strange > 0) | ((sink < INF) == 0) | is_strange(eps, FAMILY)
    sink = tl.where(sink < INF, sink, -INF)
    of_keys, top = top, tl.maximum(top, sink)
    centre = tl.where(top > -INF, top, 0.0)
    bounds = found.bounds + place * 3 + tl.arange(0, 1)
    rest = tl.load(bounds) - centre + tl.load(bounds + 1)
    rest = tl.maximum(rest, sink - centre - room(sink_mass, eps, FAMILY))
    if x.has_mass is not None:
        for part in range(parts):
            _, _, _, s, m = load_part(
                x, found, bh, i, place, part, first, last, splits, SPLIT, CAPACITY, EB
            )
            rooms = room(tl.where(m > 0, m, 1.0), eps[:, None], FAMILY)
            d = tl.where(s < INF, s, -INF) - centre[:, None]
            rest = tl.maximum(rest, tl.max(d - rooms, 1))
    else:
        alone = of_keys - centre - room(tl.full((1,), 1.0, tl.float32), eps, FAMILY)
        rest = tl.maximum(rest, alone)
    rest = tl.where(top > -INF, rest, 0.0)
    rest -= MARGIN * (1.0 + tl.abs(rest))
    return centre, rest, sink - centre, sink_mass, broken


@triton.jit
def put_weights(x, found, bh, i, place, eps, parts, centre, rest, broken, first, last, splits,
                SPLIT: tl.constexpr, CAPACITY: tl.constexpr, EB: tl.constexpr,
                FAMILY: tl.constexpr):  # fmt: skip
    """`weight` beside `key`, `whole_weight` beside `whole`; `broken` of the row."""
    for part in range(parts):
        of_list, at, there, s, m = load_part(
            x, found, bh, i, place, part, first, last, splits, SPLIT, CAPACITY, EB
        )
        p, _ = weigh(s - centre[:, None] - rest[:, None], eps[:, None], FAMILY)
        p = tl.where(broken[:, None], 0.0, p * m)
        if of_list:
            entries = found.weight + place * splits * CAPACITY + at
            tl.store(entries[None, :], p, mask=there[None, :])
        else:
            keys = found.whole_weight + place * splits * SPLIT + at
            tl.store(keys[None, :], p, mask=there[None, :])
    tl.store(found.broken + place + tl.arange(0, 1), broken.to(tl.int32))


@triton.jit
def search(x, found, splits, BM: tl.constexpr, SPLIT: tl.constexpr, CAPACITY: tl.constexpr,
           EB: tl.constexpr, STEPS: tl.constexpr, FAMILY: tl.constexpr):  # fmt: skip
    """Newton's search over a row's candidates, then their weights."""
    unit, row = tl.program_id(0), tl.program_id(1)
    bh, i, place = row_of(x, unit, row, BM)
    if tl.max(i) >= x.queries:
        return
    first, last = load_limits(x, bh, i)
    eps = load_eps(x, bh, i, FAMILY)
    parts = count_parts(found, place, splits, SPLIT, CAPACITY, EB)
    centre, rest, of_sink, sink_mass, broken = begin_search(
        x, found, bh, i, place, eps, parts, first, last, splits, SPLIT, CAPACITY, EB, FAMILY
    )
    k, going = 0, 1
    while (k < STEPS) & (going > 0):
        sink_p, sink_w = weigh(of_sink - rest, eps, FAMILY)
        total, slope = sink_p * sink_mass, sink_w * sink_mass
        for part in range(parts):
            _, _, _, s, m = load_part(
                x, found, bh, i, place, part, first, last, splits, SPLIT, CAPACITY, EB
            )
            p, w = weigh(s - centre[:, None] - rest[:, None], eps[:, None], FAMILY)
            total += tl.sum(p * m, 1)
            slope += tl.sum(w * m, 1)
        rest, going = advance(rest, total, slope, eps, broken, FAMILY)
        k += 1
    put_weights(
        x, found, bh, i, place, eps, parts, centre, rest, broken, first, last, splits, SPLIT,
        CAPACITY, EB, FAMILY,
    )  # fmt: skip
