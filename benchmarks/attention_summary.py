"""From times to what is said about them: ratios, growth, tables. Takes the JSON of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.attention_methods import PLAIN, SDPA

Entry = dict[str, Any]

_FIT_FROM = 512  # tokens: below, a call is mostly its fixed cost


class Row(NamedTuple):
    """What is told apart in a table: everything but n and the direction."""

    method: str
    deviation: float
    variant: str

    @property
    def ours(self) -> bool:
        return self.method.startswith("fl ")

    def __str__(self) -> str:
        parts = [self.method]
        if self.ours:
            parts.append(f"deviation {self.deviation:g}")
        if self.variant != PLAIN:
            parts.append(self.variant)
        return ", ".join(parts)


def row_of(entry: Entry) -> Row:
    return Row(entry["method"], entry["deviation"], entry["variant"])


def rows(results: Sequence[Entry]) -> list[Row]:
    """Every row but the baseline: ours first; a method's rows together, by their deviation."""
    distinct = dict.fromkeys(row_of(entry) for entry in results if entry["method"] != SDPA.name)
    methods = list(dict.fromkeys(row.method for row in distinct))

    def place(row: Row) -> tuple[bool, int, bool, float]:
        return not row.ours, methods.index(row.method), row.variant != PLAIN, row.deviation

    return sorted(distinct, key=place)


def timed(seconds: Sequence[float], baseline: float | None) -> Entry:
    """Median, extremes and the ratios to a baseline in seconds; nothing where nothing ran."""
    entry: Entry = {"seconds": None, "ratio": None, "rounds": len(seconds)}
    if not seconds:
        return entry
    middle, low, high = median(seconds), min(seconds), max(seconds)
    entry |= {"seconds": middle, "seconds_min": low, "seconds_max": high}
    if baseline is not None:
        entry |= {
            "ratio": middle / baseline,
            "ratio_min": low / baseline,
            "ratio_max": high / baseline,
        }
    return entry


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """b of the least-squares line log(seconds) = a + b log(size)."""
    if len(sizes) < 2 or len(set(sizes)) < 2:
        raise ValueError(f"a slope needs two different sizes, got {list(sizes)}")
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def growth(results: Sequence[Entry]) -> list[Entry]:
    """How the time of each row grows with the number of tokens, from 512 on."""
    points_by_row: dict[tuple[Row, str], list[tuple[int, float]]] = {}
    for entry in results:
        if entry["seconds"] is not None and entry["n"] >= _FIT_FROM:
            points = points_by_row.setdefault((row_of(entry), entry["direction"]), [])
            points.append((entry["n"], entry["seconds"]))
    fitted = []
    for (row, direction), points in points_by_row.items():
        sizes, seconds = zip(*sorted(points), strict=True)
        if len(sizes) > 1:
            slope = exponent(sizes, seconds)
            named = {**row._asdict(), "direction": direction, "exponent": slope}
            fitted.append({**named, "sizes": list(sizes)})
    return fitted


def sizes_of(results: Sequence[Entry]) -> list[int]:
    return sorted({entry["n"] for entry in results})


def cell(results: Sequence[Entry], row: Row, n: int, direction: str) -> str:
    """A ratio with three digits, or why there is none."""
    for entry in results:
        if row_of(entry) == row and (entry["n"], entry["direction"]) == (n, direction):
            return _why(entry["error"]) if entry["error"] else digits(entry["ratio"])
    return "–"


def _why(error: str) -> str:
    known = {"ModuleNotFoundError": "absent", "NotImplementedError": "n/a"}
    return known.get(error.partition(":")[0], "fails")


def digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def notes(results: Sequence[Entry]) -> list[str]:
    """Each thing that did not run, once, with the reason."""
    failed = {f"{e['method']}, {e['direction']}": e["error"] for e in results if e["error"]}
    return [f"{what}: {why}" for what, why in failed.items()]


def short(direction: str) -> str:
    return {"forward": "fwd", "forward+backward": "fwd+bwd"}[direction]
