"""Labelled images in the files that Fashion-MNIST and CIFAR are published in.

Fashion-MNIST: idx, gzipped or not. CIFAR: binary batches, or the pickled ones for Python, of which
only arrays and plain values are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papers.experiments.data import pickled
from papers.experiments.data.files import DataProblem, Stream, read_file, read_rest, unzipped

_IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}
_SIDE = 32  # pixels of a CIFAR image
_EVERY = 50_000  # training images of CIFAR-10
_CLASSES = {"labels": 10, "fine_labels": 100}  # of CIFAR, by their name in a pickled batch
_MOST = 2**28  # bytes of a file, unzipped: the largest that is published, of CIFAR-100, has 1.6e8


@dataclass(frozen=True, eq=False)
class Split:
    """images (n, channels, height, width), uint8; labels (n), int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise DataProblem(f"{len(self.images)} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Split:
        return self if count is None else Split(self.images[:count], self.labels[:count])


@dataclass(frozen=True, eq=False)
class ImageData:
    """note: what is to be said beside every accuracy, such as training batches that are missing."""

    name: str
    train: Split
    test: Split
    classes: int
    note: str = ""

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel over the training images, of values in 0..1."""
        flat = self.train.images.transpose(0, 1).flatten(1).float() / 255
        return flat.mean(1), flat.std(1).clamp_min(1e-6)


def load_images(name: str, folder: Path) -> ImageData:
    """name: fashion-mnist, cifar-10 or cifar-100; folder: holds its files, or a folder so named."""
    readers = {"fashion-mnist": _fashion, "cifar-10": _cifar10, "cifar-100": _cifar100}
    if name not in readers:
        raise DataProblem(f"unknown data {name!r}; known are {', '.join(readers)}")
    inside = folder / name
    where = inside if inside.is_dir() else folder
    if not where.is_dir():
        raise DataProblem(f"there is no folder {folder}; give one with --data, holding {name}/")
    return readers[name](where)


def _fashion(folder: Path) -> ImageData:
    train, test = (_idx_split(folder, *_IDX[part]) for part in ("train", "test"))
    if train.images.shape[1:] != test.images.shape[1:]:
        sides = [split.images.shape[-1] for split in (train, test)]
        raise DataProblem(
            f"{folder}: training images have sides of {sides[0]} pixels, test images of {sides[1]}"
        )
    return _checked(ImageData("fashion-mnist", train, test, 10))


def _idx_split(folder: Path, images: str, labels: str) -> Split:
    pictures, marks = _idx(_found(folder, images)), _idx(_found(folder, labels))
    if pictures.ndim != 3 or marks.ndim != 1:
        raise DataProblem(
            f"{images} must hold images and {labels} labels, got {pictures.ndim} and {marks.ndim} "
            "axes"
        )
    height, width = pictures.shape[1:]
    if height != width or not height:
        raise DataProblem(f"{folder / images}: images of {height} x {width}, expected squares")
    if len(pictures) != len(marks):
        raise DataProblem(
            f"{folder}: {len(pictures)} images in {images}, but {len(marks)} labels in {labels}"
        )
    return Split(torch.from_numpy(pictures).unsqueeze(1), torch.from_numpy(marks).long())


def _found(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataProblem(f"{folder} has no {name} (or {name}.gz)")


def _idx(path: Path) -> np.ndarray[Any, Any]:
    """Two zero bytes, the type (8: unsigned bytes), the number of axes, their sizes, the bytes."""
    with unzipped(path) as file:
        shape = _idx_shape(file, path)
        wanted = math.prod(shape)
        raw = read_rest(file, wanted, path)
    if len(raw) != wanted:
        head = 4 + 4 * len(shape)
        size, whole = head + len(raw), head + wanted
        raise DataProblem(f"{path} is cut short: {size} bytes, {whole} expected")
    return np.frombuffer(raw, np.uint8).reshape(shape).copy()


def _idx_shape(file: Stream, path: Path) -> tuple[int, ...]:
    """All that comes before the values."""
    head = file.read(4)
    if len(head) < 4 or head[:3] != b"\0\0\x08":
        raise DataProblem(f"{path} is not an idx file of bytes (it begins with {head!r})")
    axes = head[3]
    if axes not in (1, 3):
        raise DataProblem(f"{path} has {axes} axes, expected 3 for images or 1 for labels")
    sizes = file.read(4 * axes)
    if len(sizes) < 4 * axes:
        raise DataProblem(f"{path} is cut short: it ends within the sizes of its {axes} axes")
    shape = tuple(np.frombuffer(sizes, ">u4").tolist())
    if math.prod(shape) > _MOST:
        raise DataProblem(
            f"{path} would hold {math.prod(shape):,} bytes by its header, at most {_MOST:,} "
            "expected; get it again"
        )
    return shape


def _cifar10(folder: Path) -> ImageData:
    train = [_batch(folder, name, 1) for name in _BATCHES["train"] if _any(folder, name)]
    if not train:
        raise DataProblem(f"{folder} has no data_batch_1.bin, nor data_batch_1")
    joined = _joined(train)
    whole = len(joined) == _EVERY
    note = "" if whole else f"{len(joined):,} of {_EVERY:,} training images"
    return _checked(ImageData("cifar-10", joined, _batch(folder, "test_batch", 1), 10, note))


def _cifar100(folder: Path) -> ImageData:
    train, test = _batch(folder, "train", 2), _batch(folder, "test", 2)
    return _checked(ImageData("cifar-100", train, test, 100))


def _any(folder: Path, name: str) -> bool:
    return (folder / name).is_file() or (folder / f"{name}.bin").is_file()


def _joined(splits: list[Split]) -> Split:
    return Split(torch.cat([s.images for s in splits]), torch.cat([s.labels for s in splits]))


def _batch(folder: Path, name: str, labels: int) -> Split:
    """labels: bytes before each image in a binary batch; the last of them counts."""
    binary = folder / f"{name}.bin"
    if not binary.is_file():
        return _pickled(_found(folder, name), "fine_labels" if labels == 2 else "labels")
    raw = np.frombuffer(read_file(binary, _MOST), np.uint8)
    size = labels + 3 * _SIDE**2
    if not len(raw) or len(raw) % size:
        raise DataProblem(f"{binary} has {len(raw)} bytes, not a multiple of {size}: cut short?")
    rows = torch.from_numpy(raw.reshape(-1, size).copy())
    return Split(rows[:, labels:].unflatten(1, (3, _SIDE, _SIDE)), rows[:, labels - 1].long())


def _pickled(path: Path, labels: str) -> Split:
    raw = read_file(path, _MOST)
    try:
        content = pickled.read(raw)
        data, marks = (_value(content, key) for key in ("data", labels))
    except pickled.BROKEN as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) is not a batch of CIFAR: {problem}") from problem
    sizes: tuple[int, ...] = getattr(data, "shape", ())
    kind = getattr(data, "dtype", type(data).__name__)
    if kind != np.uint8 or len(sizes) != 2 or sizes[1] != 3 * _SIDE**2:
        raise DataProblem(f"{path}: its data is {kind} {sizes}, expected uint8 (n, {3 * _SIDE**2})")
    known = _marks(marks, path, _CLASSES[labels])
    if len(known) != len(data):
        raise DataProblem(f"{path}: {len(data)} images but {len(known)} labels")
    images = torch.from_numpy(data.copy()).reshape(-1, 3, _SIDE, _SIDE)
    return Split(images, torch.tensor(known, dtype=torch.int64))


def _value(content: Any, key: str) -> Any:
    """Of a dictionary whose names are texts, or the bytes of Python 2."""
    if not isinstance(content, dict):
        raise TypeError(f"a {type(content).__name__}, expected a dictionary")
    return content[key] if key in content else content[key.encode()]


def _marks(marks: Any, path: Path, classes: int) -> list[int]:
    if isinstance(marks, np.ndarray) and marks.ndim == 1:
        marks = marks.tolist()
    if not isinstance(marks, list):
        raise DataProblem(f"{path}: its labels are a {type(marks).__name__}, expected a list")
    for place, mark in enumerate(marks):
        if type(mark) is not int or not 0 <= mark < classes:
            short = type(mark) in (int, float) and abs(mark) < 1e6
            raise DataProblem(
                f"{path}: label {place} is {mark if short else f'a {type(mark).__name__}'}, "
                f"expected a whole number from 0 to {classes - 1}"
            )
    return marks


def _checked(data: ImageData) -> ImageData:
    for part, split in (("training", data.train), ("test", data.test)):
        if not len(split):
            raise DataProblem(f"{data.name}: the {part} part is empty")
        largest = int(split.labels.max())
        if largest >= data.classes:
            raise DataProblem(
                f"{data.name}: a label of the {part} part is {largest}, but there are "
                f"{data.classes} classes"
            )
    return data
