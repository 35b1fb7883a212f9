"""Shapes-VQA as data for a study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papers.experiments.data.questions import (
    InMemory,
    QuestionData,
    QuestionSplit,
    encoded,
    single,
    vocabulary,
)
from papers.experiments.data.shapes.asking import ANSWERS, FORMS, Asked, asked
from papers.experiments.data.shapes.balance import kept
from papers.experiments.data.shapes.drawing import drawn
from papers.experiments.data.shapes.scene import VERSION, Part, scenes, stream

Array = np.ndarray[Any, Any]

_QUESTIONS = [[text.split() for text in form.texts] for form in FORMS]
_WORDS = vocabulary([words for texts in _QUESTIONS for words in texts])
_LONGEST = max(len(words) for texts in _QUESTIONS for words in texts)
_ENCODED = [encoded(texts, _WORDS, _LONGEST) for texts in _QUESTIONS]


@dataclass(frozen=True, eq=False)
class _Made:
    """split, and chance: of guessing evenly among the answers of each question's form."""

    split: QuestionSplit
    chance: float


def load_shapes(
    *, images: tuple[int, int] = (6_000, 1_500), seed: int = 0, most: int = 8
) -> QuestionData:
    """Pictures of coloured shapes, drawn here, and questions whose text says nothing of the answer.

    Each text has equally many of each answer that its form allows, in both parts, so whoever does
    not look at the picture is right as often as `chance`. Regions are known for the test part.

    >>> data = load_shapes(images=(60, 30))
    >>> data.text(data.train, 0).split()[0] in ("is", "how", "what")
    True

    images: for training and for testing. seed: another one gives other pictures and questions.
    most: questions about one picture.
    """
    _check(images, seed, most)
    train = _made("train", images[0], seed, most, regions=False)
    test = _made("test", images[1], seed, most, regions=True)
    note = (
        f"Shapes-VQA version {VERSION}, seed {seed}, {images[0]:,} + {images[1]:,} pictures, "
        f"{len(train.split):,} + {len(test.split):,} questions"
    )
    return QuestionData(
        "shapes", train.split, test.split, _WORDS.copy(), list(ANSWERS), note, test.chance
    )


def _check(images: tuple[int, int], seed: int, most: int) -> None:
    if len(images) != 2 or min(images) < 1:
        raise ValueError(
            "images must be two counts of at least 1, for training and for testing, got "
            f"{images}; the usual ones are (6000, 1500)"
        )
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}; any whole number from 0 on will do")
    if most < 1:
        raise ValueError(f"most must be >= 1 question a picture, got {most}; 8 is usual")


def _made(part: Part, count: int, seed: int, most: int, *, regions: bool) -> _Made:
    seen = scenes(count, seed, part)
    questions = asked(seen)
    rows = kept(questions, most, stream(seed, part, "asking"))
    if not len(rows):
        raise ValueError(
            f"too few pictures to balance a question of the {part} part, got {count}; "
            "take at least 30"
        )
    pixels, owners = drawn(seen, stream(seed, part, "drawing"))
    split = _split(pixels, rows, _regions(owners, questions, rows) if regions else None)
    return _Made(split, float(np.mean([1 / len(FORMS[form].answers) for form in rows[:, 1]])))


def _split(pixels: Array, rows: Array, regions: Tensor | None) -> QuestionSplit:
    """rows: (questions, 4), picture, form, text, answer."""
    looked_up = rows[:, 1:].tolist()
    answers, worth = single([FORMS[form].answers[a] for form, _, a in looked_up], ANSWERS)
    return QuestionSplit(
        InMemory(torch.from_numpy(pixels)),
        torch.from_numpy(rows[:, 0].copy()),
        torch.stack([_ENCODED[form][text] for form, text, _ in looked_up]),
        answers,
        worth,
        torch.tensor([FORMS[form].kind for form, _, _ in looked_up]),
        regions,
    )


def _regions(owners: Array, questions: list[Asked], rows: Array) -> Tensor:
    """bool (questions, side, side): the pixels of the things that a question is about."""
    about = np.array([questions[form].about[p, text] for p, form, text, _ in rows])
    bits = np.where(owners > 0, 1 << (owners.astype(np.int16) - 1).clip(0), 0).astype(np.uint8)
    return torch.from_numpy((bits[rows[:, 0]] & about[:, None, None].astype(np.uint8)) > 0)
