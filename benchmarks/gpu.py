"""The GPU's kernels on a CUDA device: right first, against float64, then how fast.

Without a device the first part runs in triton's interpreter, on CPU tensors and small sizes.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks import gpu_parity, gpu_speed, machine, tables
from benchmarks.attention_rounds import Advance, part
from benchmarks.gpu_parity import Case, Outcome, Sizes
from benchmarks.gpu_speed import Place
from benchmarks.maps import DIRECTIONS
from benchmarks.tables import Listing

_PARITY = 0.4  # of the whole, for the bar of progress


@dataclass(frozen=True)
class Sweep:
    """speed: None where nothing is timed."""

    cases: tuple[Case, ...] = gpu_parity.FULL
    sizes: Sizes = field(default_factory=Sizes)
    speed: gpu_speed.Sweep | None = field(default_factory=gpu_speed.Sweep)


FULL = Sweep()
INTERPRETED = Sweep(gpu_parity.SAMPLE, gpu_parity.LITTLE, None)


@dataclass(frozen=True)
class Report:
    """left_out: what was not measured, and why. speed: entries of `gpu_speed.measure`."""

    sweep: Sweep
    device: str
    dtype: str
    outcomes: tuple[Outcome, ...]
    speed: tuple[dict[str, Any], ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def failures(self) -> int:
        return sum(not outcome.passes for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "gpu",
            "device": self.device,
            "machine": machine.summary(),
            "settings": {**asdict(self.sweep), "cases": len(self.sweep.cases), "dtype": self.dtype},
            "parity": [outcome.as_json() for outcome in self.outcomes],
            "parity_failures": self.failures,
            "results": list(self.speed),
            "left_out": list(self.left_out),
        }


def run_interpreted(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Parity alone; for a process with TRITON_INTERPRET=1."""
    device = torch.device("cpu")
    done = part(advance, "parity", 1.0)
    outcomes = gpu_parity.compare(sweep.cases, sweep.sizes, device, done)
    return Report(sweep, "triton's interpreter", "", tuple(outcomes))


def run(
    sweep: Sweep, place: Place, name: str, advance: Advance = lambda what, share: None
) -> Report:
    """Parity, and speed where all of it passes: wrong kernels are not timed.

    name: of the device.
    """
    start = time.monotonic()
    cases, left_out = _possible(sweep.cases, place)
    done = part(advance, "parity", _PARITY)
    outcomes = tuple(gpu_parity.compare(cases, sweep.sizes, place.device, done))
    report = partial(Report, sweep, name, str(place.dtype).removeprefix("torch."), outcomes)
    if sweep.speed is None or not all(outcome.passes for outcome in outcomes):
        return report((), tuple(left_out))
    done = part(advance, "speed", 1 - _PARITY)
    speed = tuple(gpu_speed.measure(sweep.speed, place, start, done))
    timed = {entry["n"] for entry in speed}
    for n in sweep.speed.sizes:
        if n not in timed:
            left_out.append(f"{n} tokens: {sweep.speed.seconds:g} seconds were over")
    return report(speed, tuple(left_out))


def _possible(cases: Sequence[Case], place: Place) -> tuple[list[Case], list[str]]:
    """Cases of precisions that the device has, and a word on the others."""
    if place.dtype == torch.bfloat16:
        return list(cases), []
    kept = [case for case in cases if case.dtype != torch.bfloat16]
    lost = len(cases) - len(kept)
    return kept, [f"{lost} cases in bfloat16, which this device lacks"] if lost else []


def has_triton() -> bool:
    """It is not imported for the answer."""
    return importlib.util.find_spec("triton") is not None


def file_name(device: str) -> str:
    """Of the results of a device."""
    return f"gpu-{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}.json"


def listings(document: dict[str, Any]) -> list[Listing]:
    shown = [_parity_listing(document)]
    if document["results"]:
        shown.append(_speed_listing(document))
    return shown


def _parity_listing(document: dict[str, Any]) -> Listing:
    rows = [
        (
            f"Tsallis({entry['alpha']:g}), {entry['form']}",
            entry["dtype"],
            "yes" if entry["passes"] else "NO",
            tables.error(entry["errors"].get("output")),
            tables.error(_largest(entry["errors"])),
            entry["error"],
        )
        for entry in document["parity"]
    ]
    header = ("against float64", "dtype", "passes", "output", "gradients", "failure")
    title = f"Errors on {document['device']}: absolute of outputs, relative of gradients"
    return Listing(title, header, rows, words=1)


def _largest(errors: dict[str, float]) -> float | None:
    """Of the gradients; NaN where one is NaN."""
    found = [errors[name] for name in gpu_parity.LEAVES if name in errors]
    return float(torch.tensor(found).max()) if found else None


def _speed_listing(document: dict[str, Any]) -> Listing:
    """One row for each method and deviation."""
    entries = document["results"]
    sizes = sorted({entry["n"] for entry in entries})
    cells = {_key(e): e["error"].partition(":")[0] or f"{e['ratio']:.2f}" for e in entries
             if e["error"] or e["ratio"] is not None}  # fmt: skip
    baseline = entries[0]["method"]
    rows = []
    for way in DIRECTIONS:
        for deviation in dict.fromkeys(e["deviation"] for e in entries):
            first = [(n, deviation, way, baseline) for n in sizes]
            seconds = {_key(e): tables.seconds(e["seconds"]) for e in entries}
            rows.append((f"{baseline}, time", way, f"{deviation:g}", *(seconds[k] for k in first)))
            for method in dict.fromkeys(e["method"] for e in entries if e["method"] != baseline):
                keys = [(n, deviation, way, method) for n in sizes]
                rows.append((method, way, f"{deviation:g}", *(cells.get(k, "–") for k in keys)))
    settings = document["settings"]
    title = (
        f"Causal attention on {document['device']}, {settings['speed']['heads']} heads of "
        f"{settings['speed']['width']}, {settings['dtype']}: time relative to {baseline}"
    )
    return Listing(title, ("method", "direction", "deviation", *(f"{n:,}" for n in sizes)), rows)


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["n"], entry["deviation"], entry["direction"], entry["method"]
