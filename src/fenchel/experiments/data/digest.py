"""A short mark of the data that a run was made of: other data are other settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fenchel.experiments.data.grids import GridFiles
from fenchel.experiments.data.images import ImageData
from fenchel.experiments.data.questions import Pictures, QuestionData, QuestionSplit

_DIGITS = 16
_AT_ONCE = 512  # pictures


def of_images(data: ImageData) -> str:
    """16 hexadecimal digits, of all images and labels in their order."""
    found = hashlib.sha256()
    for split in (data.train, data.test):
        for part in (split.images, split.labels):
            _add(found, part)
    return found.hexdigest()[:_DIGITS]


def of_questions(data: QuestionData) -> str:
    """16 hexadecimal digits, of all questions, answers and pictures in their order.

    Of pictures whose features stay on the disk, names and sizes of the files stand for what is in
    them, which would take hours to read.
    """
    found = hashlib.sha256()
    for split in (data.train, data.test):
        for part in _parts(split):
            _add(found, part)
    return found.hexdigest()[:_DIGITS]


def _parts(split: QuestionSplit) -> Iterator[Tensor | str]:
    yield from (split.words, split.picture, split.answers, split.worth, split.kinds)
    if isinstance(split.pictures, GridFiles):
        yield from _files(split.pictures)
    else:
        yield from _gathered(split.pictures)


def _gathered(pictures: Pictures) -> Iterator[Tensor]:
    for places in torch.arange(len(pictures)).split(_AT_ONCE):
        yield pictures.gathered(places)


def _files(pictures: GridFiles) -> Iterator[str]:
    """Without their folder, which is another on another machine."""
    for image in pictures.images:
        path = Path(pictures.source.named(image))
        yield f"{path.name}: {path.stat().st_size if path.is_file() else None}\n"
    whole = getattr(pictures.source, "path", None)  # one file of all images
    if whole is not None:
        yield f"{whole.stat().st_size}\n"


def _add(found: hashlib._Hash, part: Tensor | str) -> None:
    if isinstance(part, str):
        found.update(part.encode())
        return
    found.update(f"{part.dtype} {tuple(part.shape)}".encode())
    raw = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found.update(raw.numpy().data)
