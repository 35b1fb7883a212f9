"""How long a map takes, as a ratio to torch.softmax on the same rows in the same run.

Every case is timed once a round and the rounds are repeated, so that a slow moment of the
machine falls on all of them alike. Times are facts about one machine: nothing may be gated on
them.

One thread is the default. On a busy machine a parallel call waits for its other threads by whole
slices of the scheduler: a softmax of 10 microseconds then takes 10 milliseconds in every round, so
that the spread looks narrow and the other maps look fast; and as the threads spin while they wait,
processor time does not show it. With one thread a wait does show, see `Timing.busy`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fenchel as fl
from benchmarks import machine

Map = Callable[[Tensor], Tensor]
DIRECTIONS = ("forward", "forward+backward")

_BASELINE = "torch.softmax"
_SAMPLE = 5e-3  # seconds: shorter calls are repeated until the clock can see them
_BUSY = 0.9  # a run that had the processor for less of its time is called disturbed


@dataclass(frozen=True)
class Settings:
    rows: int = 1024
    length: int = 1024
    repeats: int = 7
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "length", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


QUICK = Settings(rows=64, length=256, repeats=3)


@dataclass(frozen=True)
class Case:
    name: str
    call: Map
    fewer: int = 1  # slow maps get this many times fewer rows, and so does their baseline


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one a round, against the median of the baseline on as many rows."""

    name: str
    direction: str
    rows: int
    seconds: tuple[float, ...]
    baseline: float
    busy: float = 1.0  # processor time over elapsed time

    @property
    def disturbed(self) -> bool:
        return self.busy < _BUSY

    @property
    def ratio(self) -> float:
        return median(self.seconds) / self.baseline

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.seconds) / self.baseline, max(self.seconds) / self.baseline

    def __str__(self) -> str:
        """The ratio with its spread, three digits each."""
        middle, low, high = (_three_digits(x) for x in (self.ratio, *self.spread))
        return f"{middle} ({low}..{high})"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "direction": self.direction,
            "rows": self.rows,
            "median_ms": 1e3 * median(self.seconds),
            "ratio": self.ratio,
            "ratio_min": self.spread[0],
            "ratio_max": self.spread[1],
            "busy": self.busy,
        }


@dataclass(frozen=True)
class Report:
    settings: Settings
    timings: tuple[Timing, ...]

    @property
    def warning(self) -> str:
        """What to tell the reader of a disturbed run; empty if there is nothing to tell."""
        disturbed = [timing for timing in self.timings if timing.disturbed]
        if not disturbed:
            return ""
        least = min(timing.busy for timing in disturbed)
        return (
            f"Do not trust these ratios: {len(disturbed)} of {len(self.timings)} timings waited "
            f"for a busy machine (one had the processor {least:.0%} of its time). Run again when "
            "it is idle."
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "maps",
            "baseline": _BASELINE,
            "settings": {**asdict(self.settings), "dtype": "float32", "device": "cpu"},
            "machine": machine.summary(),
            "warning": self.warning,
            "results": [timing.as_json() for timing in self.timings],
        }


def cases() -> list[Case]:
    """Ours, and those of the entmax package where it is installed."""
    return [Case(_BASELINE, _torch_softmax), *_ours(), *_entmax_package()]


def _ours() -> list[Case]:
    return [
        Case("fl.softmax", fl.softmax),
        Case("fl.entmax 1.5", lambda x: fl.entmax(x, 1.5)),
        Case("fl.sparsemax", fl.sparsemax),
        Case("fl.entmax 1.3", lambda x: fl.entmax(x, 1.3)),
        Case("fl Norm(2)", lambda x: fl.solve(x, fl.Norm(2.0)).weights),
        Case("fl Budget(4)", lambda x: fl.solve(x, fl.Budget(4)).weights),
        Case("fl Fused(0.1)", lambda x: fl.solve(x, fl.Fused(0.1)).weights, fewer=16),
    ]


def _entmax_package() -> list[Case]:
    try:
        import entmax
    except ModuleNotFoundError as missing:
        if missing.name != "entmax":
            raise
        return []
    return [
        Case("entmax.entmax15", lambda x: entmax.entmax15(x, dim=-1)),
        Case("entmax.sparsemax", lambda x: entmax.sparsemax(x, dim=-1)),
        Case("entmax.entmax_bisect 1.3", lambda x: entmax.entmax_bisect(x, alpha=1.3, dim=-1)),
    ]


def _torch_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def steps(settings: Settings) -> int:
    """How often `run` calls `advance`."""
    return (settings.repeats + 1) * len(list(_plan(settings.rows, cases())))


def run(settings: Settings, advance: Callable[[], object] = lambda: None) -> Report:
    """Time every case, a warm-up and then `repeats` rounds. `advance` is called after each."""
    with _threads(settings.threads):
        return Report(settings, tuple(_measure(settings, advance)))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(settings: Settings, advance: Callable[[], object]) -> Iterator[Timing]:
    plan = list(_plan(settings.rows, cases()))
    # A thunk and its number of calls a sample, for each entry of the plan.
    runners = []
    for case, rows, direction in plan:
        thunk = _thunk(case.call, _scores(rows, settings), direction)
        runners.append((thunk, _calls(thunk)))
        advance()
    samples: list[list[_Sample]] = [[] for _ in plan]
    for _ in range(settings.repeats):
        for (thunk, calls), column in zip(runners, samples, strict=True):
            column.append(_time(thunk, calls))
            advance()
    yield from _timings(plan, samples)


def _plan(rows: int, wanted: list[Case]) -> Iterator[tuple[Case, int, str]]:
    """(case, rows, direction), with the baseline once for every number of rows that occurs."""
    baseline = wanted[0]
    for fewer in sorted({case.fewer for case in wanted}):
        count = max(1, rows // fewer)
        group = [case for case in wanted if case.fewer == fewer]
        if fewer != baseline.fewer:
            group.insert(0, baseline)
        for case in group:
            yield from ((case, count, direction) for direction in DIRECTIONS)


def _timings(plan: list[tuple[Case, int, str]], samples: list[list[_Sample]]) -> Iterator[Timing]:
    baseline = {}
    for (case, rows, direction), column in zip(plan, samples, strict=True):
        elapsed = tuple(sample.elapsed for sample in column)
        if case.name == _BASELINE:
            baseline[rows, direction] = median(elapsed)
        busy = sum(sample.processor for sample in column) / sum(elapsed)
        yield Timing(case.name, direction, rows, elapsed, baseline[rows, direction], busy)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _scores(rows: int, settings: Settings) -> Tensor:
    generator = torch.Generator().manual_seed(settings.seed)
    return torch.randn(rows, settings.length, generator=generator)


def _thunk(call: Map, scores: Tensor, direction: str) -> Callable[[], object]:
    if direction == "forward":
        return lambda: call(scores)
    leaf = scores.clone().requires_grad_()
    cotangent = scores.flip(-1)
    return lambda: torch.autograd.grad(call(leaf), leaf, cotangent)


class _Sample(NamedTuple):
    """Seconds a call."""

    elapsed: float
    processor: float  # of all threads of this process


def _calls(thunk: Callable[[], object]) -> int:
    """Warm up, then choose how many calls make one sample; the best of three is not a stall."""
    thunk()
    return max(1, round(_SAMPLE / min(_time(thunk, 1).elapsed for _ in range(3))))


def _time(thunk: Callable[[], object], calls: int) -> _Sample:
    start, start_processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        thunk()
    elapsed, processor = time.perf_counter() - start, time.process_time() - start_processor
    return _Sample(elapsed / calls, processor / calls)
