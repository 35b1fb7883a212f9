"""Attention with masks and biases, with one query, and with short rows, as ratios in one run.

Each case names its own measure: torch's attention on the same operands, or our plain call of the
same visible area.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fenchel as fl
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
from benchmarks.tables import Listing

Entry = dict[str, Any]
Operands = tuple[Tensor, Tensor, Tensor]
Attend = Callable[..., Tensor]

FORWARD, BOTH = "forward", "forward + backward"
_OMEGA = fl.Tsallis(1.5)
P = fl.priors


@dataclass(frozen=True)
class Sweep:
    """What is measured; scores have deviation 1."""

    cached: tuple[int, ...] = (1, 1024, 8192, 32768)  # keys that one query meets
    heads: tuple[tuple[int, int, int], ...] = ((9, 3, 64), (32, 8, 128))  # query, key, width
    short: tuple[int, ...] = (16, 64, 128)  # tokens, in batches of 8 with 12 heads of 32
    structured: int = 2048  # tokens, 8 heads of 64
    windowed: int = 16384  # tokens, 2 heads of 64
    threads: tuple[int, ...] = (1, 2)
    rounds: Rounds = field(default_factory=lambda: Rounds(3, 9, 12.0))


FULL = Sweep()
QUICK = Sweep((1, 256), ((9, 3, 64),), (16,), 128, 512, (1,), Rounds(2, 3, 1.0))


class Case(NamedTuple):
    """One measure and what is compared with it, on operands of their own."""

    name: str
    direction: str
    methods: dict[str, Callable[[], Thunk]]  # the first is the measure


@dataclass(frozen=True)
class Report:
    threads: tuple[int, ...]
    results: tuple[Entry, ...]
    others: float | None = None  # share of the processors that other processes had

    def as_json(self) -> Entry:
        return {
            "bench": "structure",
            "settings": {"threads": " and ".join(map(str, self.threads)), "dtype": "float32"},
            "kernels": machine.kernels(),
            **machine.circumstances(self.others),
            "results": list(self.results),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it. advance: (what is measured, share of the whole that was just done)."""
    cases, neighbours, results = all_cases(sweep), Neighbours(), []
    before = torch.get_num_threads()
    try:
        for threads in sweep.threads:
            torch.set_num_threads(threads)
            for case in cases:
                done = part(advance, case.name, 1 / len(cases) / len(sweep.threads))
                samples = interleave(list(case.methods.values()), sweep.rounds, done)
                results += _entries(case, threads, samples)
    finally:
        torch.set_num_threads(before)
    return Report(sweep.threads, tuple(results), neighbours.share())


def all_cases(sweep: Sweep) -> list[Case]:
    return [*_decoding(sweep), *_short_rows(sweep), *_structures(sweep), *_windows(sweep)]


def _decoding(sweep: Sweep) -> list[Case]:
    """One query against keys that are cached."""
    cases = []
    for heads, kv_heads, width in sweep.heads:
        for keys in sweep.cached:
            sizes = ((1, heads, 1, width), (1, kv_heads, keys, width))
            torchs: Attend = partial(sdpa, enable_gqa=True)
            methods = {"torch": torchs, "entmax": _entmax(enable_gqa=True)}
            name = f"one query, {heads}/{kv_heads} heads of {width}, {keys:,} keys"
            cases.append(Case(name, FORWARD, _thunks(methods, sizes, FORWARD)))
    return cases


def _short_rows(sweep: Sweep) -> list[Case]:
    methods: dict[str, Attend] = {"torch": sdpa, "entmax": _entmax()}
    return [
        Case(f"8 x 12 heads of 32, {n} tokens", way, _thunks(methods, ((8, 12, n, 32),) * 2, way))
        for n in sweep.short
        for way in (FORWARD, BOTH)
    ]


def _structures(sweep: Sweep) -> list[Case]:
    """Beside our own call without structure, causal or not."""
    n = sweep.structured
    g = torch.Generator().manual_seed(0)
    table = (0.3 * torch.randn(32, 8, generator=g)).requires_grad_()
    logits = 0.5 * torch.randn(n, generator=g)
    priors = {
        "ALiBi": P.ALiBi(8),
        "T5's table, trained": P.RelativeBuckets(table),
        "one number per key": P.Preference(logits),
    }
    cases = []
    for causal in (False, True):
        methods: dict[str, Attend] = {"plain": _entmax(is_causal=causal)}
        for name, prior in priors.items():
            methods[f"{name}, added"] = _entmax(is_causal=causal, attn_mask=prior)
            methods[f"{name}, as base"] = _entmax(is_causal=causal, base=prior)
        methods["sink"] = _entmax(is_causal=causal, attn_mask=P.Sink(torch.zeros(8)))
        methods["softcap"] = _entmax(is_causal=causal, softcap=50.0)
        name = f"{n:,} tokens, {'causal' if causal else 'not causal'}"
        cases.append(Case(name, BOTH, _thunks(methods, ((1, 8, n, 64),) * 2, BOTH)))
    documents = torch.arange(4).repeat_interleave(n // 4)
    batches = _thunks({"a batch of 4": _entmax()}, ((4, 8, n // 4, 64),) * 2, BOTH)
    row = {"one row": _entmax(base=P.Documents(documents))}
    packed = _thunks(row, ((1, 8, n, 64),) * 2, BOTH)
    cases.append(Case(f"4 documents of {n // 4:,} tokens", BOTH, batches | packed))
    return cases


def _windows(sweep: Sweep) -> list[Case]:
    n, sizes = sweep.windowed, ((1, 2, sweep.windowed, 64),) * 2
    methods = {"dense": _entmax(), "window": _entmax(base=P.SlidingWindow(128, right=127))}
    return [
        Case(f"256 of {n:,} keys", way, _thunks(methods, sizes, way)) for way in (FORWARD, BOTH)
    ]


def _entmax(**options: Any) -> Attend:
    return lambda q, k, v: fl.attention(q, k, v, _OMEGA, **options)


def _thunks(
    methods: dict[str, Attend], sizes: tuple[tuple[int, ...], ...], direction: str
) -> dict[str, Callable[[], Thunk]]:
    return {name: partial(_thunk, attend, sizes, direction) for name, attend in methods.items()}


def _thunk(attend: Attend, sizes: tuple[tuple[int, ...], ...], direction: str) -> Thunk:
    g = torch.Generator().manual_seed(0)
    shapes = (sizes[0], sizes[1], sizes[1])
    q, k, v = (torch.randn(*shape, generator=g) for shape in shapes)
    trains = direction == BOTH
    leaves = [x.requires_grad_(trains) for x in (q, k, v)]

    def call() -> None:
        with nullcontext() if trains else torch.no_grad():
            output = attend(*leaves)
        if trains:
            output.backward(torch.ones_like(output))

    return call


def _entries(case: Case, threads: int, samples: list[Samples]) -> list[Entry]:
    measure = samples[0]
    rows = []
    for name, taken in zip(case.methods, samples, strict=True):
        pairs = list(zip(taken.seconds, measure.seconds, strict=False))
        ratios = sorted(time / other for time, other in pairs)
        rows.append(
            {
                "case": case.name,
                "direction": case.direction,
                "threads": threads,
                "method": name,
                "seconds": median(taken.seconds) if taken.seconds else None,
                "ratio": median(ratios) if ratios else None,
                "least": ratios[0] if ratios else None,
                "most": ratios[-1] if ratios else None,
                "rounds": len(ratios),
                "error": taken.error,
            }
        )
    return rows


def listings(document: Entry) -> list[Listing]:
    """From the JSON of a run: one table per number of threads."""
    header = ("case", "direction", "method", "time", "ratio (least..most)")
    result_tables = []
    for threads in sorted({entry["threads"] for entry in document["results"]}):
        rows = []
        for e in document["results"]:
            if e["threads"] != threads:
                continue
            ratio = f"{e['ratio']:.2f} ({e['least']:.2f}..{e['most']:.2f})" if e["ratio"] else "–"
            shown = e["error"] or ratio
            rows.append(
                (e["case"], e["direction"], e["method"], tables.seconds(e["seconds"]), shown)
            )
        title = f"Entmax-1.5, beside the first method of each case ({threads} thread(s))"
        result_tables.append(Listing(title, header, rows))
    return result_tables
