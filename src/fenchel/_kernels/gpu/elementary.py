"""Elementary functions of float32 for kernels.

The hardware's logarithm is coarse near one: 2^-22 absolutely, of a result near zero. What stands
here is right to a few ulps, and the same numbers come out of a device and of the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(1.1754944e-38)  # the smallest normal float32
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_ROOT_HALF = tl.constexpr(0x3F3504F3)  # the bits of sqrt(1/2)


@triton.jit
def _log2_near_one(x):
    """log2(1 + x) for |x| < 0.42: 2 artanh(s), an odd series whose terms fall by s^2 < 0.03."""
    s = x / (2.0 + x)
    z = s * s
    tail = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))
    return (2.0 * LOG2_E) * (s + s * tail)


@triton.jit
def log2(x):
    """For normal positive numbers: 2^k (1 + f) with 1 + f between sqrt(1/2) and sqrt(2)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32) + _log2_near_one(fraction - 1.0)


@triton.jit
def log2_1p(x):
    """log2(1 + x) for x > -1, right next to zero too."""
    near = tl.abs(x) < 0.29
    return tl.where(
        near, _log2_near_one(tl.where(near, x, 0.0)), log2(tl.where(near, 1.0, 1.0 + x))
    )


@triton.jit
def power(x, exponent):
    """x^exponent for normal positive x."""
    return tl.exp2(exponent * log2(x))


@triton.jit
def expm1_ratio(x):
    """(exp(x) - 1) / x, right next to zero too."""
    near = tl.abs(x) < 0.5
    small = tl.where(near, x, 0.0)
    series = 1 / 720 + small * (1 / 5040 + small * (1 / 40320))
    series = 1 / 6 + small * (1 / 24 + small * (1 / 120 + small * series))
    large = tl.where(near, 1.0, x)
    return tl.where(
        near, 1.0 + small * (0.5 + small * series), (tl.exp2(large * LOG2_E) - 1) / large
    )
