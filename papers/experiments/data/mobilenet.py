"""MobileNetV2 (Sandler et al. 2018), to make features of a grid over photographs.

The tensors are called as in torchvision. Features are made once and kept in a folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel.lens.files import write_whole
from papers.experiments.data.easy import pixels
from papers.experiments.data.files import DataProblem

Advance = Callable[[int, int], None]  # how many are done, of how many

SIDE = 224  # pixels of a photograph as the network sees it
LAST = 13  # the last block that keeps a grid of 14 x 14
_STRIDES = (1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)  # of blocks 1 to 17
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels
_BATCH = 32
_KEY = "features"


@dataclass(frozen=True, eq=False)
class MobileNet:
    """weights: by torchvision's names; the widths are theirs. Evaluation only."""

    weights: dict[str, Tensor]

    def grid(self, x: Tensor, last: int = LAST) -> Tensor:
        """x: (n, 3, height, width), prepared -> (n, channels, height', width') of block `last`."""
        if not 0 <= last <= len(_STRIDES):
            raise ValueError(f"last must be from 0 to {len(_STRIDES)}, got {last}")
        x = self._filtered(x, "features.0.0", "features.0.1", stride=2)
        for block, stride in enumerate(_STRIDES[:last], 1):
            x = self._block(x, f"features.{block}.conv", stride, widens=block > 1)
        return x

    def classes(self, x: Tensor) -> Tensor:
        """x: (n, 3, height, width), prepared -> (n, classes), before the softmax."""
        x = self.grid(x, len(_STRIDES))
        x = self._filtered(x, "features.18.0", "features.18.1").mean((2, 3))
        return F.linear(x, self.weights["classifier.1.weight"], self.weights["classifier.1.bias"])

    def _block(self, x: Tensor, name: str, stride: int, widens: bool) -> Tensor:
        """An inverted residual: widen, filter each channel by itself, narrow."""
        y, part = x, 0
        if widens:
            y, part = self._filtered(y, f"{name}.0.0", f"{name}.0.1"), 1
        y = self._filtered(y, f"{name}.{part}.0", f"{name}.{part}.1", stride, groups=y.shape[1])
        y = self._normed(y, f"{name}.{part + 1}", f"{name}.{part + 2}")
        return x + y if stride == 1 and x.shape[1] == y.shape[1] else y

    def _filtered(
        self, x: Tensor, conv: str, norm: str, stride: int = 1, groups: int = 1
    ) -> Tensor:
        return F.relu6(self._normed(x, conv, norm, stride, groups))

    def _normed(self, x: Tensor, conv: str, norm: str, stride: int = 1, groups: int = 1) -> Tensor:
        kernel = self.weights[f"{conv}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=groups)
        parts = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = (self.weights[f"{norm}.{part}"] for part in parts)
        return F.batch_norm(x, mean, variance, weight, bias)


def read_mobilenet(weights: Path) -> MobileNet:
    """weights: a safetensors file, or a folder with model.safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _file(weights)
    try:
        network = MobileNet({name: x.float() for name, x in load_file(path).items()})
        with torch.no_grad():
            network.classes(torch.zeros(1, 3, 32, 32))  # every name and shape is met
    except SafetensorError as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) is not a safetensors file: {problem}") from None
    except (KeyError, RuntimeError) as problem:
        raise DataProblem(
            f"{path} does not hold MobileNetV2 by torchvision's names; wrong or missing: {problem}"
        ) from problem
    odd = [name for name, x in network.weights.items() if not x.isfinite().all()]
    if odd:
        raise DataProblem(f"{path}: {odd[0]} is not finite, and {len(odd) - 1} more are not")
    return network


def _file(weights: Path) -> Path:
    path = weights / "model.safetensors" if weights.is_dir() else weights
    if not path.is_file():
        raise DataProblem(
            f"there are no weights {path}; give a safetensors file of torchvision's mobilenet_v2, "
            "or the folder that holds it as model.safetensors"
        )
    return path


def prepared(picture: np.ndarray[Any, Any]) -> Tensor:
    """picture: uint8 (height, width, 3) -> (3, 224, 224), resized whole, nothing cut off."""
    from PIL import Image

    resized = Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    scaled = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255
    mean, deviation = (torch.tensor(x).reshape(3, 1, 1) for x in (_MEAN, _DEVIATION))
    return (scaled - mean) / deviation


@dataclass(frozen=True, eq=False)
class Grids:
    """Pictures of which the network's features are kept: float16 (n, height, width, channels).

    weights: the network's file.
    """

    features: Tensor
    paths: Sequence[Path]
    weights: Path

    def __len__(self) -> int:
        return len(self.paths)

    def gathered(self, places: Tensor) -> Tensor:
        return self.features[places].float()

    def shown(self, place: int) -> np.ndarray[Any, Any]:
        return pixels(self.paths[place])

    def origin(self) -> Iterator[Tensor | str]:
        yield json.dumps(_recipe(self.paths, self.weights))


def photographs(
    paths: Sequence[Path], weights: Path, cache: Path | None, advance: Advance | None = None
) -> Grids:
    """Features of the files in `paths`, read from the folder `cache` when they were made of the
    same files by the same weights, otherwise made and kept there."""
    if cache is None:
        return Grids(_made(paths, read_mobilenet(weights), advance), paths, weights)
    if cache.exists() and not cache.is_dir():
        raise DataProblem(f"{cache} is a file; give a folder to keep features in")
    recipe = _recipe(paths, weights)
    features = _kept(cache, recipe)
    if features is None:
        features = _made(paths, read_mobilenet(weights), advance)
        _keep(cache, recipe, features)
    return Grids(features, paths, weights)


def _made(paths: Sequence[Path], network: MobileNet, advance: Advance | None) -> Tensor:
    """float16 (n, 14, 14, channels)"""
    grids = []
    for start in range(0, len(paths), _BATCH):
        batch = torch.stack([prepared(pixels(path)) for path in paths[start : start + _BATCH]])
        with torch.no_grad():
            grids.append(network.grid(batch).permute(0, 2, 3, 1).half())
        finite = grids[-1].isfinite().flatten(1).all(1)
        if not finite.all():
            path = paths[start + int(finite.long().argmin())]
            raise DataProblem(f"{path}: its features are not finite in half precision")
        if advance is not None:
            advance(start + len(batch), len(paths))
    return torch.cat(grids)


def _recipe(paths: Sequence[Path], weights: Path) -> dict[str, Any]:
    """What the features depend on; another recipe makes them again."""
    return {
        "network": f"MobileNetV2 up to features.{LAST}, resized to {SIDE} x {SIDE}, bilinear",
        "weights": _digest(_file(weights).read_bytes()),
        "pictures": [[path.name, _digest(path.read_bytes())] for path in paths],
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _kept(cache: Path, recipe: dict[str, Any]) -> Tensor | None:
    from safetensors.torch import load

    try:
        known = json.loads((cache / f"{_KEY}.json").read_text(encoding="utf-8"))
        content = (cache / f"{_KEY}.safetensors").read_bytes()
    except (OSError, ValueError):  # none yet, or damaged: made again
        return None
    if known != _signed(recipe, content):
        return None
    features = load(content)[_KEY]
    usable = features.dtype == torch.float16 and len(features) == len(recipe["pictures"])
    return features if usable and bool(features.isfinite().all()) else None


def _keep(cache: Path, recipe: dict[str, Any], features: Tensor) -> None:
    from safetensors.torch import save

    cache.mkdir(parents=True, exist_ok=True)
    content = save({_KEY: features.contiguous()})
    known = json.dumps(_signed(recipe, content))
    write_whole(cache / f"{_KEY}.safetensors", content)
    write_whole(cache / f"{_KEY}.json", known.encode())  # last: now it counts


def _signed(recipe: dict[str, Any], content: bytes) -> dict[str, Any]:
    """With a checksum of the features, by which a file that was cut short is noticed."""
    return recipe | {"sha256": _digest(content)}
