"""easy-VQA: one coloured shape a picture, from the package that carries its data."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from papers.experiments.data.files import DataProblem
from papers.experiments.data.questions import (
    InMemory,
    QuestionData,
    QuestionSplit,
    encoded,
    kind_of,
    single,
    vocabulary,
)

_PACKAGE = "easy_vqa"
_PIXELS = 2**24  # of a picture; photographs of COCO have 3e5
_CELL = 8  # pixels of a cell, at least: sides are halved three times
_WAY_OUT = "get it with `pip install --no-deps easy-vqa`, or give the folder that holds train/"


class _Asked(NamedTuple):
    words: list[str]
    answer: str
    picture: int


def load_easy(folder: Path | None = None) -> QuestionData:
    """folder: holds train/ and test/; None: the data of the installed package easy-vqa."""
    where = _where(folder)
    train, test = (_asked(where / part / "questions.json") for part in ("train", "test"))
    words = vocabulary([question.words for question in train])
    answers = sorted({question.answer for question in train})
    longest = max(len(question.words) for question in train)
    parts = (
        _split(where / "train" / "images", train, words, answers, longest),
        _split(where / "test" / "images", test, words, answers, longest),
    )
    sizes = [part.pictures.gathered(torch.zeros(1).long()).shape[2:] for part in parts]
    if sizes[0] != sizes[1]:
        raise DataProblem(
            f"{where}: pictures of train/ are {_by(sizes[0])}, those of test/ {_by(sizes[1])}"
        )
    if any(side % _CELL or not side for side in sizes[0]):
        raise DataProblem(
            f"{where}: pictures are {_by(sizes[0])}, expected sides of a multiple of {_CELL} "
            "pixels, such as 64 x 64"
        )
    return QuestionData("easy", *parts, words, answers, _note(train, test, parts, answers))


def _where(folder: Path | None) -> Path:
    if folder is None:
        spec = find_spec(_PACKAGE)  # finds a package of one level without running it
        places = list(spec.submodule_search_locations or []) if spec else []
        if not places:
            raise DataProblem(f"the package easy-vqa is not installed; {_WAY_OUT} and test/")
        folder = Path(places[0])
    inside = folder / _PACKAGE
    for where in (folder, folder / "data", inside, inside / "data"):
        if (where / "train").is_dir():
            return where
    raise DataProblem(f"{folder} has no train/; {_WAY_OUT} and test/")


def _asked(path: Path) -> list[_Asked]:
    """A JSON list of [question, answer, number of the picture]."""
    if not path.is_file():
        raise DataProblem(f"there is no {path}; {_WAY_OUT} and test/")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        asked = [_row(number, *row) for number, row in enumerate(rows)]
    except (ValueError, TypeError, RecursionError) as problem:
        size = path.stat().st_size
        raise DataProblem(
            f"{path} ({size} bytes) is not a list of [question, answer, picture]: {problem}"
        ) from problem
    if not asked:
        raise DataProblem(f"{path} has no question")
    return asked


def _row(number: int, question: object, answer: object, at: object) -> _Asked:
    if not isinstance(question, str) or not isinstance(answer, str) or type(at) is not int:
        raise TypeError(f"row {number} is not a text, a text and a whole number")
    return _Asked(_words(question), answer, at)


def _words(question: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", question.lower())


def _split(
    folder: Path, asked: list[_Asked], words: list[str], answers: list[str], longest: int
) -> QuestionSplit:
    numbers = sorted({question.picture for question in asked})
    place = {number: at for at, number in enumerate(numbers)}
    right, worth = single([question.answer for question in asked], answers)
    return QuestionSplit(
        InMemory(_stacked([folder / f"{number}.png" for number in numbers])),
        torch.tensor([place[question.picture] for question in asked]),
        encoded([question.words for question in asked], words, longest),
        right,
        worth,
        torch.tensor([kind_of(question.answer) for question in asked]),
    )


def _stacked(paths: Sequence[Path]) -> Tensor:
    """(n, 3, height, width)"""
    pictures: list[np.ndarray[Any, Any]] = []
    for path in paths:
        pictures.append(pixels(path))
        if pictures[-1].shape != pictures[0].shape:
            raise DataProblem(
                f"{path} is {_by(pictures[-1].shape)}, but {paths[0].name} is "
                f"{_by(pictures[0].shape)}: pictures must be of one size"
            )
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def _by(shape: Sequence[int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def pixels(path: Path) -> np.ndarray[Any, Any]:
    """The picture in a file, uint8 (height, width, 3)."""
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise DataProblem(f"there is no picture {path}; a question is about it")
    try:
        with Image.open(path) as picture:
            if math.prod(picture.size) > _PIXELS:  # known before it is unpacked
                raise DataProblem(
                    f"{path} is {picture.width} x {picture.height}, more than {_PIXELS:,} pixels; "
                    "make it smaller"
                )
            return np.array(picture.convert("RGB"))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) is not a picture: {problem}") from problem


def _note(
    train: list[_Asked], test: list[_Asked], parts: Sequence[QuestionSplit], answers: list[str]
) -> str:
    closed = [sum(kind_of(question.answer) == 0 for question in part) for part in (train, test)]
    return (
        f"{len(train):,} training questions ({closed[0]:,} yes/no) on {len(parts[0].pictures):,} "
        f"pictures, {len(test):,} test questions ({closed[1]:,} yes/no) on "
        f"{len(parts[1].pictures):,}, {len(answers)} answers; the commonest training answer to the "
        f"same words, without the picture, is right on {100 * blind(train, test):.1f} % of the "
        "test questions"
    )


def blind(train: Sequence[_Asked], test: Sequence[_Asked]) -> float:
    """How often the commonest training answer to the very same question is right: what a model
    that sees no picture can reach. A question that was never asked gets the commonest of all."""
    overall = Counter(question.answer for question in train)
    answers: dict[tuple[str, ...], Counter[str]] = {}
    for question in train:
        answers.setdefault(tuple(question.words), Counter())[question.answer] += 1
    right = 0
    for question in test:
        known = answers.get(tuple(question.words), overall)
        right += known.most_common(1)[0][0] == question.answer
    return right / len(test)
