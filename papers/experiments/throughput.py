"""What a training step costs with each attention, against softmax: random inputs, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import machine, tables
from benchmarks.attention_rounds import Advance, Rounds, Samples, Thunk, interleave, part
from benchmarks.tables import Listing
from papers.experiments.data.images import ImageData, Split
from papers.experiments.data.questions import QuestionData, QuestionSplit
from papers.experiments.loop import Batch, Study
from papers.experiments.vit import presets as vit
from papers.experiments.vit.study import VitStudy
from papers.experiments.vqa import presets as vqa
from papers.experiments.vqa.study import VqaStudy

__all__ = ["FULL", "QUICK", "Report", "Sweep", "listings", "run"]

Entry = dict[str, Any]
_BASELINE = "softmax"
_WORDS, _ANSWERS, _LONGEST = 50, 13, 12


@dataclass(frozen=True)
class Sweep:
    """batches: the most examples of a step, for the small networks and for the papers'."""

    batches: tuple[int, int] = (128, 16)
    papers: bool = True
    rounds: Rounds = field(default_factory=lambda: Rounds(7, 25, 40.0))
    seed: int = 0


FULL = Sweep()
QUICK = Sweep(batches=(16, 2), papers=False, rounds=Rounds(3, 3, 2.0))


class Case(NamedTuple):
    """studies: by attention, softmax the first."""

    name: str
    batch: int
    studies: dict[str, Study]


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    results: tuple[Entry, ...]

    def as_json(self) -> Entry:
        return {
            "bench": "steps",
            "settings": {"seed": self.sweep.seed, "threads": 1, "clock": "processor time"},
            "machine": machine.summary(),
            "warning": "",
            "results": list(self.results),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it. advance: (what is measured, share of the whole that was just done)."""
    all_cases, results = cases(sweep), []
    with machine.one_thread():
        for case in all_cases:
            results += _times(case, sweep, part(advance, case.name, 1 / len(all_cases)))
    return Report(sweep, tuple(results))


def cases(sweep: Sweep) -> list[Case]:
    """The networks of the presets on inputs of their data's shapes."""
    small, large = sweep.batches
    all_cases = [
        _vit("ViT, small", "cpu", (1, 28), small, sweep.seed),
        _vqa("VQA, 8 x 8 cells", "cpu", "shapes", (8, 8, 48), small, sweep.seed),
        _vqa("VQA, 14 x 14 cells", "cpu", "daquar", (14, 14, 96), small, sweep.seed),
    ]
    if sweep.papers:
        grid = (14, 14, 2048)
        all_cases.append(_vit("ViT, the paper's", "paper", (3, 32), large, sweep.seed))
        all_cases.append(_vqa("VQA, the thesis'", "paper", "vqa-v2", grid, large, sweep.seed))
    return all_cases


def _vit(name: str, preset: str, shape: tuple[int, int], batch: int, seed: int) -> Case:
    """shape: channels and side of an image."""
    settings, (channels, side) = vit.PRESETS[preset], shape
    generator = torch.Generator().manual_seed(seed)
    size = (2 * batch, channels, side, side)
    images = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    split = Split(images, torch.zeros(2 * batch, dtype=torch.int64))
    data = ImageData("random", split, split.first(2), 10)
    studies: dict[str, Study] = {
        _BASELINE: VitStudy(data, settings.size, _BASELINE),
        "transport": VitStudy(data, settings.size, "transport", sharing=vit.SHARING),
        "entmax": VitStudy(data, settings.size, "entmax"),
    }
    return Case(name, batch, studies)


@dataclass(frozen=True, eq=False)
class _Cells:
    """features: (n, rows, columns, channels)."""

    features: torch.Tensor

    def __len__(self) -> int:
        return len(self.features)

    def gathered(self, places: torch.Tensor) -> torch.Tensor:
        return self.features[places]

    def shown(self, place: int) -> None:
        return None

    def origin(self) -> Iterator[torch.Tensor | str]:
        yield self.features


def _vqa(
    name: str, preset: str, course: str, grid: tuple[int, int, int], batch: int, seed: int
) -> Case:
    settings = vqa.PRESETS[preset].courses[course]
    count, pictures = 2 * batch, -(-2 * batch // settings.together)
    generator = torch.Generator().manual_seed(seed)
    split = QuestionSplit(
        _Cells(torch.randn(pictures, *grid, generator=generator)),
        torch.arange(count) // settings.together,
        torch.randint(1, _WORDS, (count, _LONGEST), generator=generator),
        torch.randint(0, _ANSWERS, (count, 1), generator=generator),
        torch.ones(count, 1),
        torch.full((count,), 2),
    )
    answers = [str(number) for number in range(_ANSWERS)]
    words = ["", *(str(number) for number in range(1, _WORDS))]
    data = QuestionData("random", split, split.first(2), words, answers)
    many, _ = settings.functions
    names = (_BASELINE, f"continuous-softmax-{many}", f"continuous-sparsemax-{many}")
    build = partial(
        VqaStudy, data, settings.size, together=settings.together, several=settings.several
    )
    studies: dict[str, Study] = {each: build(each) for each in (*names, f"2-mca-{many}")}
    return Case(name, batch, studies)


# ---- times


def _times(case: Case, sweep: Sweep, advance: Callable[[float], object]) -> list[Entry]:
    """A step whose cost is drawn by lot is the mean of its kinds, each with its share."""
    kinds = [
        (attention, share, partial(_step, study, batch, sweep.seed))
        for attention, study in case.studies.items()
        for share, batch in study.cases(study.order(0, case.batch, sweep.seed)[0])
        if share > 0
    ]
    samples = interleave([make for _, _, make in kinds], sweep.rounds, advance, time.process_time)
    taken: dict[str, list[tuple[float, Samples]]] = {attention: [] for attention in case.studies}
    for (attention, share, _), samples_of_part in zip(kinds, samples, strict=True):
        taken[attention].append((share, samples_of_part))
    return [_entry(case, attention, parts) for attention, parts in taken.items()]


def _step(study: Study, batch: Batch, seed: int) -> Thunk:
    torch.manual_seed(seed)
    model = study.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def thunk() -> None:
        optimizer.zero_grad()
        study.loss(model, batch).backward()
        optimizer.step()

    return thunk


def _entry(case: Case, attention: str, parts: list[tuple[float, Samples]]) -> Entry:
    error = next((samples.error for _, samples in parts if samples.error), "")
    mean = None if error else sum(share * median(samples.seconds) for share, samples in parts)
    return {
        "case": case.name,
        "batch": case.batch,
        "attention": attention,
        "seconds": mean,
        "rounds": min(len(samples.seconds) for _, samples in parts),
        "error": error,
    }


def listings(document: Entry) -> list[Listing]:
    """From the JSON of a run: one table, a row for each network and attention."""
    rows = []
    for e in document["results"]:
        (base,) = (
            other["seconds"]
            for other in document["results"]
            if (other["case"], other["attention"]) == (e["case"], _BASELINE)
        )
        ratio = "–" if not (base and e["seconds"]) else f"{base / e['seconds']:.3g}"
        shown = e["error"] or tables.seconds(e["seconds"])
        rows.append((e["case"], str(e["batch"]), e["attention"], shown, ratio))
    header = ("network", "batch", "attention", "a step", f"{_BASELINE} ÷ it")
    return [Listing("Training steps, processor time of one thread", header, rows)]
