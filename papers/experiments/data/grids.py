"""Features of a grid over each photograph of COCO, made elsewhere, which stay on the disk."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from papers.experiments.data.easy import pixels
from papers.experiments.data.files import DataProblem, read_rest

Array = np.ndarray[Any, Any]

_MOST = 2**26  # bytes of a grid; 14 x 14 x 2048 in float64 take 3.2e6
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others unpack more than is asked for
_CELLS = (7 * 7, 14 * 14)  # of grids that are stored without their sides
_BOXES = ("bbox", "bboxes", "boxes", "num_bbox", "num_boxes", "image_bb")


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

    def origin(self) -> Iterator[Tensor | str]:
        """Names and sizes of the files stand for what is in them, which would take hours to read;
        not their folder, which is another on another machine."""
        for image in self.images:
            path = Path(self.source.named(image))
            yield f"{path.name}: {path.stat().st_size if path.is_file() else None}\n"
        whole = getattr(self.source, "path", None)  # one file of all images
        if whole is not None:
            yield f"{whole.stat().st_size}\n"


def grid_files(
    folder: Path, part: str, images: Sequence[int], shape: tuple[int, ...] | None = None
) -> GridFiles:
    """Features of one part, in folder/features or in folder itself: part.h5 with a dataset for
    each number of an image, or part/COCO_part_000000000009.npz with an array x.

    Each is (height, width, channels), (channels, height, width) or (height * width, channels) of a
    square grid, in the last form of 7 x 7 or 14 x 14 cells: others may be boxes.
    shape: what (height, width, channels) must be; None: as the first one has it.
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
    """float32 (height, width, channels) of a square grid, whichever way it is stored."""
    sizes = stored.shape
    if len(sizes) == 2 and sizes[0] in _CELLS:
        side = math.isqrt(sizes[0])
        stored = stored.reshape(side, side, sizes[1])  # (cells, channels)
    elif len(sizes) == 3 and sizes[0] != sizes[1] and sizes[1] == sizes[2]:
        stored = stored.transpose(1, 2, 0)  # (channels, height, width)
    if stored.ndim != 3 or stored.shape[0] != stored.shape[1] or not stored.size:
        raise DataProblem(
            f"{name} has the shape {sizes}, expected a square grid such as (14, 14, 2048), "
            "(2048, 14, 14) or (196, 2048); features of boxes are not a grid"
        )
    if shape is not None and stored.shape != shape:
        raise DataProblem(f"{name} is a grid of {stored.shape}, but the first one is of {shape}")
    return _real(stored, name)


def _real(stored: Array, name: str) -> Array:
    """float32, finite"""
    if stored.dtype.kind not in "fiu":
        raise DataProblem(f"{name} is of {stored.dtype}, expected real numbers; make it again")
    with np.errstate(over="ignore"):  # what is too large for float32 is found below
        values = stored.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise DataProblem(f"{name} has features that are not finite in float32; make it again")
    return values


_BROKEN = (
    *(OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)


def _no_boxes(names: Container[str], path: str | Path) -> None:
    """Features of boxes come with their places, which a grid does not need."""
    for name in _BOXES:
        if name in names:
            raise DataProblem(f"{path} holds {name}: features of boxes are not a grid")


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
                with zipfile.ZipFile(path) as archive:
                    names = archive.namelist()
                    _no_boxes([name.removesuffix(".npy") for name in names], path)
                    if archive.getinfo("x.npy").compress_type not in _PACKED:
                        raise ValueError("it is not compressed as numpy does")
                    with archive.open("x.npy") as file:
                        raw = read_rest(file, _MOST, f"x in {path}")
                stored = np.load(io.BytesIO(raw))
            except DataProblem:
                raise
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
        return f"dataset {image} in {self.path}"

    def missing(self, images: Sequence[int]) -> list[int]:
        with self._opened() as file:
            _no_boxes(file, self.path)
            return [image for image in images if str(image) not in file]

    def read(self, images: Sequence[int]) -> Iterator[Array]:
        with self._opened() as file:
            for image in images:
                try:
                    stored = np.asarray(self._small(file[str(image)], image))
                except DataProblem:
                    raise
                except _BROKEN as problem:
                    raise DataProblem(
                        f"{self.named(image)} cannot be read: {problem}; make it again"
                    ) from problem
                yield stored

    def _small(self, dataset: Any, image: int) -> Any:
        """As it is; what it takes is known before it is read, whole or chunk by chunk."""
        wide = getattr(getattr(dataset, "dtype", None), "itemsize", 0)  # a group has none
        shapes = (getattr(dataset, "shape", ()), getattr(dataset, "chunks", None) or ())
        size = wide * max(math.prod(shape) for shape in shapes)
        if size > _MOST:
            raise DataProblem(
                f"{self.named(image)} takes {size:,} bytes, at most {_MOST:,} expected; features "
                "of a grid are such as (14, 14, 2048)"
            )
        return dataset

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
