"""The exact estimates of one attention layer: time and iterations of four methods, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import dual_methods as methods
from benchmarks import machine, tables
from benchmarks.attention_rounds import (
    Advance,
    Neighbours,
    Rounds,
    Samples,
    Thunk,
    disturbance,
    interleave,
    part,
)
from benchmarks.dual_methods import Layer, Outcome, of_model
from benchmarks.tables import Listing

__all__ = ["FULL", "QUICK", "Report", "Sweep", "listings", "of_model", "run"]

Entry = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What is measured; layer None: a random one of these sizes."""

    layer: Layer | None = None
    tokens: int = 128
    width: int = 384
    heads: int = 12
    reliabilities: tuple[float, ...] = (1.0, 10.0, 100.0)
    gap: float = 1e-8
    rounds: Rounds = field(default_factory=lambda: Rounds(1, 5, 30.0))
    seed: int = 0
    quick: bool = False  # sizes that show that it runs, and little of the times


FULL = Sweep()
QUICK = Sweep(
    tokens=32, width=64, heads=4, reliabilities=(1.0, 10.0), rounds=Rounds(1, 3, 2.0), quick=True
)


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    layer: Layer
    results: tuple[Entry, ...]
    others: float | None = None  # share of the processors that other processes had

    @property
    def warning(self) -> str:
        small = (
            "Quick sizes: these times are not those of a layer in use." if self.sweep.quick else ""
        )
        return " ".join(note for note in (disturbance(self.others), small) if note)

    def as_json(self) -> Entry:
        templates, evidence = self.layer.templates, self.layer.evidence
        return {
            "bench": "dual",
            "settings": {
                "source": self.layer.source,
                "templates": list(templates.shape),
                "rows": len(evidence),
                "squared_diameter": self.layer.squared_diameter,
                "gap": self.sweep.gap,
                "seed": self.sweep.seed,
                "threads": torch.get_num_threads(),
                "dtype": "float64",
            },
            "machine": machine.summary(),
            "warning": self.warning,
            "others": self.others,
            "results": list(self.results),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it. advance: (what is measured, share of the whole that was just done)."""
    layer = sweep.layer
    if layer is None:
        layer = methods.synthetic(sweep.tokens, sweep.width, sweep.heads, sweep.seed)
    neighbours, results = Neighbours(), []
    for reliability in sweep.reliabilities:
        done = part(advance, f"reliability {reliability:g}", 1 / len(sweep.reliabilities))
        results += _times(sweep, layer, reliability, done)
    return Report(sweep, layer, tuple(results), neighbours.share())


def _times(
    sweep: Sweep, layer: Layer, reliability: float, advance: Callable[[float], object]
) -> list[Entry]:
    outcomes: list[list[Outcome]] = [[] for _ in methods.METHODS]
    makers = [
        partial(_thunk, method, layer, reliability, sweep.gap, kept)
        for method, kept in zip(methods.METHODS.values(), outcomes, strict=True)
    ]
    samples = interleave(makers, sweep.rounds, advance)
    return [
        _entry(name, reliability, taken, kept)
        for name, taken, kept in zip(methods.METHODS, samples, outcomes, strict=True)
    ]


def _thunk(
    method: methods.Method, layer: Layer, reliability: float, gap: float, kept: list[Outcome]
) -> Thunk:
    def thunk() -> None:
        kept[:] = [method(layer, reliability, gap)]

    return thunk


def _entry(name: str, reliability: float, samples: Samples, kept: list[Outcome]) -> Entry:
    return {
        "method": name,
        "reliability": reliability,
        "seconds": median(samples.seconds) if samples.seconds else None,
        "rounds": len(samples.seconds),
        "iterations": kept[0].iterations if kept else None,
        "largest_gap": kept[0].gap if kept else None,
        "error": samples.error,
    }


def listings(document: Entry) -> list[Listing]:
    """From the JSON of a run."""
    settings = document["settings"]
    n, d = settings["templates"]
    result_tables = []
    for reliability in dict.fromkeys(e["reliability"] for e in document["results"]):
        entries = [e for e in document["results"] if e["reliability"] == reliability]
        (ours,) = (e["seconds"] for e in entries if e["method"] == methods.OURS)
        rows = []
        for e in entries:
            ratio = "–" if not (ours and e["seconds"]) else f"{e['seconds'] / ours:.3g}"
            shown = e["error"] or tables.error(e["largest_gap"])
            time = tables.seconds(e["seconds"])
            rows.append((e["method"], time, ratio, str(e["iterations"]), shown))
        title = (
            f"reliability {reliability:g}: {settings['rows']} rows on {n} templates of {d} "
            f"coordinates ({settings['source']}), to a gap of {settings['gap']:g}"
        )
        header = ("method", "time", f"÷ {methods.OURS}", "iterations", "largest gap")
        result_tables.append(Listing(title, header, rows))
    return result_tables
