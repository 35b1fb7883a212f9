"""Experiments: both studies trained for seconds, with their tables and maps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from benchmarks import machine
from benchmarks.tables import Listing
from fenchel.lens.pictures import draw
from papers.experiments.data.questions import QuestionData
from papers.experiments.data.shapes import load_shapes
from papers.experiments.loop import Outcome, Study, train
from papers.experiments.report import maps
from papers.experiments.runs import Job
from papers.experiments.tables import Document
from papers.experiments.vit import presets as vit
from papers.experiments.vit import tables as vit_tables
from papers.experiments.vqa import measures
from papers.experiments.vqa import presets as vqa
from papers.experiments.vqa import tables as vqa_tables
from papers.tour.chapter import Chapter, Figure, Table, Tour

ORDER = 99

_INTRO = """
The papers' tables can be trained here: a vision transformer whose class token looks by softmax, by
transport or by entmax, and a network that answers questions about pictures and reads them by
discrete or by continuous attention. A table is a queue of runs that are stored one by one; the same
command goes on after an interruption.

    python -m papers experiment vit --preset cpu --data data --out build/experiments
    python -m papers experiment vqa --preset cpu --sets shapes --out build/experiments

What this chapter shows was trained while the page was written, at the size of the preset `smoke`:
seconds of training on a few hundred pictures. It shows that everything runs, and proves nothing
about the papers' claims; one seed has no interval. The results with seeds and intervals are in
`docs/results.md`.
"""
_MISSING = """
The chapter on experiments needs {name}: `pip install -c constraints.txt ".[papers]"`.
"""
_VIT = ("softmax", "transport", "entmax")
_VQA = ("softmax", "continuous-softmax-16")
_STEPS = {"vit": 48, "vqa": 64}
_SHOWN = 3  # examples

Fact = tuple[str, Callable[[Any, torch.nn.Module], Any]]
_FACTS: tuple[Fact, ...] = (("looks", measures.looks), ("agreement", measures.agreement))
Losses = dict[str, list[float]]  # by the name of a row, step by step


def chapter(tour: Tour) -> Chapter:
    try:
        return _trained(tour)
    except ModuleNotFoundError as missing:
        return Chapter("Experiments", _MISSING.format(name=missing.name))


def _trained(tour: Tour) -> Chapter:
    with torch.random.fork_rng(devices=[]), machine.one_thread():
        images, image_losses = classified(tour)
        data = _questions(tour)
        answers, answer_losses = answered(tour, data)
    figures = (_curves(image_losses, answer_losses), *_maps(answers, data))
    return Chapter("Experiments", _INTRO, figures, _tables(images, answers))


# ---- training


def classified(tour: Tour) -> tuple[list[Document], Losses]:
    """Stripes in four directions, by three attentions."""
    data = vit.load("toy")
    rate = vit.PRESETS["smoke"].rates[0]
    jobs = [vit.job("smoke", data, attention, tour.seed, rate) for attention in _VIT]
    runs = [_run(tour, job, vit.study(job, data)) for job in jobs]
    losses = {vit_tables.NAMES[d["settings"]["variant"]]: values for d, values in runs}
    return [document for document, _ in runs], losses


def _questions(tour: Tour) -> QuestionData:
    if not tour.quick:
        return vqa.load("shapes-tiny")
    return replace(load_shapes(images=(60, 30)), name="shapes-tiny")


def answered(tour: Tour, data: QuestionData) -> tuple[list[Document], Losses]:
    """Questions about coloured shapes, by discrete and by continuous softmax."""
    runs = []
    for attention in _VQA:
        job = vqa.job("smoke", data, attention, tour.seed)
        study = vqa.study(job, data)
        runs.append(_run(tour, job, study, _FACTS))
    documents = [document for document, _ in runs]
    called = vqa_tables.names(documents)
    return documents, {called[d["settings"]["variant"]]: values for d, values in runs}


def _run(
    tour: Tour, job: Job, study: Study, facts: Sequence[Fact] = ()
) -> tuple[Document, list[float]]:
    """What is stored of a run, as far as tables ask for it, and its losses."""
    steps = 3 if tour.quick else _STEPS[job.study]
    training = replace(job.training, steps=steps, evaluate_every=steps, save_every=steps)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(
            study,
            training,
            Path(folder),
            job.settings(),
            advance=lambda step, numbers: losses.append(numbers["loss"]),
        )
    outcome.model.eval()
    with torch.no_grad():
        measures = {name: measure(study, outcome.model) for name, measure in facts}
    return _document(replace(job, training=training), outcome, measures), losses


def _document(job: Job, outcome: Outcome, facts: dict[str, Any]) -> Document:
    settings = job.settings()
    settings["training"]["seed"] = 0  # the only one
    note = settings.get("note", "")
    return {"settings": settings, "note": note, "scores": outcome.scores, "facts": facts}


# ---- what is shown


def _curves(images: Losses, answers: Losses) -> Figure:
    titles = ("directions of stripes", "questions about shapes")
    panels = tuple(
        _curve(title, losses) for title, losses in zip(titles, (images, answers), strict=True)
    )
    caption = (
        "The loss of each step of training. The first data set is easy and learnt in a few dozen "
        "steps; of the second, these steps teach little more than which answers there are, and the "
        "two curves lie on each other. Half of OT-ViT's steps see a second image, so that its loss "
        "is not that of the same task."
    )
    alt = "Loss over the steps of training, of three vision transformers and of two networks."
    return Figure(panels, caption, alt, "medium")


def _curve(title: str, losses: Losses) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        steps = range(1, 1 + len(next(iter(losses.values()))))
        for (name, values), color, dash in zip(
            losses.items(), draw.SERIES, draw.DASHES, strict=False
        ):
            ax.plot(steps, values, color=color, linestyle=dash, label=name)
        ax.set(xlabel="step", ylabel="loss")
        ax.set_ylim(bottom=0)
        ax.grid(True, color=draw.FAINT, alpha=0.35, linewidth=0.5)
        ax.legend(loc="best", handlelength=2.6, labelcolor=draw.INK)

    return draw.panel(paint, "medium", 2.3)


def _maps(documents: Sequence[Document], data: QuestionData) -> tuple[Figure, ...]:
    """None where the rule finds no question, all of them answered wrong."""
    shown = maps.examples(documents, data, compact=False)[:_SHOWN]
    if not shown:
        return ()
    panels = tuple(_example(example) for example in shown)
    caption = (
        "Test questions with their answers, the picture with an outline of what the question is "
        f"about (none where it is not there), and where each network looked. {maps.RULE} Here at "
        f"most {_SHOWN} of these. "
        f"{maps.SCALE} After seconds of training they have hardly begun to look."
    )
    alt = "Pictures of coloured shapes, and over them the attention of two networks."
    return (Figure(panels, caption, alt, "medium"),)


def _example(example: maps.Example) -> str:
    rows = [example]
    height = maps.size(rows)[1]
    return draw.panel(lambda canvas: maps.paint(canvas, rows, {}), "medium", height)


def _tables(images: Sequence[Document], answers: Sequence[Document]) -> tuple[Table, ...]:
    by_data = vit_tables.by_data(images)
    listings = {listing.title: listing for listing in vqa_tables.of_data(answers, "shapes-tiny")}
    accuracy = next(listing for title, listing in listings.items() if "Table 6.2" in title)
    looked = next(listing for title, listing in listings.items() if "is about" in title)
    return (
        _table(by_data, "Directions of stripes: test accuracy in per cent, as in Table 2"),
        _table(accuracy, "Questions about shapes: accuracy in per cent, as in Table 6.2"),
        _table(
            looked,
            "Of the attention, how much lies on what the question is about, in per cent; the area "
            "is what even attention would have",
        ),
    )


def _table(listing: Listing, caption: str) -> Table:
    said = f"{caption}. Seconds of training, one seed."
    return Table(said, tuple(listing.header), tuple(map(tuple, listing.rows)))
