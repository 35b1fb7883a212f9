"""Grid features of the pictures, from a small network that learnt to name what is in each cell: in
place of the network trained on photographs that features of photographs come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fenchel.lens.files import write_whole
from papers.experiments.data.questions import InMemory, QuestionData
from papers.experiments.data.shapes.loading import load_shapes
from papers.experiments.data.shapes.scene import COLOURS, SHAPES, SIDE, VERSION, Part, scenes

CELL = 8  # pixels
_GRID = SIDE // CELL
_CHANNELS, _EPOCHS, _BATCH, _RATE = 48, 6, 64, 3e-3
_RECIPE = f"{_CHANNELS} channels, {_EPOCHS} epochs"

_PARTS = ("train", "test")

Advance = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Seen:
    """features: float16 (n, rows, columns, channels). images: uint8 (n, 3, side, side)."""

    features: Tensor
    images: InMemory

    def __len__(self) -> int:
        return len(self.features)

    def gathered(self, places: Tensor) -> Tensor:
        return self.features[places].float()

    def shown(self, place: int) -> np.ndarray[Any, Any]:
        return self.images.shown(place)

    def origin(self) -> Iterator[Tensor | str]:
        yield _RECIPE
        yield from self.images.origin()


def load_seen(
    cache: Path | None = None,
    *,
    images: tuple[int, int] = (6_000, 1_500),
    seed: int = 0,
    advance: Advance | None = None,
) -> QuestionData:
    """Shapes-VQA with features of 8 x 8 cells in place of pixels.

    cache: a folder where they are kept; one of other pictures or another recipe is made again.
    """
    data = load_shapes(images=images, seed=seed)
    known = None if cache is None else _read(cache, images, seed)
    if known is None:
        known = _made(data, images, seed, advance)
        if cache is not None:
            _write(cache, known, images, seed)
    note = f"{data.note}; features of a network that learnt to name the shapes"
    train, test = (
        replace(split, pictures=Seen(known[part], _pixels(split.pictures)))
        for part, split in (("train", data.train), ("test", data.test))
    )
    return replace(data, note=note, train=train, test=test)


def _pixels(pictures: Any) -> InMemory:
    assert isinstance(pictures, InMemory)
    return pictures


class Naming(nn.Module):
    """Pixels to cells, then the colour and the shape of what has its centre there, if anything."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 24, 2), (24, 48, 2), (48, 48, 2), (48, _CHANNELS, 1)):
            convolution = nn.Conv2d(before, after, 3, stride, padding=1)
            layers += [convolution, nn.GroupNorm(4, after), nn.GELU()]
        self.see = nn.Sequential(*layers)
        self.name = nn.Conv2d(_CHANNELS, len(COLOURS) + len(SHAPES) + 2, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """features, scores of colours and of shapes; the first of each is for none."""
        features = self.see(images.float() / 127.5 - 1)
        colours, shapes = self.name(features).split([len(COLOURS) + 1, len(SHAPES) + 1], 1)
        return features, colours, shapes


def _made(
    data: QuestionData, images: tuple[int, int], seed: int, advance: Advance | None
) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Naming()
        pixels = _pixels(data.train.pictures).images
        _train(network, pixels, _names(images[0], seed, "train"), advance)
    network.eval()
    unseen = _pixels(data.test.pictures).images
    features = {"train": _features(network, pixels), "test": _features(network, unseen)}
    return {**features, "named": _right(network, unseen, _names(images[1], seed, "test"))}


def _names(count: int, seed: int, part: Part) -> Tensor:
    """(n, 2, rows, columns), int64: colour and shape in each cell, from 1; 0 where nothing is."""
    names = torch.zeros(count, 2, _GRID, _GRID, dtype=torch.int64)
    for number, scene in enumerate(scenes(count, seed, part)):
        for thing in scene.things:
            looks = (1 + COLOURS.index(thing.colour), 1 + SHAPES.index(thing.shape))
            names[number, :, thing.y // CELL, thing.x // CELL] = torch.tensor(looks)
    return names


def _train(network: Naming, pixels: Tensor, names: Tensor, advance: Advance | None) -> None:
    batches = len(pixels) // min(_BATCH, len(pixels))
    steps = _EPOCHS * batches
    optimizer = torch.optim.AdamW(network.parameters(), _RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for step in range(steps):
        if step % batches == 0:
            order = torch.randperm(len(pixels))
        chosen = order[step % batches :: batches]
        _, colours, shapes = network(pixels[chosen])
        loss = nn.functional.cross_entropy(colours, names[chosen, 0])
        loss = loss + nn.functional.cross_entropy(shapes, names[chosen, 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if advance is not None:
            advance(step + 1, steps)


@torch.no_grad()
def _features(network: Naming, pixels: Tensor) -> Tensor:
    parts = [network(part)[0].permute(0, 2, 3, 1).half() for part in pixels.split(500)]
    return torch.cat(parts)


@torch.no_grad()
def _right(network: Naming, pixels: Tensor, names: Tensor) -> float:
    """The share of things whose colour and shape are both named right."""
    right = total = 0
    for part, wanted in zip(pixels.split(500), names.split(500), strict=True):
        _, colours, shapes = network(part)
        both = (colours.argmax(1) == wanted[:, 0]) & (shapes.argmax(1) == wanted[:, 1])
        there = wanted[:, 0] > 0
        right, total = right + int((both & there).sum()), total + int(there.sum())
    return right / total


def _facts(images: tuple[int, int], seed: int) -> dict[str, Any]:
    return {"version": VERSION, "seed": seed, "images": list(images), "recipe": _RECIPE}


def _read(cache: Path, images: tuple[int, int], seed: int) -> dict[str, Any] | None:
    """None where there is none, or another, or one that is damaged."""
    try:
        facts = json.loads((cache / "shapes.json").read_text(encoding="utf-8"))
        content = (cache / "shapes.safetensors").read_bytes()
        named = float(facts["named"])
        if facts != {**_facts(images, seed), **_signed(named, content)}:
            return None
        tensors = load(content)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None
    whole = tensors.keys() == set(_PARTS) and 0 <= named <= 1
    if not whole or not all(_fits(tensors[p], n) for p, n in zip(_PARTS, images, strict=True)):
        return None
    return {**tensors, "named": named}


def _fits(features: Tensor, count: int) -> bool:
    shape = (count, _GRID, _GRID, _CHANNELS)
    return (
        features.shape == shape
        and features.dtype == torch.float16
        and bool(features.isfinite().all())
    )


def _signed(named: float, content: bytes) -> dict[str, Any]:
    """With a checksum, by which tensors that were changed or cut are noticed."""
    return {"named": named, "sha256": hashlib.sha256(content).hexdigest()}


def _write(cache: Path, features: dict[str, Any], images: tuple[int, int], seed: int) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    content = save({part: features[part].contiguous() for part in _PARTS})
    write_whole(cache / "shapes.safetensors", content)
    facts = {**_facts(images, seed), **_signed(features["named"], content)}
    write_whole(cache / "shapes.json", json.dumps(facts).encode())
