"""The audit of every head of a model over many texts.

The work is cut into units, so that memory does not grow with the number of texts. The units follow
from the texts and the settings alone and are added in their order. So the result depends neither on
which process counted them nor on how often the audit was interrupted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fenchel._numerics import check_whole
from fenchel.lens.capture.calls import Call, watch
from fenchel.lens.capture.output_projections import find_projections
from fenchel.lens.document import Example, InputFacts
from fenchel.lens.families import Kind, place_name
from fenchel.lens.heads.batch_tallies import batches, count_attack, count_chunk, count_probe
from fenchel.lens.heads.datasets import Dataset, PreparedBatch, make_dataset
from fenchel.lens.heads.examples import make_examples
from fenchel.lens.heads.facts import AuditFacts, complete_inputs, describe_model
from fenchel.lens.heads.recipe import Search
from fenchel.lens.heads.settings import STREAMED, AuditSettings, ExecutionSettings
from fenchel.lens.heads.store import Store
from fenchel.lens.heads.switching import SwitchedHeads, count_head_switches, count_whole_switch
from fenchel.lens.heads.table import Audit
from fenchel.lens.heads.tallies import AttentionTally, Tallies, add

_PROBE_CHUNK = 16
_SHOWN = 6  # texts that the report draws


@dataclass(frozen=True)
class WorkUnit:
    """A piece of work: its name in the store, how long it takes (in texts of a chunk, about), and
    how it is counted."""

    name: str
    cost: float
    count: Callable[[], Tallies]


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
    >>> audit = lens.audit(model, tokenizer, sentences, measures=["weights", "what_if"])
    >>> audit.to_pandas(), audit.plot("entropy")

    tokenizer: of the model; for a vision model its image processor, with paths of images as texts.
    measures: of `lens.MEASURES`, all of them if None; `settings` holds the other choices.
    targets: what an encoder-decoder is to write, one per text; None: its own greedy output.
    """
    if measures is not None and settings is not None:
        raise TypeError("give measures, or settings with measures in them, not both")
    chosen = AuditSettings() if measures is None else AuditSettings(measures=tuple(measures))
    return AuditRun(model, make_dataset(tokenizer, texts, targets), settings or chosen).audit()


@dataclass(eq=False)
class AuditRun:
    """One audit: what is to be done, in units, and the result once they are there.

    chunk: texts of a unit; the result depends on it by rounding. store: where units are kept,
    opened; those that are there already are not counted again.
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

    def units(self) -> Iterator[WorkUnit]:
        """All of them, in the order in which they are added."""
        if self.settings.asks_for(*STREAMED):
            yield from self._chunks()
        if self.settings.asks_for("geometry", "local", "advantage"):
            yield from self._probe_chunks()
        if self.settings.asks_for("attack"):
            count = partial(count_attack, self.model, self.dataset, self.probe[0], self.settings)
            yield WorkUnit("attack", 0.6 * sum(map(len, self.heads().values())), count)
        if self.settings.asks_for("model"):
            yield from self._switches()
        if self.settings.asks_for("recipe"):
            yield WorkUnit("recipe", 3.0 * len(self.probe), self.search().tallies)

    def _chunks(self) -> Iterator[WorkUnit]:
        """All texts."""
        every = range(len(self.dataset))
        for number, start in enumerate(every[:: self.chunk]):
            part = every[start : start + self.chunk]
            arguments = (self.model, self.dataset, part, self.settings, self.projections)
            yield WorkUnit(f"chunk-{number:06d}", len(part), partial(count_chunk, *arguments))

    def _probe_chunks(self) -> Iterator[WorkUnit]:
        for number, start in enumerate(range(0, len(self.probe), _PROBE_CHUNK)):
            part = self.probe[start : start + _PROBE_CHUNK]
            count = partial(count_probe, self.model, self.dataset, part, self.settings)
            yield WorkUnit(f"probe-{number:06d}", 0.5 * len(part), count)

    def _switches(self) -> Iterator[WorkUnit]:
        """The model with one head replaced, or all."""
        for alpha in self.settings.alphas:
            whole = partial(self._count_whole, alpha)
            yield WorkUnit(f"model-{alpha:g}", 0.15 * len(self.probe), whole)
            for kind, layer in self.places:
                count = self.sizes[kind, layer]
                switched = SwitchedHeads(kind, layer, self.settings.choose_heads(count), count)
                cost = 0.07 * len(self.probe) * len(switched.heads)
                name = f"model-{alpha:g}-{kind}-{layer:03d}"
                yield WorkUnit(name, cost, partial(self._count_heads, switched, alpha))

    def _show_probe(self) -> Iterator[PreparedBatch]:
        return batches(self.model, self.dataset, self.probe)

    def _count_whole(self, alpha: float) -> Tallies:
        tally = count_whole_switch(self.model, self._show_probe, alpha)
        return Tallies(everywhere={f"{alpha:g}": tally})

    def _count_heads(self, switched: SwitchedHeads, alpha: float) -> Tallies:
        tally = count_head_switches(self.model, self._show_probe, switched, alpha)
        place = place_name(switched.kind, switched.layer)
        return Tallies({place: AttentionTally(model={f"{alpha:g}": tally})})

    def work(self, takes: Callable[[int], bool], advance: Callable[[WorkUnit], object]) -> None:
        """Count the units that are missing; of those whose number this process takes."""
        if self.store is None:
            raise ValueError("work needs a store; without one use audit")
        for number, unit in enumerate(self.units()):
            if takes(number):
                if self.store.load(unit.name) is None:
                    self.store.save(unit.name, unit.count())
                    return_memory()
                advance(unit)

    def audit(self) -> Audit:
        """All units added; what is missing is counted."""
        total = Tallies()
        for unit in self.units():
            total = add(total, self._load_or_count(unit))
        return Audit(total, self.heads(), self.facts(), self.examples())

    def _load_or_count(self, unit: WorkUnit) -> Tallies:
        stored = None if self.store is None else self.store.load(unit.name)
        if stored is not None:
            return stored
        tallies = unit.count()
        if self.store is not None:
            self.store.save(unit.name, tallies)
        return tallies

    def search(self) -> Search:
        """For the recipe; verified on as many texts that the probe leaves out."""
        left = sorted(set(range(len(self.dataset))) - set(self.probe))
        some = min(self.settings.probe, len(left))
        unseen = [left[number * len(left) // some] for number in range(some)]
        layers = (self.projections, self.sizes)
        return Search(self.model, self.dataset, self.settings, *layers, self.probe, unseen)

    def facts(self) -> AuditFacts:
        """Of the model and of what it was shown."""
        inputs = InputFacts(
            what=self.dataset.what,
            count=len(self.dataset),
            probe=len(self.probe),
            chunk=self.chunk,
            longest=getattr(self.dataset, "longest", None),
        )
        return AuditFacts(describe_model(self.model, self.paths, self.sizes), inputs, self.settings)

    def add_execution(self, audit: Audit, execution: ExecutionSettings) -> Audit:
        """The audit with the settings of the command, and with counts of its inputs."""
        counted = audit.tallies.inputs is not None
        inputs = complete_inputs(audit.facts.inputs, self.model, self.dataset, counted)
        return replace(audit, facts=replace(audit.facts, inputs=inputs, execution=execution))

    def heads(self) -> dict[tuple[Kind, int], list[int]]:
        return {place: self.settings.choose_heads(self.sizes[place]) for place in self.places}

    def examples(self) -> list[Example]:
        """The first of the probe, with their strongest links."""
        return make_examples(self.model, self.dataset, self.probe[:_SHOWN], self.settings)


def return_memory() -> None:
    """Free memory goes back to the system, where the C library would keep it in pieces."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else object()
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(0)
