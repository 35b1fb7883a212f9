"""The certificate: how far from optimal an answer can be."""

from __future__ import annotations

import dataclasses

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

import fenchel as fl
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Figure, Table, Tour, number
from papers.tour.gallery import GALLERY, bumpy_scores

ORDER = 40
_SHIFT = 1e-3

_INTRO = """
Every answer carries its own proof. `gap` bounds by how much the objective of the given weights
can fall short of the best possible; it is a sum of non-negative terms, evaluated in float64 from
the weights and the multipliers alone, and zero only at the optimum. `potential` (the value of the
best) and `objective` (the value of these weights) agree up to it.

A check that cannot fail says nothing, so each answer is also spoiled: 0.001 of weight is moved
from the key that has most to the key that has least (but some), and the gap is read again. The
scores are those of the eight small pictures above.
"""


def chapter(tour: Tour) -> Chapter:
    scores = bumpy_scores(tour)
    tables = (_table(scores, "float64"), _table(scores.float(), "float32"))
    return Chapter("Supports and certificates", _INTRO, (_growth(scores),), tables)


def spoiled(solution: fl.Solution, shift: float) -> fl.Solution:
    """The same solution with `shift` of weight moved from its largest to its smallest entry."""
    weights = solution.weights.clone()
    least = torch.where(weights > 0, weights, torch.inf).argmin()
    weights[weights.argmax()] -= shift
    weights[least] += shift
    return dataclasses.replace(solution, weights=weights)


def _table(scores: Tensor, dtype: str) -> Table:
    header = ("regulariser", "keys", "threshold", "potential", "objective", "gap", "gap, spoiled")
    rows = tuple(_row(name, fl.solve(scores, omega)) for name, omega in GALLERY)
    return Table(f"{len(scores)} scores in {dtype}.", header, rows)


def _row(name: str, solution: fl.Solution) -> tuple[str, ...]:
    values = (solution.threshold, solution.potential, solution.objective)
    return (
        f"`{name}`",
        str(int(solution.support_size)),
        *(number(float(value), 6) for value in values),
        number(float(solution.gap), 2),
        number(float(spoiled(solution, _SHIFT).gap), 3),
    )


def _growth(scores: Tensor) -> Figure:
    shifts = torch.logspace(-7, -2, 26, dtype=torch.float64).tolist()
    wanted = [(n, o) for n, o in GALLERY if n in _SHOWN]
    solutions = [(name, fl.solve(scores, omega)) for name, omega in wanted]
    series = [
        (name, [float(spoiled(solution, shift).gap) for shift in shifts])
        for name, solution in solutions
    ]

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        draw.lines(ax, shifts, series, place="lower right")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("weight moved")
        ax.set_ylabel("gap")

    caption = (
        "The gap of spoiled weights against how much was moved: it sees a shift of 1e-7 and falls "
        "with the square of it, as it must near a smooth optimum (with the shift itself where "
        "Fused is kinked)."
    )
    alt = "Gap against the size of the perturbation, both axes logarithmic, five regularisers."
    return Figure((draw.panel(paint, "wide", 2.8),), caption, alt, "wide")


_SHOWN = ("Shannon()", "Tsallis(1.5)", "Norm(2)", "Budget(3)", "Fused(0.3)")
