"""What continuous attention costs, as ratios to what it replaces, in one run.

Attention over a grid against softmax with the same head; weighted EM in batch against
scikit-learn's one fit after the other; a transformer layer on N functions against one on L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import attention_summary as summary
from benchmarks import continuous_methods as methods
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
from benchmarks.continuous_methods import Images, Kind, Layers, Mixtures
from benchmarks.maps import DIRECTIONS
from benchmarks.tables import Listing

Entry = dict[str, Any]

_FIT_FROM = 512  # tokens: below, a call is mostly its fixed cost


@dataclass(frozen=True)
class Sweep:
    """What is measured."""

    images: Images = field(default_factory=Images)
    mixtures: Mixtures = field(default_factory=Mixtures)
    layers: Layers = field(default_factory=Layers)
    rounds: Rounds = field(default_factory=lambda: Rounds(3, 7, 20.0))
    threads: int | None = None  # None: as many as torch has


FULL = Sweep()
QUICK = Sweep(
    images=Images(batch=4, channels=128),
    mixtures=Mixtures(batch=8),
    layers=Layers(lengths=(256, 1024, 4096)),
    rounds=Rounds(3, 5, 3.0),
)


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    threads: int
    images: tuple[Entry, ...]
    mixtures: tuple[Entry, ...]
    layers: tuple[Entry, ...]
    difference: float | None  # of the log-likelihoods
    others: float | None = None  # share of the processors that other processes had

    def as_json(self) -> Entry:
        sweep = self.sweep
        return {
            "bench": "continuous",
            "baseline": methods.SOFTMAX,
            "settings": {
                "images": {**asdict(sweep.images), "dtype": "float32"},
                "mixtures": {**asdict(sweep.mixtures), "dtype": "float64"},
                "layers": {**asdict(sweep.layers), "batch": 1, "dtype": "float32"},
                "threads": self.threads,
            },
            **machine.circumstances(self.others),
            "results": list(self.images),
            "mixtures": list(self.mixtures),
            "log_likelihood_difference": self.difference,
            "layers": list(self.layers),
            "growth": growth(self.layers),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it. advance: (what is measured, share of the whole that was just done)."""
    before = torch.get_num_threads()
    threads = sweep.threads or before
    torch.set_num_threads(threads)
    try:
        neighbours = Neighbours()
        images = _images(sweep, part(advance, "attention", 0.6))
        mixtures = _mixtures(sweep, part(advance, "mixtures", 0.1))
        layers = _layers(sweep, advance, 0.3)
        others = neighbours.share()
        difference = methods.likelihood_difference(sweep.mixtures)
    finally:
        torch.set_num_threads(before)
    return Report(sweep, threads, images, mixtures, layers, difference, others)


def _images(sweep: Sweep, advance: Callable[[float], object]) -> tuple[Entry, ...]:
    """Slow kinds in a group of their own, with softmax once more: the others get more rounds."""
    quick = [kind for kind in methods.KINDS if not kind.slow]
    slow = [methods.KINDS[0], *(kind for kind in methods.KINDS if kind.slow)]
    few = replace(sweep.rounds, least=min(2, sweep.rounds.least))
    first = _image_group(quick, sweep.images, sweep.rounds, lambda share: advance(share / 2))
    then = _image_group(slow, sweep.images, few, lambda share: advance(share / 2))
    return (*first, *then[len(DIRECTIONS) :])


def _image_group(
    kinds: Sequence[Kind], sizes: Images, rounds: Rounds, advance: Callable[[float], object]
) -> tuple[Entry, ...]:
    plan = [(kind, direction) for kind in kinds for direction in DIRECTIONS]
    makers = [partial(methods.image_thunk, kind, sizes, direction) for kind, direction in plan]
    names = [{"method": kind.name, "direction": direction} for kind, direction in plan]
    return _compared(makers, names, len(DIRECTIONS), rounds, advance)


def _mixtures(sweep: Sweep, advance: Callable[[float], object]) -> tuple[Entry, ...]:
    makers = [partial(make, sweep.mixtures) for _, make in methods.FITS]
    names = [{"method": name} for name, _ in methods.FITS]
    return _compared(makers, names, 1, sweep.rounds, advance)


def _layers(sweep: Sweep, advance: Advance, size: float) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    lengths = sweep.layers.lengths
    for n in lengths:
        done = part(advance, f"{n} tokens", size * n / sum(lengths))
        makers = [partial(methods.layer_thunk, m, sweep.layers, n) for _, m in methods.LAYERS]
        names = [{"method": name, "n": n} for name, _ in methods.LAYERS]
        entries += _compared(makers, names, 1, sweep.rounds, done)
    return tuple(entries)


def _compared(
    makers: Sequence[Callable[[], Thunk]],
    names: Sequence[Entry],
    baselines: int,
    rounds: Rounds,
    advance: Callable[[float], object],
) -> tuple[Entry, ...]:
    """Timed in turn; the first `baselines` are what the rest is divided by, in that order."""
    samples = interleave(makers, rounds, advance)
    base = [median(s.seconds) if s.seconds else None for s in samples[:baselines]]
    return tuple(
        _entry(name, sample, base[index % baselines])
        for index, (name, sample) in enumerate(zip(names, samples, strict=True))
    )


def _entry(name: Entry, samples: Samples, baseline: float | None) -> Entry:
    return {**name, **summary.timed(samples.seconds, baseline), "error": samples.error}


def growth(layers: Sequence[Entry]) -> list[Entry]:
    """The power of the number of tokens with which a layer's time grows, from 512 on."""
    fitted = []
    for name, _ in methods.LAYERS:
        points = [
            (e["n"], e["seconds"])
            for e in layers
            if e["method"] == name and e["seconds"] is not None and e["n"] >= _FIT_FROM
        ]
        if len(points) > 1:
            sizes, seconds = zip(*points, strict=True)
            exponent = summary.exponent(sizes, seconds)
            fitted.append({"method": name, "exponent": exponent, "sizes": list(sizes)})
    return fitted


# ---- what is shown


def listings(document: Entry) -> list[Listing]:
    """From the JSON of a run."""
    return [_image_listing(document), _mixture_listing(document), _layer_listing(document)]


def _image_listing(document: Entry) -> Listing:
    sizes = document["settings"]["images"]
    title = (
        f"Time relative to softmax with the same head ({sizes['side']} x {sizes['side']} grid, "
        f"{sizes['functions']} functions, {sizes['channels']} channels, batch {sizes['batch']})"
    )
    rows: dict[str, list[str]] = {}
    for e in document["results"]:
        rows.setdefault(e["method"], []).append(_shown(e))
    return Listing(title, ("attention", *DIRECTIONS), [(k, *cells) for k, cells in rows.items()])


def _mixture_listing(document: Entry) -> Listing:
    sizes = document["settings"]["mixtures"]
    title = (
        f"{sizes['modes']} modes at {sizes['side'] ** 2} positions, {sizes['iterations']} "
        f"iterations, batch {sizes['batch']}; largest difference of the log-likelihood "
        f"{tables.error(document['log_likelihood_difference'])}"
    )
    rows = [(e["method"], tables.seconds(e["seconds"]), _shown(e)) for e in document["mixtures"]]
    return Listing(title, ("fit", "time", f"÷ {methods.SKLEARN}"), rows)


def _layer_listing(document: Entry) -> Listing:
    sizes = document["settings"]["layers"]
    powers = ", ".join(f"{e['method']} n^{e['exponent']:.2f}" for e in document["growth"])
    title = f"Forward time of a layer, width {sizes['embed']}, {sizes['functions']} functions"
    rows: dict[int, list[str]] = {}
    for e in document["layers"]:
        rows.setdefault(e["n"], []).append(e["error"] or tables.seconds(e["seconds"]))
        if e["method"] == methods.CONTINUOUS:
            rows[e["n"]].append(_shown(e))
    header = ("tokens", *(name for name, _ in methods.LAYERS), "ratio")
    return Listing(
        f"{title}; {powers}" if powers else title, header, [(str(n), *c) for n, c in rows.items()]
    )


def _shown(entry: Entry) -> str:
    """The ratio with its spread, or why there is none."""
    if entry["error"]:
        return str(entry["error"])
    if entry["ratio"] is None:
        return "–"
    middle, low, high = (summary.digits(entry[k]) for k in ("ratio", "ratio_min", "ratio_max"))
    return f"{middle} ({low}..{high})"
