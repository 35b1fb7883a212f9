"""From times to what is said about them: ratios, growth, tables. Takes the JSON of a run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.attention_methods import PADDED, PLAIN, SDPA
from benchmarks.maps import DIRECTIONS

Entry = dict[str, Any]

_FIT_FROM = 512  # tokens: below, a call is mostly its fixed cost
_SHOWN = (128, 1024, 4096, 16384)  # columns of the README
_MIB = 2**20


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
    found = dict.fromkeys(row_of(entry) for entry in results if entry["method"] != SDPA.name)
    methods = list(dict.fromkeys(row.method for row in found))

    def place(row: Row) -> tuple[bool, int, bool, float]:
        return not row.ours, methods.index(row.method), row.variant != PLAIN, row.deviation

    return sorted(found, key=place)


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
    found: dict[tuple[Row, str], list[tuple[int, float]]] = {}
    for entry in results:
        if entry["seconds"] is not None and entry["n"] >= _FIT_FROM:
            points = found.setdefault((row_of(entry), entry["direction"]), [])
            points.append((entry["n"], entry["seconds"]))
    fitted = []
    for (row, direction), points in found.items():
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


# ---- the README


def readme_table(results: Entry) -> str:
    """The Markdown that the README shows, from the JSON of `python -m benchmarks attention`."""
    entries = results["results"]
    measured = sizes_of(entries)
    sizes = [n for n in _SHOWN if n in measured] or measured
    header = ["time ÷ SDPA", *(f"{short(d)} n={n}" for d in DIRECTIONS for n in sizes)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for row in filter(_told, rows(entries)):
        cells = [cell(entries, row, n, d) for d in DIRECTIONS for n in sizes]
        if set(cells) != {"–"}:
            lines.append([_label(row), *cells])
    lines.append(["SDPA itself, ms", *_milliseconds(entries, sizes)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    sentences = [_memory_sentence(results["memory"]), _growth_sentence(results["growth"])]
    prose = textwrap.fill(" ".join(filter(None, sentences)), 100, break_on_hyphens=False)
    return f"{table}\n\n{prose}".rstrip()


def short(direction: str) -> str:
    return {"forward": "fwd", "forward+backward": "fwd+bwd"}[direction]


def _told(row: Row) -> bool:
    """A large deviation flatters: it is told once. So are the masks, at alpha = 1.5."""
    if not row.ours or row.method == "fl Tsallis(1.5)":
        return True
    return row.deviation <= 1 and row.variant == PLAIN


def _label(row: Row) -> str:
    code = row.ours or row.method.startswith("entmax.")
    name = f"`{row.method.removeprefix('fl ')}`" if code else row.method
    rest = str(row).removeprefix(row.method)
    return name + rest.replace(f", {PADDED}", ", a quarter padding")


def _milliseconds(entries: Sequence[Entry], sizes: Sequence[int]) -> list[str]:
    found = {
        (e["n"], e["direction"]): 1e3 * e["seconds"]
        for e in entries
        if e["method"] == SDPA.name and e["variant"] == PLAIN and e["seconds"] is not None
    }
    keys = [(n, direction) for direction in DIRECTIONS for n in sizes]
    return [digits(found[key]) if key in found else "–" for key in keys]


def _memory_sentence(memory: Sequence[Entry]) -> str:
    parts = []
    for entry in memory:
        if entry["ratio"] is not None and entry["method"] != SDPA.name:
            size = f"{entry['extra_bytes'] / _MIB:.0f} MiB at n = {entry['n']}"
            name = _label(Row(entry["method"], 1.0, PLAIN)).partition(",")[0]
            parts.append(f"{name} {size}, {digits(entry['ratio'])} of SDPA's")
    if not parts:
        return ""
    return f"Peak memory beyond the inputs, forward+backward: {'; '.join(parts)}."


def _growth_sentence(fitted: Sequence[Entry]) -> str:
    wanted = ("fl Tsallis(1.5)", SDPA.name)
    parts = [
        f"{entry['exponent']:.2f} for {_label(row_of(entry)).partition(',')[0]}"
        for entry in fitted
        if entry["method"] in wanted
        and (entry["deviation"], entry["variant"]) == (1.0, PLAIN)
        and entry["direction"] == "forward+backward"
    ]
    if not parts:
        return ""
    return f"Time grows as n to the power {' and '.join(parts)} (forward+backward, deviation 1)."
