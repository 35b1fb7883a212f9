"""Labelled images in the files that Fashion-MNIST and CIFAR are published in.

Fashion-MNIST: idx, gzipped or not. CIFAR: binary batches, or the pickled ones for Python, of which
only arrays and plain values are read.
"""

from __future__ import annotations

import gzip
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}
_SIDE = 32  # pixels of a CIFAR image
_SAFE = {  # what a pickled batch is made of
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class DataProblem(ValueError):
    """Data that is missing or not what it should be; the message says which file and what to do."""


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
    return _checked(ImageData("fashion-mnist", train, test, 10))


def _idx_split(folder: Path, images: str, labels: str) -> Split:
    pictures, marks = _idx(_found(folder, images)), _idx(_found(folder, labels))
    if pictures.ndim != 3 or marks.ndim != 1:
        raise DataProblem(
            f"{images} must hold images and {labels} labels, got {pictures.ndim} and {marks.ndim} "
            "axes"
        )
    return Split(torch.from_numpy(pictures).unsqueeze(1), torch.from_numpy(marks).long())


def _found(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataProblem(f"{folder} has no {name} (or {name}.gz)")


def _idx(path: Path) -> np.ndarray[Any, Any]:
    """Two zero bytes, the type (8: unsigned bytes), the number of axes, their sizes, the bytes."""
    raw = _bytes(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataProblem(f"{path} is not an idx file of bytes (it begins with {raw[:4]!r})")
    axes = raw[3]
    shape = tuple(np.frombuffer(raw, ">u4", axes, 4).tolist()) if len(raw) >= 4 + 4 * axes else ()
    wanted = int(np.prod(shape)) + 4 + 4 * axes
    if len(raw) != wanted:
        raise DataProblem(f"{path} is cut short or too long: {len(raw)} bytes, {wanted} expected")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def _bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, OSError) as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) does not unzip: {problem}") from problem


def _cifar10(folder: Path) -> ImageData:
    train = [_batch(folder, name, 1) for name in _BATCHES["train"] if _any(folder, name)]
    if not train:
        raise DataProblem(f"{folder} has no data_batch_1.bin, nor data_batch_1")
    missing = len(_BATCHES["train"]) - len(train)
    joined = _joined(train)
    note = f"{len(joined):,} of 50,000 training images" if missing else ""
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
    raw = np.frombuffer(binary.read_bytes(), np.uint8)
    size = labels + 3 * _SIDE**2
    if not len(raw) or len(raw) % size:
        raise DataProblem(f"{binary} has {len(raw)} bytes, not a multiple of {size}: cut short?")
    rows = torch.from_numpy(raw.reshape(-1, size).copy())
    return Split(rows[:, labels:].unflatten(1, (3, _SIDE, _SIDE)), rows[:, labels - 1].long())


class _Arrays(pickle.Unpickler):
    """Arrays, lists, numbers and strings; anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _SAFE:
            raise DataProblem(f"a batch of images holds no {module}.{name}; it was not read")
        return super().find_class(module, name)


def _pickled(path: Path, labels: str) -> Split:
    try:
        found = _Arrays(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        data, marks = found["data"], found[labels]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) is not a batch of CIFAR: {problem}") from problem
    images = torch.from_numpy(np.asarray(data, np.uint8).copy()).reshape(-1, 3, _SIDE, _SIDE)
    return Split(images, torch.tensor(marks, dtype=torch.int64))


def _checked(data: ImageData) -> ImageData:
    for part, split in (("training", data.train), ("test", data.test)):
        largest = int(split.labels.max()) if len(split) else -1
        if largest >= data.classes:
            raise DataProblem(
                f"{data.name}: a label of the {part} part is {largest}, but there are "
                f"{data.classes} classes"
            )
        if not len(split):
            raise DataProblem(f"{data.name}: the {part} part is empty")
    return data
