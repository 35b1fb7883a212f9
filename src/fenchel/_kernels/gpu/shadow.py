"""The shadow of a cache on a GPU: each key in one byte per component, and how far it is from that.

A key k of a page is c + s y + r. The centre c belongs to the page, y are whole numbers from -127 to
127, s is a step and |r| <= rho; s and rho are bfloat16, rounded up. A query q, times the scale, is
a x + e with a power of two a and whole x = 128 h + l, so that the products h . y and l . y of bytes
are exact. With Cauchy and Schwarz, and |y| <= 127 sqrt(d),

    |q . k - q . c - s a (x . y)|  <=  s |e| 127 sqrt(d) + |q| rho.

What rounding adds is below eta |q| (|c| + s |y| + rho), eta = (d + 16) 2^-22:
- a sum of d products in float32, in any order, also where each step cuts instead of rounding as
  tensor cores do, is wrong by less than d 2^-23 of the sum of the magnitudes. That goes for the
  score that `products` or `rescore` computes, |q| |k| at most, and, with half of it, for q . c.
- q times the scale, x . y as float32, and the few sums after it: less than 2^-23 each, ten of them.
Norms are computed of vectors whose largest component is one, and rounded up; 1e-30 covers what is
too small for float32. A bound that is no number says nothing: the key is scored.

Of a page of one head, in bytes: the centre, its norm (one number in 64 bytes), a word for each key
with s in its upper half and rho in the lower one, and y, key by key.
"""

import triton
import triton.language as tl

from fenchel._kernels.gpu.bound import keep_better
from fenchel._kernels.gpu.decode import put_lanes, split_blocks
from fenchel._kernels.gpu.family import INF, TINY
from fenchel._kernels.gpu.paging import PAGE, page_of
from fenchel._kernels.gpu.scores import (
    finish,
    load_eps,
    load_limits,
    load_query,
    load_tokens,
    masses,
    unit_rows,
)

ULP = tl.constexpr(2.0**-23)
LARGE = tl.constexpr(1e30)  # a key with a larger component has no shadow
SMALL = tl.constexpr(1e-30)
UPPER_HALF = tl.constexpr(-65536)  # of a word


# ---- writing


@triton.jit
def norm_above(rows, D: tl.constexpr):
    """No less than the Euclidean norm of each row, at any scale; NaN where a component is."""
    most = tl.max(tl.abs(rows), 1)
    unit = rows / tl.where(most > 0, most, 1.0)[:, None]
    return most * tl.sqrt(tl.sum(unit * unit, 1)) * (1.0 + (D + 16) * ULP) + TINY


@triton.jit
def bfloat_above(values):
    """The least bfloat16 that is not below these numbers >= 0, as float32 in 32 bits."""
    return (values.to(tl.int32, bitcast=True) + 0xFFFF) & UPPER_HALF


@triton.jit
def written_part(x, b, page):
    """(first, last + 1 key that was added to the page, whether the page gets a new centre): when
    the number of its keys reaches a power of two, so that keys that come one by one are written
    twice on average. page: counted in the sequence."""
    length = tl.load(x.lengths + b)
    first = tl.maximum(length - page * PAGE, 0)
    last = tl.minimum(length + x.tokens - page * PAGE, PAGE)
    due = first == 0
    for power in tl.static_range(4, 10):
        due = due | ((first < (1 << power)) & (last >= (1 << power)))
    return first, last, due


@triton.jit
def shadow_page(part, page, h):
    return part.data + h.to(tl.int64) * part.strides[0] + page.to(tl.int64) * part.strides[1]


@triton.jit
def page_keys(x, page, h, first, last, BN: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Keys of a page from `first` on, in float32."""
    key = x.key.data + page.to(tl.int64) * x.key.strides[0] + h.to(tl.int64) * x.key.strides[1]
    return load_tokens(key, x.key.strides[2], first, last, BN, D, WIDTH).to(tl.float32)


@triton.jit
def centre(x, shadow, D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr):
    """The mean of a page's keys, without those that are large or no numbers, and its norm."""
    b, h = tl.program_id(0), tl.program_id(1)
    place = tl.load(x.lengths + b) // PAGE + tl.program_id(2)
    _, last, due = written_part(x, b, place)
    if (last <= 0) | (due == 0):
        return
    page = page_of(x.pages, b, place * PAGE)
    total = tl.zeros((1, WIDTH), tl.float32)
    count = 0.0
    for block in range(tl.cdiv(last, BN)):
        i = block * BN + tl.arange(0, BN)
        k = page_keys(x, page, h, block * BN, last, BN, D, WIDTH)
        strange = tl.max(tl.where(tl.abs(k) < LARGE, 0, 1), 1) > 0
        usable = (strange == 0) & (i < last)
        total += tl.sum(tl.where(usable[:, None], k, 0.0), 0)[None, :]
        count += tl.sum(usable.to(tl.float32), 0)
    mean = total / tl.maximum(count, 1.0)
    d = tl.arange(0, WIDTH)
    to = shadow_page(shadow.centre, page, h) + d[None, :]
    tl.store(to, mean, mask=(d < D)[None, :])
    tl.store(shadow_page(shadow.norm, page, h) + tl.arange(0, 1), norm_above(mean, D))


@triton.jit
def quantise(x, shadow, D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr):
    """Bytes and words of the keys that were added, or of all keys of a page with a new centre."""
    b, h = tl.program_id(0), tl.program_id(1)
    place = tl.load(x.lengths + b) // PAGE + tl.program_id(2) // (PAGE // BN)
    first, last, due = written_part(x, b, place)
    first = tl.where(due, 0, first)
    begin = tl.program_id(2) % (PAGE // BN) * BN
    i = begin + tl.arange(0, BN)
    on = (i >= first) & (i < last)
    if tl.max(on.to(tl.int32)) == 0:
        return
    page = page_of(x.pages, b, place * PAGE)
    d = tl.arange(0, WIDTH)
    c = tl.load(shadow_page(shadow.centre, page, h) + d, mask=d < D, other=0.0)
    far = page_keys(x, page, h, begin, last, BN, D, WIDTH) - c[None, :]
    most = tl.max(tl.abs(far), 1)
    strange = tl.max(tl.where(tl.abs(far) < LARGE, 0, 1), 1) > 0
    fits = (strange == 0) & (most > SMALL)
    bits = bfloat_above(tl.where(fits, most, 1.0) * ((1.0 + 1e-6) / 127))
    step = bits.to(tl.float32, bitcast=True)
    y = tl.floor(tl.where(fits[:, None], far, 0.0) / step[:, None] + 0.5)
    y = tl.minimum(tl.maximum(y, -127.0), 127.0)
    rest = far / step[:, None] - y
    # The division, within two roundings of up to 127, and the difference k - c are wrong by
    # less than 2^-21 of the largest component.
    left = step * norm_above(tl.where(fits[:, None], rest, 0.0), D)
    root = tl.sqrt(tl.full((), D, tl.float32)) * (1.0 + 1e-6)
    left = tl.where(fits, left, most) + most * root * tl.where(fits, 4 * ULP, 1.0 + 4 * ULP)
    left = tl.where(strange, INF, left * (1.0 + 1e-6) + 1e-36)
    rho = bfloat_above(left)
    word = tl.where(fits, bits, 0) | ((rho >> 16) & 0xFFFF)
    tl.store(shadow_page(shadow.words, page, h) + i, word, mask=on)
    to = shadow_page(shadow.bytes, page, h) + i[:, None] * shadow.width + d[None, :]
    tl.store(to, y.to(tl.int8), mask=on[:, None] & (d < shadow.width)[None, :])


@triton.jit
def store(x, D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, VALUE_WIDTH: tl.constexpr,
          BN: tl.constexpr):  # fmt: skip
    """New keys and values behind those of their sequences."""
    b, h = tl.program_id(0), tl.program_id(1)
    t = tl.program_id(2) * BN + tl.arange(0, BN)
    there = t < x.tokens
    place = tl.load(x.lengths + b) + t
    number = x.pages.numbers + b.to(tl.int64) * x.pages.chunks + place // PAGE
    page = tl.load(number, mask=there, other=0).to(tl.int64)
    copy_tokens(x.new_key, x.key, b, h, t, page, place % PAGE, x.tokens, BN, D, WIDTH)
    copy_tokens(x.new_value, x.value, b, h, t, page, place % PAGE, x.tokens, BN, DV, VALUE_WIDTH)


@triton.jit
def copy_tokens(new, to, b, h, t, page, row, tokens, BN: tl.constexpr, D: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    source = new.data + b.to(tl.int64) * new.strides[0] + h.to(tl.int64) * new.strides[1]
    d = tl.arange(0, WIDTH)
    values = load_tokens(source, new.strides[2], tl.program_id(2) * BN, tokens, BN, D, WIDTH)
    target = to.data + page * to.strides[0] + h.to(tl.int64) * to.strides[1] + row * to.strides[2]
    mask = (t < tokens)[:, None] & (d < D)[None, :]
    tl.store(target[:, None] + d[None, :], values, mask=mask)


# ---- reading


@triton.jit
def whole_query(q, D: tl.constexpr):
    """(h, l, a, |q|, |e|, whether it can be used) of the rows of q: q = a (128 h + l) + e."""
    most = tl.max(tl.abs(q), 1)
    usable = (most > 1e-15) & (most < 1e15) & (tl.max(tl.where(q == q, 0, 1), 1) == 0)
    bits = tl.where(usable, most, 1.0) * ((1.0 + 1e-6) / 16256)
    power = (bits.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    a = power.to(tl.float32, bitcast=True)  # a power of two: a x is exact
    q = tl.where(usable[:, None], q, 0.0)
    x = tl.floor(q / a[:, None] + 0.5)
    high = tl.floor((x + 64.0) / 128.0)
    rest = q - a[:, None] * x
    norm, rest = norm_above(q, D), norm_above(rest, D)
    return high.to(tl.int8), (x - 128.0 * high).to(tl.int8), a, norm, rest, usable


@triton.jit
def byte_products(x, y, BYTES: tl.constexpr):
    """x @ y of bytes as int32. Without products of bytes: numbers up to 127 are exact in float16,
    and so are sums of up to 1,040 of their products in float32, below 2^24."""
    if BYTES:
        return tl.dot(x, y, out_dtype=tl.int32)
    else:
        return tl.dot(x.to(tl.float16), y.to(tl.float16), out_dtype=tl.float32).to(tl.int32)


@triton.jit
def shadow_bounds(shadow, q, page, h, i, last, D: tl.constexpr, WIDTH: tl.constexpr,
                  BYTES: tl.constexpr):  # fmt: skip
    """(above, below) every score <q, k> of the rows q, times the scale, and keys i of a page."""
    high, low, a, norm, rest, usable = whole_query(q, D)
    d = tl.arange(0, WIDTH)
    c = tl.load(shadow_page(shadow.centre, page, h) + d, mask=d < D, other=0.0)
    centre_norm = tl.load(shadow_page(shadow.norm, page, h))
    bytes_at = shadow_page(shadow.bytes, page, h) + i[:, None] * shadow.width + d[None, :]
    there = i < last
    y = tl.load(bytes_at, mask=there[:, None] & (d < shadow.width)[None, :], other=0)
    word = tl.load(shadow_page(shadow.words, page, h) + i, mask=there, other=0)
    step = (word & UPPER_HALF).to(tl.float32, bitcast=True)[None, :]
    rho = (word << 16).to(tl.float32, bitcast=True)[None, :]
    y = tl.trans(y)
    product = byte_products(high, y, BYTES) * 128 + byte_products(low, y, BYTES)
    eta = (D + 16) * 2 * ULP
    longest = 127.0 * tl.sqrt(tl.full((), D, tl.float32)) * (1.0 + 1e-6)
    of_step = (rest + eta * norm) * longest
    half = step * of_step[:, None] + rho * (norm * (1.0 + eta))[:, None]
    half = (half + (eta * norm * centre_norm + SMALL)[:, None]) * (1.0 + 1e-6)
    middle = tl.sum(q * c[None, :], 1)[:, None] + step * (a[:, None] * product.to(tl.float32))
    says = usable[:, None] & (middle + half < INF) & (middle - half > -INF)
    return tl.where(says, middle + half, INF), tl.where(says, middle - half, -INF)


@triton.jit
def finish_bounds(x, bound, other, side, bh, i, j, first, last):
    """The scores of `finish` from bounds of the products. side: 1 above, -1 below, what `other`,
    that says nothing, is on that side."""
    score = finish(x, bound, bh, i[:, None], j, first[:, None], last[:, None], 0)
    if x.softcap is not None:  # tanh as it is computed may fall where it should rise
        score += side * (4e-6 * x.softcap + 4 * ULP * tl.abs(score))
    return tl.where((bound == other) & (score > -INF), other, score)


@triton.jit
def scan_shadow(x, pages, shadow, found, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, SPLIT: tl.constexpr, FAMILY: tl.constexpr,
                BYTES: tl.constexpr):  # fmt: skip
    """As `scan`, but `upper` is a bound of the scores, and lanes hold lower bounds of them."""
    unit, split = tl.program_id(0), tl.program_id(1)
    bh, start, i = unit_rows(x, unit, BM)
    first, last = load_limits(x, bh, i)
    eps = load_eps(x, bh, i, FAMILY)
    q = load_query(x, bh, start, BM, D, WIDTH)
    q = q.to(tl.float32) * x.scale
    rows = unit.to(tl.int64) * BM + tl.arange(0, BM)
    upper = found.upper + rows[:, None] * tl.num_programs(1) * SPLIT
    score = tl.full((BM, BN), -INF, tl.float32)
    alone = tl.full((BM, BN), -INF, tl.float32)
    mass = tl.full((BM, BN), 1.0, tl.float32)
    begin, end = split_blocks(x, first, last, split, BN, SPLIT)
    if begin < end:
        page = page_of(pages, bh // x.heads, split * SPLIT)
        seen = tl.max(last)
        for block in range(begin, end):
            j = (block * BN + tl.arange(0, BN))[None, :]
            place = block * BN + tl.arange(0, BN) - split * SPLIT // PAGE * PAGE
            stop = seen - split * SPLIT // PAGE * PAGE
            above, below = shadow_bounds(
                shadow, q, page, bh % x.heads, place, stop, D, WIDTH, BYTES
            )
            above = finish_bounds(x, above, INF, 1.0, bh, i, j, first, last)
            below = finish_bounds(x, below, -INF, -1.0, bh, i, j, first, last)
            below = tl.where(below < INF, below, -INF)
            m = 1.0
            if x.has_mass is not None:
                m = masses(x, bh, i[:, None], j)
                above, below = tl.where(m > 0, above, -INF), tl.where(m > 0, below, -INF)
            tl.store(upper + j, above, mask=(i < x.queries)[:, None])
            score, alone, mass = keep_better(x, score, alone, mass, below, m, eps, FAMILY)
    put_lanes(x, found, rows, split, score, mass, BN)
