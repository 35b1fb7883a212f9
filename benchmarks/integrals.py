"""The thesis' Table 4.1 again: what an integral over an ellipse costs, and how far off it is.

Every method is timed on single integrals, and those that can on a whole batch. Times are per
integral and include the way to the coordinates of the disc. Single integrals are drawn from those
that are not next to nothing, so that adaptive methods have something to do. `fl expect` finds what
its derivative needs in the same pass, which the others leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import integrals_methods as methods
from benchmarks import machine, tables
from benchmarks.attention_rounds import (
    Advance,
    Neighbours,
    Rounds,
    Samples,
    Thunk,
    interleave,
    part,
)
from benchmarks.integrals_methods import METHODS, Method, Problem, Setting
from benchmarks.tables import Listing
from fenchel.continuous.ball import Rule

PIECES = 3  # at most so many has a window of `fl expect`, each with the nodes of its rule
TRAPEZOID = "trapezoid"
_FINEST = 1e-14  # the least tolerance that is allowed
_AGREED = 1e-12


@dataclass(frozen=True)
class Sweep:
    """What is measured."""

    settings: tuple[Setting, ...] = (
        Setting("smooth", 0.05, (1.0, 4.0)),
        Setting("narrow", 0.001, (1.0, 4.0)),
        Setting("very narrow", 0.0001, (1.0, 4.0)),
        Setting("thin density", 0.001, (100.0, 100.0)),
    )
    densities: int = 64
    functions: int = 10  # along each axis
    doubles: int = 3  # single integrals for the adaptive method in two dimensions
    singles: int = 20  # and for every other method
    nodes: tuple[int, ...] = (10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 800)
    tolerances: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-9, 1e-10, 1e-12, 1e-14)
    reference: int = 4000  # angles
    rounds: Rounds = field(default_factory=lambda: Rounds(3, 7, 8.0))
    threads: int = 1  # scipy has no more
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError("settings must not be empty")
        for name in ("densities", "functions", "doubles", "singles", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    def count(self, method: Method) -> int:
        """Single integrals of a method."""
        return self.doubles if method.call is methods.cubature else self.singles


FULL = Sweep()
QUICK = Sweep(
    densities=8,
    functions=5,
    doubles=1,
    singles=5,
    nodes=(10, 20, 50, 100, 200, 500),
    tolerances=(1e-2, 1e-4, 1e-6, 1e-9, 1e-12),
    rounds=Rounds(1, 3, 1.0),
)


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    results: tuple[dict[str, Any], ...]
    curves: tuple[dict[str, Any], ...]
    references: tuple[dict[str, Any], ...]
    others: float | None = None  # share of the processors that other processes had

    def as_json(self) -> dict[str, Any]:
        sweep = self.sweep
        return {
            "bench": "integrals",
            "settings": {
                "cases": [asdict(setting) for setting in sweep.settings],
                "densities": sweep.densities,
                "functions": sweep.functions**2,
                "angles": methods.ANGLES,
                "pieces": PIECES,
                "threads": sweep.threads,
                "seed": sweep.seed,
                "dtype": "float64",
            },
            **machine.circumstances(self.others),
            "references": list(self.references),
            "results": list(self.results),
            "curves": list(self.curves),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it. advance: (what is measured, share of the whole that was just done)."""
    before = torch.get_num_threads()
    torch.set_num_threads(sweep.threads)
    results: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    references: list[dict[str, Any]] = []
    parts = len(sweep.settings)
    try:
        neighbours = Neighbours()
        for setting in sweep.settings:
            done = part(advance, setting.name, 1 / parts)
            problem = setting.problem(sweep.densities, sweep.functions, sweep.seed)
            exact, apart = reference(problem, sweep.reference)
            references.append({"setting": setting.name, "angles": sweep.reference, "apart": apart})
            done(0.2)
            timed = _times(sweep, problem, exact, part(advance, setting.name, 0.6 / parts))
            results += [{"setting": setting.name, **entry} for entry in timed]
            curves += [{"setting": setting.name, **e} for e in _curve(sweep, problem, exact)]
            done(0.2)
        others = neighbours.share()
    finally:
        torch.set_num_threads(before)
    return Report(sweep, tuple(results), tuple(curves), tuple(references), others)


def largest_error(values: Tensor, exact: Tensor) -> float:
    """Relative to 1 + |value|."""
    return float(((values - exact).abs() / (1 + exact.abs())).max())


def reference(problem: Problem, angles: int) -> tuple[Tensor, float]:
    """The trapezoid rule with many angles, and how far `fl expect` at its finest is from it.

    Two methods that share nothing must agree before anything is measured with one of them.
    """
    exact = methods.trapezoid(problem, angles)
    apart = largest_error(methods.ours(problem, _FINEST), exact)
    if not apart <= _AGREED:
        raise ArithmeticError(
            f"no reference: {angles} angles and fl expect at {_FINEST:g} differ by {apart:.1e}, "
            f"expected at most {_AGREED:g}"
        )
    return exact, apart


# ---- times


def _times(
    sweep: Sweep, problem: Problem, exact: Tensor, advance: Callable[[float], object]
) -> list[dict[str, Any]]:
    chosen = _worth(exact, max(sweep.singles, sweep.doubles), sweep.seed)
    numbers = [chosen[: sweep.count(method)] for method in METHODS]
    alone: list[list[Tensor]] = [[] for _ in METHODS]
    batch: list[list[Tensor]] = [[] for _ in METHODS]
    makers = []
    for method, few, values in zip(METHODS, numbers, alone, strict=True):
        makers.append(partial(_thunk, method, [problem.one(k) for k in few], values))
    at_once = [index for index, method in enumerate(METHODS) if method.batched]
    makers += [partial(_thunk, METHODS[index], [problem], batch[index]) for index in at_once]
    samples = interleave(makers, sweep.rounds, advance)
    in_batch = dict(zip(at_once, samples[len(METHODS) :], strict=True))
    entries = []
    for index, method in enumerate(METHODS):
        few = numbers[index]
        entry = _entry(method, samples[index], alone[index], exact.flatten()[few])
        if index in in_batch:
            entry |= _in_batch(in_batch[index], batch[index], exact)
        entries.append(entry)
    return entries


def _worth(exact: Tensor, count: int, seed: int) -> list[int]:
    """Integrals drawn from those above a thousandth of the largest."""
    values = exact.flatten()
    worth = (values > 1e-3 * values.max()).nonzero().flatten()
    drawn = torch.randperm(len(worth), generator=torch.Generator().manual_seed(seed))
    return [int(k) for k in worth[drawn[:count]]]


def _thunk(method: Method, problems: list[Problem], values: list[Tensor]) -> Thunk:
    """found: gets the values of the last call."""

    def thunk() -> None:
        values[:] = [method.call(problem).flatten() for problem in problems]

    return thunk


def _entry(method: Method, samples: Samples, values: list[Tensor], exact: Tensor) -> dict[str, Any]:
    """seconds: of one integral, in a batch where there is one."""
    seconds = _per_integral(samples, len(exact))
    return {
        "method": method.name,
        "batched": False,
        "integrals": len(exact),
        "largest_error": largest_error(torch.cat(values), exact) if values else None,
        "seconds": seconds,
        "seconds_alone": seconds,
        "rounds": len(samples.seconds),
        "error": samples.error,
    }


def _in_batch(samples: Samples, values: list[Tensor], exact: Tensor) -> dict[str, Any]:
    return {
        "batched": True,
        "integrals": exact.numel(),
        "largest_error": largest_error(torch.cat(values), exact.flatten()) if values else None,
        "seconds": _per_integral(samples, exact.numel()),
        "error": samples.error,
    }


def _per_integral(samples: Samples, count: int) -> float | None:
    return median(samples.seconds) / count if samples.seconds else None


# ---- error over nodes


def _curve(sweep: Sweep, problem: Problem, exact: Tensor) -> list[dict[str, Any]]:
    """nodes: along the angle; for ours in a piece, and `most` in a window of three pieces."""
    entries: list[dict[str, Any]] = []
    for nodes in sweep.nodes:
        error = largest_error(methods.trapezoid(problem, nodes), exact)
        entry = {"method": TRAPEZOID, "tolerance": None, "nodes": nodes, "most": nodes}
        entries.append({**entry, "largest_error": error})
    for tolerance in sweep.tolerances:
        rule = Rule.closed(tolerance)
        error = largest_error(methods.by_rule(problem, rule), exact)
        named = {"method": methods.OURS, "tolerance": tolerance, "nodes": rule.nodes}
        entries.append({**named, "most": PIECES * rule.nodes, "largest_error": error})
    return entries


# ---- what is shown


def listings(document: dict[str, Any]) -> list[Listing]:
    """From the JSON of a run."""
    names = list(dict.fromkeys(entry["setting"] for entry in document["results"]))
    return [*(_setting_listing(document, name) for name in names), _curve_listing(document, names)]


def _setting_listing(document: dict[str, Any], name: str) -> Listing:
    (case,) = (c for c in document["settings"]["cases"] if c["name"] == name)
    low, high = case["ratio"]
    ratio = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    title = f"{name}: functions of variance {case['variance']:g}, densities of ratio {ratio}"
    header = ("method", "integrals", "largest error", "time of one", "time of one, alone")
    rows = []
    for e in document["results"]:
        if e["setting"] == name:
            alone, together = tables.seconds(e["seconds_alone"]), tables.seconds(e["seconds"])
            shown = e["error"] or tables.error(e["largest_error"])
            rows.append((e["method"], str(e["integrals"]), shown, together, alone))
    return Listing(title, header, rows)


def _curve_listing(document: dict[str, Any], names: list[str]) -> Listing:
    """One row for each rule, one column for each setting."""
    rows: dict[str, list[str]] = {}
    for e in document["curves"]:
        label = f"{e['method']}, {e['nodes']} nodes"
        if e["tolerance"] is not None:
            label = f"{label} a piece (tolerance {e['tolerance']:g})"
        rows.setdefault(label, []).append(tables.error(e["largest_error"]))
    title = f"Largest error over nodes; a window of {methods.OURS} has up to {PIECES} pieces"
    return Listing(title, ("rule", *names), [(label, *cells) for label, cells in rows.items()])
