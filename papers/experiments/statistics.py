"""What a few seeds say: means and differences with 95 % intervals of Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

ENOUGH = 3  # runs, to say anything


@dataclass(frozen=True)
class Estimate:
    """mean ± half, over `count` runs; half is None for one run, which tells no interval."""

    mean: float
    half: float | None
    count: int

    def text(self, percent: bool = True) -> str:
        scale = 100 if percent else 1
        spread = "" if self.half is None else f" ± {self.half * scale:.2f}"
        return f"{self.mean * scale:.2f}{spread}"

    @property
    def beyond_zero(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.half is not None and abs(self.mean) > self.half

    @property
    def shows(self) -> bool:
        """Whether it shows a difference: with two runs an interval may leave zero out by chance."""
        return self.count >= ENOUGH and self.beyond_zero


def estimate(values: Sequence[float]) -> Estimate:
    from scipy.stats import t

    count = len(values)
    if not count:
        raise ValueError("an estimate needs at least one value")
    if not all(math.isfinite(value) for value in values):
        told = ", ".join(f"{value:g}" for value in values)
        raise ValueError(f"an estimate needs finite values, got {told}; make that run again")
    if count == 1:
        return Estimate(values[0], None, 1)
    half = float(t.ppf(0.975, count - 1)) * stdev(values) / math.sqrt(count)
    return Estimate(fmean(values), half, count)


def paired(scores: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """own − base over the seeds that both have; None where there is none."""
    seeds = sorted(scores.keys() & base.keys())
    return estimate([scores[seed] - base[seed] for seed in seeds]) if seeds else None
