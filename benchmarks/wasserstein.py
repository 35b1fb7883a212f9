"""Wasserstein distances: by sorting, by assignment and between bounds, against POT, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import extras, machine, tables
from benchmarks.attention_rounds import (
    Advance,
    Neighbours,
    Rounds,
    Samples,
    Thunk,
    interleave,
    part,
)
from benchmarks.tables import Listing
from fenchel.measures.distances import wasserstein1
from fenchel.measures.empirical import Empirical
from fenchel.measures.entropic import entropic_wasserstein1

__all__ = ["FULL", "OURS", "POT", "QUICK", "Report", "Sweep", "listings", "run"]

Entry = dict[str, Any]
OURS, BOUNDS, POT = "fl wasserstein1", "fl entropic_wasserstein1", "POT emd2"
_PIVOTS = 10_000_000  # POT's own default is too few for the larger sizes


@dataclass(frozen=True)
class Sweep:
    """What is measured: numbers of atoms a case, and the dimension off the line."""

    line: tuple[int, ...] = (500, 2000)
    plane: tuple[int, ...] = (100, 500)
    bounds: int = 500
    batch: int = 64
    small: int = 16
    dim: int = 2
    rounds: Rounds = field(default_factory=lambda: Rounds(5, 9, 20.0))
    seed: int = 0


FULL = Sweep()
QUICK = Sweep(line=(50, 200), plane=(20, 60), bounds=50, batch=8, rounds=Rounds(3, 3, 2.0))


class Distance(NamedTuple):
    """Values of a batch, and by how much they may be off, relative to the exact ones."""

    value: Tensor
    error: float = 0.0


Method = Callable[[Empirical, Empirical], Distance]


class Case(NamedTuple):
    name: str
    n: int
    mu: Empirical
    nu: Empirical
    methods: dict[str, Method]


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    results: tuple[Entry, ...]
    others: float | None = None  # share of the processors that other processes had

    def as_json(self) -> Entry:
        return {
            "bench": "wasserstein",
            "settings": {
                "dim": self.sweep.dim,
                "batch": self.sweep.batch,
                "seed": self.sweep.seed,
                "threads": torch.get_num_threads(),
                "dtype": "float64",
            },
            **machine.circumstances(self.others),
            "results": list(self.results),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it. advance: (what is measured, share of the whole that was just done)."""
    all_cases = cases(sweep)
    neighbours, results = Neighbours(), []
    for case in all_cases:
        done = part(advance, case.name, 1 / len(all_cases))
        results += _times(case, sweep.rounds, done)
    return Report(sweep, tuple(results), neighbours.share())


def cases(sweep: Sweep) -> list[Case]:
    """Two clouds each, the second moved by a half."""
    g = torch.Generator().manual_seed(sweep.seed)
    exact: dict[str, Method] = {POT: _pot, OURS: _ours}
    all_cases = []
    for n in sweep.line:
        all_cases.append(Case("line, even weights", n, *_clouds(g, n, 1, even=True), exact))
        all_cases.append(Case("line, weights", n, *_clouds(g, n, 1), exact))
    all_cases += [
        Case("assignment", n, *_clouds(g, n, sweep.dim, even=True), exact) for n in sweep.plane
    ]
    bounds = {**exact, BOUNDS: _bounds}
    all_cases.append(Case("bounds", sweep.bounds, *_clouds(g, sweep.bounds, sweep.dim), bounds))
    for d, where in ((1, "line"), (sweep.dim, "assignment")):
        clouds = _clouds(g, sweep.small, d, even=True, batch=sweep.batch)
        all_cases.append(Case(f"batch, {where}", sweep.small, *clouds, exact))
    return all_cases


def _clouds(
    g: torch.Generator, n: int, d: int, *, even: bool = False, batch: int = 1
) -> tuple[Empirical, Empirical]:
    clouds = []
    for shift in (0.0, 0.5):
        points = shift + torch.randn(batch, n, d, generator=g, dtype=torch.float64)
        weights = torch.rand(batch, n, generator=g, dtype=torch.float64)
        clouds.append(Empirical(points) if even else Empirical.of_masses(points, weights))
    return clouds[0], clouds[1]


# ---- the methods, all with the cost |x - y|_2


def _ours(mu: Empirical, nu: Empirical) -> Distance:
    return Distance(wasserstein1(mu, nu, 2))


def _bounds(mu: Empirical, nu: Empirical) -> Distance:
    bounds = entropic_wasserstein1(mu, nu, 2)
    return Distance(bounds.upper, float((bounds.error / bounds.upper).max()))


def _pot(mu: Empirical, nu: Empirical) -> Distance:
    """One after the other, as it has no batches."""
    ot = extras.load("ot")
    operands = zip(mu.points, nu.points, mu.rows(), nu.rows(), strict=True)
    values = []
    for x, y, a, b in ((each.numpy() for each in four) for four in operands):
        cost = ot.dist(x, y, "euclidean")
        values.append(float(ot.emd2(a.copy(), b.copy(), cost, numItermax=_PIVOTS)))
    return Distance(torch.tensor(values, dtype=torch.float64))


# ---- times


def _times(case: Case, rounds: Rounds, advance: Callable[[float], object]) -> list[Entry]:
    distances: dict[str, list[Distance]] = {name: [] for name in case.methods}
    makers = [partial(_thunk, case, name, distances[name]) for name in case.methods]
    samples = interleave(makers, rounds, advance)
    (exact,) = distances[OURS]
    return [
        _entry(case, name, taken, distances[name], exact)
        for name, taken in zip(case.methods, samples, strict=True)
    ]


def _thunk(case: Case, name: str, kept: list[Distance]) -> Thunk:
    def thunk() -> None:
        kept[:] = [case.methods[name](case.mu, case.nu)]

    return thunk


def _entry(case: Case, name: str, samples: Samples, kept: list[Distance], exact: Distance) -> Entry:
    off = (kept[0].value - exact.value).abs() / exact.value if kept else None
    return {
        "case": case.name,
        "n": case.n,
        "batch": len(case.mu.points),
        "method": name,
        "seconds": median(samples.seconds) if samples.seconds else None,
        "rounds": len(samples.seconds),
        "value": float(kept[0].value.mean()) if kept else None,
        "off": None if off is None else float(off.max()),
        "proven": kept[0].error if kept else None,
        "error": samples.error,
    }


def listings(document: Entry) -> list[Listing]:
    """From the JSON of a run: one table, a row for each case and method."""
    rows = []
    for e in document["results"]:
        case = (e["case"], e["n"])
        (pot,) = (
            other["seconds"]
            for other in document["results"]
            if (other["case"], other["n"], other["method"]) == (*case, POT)
        )
        ratio = "–" if not (pot and e["seconds"]) else f"{pot / e['seconds']:.3g}"
        atoms = str(e["n"]) if e["batch"] == 1 else f"{e['batch']} x {e['n']}"
        shown = e["error"] or tables.error(e["off"])
        proven = tables.error(e["proven"]) if e["method"] == BOUNDS else ""
        rows.append(
            (e["case"], atoms, e["method"], tables.seconds(e["seconds"]), ratio, shown, proven)
        )
    header = ("case", "atoms", "method", "time", f"{POT} ÷ it", "off by", "bounds apart by")
    title = f"Wasserstein-1 distances ({document['settings']['threads']} thread(s))"
    return [Listing(title, header, rows)]
