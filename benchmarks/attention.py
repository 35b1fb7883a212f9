"""How long attention takes, as a ratio to torch's own on the same inputs in the same run.

For each number of tokens all methods are timed in turn, round after round. The time of
`scaled_dot_product_attention` does not depend on what the scores are; ours does, since keys far
below the threshold are skipped. So every ratio names the standard deviation of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fenchel as fl
from benchmarks import attention_methods as methods
from benchmarks import attention_summary as summary
from benchmarks import machine
from benchmarks.attention_memory import Peak, Request, measure
from benchmarks.attention_methods import CAUSAL, PADDED, PLAIN, Inputs, Method, Shape
from benchmarks.attention_rounds import (
    Advance,
    Neighbours,
    Rounds,
    Samples,
    Thunk,
    disturbance,
    interleave,
)
from benchmarks.maps import DIRECTIONS

_ROW_MAPS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("torch.softmax", lambda x: torch.softmax(x, -1)),
    ("fl.entmax 1.5", lambda x: fl.entmax(x, 1.5)),
    ("fl.sparsemax", fl.sparsemax),
)


@dataclass(frozen=True)
class Sweep:
    """What is measured. Peers come with the largest n they are asked for."""

    sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    deviations: tuple[float, ...] = (0.2, 1.0, 2.0)
    alphas: tuple[float, ...] = (1.5, 2.0, 1.3)
    focus: int = 4096  # here also flat scores, alpha per head, causal and padded
    long: int = 4096  # beyond it the first alpha alone: minutes each, and nothing new
    peers: tuple[tuple[Method, int], ...] = (
        (methods.SOFTMAX, 4096),
        (methods.FLEX, 4096),
        (methods.SORT_15, 2048),
        (methods.TOP_15, 2048),
        (methods.SORT_2, 2048),
        (methods.BISECT, 1024),
    )
    memory: tuple[tuple[Method, int], ...] = (
        (methods.SDPA, 16384),
        (methods.tsallis(1.5), 16384),
        (methods.SDPA, 4096),
        (methods.tsallis(1.5), 4096),
        (methods.SOFTMAX, 4096),
    )
    row_maps: tuple[int, int] | None = (8192, 1024)  # (rows, keys)
    shape: Shape = field(default_factory=Shape)
    rounds: Rounds = field(default_factory=Rounds)
    threads: int | None = None  # None: as many as torch has

    def __post_init__(self) -> None:
        for name in ("sizes", "deviations", "alphas"):
            values = getattr(self, name)
            if not values or min(values) <= 0:
                raise ValueError(f"{name} must be positive and not empty, got {values}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be >= 1 or None, got {self.threads}")

    def up_to(self, largest: int) -> Sweep:
        """The same without longer sequences; extras move to the longest that is left."""
        sizes = tuple(n for n in self.sizes if n <= largest)
        if not sizes:
            raise ValueError(f"the shortest sequence has {min(self.sizes)} tokens, got {largest}")
        memory = tuple((method, n) for method, n in self.memory if n <= largest)
        return replace(self, sizes=sizes, focus=min(self.focus, max(sizes)), memory=memory)

    def cases(self, n: int) -> list[Case]:
        """All that is timed in turn at n tokens; each variant has its own baseline."""
        alphas = self.alphas if n <= self.long else self.alphas[:1]
        ours = [methods.tsallis(alpha) for alpha in alphas]
        cases = [Case(methods.SDPA, n)]
        cases += [Case(method, n, deviation) for method in ours for deviation in self.deviations]
        if n == self.focus:
            cases += [Case(method, n, _FLAT) for method in ours]
            cases += [Case(methods.PER_HEAD, n, deviation) for deviation in self.deviations]
            for variant in (CAUSAL, PADDED):
                masked = (methods.SDPA, *ours)
                cases += [Case(method, n, variant=variant) for method in masked]
        cases += [Case(m, n) for m, largest in self.peers if m.above < n <= largest]
        return cases


_FLAT = 0.02  # a deviation so small that every key carries weight

FULL = Sweep()
QUICK = Sweep(
    sizes=(128, 512, 2048),
    alphas=(1.5, 2.0),
    focus=2048,
    peers=(
        (methods.SOFTMAX, 2048),
        (methods.FLEX, 512),
        (methods.SORT_15, 512),
        (methods.SORT_2, 512),
        (methods.BISECT, 512),
    ),
    memory=tuple((m, 2048) for m in (methods.SDPA, methods.tsallis(1.5), methods.SOFTMAX)),
    row_maps=(1024, 1024),
    rounds=Rounds(3, 5, 5.0),
)


class Case(NamedTuple):
    method: Method
    n: int
    deviation: float = 1.0
    variant: str = PLAIN


@dataclass(frozen=True)
class Timing:
    """One case in one direction; baseline: median seconds of SDPA, None where it failed."""

    case: Case
    direction: str
    samples: Samples
    baseline: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.case.method.name,
            "variant": self.case.variant,
            "n": self.case.n,
            "deviation": self.case.deviation,
            "direction": self.direction,
            **summary.timed(self.samples.seconds, self.baseline),
            "error": self.samples.error,
        }


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    threads: int
    timings: tuple[Timing, ...]
    row_maps: tuple[dict[str, Any], ...] = ()
    memory: tuple[Peak, ...] = ()
    others: float | None = None  # share of the processors that other processes had

    @property
    def warning(self) -> str:
        """What to tell the reader of a disturbed run; empty if there is nothing to tell."""
        return disturbance(self.others)

    def as_json(self) -> dict[str, Any]:
        results = [timing.as_json() for timing in self.timings]
        shape = asdict(self.sweep.shape)
        return {
            "bench": "attention",
            "baseline": methods.SDPA.name,
            "settings": {**shape, "batch": 1, "dtype": "float32", "threads": self.threads},
            "machine": machine.summary(),
            "kernels": machine.kernels(),
            "warning": self.warning,
            "others": self.others,
            "results": results,
            "growth": summary.growth(results),
            "maps": list(self.row_maps),
            "memory": _memory_json(self.memory),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it, the longest sequences last."""
    before = torch.get_num_threads()
    threads = sweep.threads or before
    torch.set_num_threads(threads)
    work = _Work(sweep, advance)
    try:
        neighbours = Neighbours()
        row_maps = tuple(_time_row_maps(sweep, work))
        timings = tuple(t for n in sweep.sizes for t in _time_size(sweep, n, work))
        others = neighbours.share()
        memory = tuple(_measure_memory(sweep, threads, work))
    finally:
        torch.set_num_threads(before)
    return Report(sweep, threads, timings, row_maps, memory, others)


class _Work:
    """Shares of the whole: the cost of a size is taken to grow with its square."""

    def __init__(self, sweep: Sweep, advance: Advance) -> None:
        self._advance = advance
        weights = {n: self._weight(n) * len(sweep.cases(n)) for n in sweep.sizes}
        self._rows = self._weight(512) if sweep.row_maps else 0.0
        peaks = sum(self._weight(n) for _, n in sweep.memory)
        self._total = sum(weights.values()) + self._rows + peaks or 1.0
        self._sizes = weights

    @staticmethod
    def _weight(n: int) -> float:
        return float(max(n, 512)) ** 2

    def size(self, n: int) -> Callable[[float], object]:
        return self._part(f"n = {n}", self._sizes[n])

    def rows(self) -> Callable[[float], object]:
        return self._part("row maps", self._rows)

    def peak(self, n: int) -> Callable[[float], object]:
        return self._part("memory", self._weight(n))

    def _part(self, what: str, weight: float) -> Callable[[float], object]:
        self._advance(what, 0.0)
        return lambda share: self._advance(what, share * weight / self._total)


def _time_size(sweep: Sweep, n: int, work: _Work) -> Iterator[Timing]:
    plan = [(case, direction) for case in sweep.cases(n) for direction in DIRECTIONS]
    inputs: dict[tuple[float, str], Inputs] = {}

    def make(case: Case, direction: str) -> Thunk:
        key = (case.deviation, case.variant)
        if key not in inputs:
            inputs[key] = sweep.shape.inputs(n, *key)
        return methods.thunk(case.method, inputs[key], direction)

    makers = [partial(make, case, direction) for case, direction in plan]
    all_samples = interleave(makers, sweep.rounds, work.size(n))
    baselines = {
        (case.variant, direction): median(samples.seconds)
        for (case, direction), samples in zip(plan, all_samples, strict=True)
        if case.method is methods.SDPA and samples.seconds
    }
    for (case, direction), samples in zip(plan, all_samples, strict=True):
        yield Timing(case, direction, samples, baselines.get((case.variant, direction)))


def _time_row_maps(sweep: Sweep, work: _Work) -> Iterator[dict[str, Any]]:
    """Maps of rows alone, as ratios to torch.softmax."""
    if sweep.row_maps is None:
        return
    rows, length = sweep.row_maps
    scores = torch.randn(rows, length, generator=torch.Generator().manual_seed(sweep.shape.seed))
    plan = [(name, call, direction) for name, call in _ROW_MAPS for direction in DIRECTIONS]
    makers = [partial(_row_thunk, call, scores, direction) for _, call, direction in plan]
    all_samples = interleave(makers, sweep.rounds, work.rows())
    baselines = [median(samples.seconds) for samples in all_samples[: len(DIRECTIONS)]]
    for index, ((name, _, direction), samples) in enumerate(zip(plan, all_samples, strict=True)):
        yield {
            "method": name,
            "direction": direction,
            "rows": rows,
            "length": length,
            **summary.timed(samples.seconds, baselines[index % len(DIRECTIONS)]),
            "error": samples.error,
        }


def _row_thunk(call: Callable[[Tensor], Tensor], scores: Tensor, direction: str) -> Thunk:
    if direction == "forward":
        return lambda: call(scores)
    leaf, cotangent = scores.clone().requires_grad_(), scores.flip(-1)
    return lambda: torch.autograd.grad(call(leaf), leaf, cotangent)


def _measure_memory(sweep: Sweep, threads: int, work: _Work) -> Iterator[Peak]:
    for method, n in sweep.memory:
        done = work.peak(n)
        yield measure(Request(method.name, n, **asdict(sweep.shape), threads=threads))
        done(1.0)


def _memory_json(peaks: Sequence[Peak]) -> list[dict[str, Any]]:
    baselines = {peak.n: peak.extra for peak in peaks if peak.method == methods.SDPA.name}
    entries = []
    for peak in peaks:
        baseline = baselines.get(peak.n)
        ratio = peak.extra / baseline if baseline and peak.extra is not None else None
        entry = {"method": peak.method, "n": peak.n, "direction": "forward+backward"}
        entries.append({**entry, "extra_bytes": peak.extra, "ratio": ratio, "error": peak.error})
    return entries
