"""The derivative of the weights of rows, from the weights alone."""

from __future__ import annotations

import triton
import triton.language as tl

from fenchel._kernels.gpu.elementary import LEAST, power

# How weights p answer to scores.
SHARE = tl.constexpr(0)  # r = p^(1 - eps)
ROOT = tl.constexpr(1)  # the same at eps = 1/2
FLAT = tl.constexpr(2)  # the same at eps = 1
FREE = tl.constexpr(3)  # budget: keys that are neither empty nor full
NORM = tl.constexpr(4)  # r = p^(1 - eps) |p|^eps / eps, and what moves the norm is taken out


@triton.jit
def _response(p, eps, KIND: tl.constexpr):
    """How fast each weight moves, up to a factor of the row; zero off the support and for NaN."""
    if KIND == FREE:
        return tl.where((p > 0) & (p < 1), 1.0, 0.0)
    on = p > 0
    if KIND == FLAT:
        return tl.where(on, 1.0, 0.0)
    if KIND == ROOT:
        return tl.where(on, tl.sqrt(tl.where(on, p, 1.0)), 0.0)
    seen = p >= LEAST
    return tl.where(seen, power(tl.where(seen, p, 1.0), 1.0 - eps), 0.0)


@triton.jit
def _sums(p, g, eps, KIND: tl.constexpr):
    """Key by key: what the mean is the quotient of (NORM: the mean itself, and |p|^alpha)."""
    if KIND == NORM:
        on = p >= LEAST
        return tl.where(on, p * g, 0.0), tl.where(on, power(tl.where(on, p, 1.0), 1.0 + eps), 0.0)
    r = _response(p, eps, KIND)
    return tl.where(r > 0, r * g, 0.0), r  # a zero response silences an infinite gradient


@triton.jit
def _moves(p, g, mean, factor, eps, KIND: tl.constexpr):
    r = _response(p, eps, KIND)
    return tl.where(r > 0, factor * r * (g - mean), 0.0)


@triton.jit
def _load(weights, gradient, at, keys):
    on = at < keys
    return tl.load(weights + at, mask=on, other=0.0), tl.load(gradient + at, mask=on, other=0.0)


@triton.jit
def differentiate_rows(
    weights,
    gradient,
    slopes,
    keys,
    eps,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program per row: gradient of the weights to gradient of the scores. All (rows, keys)."""
    first = tl.program_id(0).to(tl.int64) * keys
    weights += first
    gradient += first
    lane = tl.arange(0, BLOCK)
    p, g = _load(weights, gradient, lane, keys)
    above, below = _sums(p, g, eps, KIND)
    if not WHOLE:
        for start in range(BLOCK, keys, BLOCK):
            p, g = _load(weights, gradient, start + lane, keys)
            a, b = _sums(p, g, eps, KIND)
            above += a
            below += b
    mean, size = tl.sum(above, 0), tl.sum(below, 0)
    factor = size * 0 + 1.0
    taken = size * 0
    some = tl.where(size > 0, size, 1.0)
    if KIND == NORM:
        factor = power(some, eps / (1.0 + eps)) / eps
        moves = tl.zeros([BLOCK], tl.float32)
        for start in range(0, keys, BLOCK):
            p, g = _load(weights, gradient, start + lane, keys)
            moves += _moves(p, g, mean, factor, eps, KIND)
        taken = tl.sum(moves, 0)
    else:
        mean = mean / some
    for start in range(0, keys, BLOCK):
        p, g = _load(weights, gradient, start + lane, keys)
        moved = _moves(p, g, mean, factor, eps, KIND)
        if KIND == NORM:
            moved -= tl.where(p > 0, p, 0.0) * taken
        tl.store(slopes + first + start + lane, moved, mask=start + lane < keys)
