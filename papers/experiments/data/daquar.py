"""DAQUAR (Malinowski and Fritz 2014): questions about photographs of rooms, by the official split.

The photographs are seen through the grid of a MobileNetV2 trained on ImageNet.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from papers.experiments.data.files import DataProblem
from papers.experiments.data.mobilenet import Advance, Grids, photographs
from papers.experiments.data.questions import (
    QuestionData,
    QuestionSplit,
    encoded,
    kind_of,
    single,
    vocabulary,
)

_COLUMNS = ("question", "answer", "image_id")
_LISTS = ("train_images_list.txt", "test_images_list.txt")
_ENCODING = "utf-8-sig"  # with a mark of the order of bytes before it, or without
_COVERED = 99.5  # per cent of the training questions that are read to their last word


class _Asked(NamedTuple):
    words: list[str]
    answer: str
    picture: str


def load_daquar(
    folder: Path,
    weights: Path,
    cache: Path | None = None,
    advance: Advance | None = None,
    *,
    least: int = 2,
) -> QuestionData:
    """folder: holds data.csv, the lists of the official split and images/, or a folder daquar.

    weights: of MobileNetV2, see `read_mobilenet`. cache: a folder that keeps the features, which
    take minutes to make; None makes them every time. advance(done, total) hears of it.
    least: how often an answer occurs in the training part to be one that can be given. Training
    questions with a rarer one are left out; test questions with one stay, and count as wrong.
    """
    if least < 1:
        raise ValueError(f"least must be >= 1, got {least}")
    where = folder / "daquar" if (folder / "daquar").is_dir() else folder
    if not where.is_dir():
        raise DataProblem(f"there is no folder {folder}; give one that holds daquar/ with --data")
    names = [_listed(where / name) for name in _LISTS]
    every, test = _parts(where / "data.csv", names)
    counts = Counter(question.answer for question in every)
    answers = sorted(answer for answer, count in counts.items() if count >= least)
    train = [question for question in every if counts[question.answer] >= least]
    if not train:
        raise DataProblem(f"{where / 'data.csv'}: no training answer occurs {least} times")
    words = vocabulary([question.words for question in train])
    lengths = [len(question.words) for question in train]
    longest = math.ceil(np.percentile(lengths, _COVERED))
    grids = _halves(where, names, weights, cache, advance)
    parts = (
        _split(grids[0], names[0], train, words, answers, longest),
        _split(grids[1], names[1], test, words, answers, longest),
    )
    note = _note(every, train, test, names, answers, least, longest)
    return QuestionData("daquar", *parts, words, answers, note)


def _listed(path: Path) -> list[str]:
    if not path.is_file():
        raise DataProblem(f"there is no {path}; it names the pictures of the official split")
    try:
        names = path.read_text(encoding=_ENCODING).split()
    except UnicodeDecodeError as problem:
        raise DataProblem(f"{path} is not UTF-8: {problem}") from problem
    if not names:
        raise DataProblem(f"{path} names no picture")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataProblem(f"{path} names {twice[0]} more than once")
    return names


def _parts(path: Path, names: Sequence[Sequence[str]]) -> list[list[_Asked]]:
    """The questions on the pictures of either list."""
    both = sorted(set(names[0]) & set(names[1]))
    if both:
        raise DataProblem(
            f"{path.parent}: {both[0]} and {len(both) - 1} more are in both {_LISTS[0]} and "
            f"{_LISTS[1]}; a test on pictures that were trained on says nothing"
        )
    part = {name: number for number, listed in enumerate(names) for name in listed}
    parts: list[list[_Asked]] = [[], []]
    for question in _asked(path):
        if question.picture not in part:
            raise DataProblem(
                f"{path} asks about {question.picture}, which is neither in {_LISTS[0]} nor in "
                f"{_LISTS[1]}"
            )
        parts[part[question.picture]].append(question)
    for listed, asked in zip(_LISTS, parts, strict=True):
        if not asked:
            raise DataProblem(f"{path} has no question on a picture of {listed}")
    return parts


def _asked(path: Path) -> list[_Asked]:
    """Of a table with commas between its fields, whose first line names the columns."""
    if not path.is_file():
        raise DataProblem(f"there is no {path}; it holds the questions: {', '.join(_COLUMNS)}")
    with path.open(newline="", encoding=_ENCODING) as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, [])
            places = _places(header, path)
            questions = []
            for row in rows:
                if row:  # an empty line is none
                    at = f"{path}, line {rows.line_num}"
                    questions.append(_question(row, len(header), places, at))
        except (csv.Error, UnicodeDecodeError) as problem:
            raise DataProblem(f"{path}, after line {rows.line_num}: {problem}") from problem
    return questions


def _places(header: Sequence[str], path: Path) -> list[int]:
    """Of the columns that are read."""
    for name in _COLUMNS:
        if header.count(name) != 1:
            how = "more than one column" if name in header else "no column"
            raise DataProblem(
                f"{path} has {how} {name}; its first line must name {', '.join(_COLUMNS)}, got "
                f"{', '.join(header) or 'nothing'}"
            )
    return [header.index(name) for name in _COLUMNS]


def _question(row: Sequence[str], fields: int, places: Sequence[int], at: str) -> _Asked:
    if len(row) != fields:
        raise DataProblem(f"{at}: {len(row)} fields, {fields} expected; is a comma not in quotes?")
    question, answer, picture = (row[place] for place in places)
    for name, value in zip(_COLUMNS, (question, answer, picture), strict=True):
        if not value.strip():
            raise DataProblem(f"{at}: {name} is empty")
    return _Asked(question.lower().split(), answer.strip().lower(), picture)


def _halves(
    where: Path,
    names: Sequence[Sequence[str]],
    weights: Path,
    cache: Path | None,
    advance: Advance | None,
) -> tuple[Grids, Grids]:
    """Of the training and of the test pictures, made and kept together."""
    paths = [where / "images" / f"{name}.jpg" for listed in names for name in listed]
    absent = [path for path in paths if not path.is_file()]
    if absent:
        raise DataProblem(
            f"there is no picture {absent[0]}; {len(absent)} of the {len(paths)} that {_LISTS[0]} "
            f"and {_LISTS[1]} name are not there"
        )
    grids, border = photographs(paths, weights, cache, advance), len(names[0])
    return (
        Grids(grids.features[:border], paths[:border], weights),
        Grids(grids.features[border:], paths[border:], weights),
    )


def _split(
    grids: Grids,
    names: Sequence[str],
    asked: Sequence[_Asked],
    words: Sequence[str],
    answers: Sequence[str],
    longest: int,
) -> QuestionSplit:
    place = {name: at for at, name in enumerate(names)}
    right, worth = single([question.answer for question in asked], answers)
    return QuestionSplit(
        grids,
        torch.tensor([place[question.picture] for question in asked]),
        encoded([question.words for question in asked], words, longest),
        right,
        worth,
        torch.tensor([kind_of(question.answer) for question in asked]),
    )


def _note(
    every: Sequence[_Asked],
    train: Sequence[_Asked],
    test: Sequence[_Asked],
    names: Sequence[Sequence[str]],
    answers: Sequence[str],
    least: int,
    longest: int,
) -> str:
    known = set(answers)
    inside = sum(question.answer in known for question in test)
    common = Counter(question.answer for question in train).most_common(1)[0][0]
    floor = sum(question.answer == common for question in test)
    cut = sum(len(question.words) > longest for question in [*train, *test])
    return (
        f"official split; {len(train):,} of {len(every):,} training questions on {len(names[0])} "
        f"pictures (answers that occur at least {least} times), {len(test):,} test questions on "
        f"{len(names[1])}; {len(answers)} answers, a list of things counts as one; {inside:,} test "
        f"questions ({100 * inside / len(test):.1f} %) have one of them, the others count as "
        f"wrong; always {common!r} is right on {100 * floor / len(test):.1f} %; questions end "
        f"after {longest} words ({cut} are cut)"
    )
