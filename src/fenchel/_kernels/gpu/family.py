"""Weights from distances, and Newton's step, as `native/family.h` has them.

With eps = alpha - 1 and d the distance of a score from its row's offset, a key of mass nu weighs
nu y^(1/eps), where y = eps d; or y = 1 + eps d for gentle rows, eps <= 1/4. Offsets are kept as
`centre + rest`, the centre being a score: a difference of near scores is exact.
"""

import triton
import triton.language as tl

from fenchel._kernels.gpu.call import GENERAL as _GENERAL
from fenchel._kernels.gpu.call import RAMP as _RAMP
from fenchel._kernels.gpu.call import SQUARE as _SQUARE

GENERAL = tl.constexpr(_GENERAL)
SQUARE = tl.constexpr(_SQUARE)
RAMP = tl.constexpr(_RAMP)
INF = tl.constexpr(float("inf"))
LEAST = tl.constexpr(-3.4028234663852886e38)  # float32
TINY = tl.constexpr(1.1754943508222875e-38)
GENTLE = tl.constexpr(0.25)


@triton.jit
def log_one_plus(z):
    """log(1 + z), which a rounded 1 + z would spoil (Kahan): the quotient corrects it."""
    u = 1.0 + z
    return tl.where(u == 1.0, z, tl.log(u) * (z / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def exp_minus_one(z):
    """exp(z) - 1, in the same way."""
    u = tl.exp(z)
    inside = (u != 1.0) & (u > 0.0) & (u < INF)
    log_u = tl.log(tl.where(inside, u, 2.0))
    return tl.where(u == 1.0, z, tl.where(inside, (u - 1.0) * (z / log_u), u - 1.0))


@triton.jit
def tangent(z):
    """tanh"""
    e = exp_minus_one(-2.0 * tl.abs(z))
    t = -e / (e + 2.0)
    return tl.where(z < 0, -t, t)


@triton.jit
def weigh(d, eps, FAMILY: tl.constexpr):
    """Weight before its mass, and its derivative in the score."""
    if FAMILY == SQUARE:
        slope = tl.maximum(d, 0.0) * 0.5
        return slope * slope, slope
    elif FAMILY == RAMP:
        return tl.maximum(d, 0.0), tl.where(d > 0, 1.0, 0.0)
    else:
        there = d > LEAST
        z = eps * tl.where(there, d, 0.0)
        gentle = eps <= GENTLE
        y = tl.where(gentle, 1.0 + z, z)
        on = there & (y > TINY)
        y = tl.where(on, y, 1.0)
        log_y = tl.where(gentle, log_one_plus(tl.where(on & gentle, z, 0.0)), tl.log(y))
        log_p = tl.where(eps > 0, log_y / tl.where(eps > 0, eps, 1.0), d)
        p = tl.where(on, tl.exp(tl.where(on, log_p, 0.0)), 0.0)
        return p, p / y


@triton.jit
def is_strange(eps, FAMILY: tl.constexpr):
    """alpha is not between 1 and 2. On a device nobody asks that before."""
    if FAMILY == GENERAL:
        return ((eps >= 0) & (eps <= 1)) == 0
    else:
        return eps != eps  # never: a closed form has no eps


@triton.jit
def reach(eps, FAMILY: tl.constexpr):
    """From the offset down to the score that gets nothing."""
    if FAMILY != GENERAL:
        return tl.zeros_like(eps)
    else:
        gentle = tl.where(eps > 0, 1.0 / tl.where(eps > 0, eps, 1.0), INF)
        return tl.where(eps <= GENTLE, gentle, 0.0)


@triton.jit
def room(mass, eps, FAMILY: tl.constexpr):
    """How far below a key that carries everything alone the offset lies."""
    if FAMILY == SQUARE:
        return 2.0 / tl.sqrt(mass)
    elif FAMILY == RAMP:
        return 1.0 / mass
    else:
        log_mass = tl.log(mass)
        safe = tl.where(eps > 0, eps, 1.0)
        gentle = tl.where(eps > 0, exp_minus_one(-eps * log_mass) / safe, -log_mass)
        return tl.where(eps <= GENTLE, gentle, tl.exp(-eps * log_mass) / safe)


@triton.jit
def step(mass, slope, eps, FAMILY: tl.constexpr):
    """Newton's step for the norm mass^eps, which is convex in the offset: from the left it stays
    left. As eps goes to zero it becomes log sum exp, solved at once."""
    on = (mass > 0) & (slope > 0)
    mass, slope = tl.where(on, mass, 1.0), tl.where(on, slope, 1.0)
    if FAMILY == SQUARE:
        moved = 2.0 * (mass - tl.sqrt(mass))
    elif FAMILY == RAMP:
        moved = mass - 1.0
    else:
        log_mass = tl.log(mass)
        safe = tl.where(eps > 0, eps, 1.0)
        gain = tl.where(eps > 0, -exp_minus_one(-eps * log_mass) / safe, log_mass)
        moved = mass * gain
    return tl.where(on, moved / slope, 0.0)


@triton.jit
def moves_on(change, mass, slope, eps, FAMILY: tl.constexpr):
    """Whether another step can change the offset: the error after this one is of the order of its
    square, or of its power 1 / eps where it made a key leave the support."""
    if FAMILY == SQUARE:
        tolerance = 8.6e-5 + tl.zeros_like(eps)  # a quarter of the root of an ulp
    elif FAMILY == RAMP:
        tolerance = 3e-8 + tl.zeros_like(eps)
    else:
        tolerance = 0.25 * tl.exp(-15.942385 * tl.maximum(eps, 0.5))
    return (change > 0) & (change * slope > tolerance * mass)


@triton.jit
def advance(rest, mass, slope, eps, broken, FAMILY: tl.constexpr):
    """(the offsets after one of Newton's steps, whether another can change one). Rows that are
    broken stay where they are."""
    change = tl.where(broken, 0.0, step(mass, slope, eps, FAMILY))
    going = tl.max(moves_on(change, mass, slope, eps, FAMILY).to(tl.int32))
    return rest + change, going


@triton.jit
def log_slope(d, eps):
    """d log weight / d eps at fixed score and offset. For rows that are not gentle its part
    -1 / (eps^2 y) is left out: against a centred gradient it sums to zero."""
    gentle = eps <= GENTLE
    z = eps * d
    y = tl.where(gentle, 1.0, tl.maximum(z, TINY))
    edge = (1.0 - tl.log(y)) / (eps * eps)
    inner = tl.where(gentle & (z > -1.0), z, 0.0)
    near = tl.abs(inner) < 0.1
    # the series of z / (1 + z) - log(1 + z) over z^2
    series = inner * (6.0 / 7 - inner * (7.0 / 8 - inner * (8.0 / 9)))
    series = inner * (4.0 / 5 - inner * (5.0 / 6 - series))
    series = inner * (2.0 / 3 - inner * (3.0 / 4 - series))
    safe = tl.where(near, 1.0, inner)
    square = tl.where(near, 1.0, eps * eps)
    far = (safe / (1.0 + safe) - log_one_plus(safe)) / square
    return tl.where(gentle, tl.where(near, d * d * (series - 0.5), far), edge)
