"""Every question that can be asked of every picture, its answer, and the things it is about.

A form has a fixed list of texts and of possible answers. `asked` fills one table a form, pictures
by texts, at once for all pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import numpy as np

from papers.experiments.data.shapes.scene import COLOURS, MOST, SHAPES, Scene

Array = np.ndarray[Any, Any]

YES_NO = ("yes", "no")
NUMBERS = ("0", "1", "2", "3")
ANSWERS = (*YES_NO, *NUMBERS, *COLOURS, *SHAPES)
APART = 8  # pixels along an axis, between two things that are compared
CLEAR = 6  # pixels from the outermost thing to the next

_SIDES = ("left of", "right of", "above", "below")
_ENDS = ("leftmost", "rightmost", "topmost", "bottommost")
_PLURALS = ("circles", "squares", "triangles")
_PAIRS = list(permutations(range(len(COLOURS)), 2))


@dataclass(frozen=True)
class Form:
    """kind: place in KINDS; share: wanted, of all questions."""

    name: str
    kind: int
    share: float
    texts: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Asked:
    """answers: (pictures, texts), places in the form's answers, -1: not to be asked here.
    about: (pictures, texts), bit i for thing i."""

    answers: Array
    about: Array


def _relation(side: str, pair: tuple[int, int]) -> str:
    return f"is the {COLOURS[pair[0]]} shape {side} the {COLOURS[pair[1]]} shape"


FORMS = (
    Form(
        "existence",
        0,
        0.24,
        tuple(f"is there a {c} {s}" for c, s in product(COLOURS, SHAPES)),
        YES_NO,
    ),
    Form(
        "relation",
        0,
        0.12,
        tuple(_relation(side, pair) for side, pair in product(_SIDES, _PAIRS)),
        YES_NO,
    ),
    Form(
        "number",
        1,
        0.28,
        (
            *(f"how many {c} shapes are there" for c in COLOURS),
            *(f"how many {s} are there" for s in _PLURALS),
        ),
        NUMBERS,
    ),
    Form("colour", 2, 0.09, tuple(f"what colour is the {s}" for s in SHAPES), COLOURS),
    Form("shape", 2, 0.09, tuple(f"what shape is the {c} one" for c in COLOURS), SHAPES),
    Form("end colour", 2, 0.09, tuple(f"what colour is the {e} shape" for e in _ENDS), COLOURS),
    Form("end shape", 2, 0.09, tuple(f"what shape is the {e} one" for e in _ENDS), SHAPES),
)


@dataclass(frozen=True, eq=False)
class _Table:
    """All (pictures, MOST); colour and shape are -1 where there is no thing."""

    colour: Array
    shape: Array
    x: Array
    y: Array

    def of_colour(self) -> Array:
        """bool (pictures, colours, MOST)."""
        return np.equal(self.colour[:, None], np.arange(len(COLOURS))[:, None])

    def of_shape(self) -> Array:
        """bool (pictures, shapes, MOST)."""
        return np.equal(self.shape[:, None], np.arange(len(SHAPES))[:, None])


def asked(scenes: Sequence[Scene]) -> list[Asked]:
    """In the order of FORMS."""
    table = _table(scenes)
    return [
        _existence(table),
        _relations(table),
        _numbers(table),
        _unique(table.of_shape(), table.colour),
        _unique(table.of_colour(), table.shape),
        _ends(table, table.colour),
        _ends(table, table.shape),
    ]


def _table(scenes: Sequence[Scene]) -> _Table:
    values = np.full((4, len(scenes), MOST), -1)
    for number, scene in enumerate(scenes):
        for place, thing in enumerate(scene.things):
            looks = COLOURS.index(thing.colour), SHAPES.index(thing.shape)
            values[:, number, place] = *looks, thing.x, thing.y
    return _Table(*values)


def _existence(table: _Table) -> Asked:
    both = table.of_colour()[:, :, None] & table.of_shape()[:, None]
    both = both.reshape(len(both), -1, MOST)  # (pictures, colours * shapes, MOST)
    return Asked(np.where(both.any(-1), 0, 1), _bits(both))


def _relations(table: _Table) -> Asked:
    matching = table.of_colour()
    one = matching.sum(-1) == 1
    first, second = np.array(_PAIRS).T
    both = one[:, first] & one[:, second]
    answers = []
    for axis, sign in ((table.x, 1), (table.x, -1), (table.y, 1), (table.y, -1)):  # as in _SIDES
        at = (matching * axis[:, None]).sum(-1)  # (pictures, colours), of use where there is one
        ahead = sign * (at[:, second] - at[:, first])
        answers.append(np.where(both & (abs(ahead) >= APART), np.where(ahead > 0, 0, 1), -1))
    about = _bits(matching[:, first] | matching[:, second])
    return Asked(np.concatenate(answers, 1), np.tile(about, (1, len(_SIDES))))


def _numbers(table: _Table) -> Asked:
    matching = np.concatenate([table.of_colour(), table.of_shape()], 1)
    count = matching.sum(-1)
    return Asked(np.where(count < len(NUMBERS), count, -1), _bits(matching))


def _unique(matching: Array, look: Array) -> Asked:
    """matching: (pictures, texts, MOST); look: (pictures, MOST), the answer for each thing."""
    answer = (matching * look[:, None]).sum(-1)
    return Asked(np.where(matching.sum(-1) == 1, answer, -1), _bits(matching))


def _ends(table: _Table, look: Array) -> Asked:
    pictures = np.arange(len(look))
    answers, about = [], []
    for axis, sign in ((table.x, 1), (table.x, -1), (table.y, 1), (table.y, -1)):  # as in _ENDS
        far = np.where(table.colour >= 0, sign * axis, np.iinfo(np.int64).max // 2)
        nearest = np.sort(far, 1)
        end = far.argmin(1)
        clear = nearest[:, 1] - nearest[:, 0] >= CLEAR
        answers.append(np.where(clear, look[pictures, end], -1))
        about.append(1 << end)
    return Asked(np.stack(answers, 1), np.stack(about, 1))


def _bits(matching: Array) -> Array:
    """(…, MOST) -> (…)."""
    bits: Array = (matching * (1 << np.arange(MOST))).sum(-1)
    return bits
