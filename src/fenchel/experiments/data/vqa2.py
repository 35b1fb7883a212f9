"""VQA-v2 (Goyal et al. 2017) from its official JSON files, with features of a grid made elsewhere.

The test parts need the evaluation server, so train2014 is trained on and val2014 tested on.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fenchel.experiments.data.easy import pixels
from fenchel.experiments.data.images import DataProblem
from fenchel.experiments.data.questions import (
    KINDS,
    QuestionData,
    QuestionSplit,
    encoded,
    vocabulary,
)

Array = np.ndarray[Any, Any]

_TRAIN, _TEST = "train2014", "val2014"
_GET = "get it from visualqa.org/download.html"
_ENOUGH = 3  # annotators who agree make an answer right
_MARKS = ';/[]"{}()=+\\_-><@`,?!'  # the punctuation of the official evaluation
_ARTICLES = {"a", "an", "the"}
_SPELT = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(_SPELT)}


class _Asked(NamedTuple):
    """answers: of the annotators, processed. common: the one most of them gave."""

    words: list[str]
    image: int
    common: str
    answers: list[str]
    kind: int


def load_vqa2(folder: Path, *, answers: int = 3129, longest: int = 14) -> QuestionData:
    """folder: holds the official JSON files, and for each part features/train2014/*.npz or
    train2014.h5, see `grid_files`; they are read when asked for.

    answers: how many of the commonest training answers can be given. longest: words of a question.
    An answer is worth min(1, n / 3) when n of the ten annotators gave it. Training questions that
    have none of the answers are left out; test questions stay, and score nothing.
    """
    for name, value in (("answers", answers), ("longest", longest)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if not folder.is_dir():
        raise DataProblem(f"there is no folder {folder}; give one with the files of VQA-v2")
    every, test = _asked(folder, _TRAIN), _asked(folder, _TEST)
    known = _commonest([question.common for question in every], answers)
    train = [question for question in every if not known.keys().isdisjoint(question.answers)]
    if not train:
        raise DataProblem(f"{folder}: no annotator of {_TRAIN} gave a common answer of that part")
    words = vocabulary([question.words for question in train])
    first = grid_files(folder, _TRAIN, sorted({question.image for question in train}))
    second = grid_files(folder, _TEST, sorted({question.image for question in test}), first.shape)
    parts = (
        _split(first, train, words, known, longest),
        _split(second, test, words, known, longest),
    )
    note = _note(parts, len(every), len(known))
    return QuestionData("vqa-v2", *parts, words, list(known), note)


def _commonest(given: Sequence[str], count: int) -> dict[str, int]:
    """The places of the commonest, alphabetical where they are equally common."""
    counts = Counter(given)
    order = sorted(counts, key=lambda answer: (-counts[answer], answer))
    return {answer: place for place, answer in enumerate(order[:count])}


# ---- reading


def _asked(folder: Path, part: str) -> list[_Asked]:
    asking = _found(folder, f"v2_OpenEnded_mscoco_{part}_questions.json")
    telling = _found(folder, f"v2_mscoco_{part}_annotations.json")
    questions = {row["question_id"]: row for row in _rows(asking, "questions", _QUESTION)}
    asked = []
    for row in _rows(telling, "annotations", _ANNOTATION):
        question = questions.pop(row["question_id"], None)
        if question is None:
            raise DataProblem(
                f"{telling} answers question {row['question_id']}, which {asking.name} does not "
                "ask (or answers it twice): are both of the same part and version?"
            )
        asked.append(_joined(question, row, telling))
    if questions:
        raise DataProblem(
            f"{telling} does not answer {len(questions)} questions of {asking.name}, such as "
            f"{next(iter(questions))}: are both of the same part and version?"
        )
    if not asked:
        raise DataProblem(f"{asking} has no question; {_GET}")
    return asked


_QUESTION = {"question_id", "question", "image_id"}
_ANNOTATION = {"question_id", "multiple_choice_answer", "answers", "answer_type"}


def _found(folder: Path, name: str) -> Path:
    for pattern in (name, f"*/{name}", f"*/*/{name}"):
        for path in sorted(folder.glob(pattern)):
            return path
    raise DataProblem(f"{folder} has no {name}, nor a folder in it; {_GET} and unzip it")


def _rows(path: Path, key: str, fields: set[str]) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[key]
        for row in rows:
            missing = fields - row.keys()
            if missing:
                raise DataProblem(
                    f"{path}: {key} number {rows.index(row)} has no {min(missing)}; {_GET}"
                )
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) is not JSON: {problem}; {_GET}") from problem
    except (KeyError, TypeError, AttributeError) as problem:
        raise DataProblem(f"{path} has no list {key!r} of objects: {problem!r}") from problem
    return rows


def _joined(question: dict[str, Any], annotation: dict[str, Any], path: Path) -> _Asked:
    kind = annotation["answer_type"]
    if kind not in KINDS:
        raise DataProblem(
            f"{path}: question {question['question_id']} has the answer_type {kind!r}, expected "
            f"one of {', '.join(KINDS)}"
        )
    return _Asked(
        words_of(question["question"]),
        int(question["image_id"]),
        processed(annotation["multiple_choice_answer"]),
        [processed(given["answer"]) for given in annotation["answers"]],
        KINDS.index(kind),
    )


# ---- words


def words_of(question: str) -> list[str]:
    """As in MCAN (Yu et al. 2019): lower case, no punctuation, parts of compounds apart."""
    plain = re.sub(r"[.,'!?\"()*#:;]", "", question.lower())
    return plain.replace("-", " ").replace("/", " ").split()


@lru_cache(maxsize=1 << 18)
def processed(answer: str) -> str:
    """As the official evaluation does: lower case, punctuation, articles, numbers as digits.

    Left out is its table that puts the apostrophe back into dont, isnt and their like.
    """
    given = " ".join(answer.lower().split())
    text, thousands = given, re.search(r"\d,\d", given) is not None
    for mark in _MARKS:
        # a mark inside a word parts it, unless the answer has a comma between digits
        apart = not (thousands or f"{mark} " in given or f" {mark}" in given)
        text = text.replace(mark, " " if apart else "")
    text = re.sub(r"\.(?!\d)", "", text)
    return " ".join(_DIGITS.get(word, word) for word in text.split() if word not in _ARTICLES)


# ---- tensors


def _split(
    grids: GridFiles, asked: list[_Asked], words: list[str], known: dict[str, int], longest: int
) -> QuestionSplit:
    place = {image: at for at, image in enumerate(grids.images)}
    answers, worth = _scored([question.answers for question in asked], known)
    return QuestionSplit(
        grids,
        torch.tensor([place[question.image] for question in asked]),
        encoded([question.words for question in asked], words, longest),
        answers,
        worth,
        torch.tensor([question.kind for question in asked]),
    )


def _scored(given: Sequence[Sequence[str]], known: dict[str, int]) -> tuple[Tensor, Tensor]:
    """answers (n, most) and worth (n, most); most: of different known answers to a question."""
    counts = [Counter(known[one] for one in answers if one in known) for answers in given]
    most = max([1, *map(len, counts)])
    found, worth = np.full((len(given), most), -1), np.zeros((len(given), most), np.float32)
    for row, count in enumerate(counts):
        for column, (answer, times) in enumerate(count.most_common()):
            found[row, column], worth[row, column] = answer, min(1, times / _ENOUGH)
    return torch.from_numpy(found), torch.from_numpy(worth)


def _note(parts: tuple[QuestionSplit, QuestionSplit], every: int, answers: int) -> str:
    train, test = parts
    inside = int((test.answers >= 0).any(1).sum())
    best = float(test.worth.amax(1).mean())
    return (
        f"trained on {len(train):,} of {every:,} questions of {_TRAIN} ({len(train.pictures):,} "
        f"images), tested on all {len(test):,} of {_TEST} ({len(test.pictures):,}), because "
        f"test-dev needs the evaluation server; {answers:,} answers, one of which {inside:,} test "
        f"questions have, so that {100 * best:.1f} % can be reached; an answer of n annotators is "
        f"worth min(1, n / {_ENOUGH}); contractions are not restored in answers"
    )


# ---- features


class _Source(Protocol):
    """Where the features of one part lie, by the number of the image."""

    def named(self, image: int) -> str: ...

    def missing(self, images: Sequence[int]) -> list[int]: ...

    def read(self, images: Sequence[int]) -> Iterator[Array]: ...


@dataclass(frozen=True, eq=False)
class GridFiles:
    """Pictures whose features stay on the disk. images: their numbers. shape: (height, width,
    channels) of each. photos: where their JPEGs would be, to be shown."""

    source: _Source
    images: Sequence[int]
    shape: tuple[int, ...]
    photos: Path

    def __len__(self) -> int:
        return len(self.images)

    def gathered(self, places: Tensor) -> Tensor:
        """A picture that is asked for twice is read once."""
        once, again = torch.unique(places, return_inverse=True)
        wanted = [self.images[place] for place in once.tolist()]
        grids = np.empty((len(wanted), *self.shape), np.float32)
        for row, (image, stored) in enumerate(zip(wanted, self.source.read(wanted), strict=True)):
            grids[row] = _as_grid(stored, self.source.named(image), self.shape)
        return torch.from_numpy(grids)[again]

    def shown(self, place: int) -> Array | None:
        path = self.photos / f"{_stem(self.photos.name, self.images[place])}.jpg"
        return pixels(path) if path.is_file() else None


def grid_files(
    folder: Path, part: str, images: Sequence[int], shape: tuple[int, ...] | None = None
) -> GridFiles:
    """Features of one part, in folder/features or in folder itself: part.h5 with a dataset for
    each number of an image, or part/COCO_part_000000000009.npz with an array x.

    Each is (height, width, channels), (channels, height, width) or (height * width, channels) of a
    square grid. shape: what (height, width, channels) must be; None: as the first one has it.
    """
    source = _source(folder, part)
    missing = source.missing(images)
    if missing:
        raise DataProblem(
            f"there is no {source.named(missing[0])}: {len(missing)} of the {len(images)} images "
            f"of {part} have no features, such as {missing[0]}"
        )
    first = _as_grid(next(source.read(images[:1])), source.named(images[0]), shape)
    photos = folder / "images" / part
    return GridFiles(source, images, first.shape, photos if photos.is_dir() else folder / part)


def _source(folder: Path, part: str) -> _Source:
    for where in (folder / "features", folder):
        if (where / f"{part}.h5").is_file():
            return _Hdf5(where / f"{part}.h5")
        if next((where / part).glob("*.npz"), None) is not None:
            return _Npz(where / part)
    raise DataProblem(
        f"{folder} has no features of {part}: looked for features/{part}.h5, "
        f"features/{part}/{_stem(part, 9)}.npz, and the same without features/"
    )


def _stem(part: str, image: int) -> str:
    return f"COCO_{part}_{image:012d}"


def _as_grid(stored: Array, name: str, shape: tuple[int, ...] | None) -> Array:
    """(height, width, channels) of a square grid, whichever way it is stored."""
    sizes = stored.shape
    if len(sizes) == 2 and math.isqrt(sizes[0]) ** 2 == sizes[0]:
        side = math.isqrt(sizes[0])
        stored = stored.reshape(side, side, sizes[1])  # (cells, channels)
    elif len(sizes) == 3 and sizes[0] != sizes[1] and sizes[1] == sizes[2]:
        stored = stored.transpose(1, 2, 0)  # (channels, height, width)
    if stored.ndim != 3 or stored.shape[0] != stored.shape[1]:
        raise DataProblem(
            f"{name} has the shape {sizes}, expected a square grid such as (14, 14, 2048), "
            "(2048, 14, 14) or (196, 2048); features of boxes are not a grid"
        )
    if shape is not None and stored.shape != shape:
        raise DataProblem(f"{name} is a grid of {stored.shape}, but the first one is of {shape}")
    return stored


_BROKEN = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True)
class _Npz:
    """A file for each image."""

    folder: Path

    def named(self, image: int) -> str:
        return str(self.folder / f"{_stem(self.folder.name, image)}.npz")

    def missing(self, images: Sequence[int]) -> list[int]:
        there = {entry.name for entry in os.scandir(self.folder)}
        return [image for image in images if Path(self.named(image)).name not in there]

    def read(self, images: Sequence[int]) -> Iterator[Array]:
        for image in images:
            path = self.named(image)
            try:
                with open(path, "rb") as raw, np.load(raw) as file:
                    stored = file["x"]
            except _BROKEN as problem:
                raise DataProblem(
                    f"{path} does not give the array x of image {image}: {problem}; make it again"
                ) from problem
            yield stored


@dataclass(frozen=True)
class _Hdf5:
    """One file, opened anew for each batch: handles do not survive a fork."""

    path: Path

    def named(self, image: int) -> str:
        return f"{self.path}, dataset {image}"

    def missing(self, images: Sequence[int]) -> list[int]:
        with self._opened() as file:
            return [image for image in images if str(image) not in file]

    def read(self, images: Sequence[int]) -> Iterator[Array]:
        with self._opened() as file:
            for image in images:
                yield np.asarray(file[str(image)])

    def _opened(self) -> Any:
        try:
            return import_module("h5py").File(self.path, "r")
        except ImportError as problem:
            raise DataProblem(
                f"reading {self.path} needs h5py: `pip install h5py`, or give an .npz an image"
            ) from problem
        except OSError as problem:
            size = self.path.stat().st_size
            raise DataProblem(f"{self.path} ({size} bytes) is not HDF5: {problem}") from problem
