"""Which questions to keep: equally many of each answer of each text, and not too many a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from papers.experiments.data.shapes.asking import FORMS, Asked

Array = np.ndarray[Any, Any]

_FULL = 7 / 8  # of the places for questions that one tries to fill: the last ones fit few


@dataclass(frozen=True, eq=False)
class Cell:
    """The pictures for which a text has one of its answers; wanted: how many of them to keep."""

    form: int
    text: int
    answer: int
    pictures: Array
    wanted: int


def kept(asked: Sequence[Asked], most: int, rng: np.random.Generator) -> Array:
    """(questions, 4): picture, form, text, answer, in this order."""
    pictures = len(asked[0].answers)
    cells = [
        cell
        for form, part in enumerate(asked)
        for cell in _cells(form, part, _FULL * most * pictures, rng)
    ]
    rows = [_rows(cell, picked) for cell, picked in _even(_picked(cells, pictures, most, rng))]
    questions = np.concatenate(rows) if rows else np.empty((0, 4), np.int64)
    return questions[np.lexsort(questions.T[::-1])]


def _cells(form: int, part: Asked, total: float, rng: np.random.Generator) -> list[Cell]:
    kinds = len(FORMS[form].answers)
    groups = [
        [np.flatnonzero(column == answer) for answer in range(kinds)] for column in part.answers.T
    ]
    least = np.array([min(len(pictures) for pictures in group) for group in groups])
    quotas = _shared(least, round(total * FORMS[form].share / kinds), rng)
    return [
        Cell(form, text, answer, pictures, int(quotas[text]))
        for text, group in enumerate(groups)
        for answer, pictures in enumerate(group)
        if quotas[text]
    ]


def _shared(least: Array, total: int, rng: np.random.Generator) -> Array:
    """`total` dealt out as evenly as `least`, the most that each can take, allows."""
    levels = np.arange(int(least.max()) + 1)
    filled = np.minimum(least[:, None], levels).sum(0)
    level = int(levels[filled <= total].max())
    quotas: Array = np.minimum(least, level)
    rest = np.flatnonzero(least > level)
    quotas[rng.permutation(rest)[: total - int(quotas.sum())]] += 1
    return quotas


def _picked(
    cells: list[Cell], pictures: int, most: int, rng: np.random.Generator
) -> list[tuple[Cell, Array]]:
    """The scarce first, and each from the pictures that have the fewest questions so far."""
    load = np.zeros(pictures, np.int64)
    picks = []
    for cell in sorted(cells, key=lambda cell: len(cell.pictures) / cell.wanted):
        free = rng.permutation(cell.pictures[load[cell.pictures] < most])
        chosen = free[np.argsort(load[free], kind="stable")][: cell.wanted]
        load[chosen] += 1
        picks.append((cell, rng.permutation(chosen)))
    return picks


def _even(picked: list[tuple[Cell, Array]]) -> list[tuple[Cell, Array]]:
    """Cut to the fewest that any answer of the same text has."""
    fewest: dict[tuple[int, int], int] = {}
    for cell, chosen in picked:
        key = cell.form, cell.text
        fewest[key] = min(fewest.get(key, len(chosen)), len(chosen))
    return [(cell, chosen[: fewest[cell.form, cell.text]]) for cell, chosen in picked]


def _rows(cell: Cell, chosen: Array) -> Array:
    fixed = np.tile([cell.form, cell.text, cell.answer], (len(chosen), 1))
    return np.concatenate([chosen[:, None], fixed], 1)
