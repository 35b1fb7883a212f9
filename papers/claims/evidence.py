"""What a claim computes: figures with the range they must, or must not, lie in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

Number = float | Tensor
Figure = Number | Iterable[Number]  # several: the one that is furthest off counts
IDENTITY = 1e-10  # of identities in float64
DIFFERENCES = 1e-6  # of derivatives against central differences
SLACK = 1e-12  # by which a bound may seem exceeded, from rounding


@dataclass(frozen=True)
class Check:
    """A figure and where the statement says that it lies. as_printed: of the statement as the paper
    has it, which this figure is to prove wrong. infinite: it may be infinite, that is the point."""

    what: str
    figure: float
    low: float
    high: float
    as_printed: bool = False
    infinite: bool = False

    @property
    def inside(self) -> bool:
        return self.low <= self.figure <= self.high  # False for NaN

    @property
    def bears_out(self) -> bool:
        """NaN proves nothing, in either direction; nor does infinity, which may be an overflow."""
        told = math.isfinite(self.figure) or (self.infinite and not math.isnan(self.figure))
        return told and self.inside != self.as_printed

    def range(self) -> str:
        """In words: <= 1e-10, 3 ± 0.05."""
        if math.isinf(self.low):
            return f"≤ {self.high:.4g}"
        if math.isinf(self.high):
            return f"≥ {self.low:.4g}"
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return f"{middle:.6g} ± {half:.2g}"


@dataclass(frozen=True)
class Curves:
    """A picture: named lines (x, y), numbers only. logarithmic: of "x" and "y", which."""

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    logarithmic: str = ""


@dataclass(frozen=True)
class Fields:
    """A picture: named maps, rows from bottom to top, all over the same rectangle."""

    title: str
    panels: Mapping[str, Sequence[Sequence[float]]]
    extent: tuple[float, float, float, float]  # left, right, bottom, top


@dataclass
class Evidence:
    """Given to a claim, which writes into it. The first check is the claim's figure.

    seed: the first of five. slow: search longer. results: folder of stored training runs.
    """

    seed: int = 0
    slow: bool = False
    results: Path | None = None
    checks: list[Check] = field(default_factory=list)
    correction: str = ""
    counterexample: str = ""
    notes: list[str] = field(default_factory=list)
    pictures: list[Curves | Fields] = field(default_factory=list)

    # ---- what a claim asks

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + 5)

    def generators(self) -> Iterable[torch.Generator]:
        """One for each seed."""
        return (torch.Generator().manual_seed(seed) for seed in self.seeds)

    def trials(self, quick: int, slow: int) -> int:
        return slow if self.slow else quick

    # ---- what it says

    def below(
        self, what: str, figure: Figure, bound: float = IDENTITY, *, infinite: bool = False
    ) -> None:
        """The statement holds: figure <= bound. Of several the largest counts, and NaN before it;
        Python's own max would lose it. infinite: -inf is an answer."""
        self.checks.append(Check(what, largest(figure), -math.inf, bound, infinite=infinite))

    def above(self, what: str, figure: Figure, bound: float, *, infinite: bool = False) -> None:
        """infinite: +inf is an answer."""
        self.checks.append(Check(what, smallest(figure), bound, math.inf, infinite=infinite))

    def near(self, what: str, figure: Number, expected: float, within: float) -> None:
        self.checks.append(Check(what, float(figure), expected - within, expected + within))

    def printed_below(self, what: str, figure: Figure, bound: float = IDENTITY) -> None:
        """The paper says figure <= bound, and that is false: the claim stands if it is not so."""
        self.checks.append(Check(what, largest(figure), -math.inf, bound, as_printed=True))

    def printed_above(self, what: str, figure: Figure, bound: float) -> None:
        self.checks.append(Check(what, smallest(figure), bound, math.inf, as_printed=True))

    def printed_near(self, what: str, figure: Number, expected: float, within: float) -> None:
        low, high = expected - within, expected + within
        self.checks.append(Check(what, float(figure), low, high, as_printed=True))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def draw(self, picture: Curves | Fields) -> None:
        self.pictures.append(picture)


def largest(figure: Figure) -> float:
    """Of all entries of all of them; NaN if there is one. None at all is an error."""
    return float(_joined(figure).max())


def smallest(figure: Figure) -> float:
    return float(_joined(figure).min())


def _joined(figure: Figure) -> Tensor:
    parts = [figure] if isinstance(figure, float | int | Tensor) else list(figure)
    flat = [torch.as_tensor(part, dtype=torch.float64).detach().reshape(-1) for part in parts]
    if not flat or not any(part.numel() for part in flat):
        raise ValueError("a check of no figures proves nothing")
    return torch.cat(flat)
