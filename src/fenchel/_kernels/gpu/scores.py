"""Scores of one tile, and what kernels need to know of their rows: shared by all of them.

`x` is a `Call` (`call.py`). A unit is a block of rows of one head: units count row blocks first,
then heads, then batches. In a tile rows `i` stand along one axis and keys `j` along the other, so
that both broadcast, and so does what rows or keys have: (rows, 1) and (1, keys), or (1, rows) and
(keys, 1).
"""

import triton
import triton.language as tl

from fenchel._kernels.gpu.family import GENERAL, INF, LEAST, TINY, tangent


@triton.jit
def unit_rows(x, unit, BM: tl.constexpr):
    """(batch and head, first row, rows) of a unit."""
    blocks = tl.cdiv(x.queries, BM)
    first = unit % blocks * BM
    return unit // blocks, first, first + tl.arange(0, BM)


@triton.jit
def head_base(operand, bh, heads, repeats):
    """Where the head's tokens begin."""
    b, h = bh // heads, bh % heads // repeats
    return operand.data + b.to(tl.int64) * operand.strides[0] + h.to(tl.int64) * operand.strides[1]


@triton.jit
def load_tokens(base, stride, first, n, ROWS: tl.constexpr, D: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """Rows from `first` on of a (n, D) matrix, zeros beyond it, padded to WIDTH columns."""
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = (first + row < n)[:, None]
    if D < WIDTH:
        there = there & (d < D)[None, :]
    base += (tl.full((), 0, tl.int64) + first) * stride
    return tl.load(base + (row[:, None] * stride + d[None, :]), mask=there, other=0.0)


@triton.jit
def load_query(x, bh, first, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    return load_head(x, x.query, bh, first, ROWS, D, WIDTH)


@triton.jit
def load_head(x, operand, bh, first, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a head, of an operand with one token per query."""
    base = head_base(operand, bh, x.heads, 1)
    return load_tokens(base, operand.strides[2], first, x.queries, ROWS, D, WIDTH)


@triton.jit
def limit_base(x, bh):
    b, h = bh // x.heads, bh % x.heads
    strides = x.limits.strides
    return x.limits.data + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_limits(x, bh, i):
    """The keys first .. last - 1 that each row sees; a row beyond the end sees none."""
    base = limit_base(x, bh)
    first = tl.load(base + i, mask=i < x.queries, other=0)
    return first, tl.load(base + x.queries + i, mask=i < x.queries, other=0)


@triton.jit
def key_blocks(x, first, last, BN: tl.constexpr):
    """Blocks of keys from .. to - 1 that some of these rows sees."""
    seen = last > first
    start = tl.min(tl.where(seen, first, x.keys))
    stop = tl.max(tl.where(seen, last, 0))
    return tl.minimum(start, stop) // BN, tl.cdiv(stop, BN)


@triton.jit
def load_eps(x, bh, i, FAMILY: tl.constexpr):
    """alpha - 1 of the rows; where the family knows it, a number that nobody looks at."""
    if FAMILY == GENERAL:
        row = bh.to(tl.int64) * x.queries + i
        return tl.load(x.eps + row, mask=i < x.queries, other=1.0)
    else:
        return tl.full(i.shape, 1.0, tl.float32)


@triton.jit
def add(score, term):
    """Sums of finite numbers stay finite, so that -inf alone hides a key, whatever it holds."""
    total = score + term
    total = tl.where(total < LEAST, tl.minimum(score, LEAST), total)
    return tl.where(term < LEAST, -INF, total)


@triton.jit
def dense_at(x, dense, bh, i, j):
    """Entries of a view (batch, head, query, key)."""
    b, h = bh // x.heads, bh % x.heads
    strides = dense.strides
    base = dense.data + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    place = i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
    there = (i < x.queries) & (j < x.keys)
    return tl.load(base + place, mask=there, other=0)


@triton.jit
def table_base(x, table, bh):
    b, h = bh // x.heads, bh % x.heads
    return table.data + b.to(tl.int64) * table.strides[0] + h.to(tl.int64) * table.strides[1]


@triton.jit
def at_position(x, table, bh, i, j):
    """Entries by relative position."""
    zero = tl.load(limit_base(x, bh) + 2 * x.queries + i, mask=i < x.queries, other=0)
    place = zero + j
    there = (place >= 0) & (place < table.size) & (i < x.queries)
    return tl.load(table_base(x, table, bh) + place, mask=there, other=0.0)


@triton.jit
def at_key(x, table, bh, j):
    """Entries by key."""
    return tl.load(table_base(x, table, bh) + j, mask=j < x.keys, other=0.0)


@triton.jit
def cap_slope(x, product):
    """d capped / d product"""
    t = tangent(product / x.softcap)
    return 1.0 - t * t


@triton.jit
def masses(x, bh, i, j):
    """The base measure of a tile; too small a mass is none, as in `native/scores.h`."""
    mass = (i * 0 + j * 0).to(tl.float32) + 1.0
    if x.mass is not None:
        mass = dense_at(x, x.mass, bh, i, j).to(tl.float32)
    if x.log_mass is not None:
        mass = tl.exp(dense_at(x, x.log_mass, bh, i, j).to(tl.float32))
    if x.relative_log_mass is not None:
        mass = mass * tl.exp(at_position(x, x.relative_log_mass, bh, i, j))
    if x.of_key_log_mass is not None:
        mass = mass * tl.exp(at_key(x, x.of_key_log_mass, bh, j))
    return tl.where(mass < 4 * TINY, 0.0, mass)


@triton.jit
def finish(x, product, bh, i, j, first, last):
    """Scores from scaled products: softcap, biases, masks; what a row does not see is -inf."""
    score = product
    if x.softcap is not None:
        score = x.softcap * tangent(score / x.softcap)
    if x.relative is not None:
        score = add(score, at_position(x, x.relative, bh, i, j))
    if x.of_key is not None:
        score = add(score, at_key(x, x.of_key, bh, j))
    if x.bias is not None:
        bias = dense_at(x, x.bias, bh, i, j).to(tl.float32)
        score = add(score, tl.where(bias < LEAST, -INF, bias * x.bias_scale))
    if x.mask is not None:
        score = tl.where(dense_at(x, x.mask, bh, i, j) != 0, score, -INF)
    return tl.where((j >= first) & (j < last), score, -INF)


@triton.jit
def products(x, q, k, PRECISION: tl.constexpr):
    return tl.dot(q, tl.trans(k), input_precision=PRECISION) * x.scale


@triton.jit
def tile(x, q, base, bh, i, key, first, last, BN: tl.constexpr, D: tl.constexpr,
         WIDTH: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """(scores, masses) of the rows i, the first axis, and BN keys from `key` on; masses are one
    without a base."""
    k = load_tokens(base, x.key.strides[2], key, x.keys, BN, D, WIDTH)
    rows, columns = i[:, None], (key + tl.arange(0, BN))[None, :]
    product = products(x, q, k, PRECISION)
    score = finish(x, product, bh, rows, columns, first[:, None], last[:, None])
    if x.has_mass is not None:
        mass = masses(x, bh, rows, columns)
        return tl.where(mass > 0, score, -INF), mass
    else:
        return score, 1.0


@triton.jit
def sink_of(x, bh):
    """(score, mass) of the null key; without one, a score that carries nothing."""
    if x.sink is not None:
        score = tl.load(x.sink.score + bh)
        mass = tl.full((), 1.0, tl.float32)
        if x.sink.mass is not None:
            mass = tl.load(x.sink.mass + bh)
        return score, mass
    else:
        return tl.full((), -INF, tl.float32), tl.full((), 1.0, tl.float32)


@triton.jit
def mix(word):
    """The finaliser of `_kernels/dropout.py`."""
    word = (word ^ (word >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def row_words(x, bh, i):
    """The row's half of dropout's hash."""
    number = (bh.to(tl.int64) * x.dropout.queries + x.dropout.first + i).to(tl.uint32)
    seed = tl.load(x.dropout.seed).to(tl.uint32)
    return mix(number * tl.full((), 0x9E3779B1, tl.uint32) + seed)


@triton.jit
def first_keys(x, bh, i):
    """Of the sequence of each row: dropout counts keys from there."""
    return tl.load(limit_base(x, bh) + 3 * x.queries + i, mask=i < x.queries, other=0)


@triton.jit
def survival(x, words, keys):
    """What dropout multiplies weights by; words and keys (counted in their sequence) broadcast."""
    word = mix(words ^ (keys.to(tl.uint32) * tl.full((), 0x85EBCA77, tl.uint32)))
    kept = word >= tl.full((), x.dropout.limit, tl.uint32)
    return tl.where(kept, x.dropout.factor, 0.0)


@triton.jit
def tile_survival(x, bh, i, j):
    return survival(x, row_words(x, bh, i), j - first_keys(x, bh, i))


@triton.jit
def cleaned(rows):
    """(rows with zeros where they are not finite, NaN beside each row that was not). A weight of
    zero then leaves them out, and other weights take the NaN on."""
    wide = rows.to(tl.float32)
    spoil = tl.sum(wide * 0.0, 1)
    return tl.where(tl.abs(wide) < INF, wide, 0.0).to(rows.dtype), spoil


@triton.jit
def expect(weights, rows, total, PRECISION: tl.constexpr):
    """total + weights @ rows"""
    return tl.dot(weights.to(rows.dtype), rows, total, input_precision=PRECISION)
