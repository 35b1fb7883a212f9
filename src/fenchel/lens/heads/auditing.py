"""The audit: every head of a model over many texts, in units of work, with memory that does not
grow. The units follow from the texts and the settings alone, and are added in their order, so that
the result does not depend on who made them, or in how many sittings."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fenchel._numerics import check_whole
from fenchel.lens.capture.calls import Call, watch
from fenchel.lens.capture.output_projections import find_projections
from fenchel.lens.families import Kind
from fenchel.lens.heads.batch_tallies import attack_tallies, batches, chunk_tallies, probe_tallies
from fenchel.lens.heads.datasets import Dataset, make_dataset
from fenchel.lens.heads.examples import Example, examples
from fenchel.lens.heads.recipe import Search
from fenchel.lens.heads.settings import STREAMED, AuditSettings
from fenchel.lens.heads.store import Store
from fenchel.lens.heads.switching import head_tallies, whole_tallies
from fenchel.lens.heads.table import Audit
from fenchel.lens.heads.tallies import Tallies, added

_PROBE_CHUNK = 16
_SHOWN = 6  # texts that the report draws


@dataclass(frozen=True)
class Unit:
    """A piece of work: its name in the store, how long it takes (in texts of a chunk, about), and
    how it is made."""

    name: str
    work: float
    run: Callable[[], Tallies]


def audit(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str] | Sequence[Path],
    *,
    measures: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    settings: AuditSettings | None = None,
) -> Audit:
    """Every head of the model over the texts.

    >>> model, tokenizer = lens.load("build/models/minilm")
    >>> found = lens.audit(model, tokenizer, sentences, measures=["weights", "what_if"])
    >>> found.to_pandas(), found.plot("entropy")

    tokenizer: of the model; for a vision model its image processor, with paths of images as texts.
    measures: of `lens.MEASURES`, all of them if None; `settings` holds the other choices.
    targets: what an encoder-decoder is to write, one a text; None: its own greedy output.
    """
    if measures is not None and settings is not None:
        raise TypeError("give measures, or settings with measures in them, not both")
    chosen = AuditSettings() if measures is None else AuditSettings(measures=tuple(measures))
    return Run(model, make_dataset(tokenizer, texts, targets), settings or chosen).audit()


@dataclass(eq=False)
class Run:
    """One audit: what is to be done, in units, and the result once they are there.

    chunk: texts of a unit; the result depends on it by rounding. store: where units are kept,
    opened; those that are there already are not made again.
    """

    model: Any
    dataset: Dataset
    settings: AuditSettings
    chunk: int = 32
    store: Store | None = None

    def __post_init__(self) -> None:
        check_whole(self.chunk, "chunk", 1)
        first = next(batches(self.model, self.dataset, [0]))
        self.sizes: dict[tuple[Kind, int], int] = {}
        self.paths: dict[tuple[Kind, int], str] = {}
        with watch(self.model, self._note):
            self.model(**first.arguments)
        self._check_layers()
        self.projections = find_projections(self.model, first.arguments)

    def _note(self, call: Call) -> None:
        self.sizes[call.kind, call.layer] = call.heads
        self.paths[call.kind, call.layer] = call.path

    def _check_layers(self) -> None:
        last = max(layer for _, layer in self.sizes)
        beyond = [layer for layer in self.settings.layers or () if layer > last]
        if beyond:
            raise ValueError(f"there are layers 0 to {last}, no layer {beyond[0]}")
        for count in self.sizes.values():
            self.settings.choose_heads(count)

    @property
    def places(self) -> list[tuple[Kind, int]]:
        return [place for place in self.sizes if self.settings.includes_layer(place[1])]

    @property
    def probe(self) -> list[int]:
        """Texts at even distances. (places)"""
        count, some = len(self.dataset), min(self.settings.probe, len(self.dataset))
        return [number * count // some for number in range(some)]

    def units(self) -> Iterator[Unit]:
        """All of them, in the order in which they are added."""
        model, shown, settings = self.model, self.dataset, self.settings
        if settings.asks_for(*STREAMED):
            for number, start in enumerate(range(0, len(shown), self.chunk)):
                part = range(start, min(start + self.chunk, len(shown)))
                job = partial(chunk_tallies, model, shown, part, settings, self.projections)
                yield Unit(f"chunk-{number:06d}", len(part), job)
        if settings.asks_for("geometry", "local", "advantage"):
            for number, start in enumerate(range(0, len(self.probe), _PROBE_CHUNK)):
                some = self.probe[start : start + _PROBE_CHUNK]
                job = partial(probe_tallies, model, shown, some, settings)
                yield Unit(f"probe-{number:06d}", 0.5 * len(some), job)
        if settings.asks_for("attack"):
            job = partial(attack_tallies, model, shown, self.probe[0], settings)
            yield Unit("attack", 0.6 * sum(map(len, self.heads().values())), job)
        if settings.asks_for("model"):
            yield from self._switches()
        if settings.asks_for("recipe"):
            yield Unit("recipe", 3.0 * len(self.probe), self.search().tallies)

    def _switches(self) -> Iterator[Unit]:
        """The model with one head replaced, or all."""
        show = partial(batches, self.model, self.dataset, self.probe)
        for alpha in self.settings.alphas:
            job = partial(_named, "model/0/", partial(whole_tallies, self.model, show, alpha))
            yield Unit(f"model-{alpha:g}", 0.15 * len(self.probe), job)
            for place in self.places:
                heads = self.settings.choose_heads(self.sizes[place])
                kind, layer = place
                make = partial(
                    head_tallies, self.model, show, place, (heads, self.sizes[place]), alpha
                )
                job = partial(_named, f"{kind}/{layer}/", make)
                name = f"model-{alpha:g}-{kind}-{layer:03d}"
                yield Unit(name, 0.07 * len(self.probe) * len(heads), job)

    def work(self, mine: Callable[[int], bool], advance: Callable[[Unit], object]) -> None:
        """Make the units that are missing; of those whose number is `mine`."""
        if self.store is None:
            raise ValueError("work needs a store; without one use audit")
        for number, unit in enumerate(self.units()):
            if mine(number):
                if self.store.load(unit.name) is None:
                    self.store.save(unit.name, unit.run())
                    give_back()
                advance(unit)

    def audit(self) -> Audit:
        """All units added; what is missing is made."""
        total: Tallies = {}
        for unit in self.units():
            made = None if self.store is None else self.store.load(unit.name)
            if made is None:
                made = unit.run()
                if self.store is not None:
                    self.store.save(unit.name, made)
            total = added(total, made)
        return Audit(total, self.heads(), self.facts(), self.examples())

    def search(self) -> Search:
        """For the recipe; verified on as many texts that the probe leaves out."""
        left = sorted(set(range(len(self.dataset))) - set(self.probe))
        some = min(self.settings.probe, len(left))
        unseen = [left[number * len(left) // some] for number in range(some)]
        known = (self.projections, self.sizes)
        return Search(self.model, self.dataset, self.settings, *known, self.probe, unseen)

    def facts(self) -> dict[str, Any]:
        """Of the model and of what it was shown, as JSON can hold them."""
        model = self.model
        name = str(getattr(model, "name_or_path", "") or "").rstrip("/").rpartition("/")[2]
        return {
            "model": {
                "name": name or type(model).__name__,
                "type": str(getattr(model.config, "model_type", "")),
                "class": type(model).__name__,
                "parameters": sum(x.numel() for x in model.parameters()),
                "paths": {f"{kind}/{layer}": path for (kind, layer), path in self.paths.items()},
                "heads": {f"{kind}/{layer}": n for (kind, layer), n in self.sizes.items()},
            },
            "inputs": {
                "what": self.dataset.what,
                "count": len(self.dataset),
                "probe": len(self.probe),
                "chunk": self.chunk,
                "longest": getattr(self.dataset, "longest", None),
            },
            "settings": dataclasses.asdict(self.settings),
        }

    def heads(self) -> dict[tuple[Kind, int], list[int]]:
        return {place: self.settings.choose_heads(self.sizes[place]) for place in self.places}

    def examples(self) -> list[Example]:
        """The first of the probe, with their strongest links."""
        return examples(self.model, self.dataset, self.probe[:_SHOWN], self.settings)


def give_back() -> None:
    """Free memory goes back to the system, where the C library would keep it in pieces."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else object()
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _named(prefix: str, make: Callable[[], Tallies]) -> Tallies:
    return {prefix + name: value for name, value in make().items()}
