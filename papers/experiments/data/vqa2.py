"""VQA-v2 (Goyal et al. 2017) from its official JSON files, with features of a grid made elsewhere.

The test parts need the evaluation server, so train2014 is trained on and val2014 tested on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from papers.experiments.data.files import DataProblem
from papers.experiments.data.grids import GridFiles, grid_files
from papers.experiments.data.questions import (
    KINDS,
    QuestionData,
    QuestionSplit,
    encoded,
    vocabulary,
)

__all__ = ["GridFiles", "load_vqa2", "processed", "words_of"]

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
        raise DataProblem(
            f"there is no folder {folder}; give one with the files of VQA-v2, by --data"
        )
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
    questions = _by_id(asking, "questions", _QUESTION)
    annotations = _by_id(telling, "annotations", _ANNOTATION)
    for number in annotations:
        if number not in questions:
            raise DataProblem(
                f"{telling} answers question {number}, which {asking.name} does not ask: are both "
                "of the same part and version?"
            )
    open_ones = questions.keys() - annotations.keys()
    if open_ones:
        raise DataProblem(
            f"{telling} does not answer {len(open_ones)} questions of {asking.name}, such as "
            f"{min(open_ones)}: are both of the same part and version?"
        )
    asked = [_joined(questions[number], row, telling) for number, row in annotations.items()]
    if not asked:
        raise DataProblem(f"{asking} has no question; {_GET}")
    return asked


_QUESTION = {"question_id": int, "question": str, "image_id": int}
_ANNOTATION = {
    "question_id": int,
    "multiple_choice_answer": str,
    "answers": list,
    "answer_type": str,
}


def _found(folder: Path, name: str) -> Path:
    for pattern in (name, f"*/{name}", f"*/*/{name}"):
        for path in sorted(folder.glob(pattern)):
            return path
    raise DataProblem(f"{folder} has no {name}, nor a folder in it; {_GET} and unzip it")


def _by_id(path: Path, key: str, fields: dict[str, type]) -> dict[int, dict[str, Any]]:
    """The rows of a file by the number of their question, in their order."""
    rows: dict[int, dict[str, Any]] = {}
    for place, row in enumerate(_rows(path, key)):
        if not isinstance(row, dict):
            raise DataProblem(f"{path}: {key} number {place} is no object; {_GET}")
        for name, kind in fields.items():
            if name not in row:
                raise DataProblem(f"{path}: {key} number {place} has no {name}; {_GET}")
            if type(row[name]) is not kind:
                raise DataProblem(
                    f"{path}: {name} of {key} number {place} (question {_short(row)}) is a "
                    f"{type(row[name]).__name__}, expected {kind.__name__}; {_GET}"
                )
        if row["question_id"] in rows:
            raise DataProblem(f"{path} has {key} with question_id {_short(row)} twice; {_GET}")
        rows[row["question_id"]] = row
    return rows


def _short(row: dict[str, Any]) -> str:
    number = row.get("question_id")
    return str(number) if type(number) is int and abs(number) < 1 << 63 else "unknown"


def _rows(path: Path, key: str) -> list[Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) is not JSON: {problem}; {_GET}") from problem
    rows = document.get(key) if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise DataProblem(f"{path} has no list {key!r} of objects; {_GET}")
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
        question["image_id"],
        processed(annotation["multiple_choice_answer"]),
        [processed(text) for text in _given(annotation, path)],
        KINDS.index(kind),
    )


def _given(annotation: dict[str, Any], path: Path) -> list[str]:
    """What each annotator answered."""
    rows = annotation["answers"]
    given = [row["answer"] for row in rows if isinstance(row, dict) and "answer" in row]
    texts = [text for text in given if isinstance(text, str)]
    if not texts or len(texts) != len(rows):
        raise DataProblem(
            f"{path}: answers of question {_short(annotation)} must be objects with a text "
            f"'answer', at least one; {_GET}"
        )
    return texts


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
    codes, worth = np.full((len(given), most), -1), np.zeros((len(given), most), np.float32)
    for row, count in enumerate(counts):
        for column, (answer, times) in enumerate(count.most_common()):
            codes[row, column], worth[row, column] = answer, min(1, times / _ENOUGH)
    return torch.from_numpy(codes), torch.from_numpy(worth)


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
