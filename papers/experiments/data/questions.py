"""Questions about pictures, whatever files they come from: what a study needs to know of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from papers.experiments.data.files import DataProblem

KINDS = ("yes/no", "number", "other")
UNKNOWN = "<unknown>"  # word 1; word 0 is none
_AT_ONCE = 512  # pictures


class Pictures(Protocol):
    """By their place, so that features that fill a disk need not fill the memory."""

    def __len__(self) -> int: ...

    def gathered(self, places: Tensor) -> Tensor:
        """uint8 images (n, 3, height, width), or features of a grid (n, height, width, channels),
        float."""

    def shown(self, place: int) -> np.ndarray[Any, Any] | None:
        """uint8 (height, width, 3), to draw attention on; None: not at hand."""

    def origin(self) -> Iterator[Tensor | str]:
        """What `gathered` is made from, the same on every machine: features that are computed
        differ in their last bits from one processor to another."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """images: uint8 (n, 3, height, width)."""

    images: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def gathered(self, places: Tensor) -> Tensor:
        return self.images[places]

    def shown(self, place: int) -> np.ndarray[Any, Any]:
        picture: np.ndarray[Any, Any] = self.images[place].permute(1, 2, 0).numpy()
        return picture

    def origin(self) -> Iterator[Tensor | str]:
        yield from self.images.split(_AT_ONCE)


@dataclass(frozen=True, eq=False)
class QuestionSplit:
    """n questions.

    picture: (n), the place in `pictures`. words: (n, longest), int64 places in the vocabulary, 0
    after the last. answers: (n, most), int64 places in the list of answers, -1 for none, and worth:
    (n, most), what each of them scores, 0 to 1. kinds: (n), places in KINDS.
    regions: bool (n, height, width), the pixels that the question is about, where that is known.
    """

    pictures: Pictures
    picture: Tensor
    words: Tensor
    answers: Tensor
    worth: Tensor
    kinds: Tensor
    regions: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.picture)
        for name in ("words", "answers", "worth", "kinds", "regions"):
            part = getattr(self, name)
            if part is not None and len(part) != count:
                raise DataProblem(f"{count} questions, but {len(part)} rows of {name}")
        if count and int(self.picture.max()) >= len(self.pictures):
            raise DataProblem(
                f"a question is about picture {int(self.picture.max())}, but there are "
                f"{len(self.pictures)}"
            )

    def __len__(self) -> int:
        return len(self.picture)

    def first(self, count: int | None) -> QuestionSplit:
        if count is None:
            return self
        picture, words = self.picture[:count], self.words[:count]
        answers, worth = self.answers[:count], self.worth[:count]
        regions = None if self.regions is None else self.regions[:count]
        kinds = self.kinds[:count]
        return QuestionSplit(self.pictures, picture, words, answers, worth, kinds, regions)


@dataclass(frozen=True, eq=False)
class QuestionData:
    """note: what is to be said beside every accuracy. chance: of guessing evenly among the answers
    that a question of its form can have, where the data is balanced for that."""

    name: str
    train: QuestionSplit
    test: QuestionSplit
    vocabulary: list[str]
    answers: list[str]
    note: str = ""
    chance: float | None = None

    def text(self, split: QuestionSplit, question: int) -> str:
        return " ".join(self.vocabulary[word] for word in split.words[question].tolist() if word)


def vocabulary(questions: Sequence[Sequence[str]], least: int = 1) -> list[str]:
    """ "", the unknown, then every word that occurs `least` times, in the order of the alphabet."""
    counts: dict[str, int] = {}
    for question in questions:
        for word in question:
            counts[word] = counts.get(word, 0) + 1
    return ["", UNKNOWN, *sorted(word for word, count in counts.items() if count >= least)]


def encoded(questions: Sequence[Sequence[str]], words: Sequence[str], longest: int) -> Tensor:
    """(n, longest); words beyond that are cut, those outside the vocabulary are unknown."""
    place = {word: number for number, word in enumerate(words)}
    codes = torch.zeros(len(questions), longest, dtype=torch.int64)
    for row, question in enumerate(questions):
        for column, word in enumerate(question[:longest]):
            codes[row, column] = place.get(word, 1)
    return codes


def single(answers: Sequence[str], known: Sequence[str]) -> tuple[Tensor, Tensor]:
    """answers and worth of one right answer a question; one that is not known is -1."""
    place = {answer: number for number, answer in enumerate(known)}
    codes = torch.tensor([[place.get(answer, -1)] for answer in answers])
    return codes.reshape(-1, 1), torch.ones(len(answers), 1)


def kind_of(answer: str) -> int:
    """Of KINDS, from the answer, as in VQA-v2."""
    if answer in ("yes", "no"):
        return 0
    return 1 if answer.isdigit() else 2
