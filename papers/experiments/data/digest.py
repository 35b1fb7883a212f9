"""A short mark of the data that a run was made of: other data are other settings."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from papers.experiments.data.images import ImageData
from papers.experiments.data.questions import QuestionData

_DIGITS = 16


def of_images(data: ImageData) -> str:
    """16 hexadecimal digits, of all images and labels in their order."""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        for part in (split.images, split.labels):
            _add(digest, part)
    return digest.hexdigest()[:_DIGITS]


def of_questions(data: QuestionData) -> str:
    """16 hexadecimal digits, of all questions, answers and pictures in their order."""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        for part in (split.words, split.picture, split.answers, split.worth, split.kinds):
            _add(digest, part)
        for origin in split.pictures.origin():
            _add(digest, origin)
    return digest.hexdigest()[:_DIGITS]


def _add(digest: hashlib._Hash, part: Tensor | str) -> None:
    if isinstance(part, str):
        digest.update(part.encode())
        return
    digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
    raw = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(raw.numpy().data)
