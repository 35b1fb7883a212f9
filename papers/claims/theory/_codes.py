"""Tokens at the words of a binary code, and how far attention's outputs move with one more at zero.

Tokens: the origin and r c for the M words c in {-1, 1}^d of a linear code, G = exp(-|x - y|^2).
Distances are 2 r sqrt(w) between words that differ in w places, and r sqrt(d) to the origin. Moved
by h along an axis, the origin changes the mean distance of tokens by h / N, and the output i by
h dy_i: locally W1(mu A, nu A) / W1(mu, nu) is the sum of all |dy_i|_1. At a word,

    dy = p (e - 2 m c_e r),    p the weight of the origin there, m the output,

since the logarithm of the origin's weight changes by 2 c_e r. Flipping signs by a word maps the
code to itself: it is enough to look at the word of ones, where m = r g (1, ..., 1) if no coordinate
is preferred. At the origin itself, dy = (1 - q) e + 2 Cov e, with Cov = q r^2 I if any two
coordinates are independent, q the weight of the code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[int, int]  # how many words differ from one of them in so many places

GOLAY: Weights = {0: 1, 8: 759, 12: 2576, 16: 759, 24: 1}
GOLD: Weights = {0: 1, 12: 112, 16: 286, 20: 112, 32: 1}  # of `gold_code`
_BCH = {0: 1, 16: 2604, 18: 10752, 22: 216576, 24: 291648, 26: 1645056, 28: 888832, 30: 4419072}
BCH: Weights = {**_BCH, **{64 - w: count for w, count in _BCH.items()}, 32: 1828134}


def reed_muller(m: int) -> Weights:
    """Of RM(2, m), by the number of quadratic forms of each rank (Sloane and Berlekamp, 1970)."""
    counts = {0: 1, 2**m: 1}
    for half in range(1, m // 2 + 1):
        above = math.prod(2 ** (m - i) - 1 for i in range(2 * half))
        below = math.prod(4**i - 1 for i in range(1, half + 1))
        forms = 2 ** (half * (half + 1)) * above // below
        for sign in (-1, 1):
            counts[2 ** (m - 1) + sign * 2 ** (m - 1 - half)] = forms
    middle = 2 ** (1 + m + m * (m - 1) // 2) - sum(counts.values())
    return {**counts, 2 ** (m - 1): middle}


def rate(length: int, weights: Weights, square: float) -> float:
    """The sum of all |dy_i|_1, for r^2 = square."""
    origin = math.exp(-length * square)
    masses = {w: count * math.exp(-4 * w * square) for w, count in weights.items()}
    total = sum(masses.values()) + origin
    g = sum(mass * (1 - 2 * w / length) for w, mass in masses.items()) / total
    pull = 2 * square * g
    of_words = sum(weights.values()) * origin / total * (abs(1 - pull) + (length - 1) * abs(pull))
    code = sum(weights.values()) * origin
    return of_words + (1 + 2 * square * code) / (1 + code)


def best(length: int, weights: Weights) -> tuple[float, float]:
    """The best r^2, by refining a grid, and the rate there."""
    low, high = 0.01, 1.0
    for _ in range(12):
        squares = np.linspace(low, high, 41)
        place = int(np.argmax([rate(length, weights, square) for square in squares]))
        low, high = squares[max(0, place - 1)], squares[min(40, place + 1)]
    return float(squares[place]), rate(length, weights, float(squares[place]))


def dual_words(length: int, weights: Weights, places: int) -> int:
    """How many words with so many ones the dual code has (MacWilliams); an integer for a code."""
    total = 0
    for w, count in weights.items():
        signed = sum(
            (-1) ** i * math.comb(w, i) * math.comb(length - w, places - i)
            for i in range(places + 1)
        )
        total += count * signed
    words, rest = divmod(total, sum(weights.values()))
    return words if rest == 0 else -1


# ---- words


def gold_code() -> Tensor:
    """A [32, 9, 12] code, (512, 32) of -1 and 1: c + Tr(b x) + Tr(a x^3) over the field of 32
    elements, a in a space of dimension three."""
    field = _Field(5, 0b100101)
    return words(torch.tensor([[1] * 32, *field.traces(1, 5), *field.traces(3, 3)]))


def bch_weights() -> Weights:
    """Of the extended BCH code [64, 24, 16], by counting all 2^24 words."""
    field = _Field(6, 0b1000011)
    rows = [[1] * 64, *(row for power in (1, 3, 5, 9, 21) for row in field.traces(power, 6))]
    basis = _independent([sum(bit << k for k, bit in enumerate(row)) for row in rows])
    code = np.zeros(1, dtype=np.uint64)
    for word in basis:
        code = np.concatenate([code, code ^ np.uint64(word)])
    ones = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)
    weights = ones[code.view(np.uint8)].reshape(-1, 8).sum(-1, dtype=np.uint8)
    levels, counts = np.unique(weights, return_counts=True)
    return dict(zip(levels.tolist(), counts.tolist(), strict=True))


class _Field:
    """The field of 2^m elements, numbers whose bits are coefficients; of a primitive polynomial."""

    def __init__(self, m: int, polynomial: int) -> None:
        self.m, self.powers = m, [1]
        for _ in range(2**m - 2):
            twice = self.powers[-1] << 1
            self.powers.append(twice ^ polynomial if twice >> m else twice)
        self.place = {value: k for k, value in enumerate(self.powers)}

    def times(self, x: int, y: int) -> int:
        return self.powers[(self.place[x] + self.place[y]) % len(self.powers)] if x and y else 0

    def power(self, x: int, k: int) -> int:
        return self.powers[self.place[x] * k % len(self.powers)] if x else 0

    def trace(self, x: int) -> int:
        total = 0
        for _ in range(self.m):
            total, x = total ^ x, self.times(x, x)
        return total

    def traces(self, power: int, count: int) -> list[list[int]]:
        """The words Tr(a x^power) for a = 1, 2, 4, ...: so many of them."""
        points = range(2**self.m)
        scales = [1 << k for k in range(count)]
        return [[self.trace(self.times(a, self.power(x, power))) for x in points] for a in scales]


def _independent(rows: list[int]) -> list[int]:
    """A basis of what the rows span, bits added modulo two."""
    basis: list[int] = []
    for row in rows:
        for known in basis:
            row = min(row, row ^ known)
        if row:
            basis.append(row)
    return basis


def golay_code() -> Tensor:
    """The extended Golay code, (4096, 24) of -1 and 1."""
    polynomial = [1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1]  # divides t^23 + 1
    rows = torch.zeros(12, 24, dtype=torch.long)
    for k in range(12):
        rows[k, k : k + 12] = torch.tensor(polynomial)
    rows[:, 23] = rows[:, :23].sum(-1) % 2
    return words(rows)


def quadratic_code(m: int) -> Tensor:
    """RM(2, m): all polynomials of degree two in m bits, (2^k, 2^m) of -1 and 1."""
    bits = torch.tensor(list(product((0, 1), repeat=m))).mT
    pairs = [bits[i] * bits[j] for i in range(m) for j in range(i)]
    return words(torch.stack([torch.ones(2**m, dtype=torch.long), *bits, *pairs]))


def five_bit_code() -> Tensor:
    """Another [32, 9] code, (512, 32) of -1 and 1: sums of 1, five bits and three quadratic forms,
    one of which has rank two, and so four words of weight 8."""
    x1, x2, x3, x4, x5 = bits = torch.tensor(list(product((0, 1), repeat=5))).mT
    forms = [x1 * x3 ^ x2 * x4, x1 * x2 ^ x3 * x5, x2 * x3]
    return words(torch.stack([torch.ones(32, dtype=torch.long), *bits, *forms]))


def words(basis: Tensor) -> Tensor:
    """All sums of the rows (k, d) of zeros and ones, as (2^k, d) of 1 and -1."""
    all_words = torch.zeros(1, basis.shape[1], dtype=torch.long)
    for row in basis:
        all_words = torch.cat([all_words, all_words ^ row])
    return 1.0 - 2.0 * all_words.double()


def counted(code: Tensor) -> Weights:
    """How many words have so many -1."""
    levels, counts = (code < 0).sum(-1).unique(return_counts=True)
    return dict(zip(levels.tolist(), counts.tolist(), strict=True))
