"""What is in a picture and where: 2 to 5 shapes, apart from each other, scattered or clustered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

VERSION = 1  # to be raised with any change of the data
SIDE = 64  # pixels
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")
LAYOUTS = ("scattered", "clustered")
PARTS = ("train", "test")
STEPS = ("scene", "drawing", "asking")
RADII = (5, 6, 7, 8)
MOST = 5  # shapes in a picture

Part = Literal["train", "test"]
Step = Literal["scene", "drawing", "asking"]

_COUNTS = np.array([2, 3, 4, 5])
_COUNT_ODDS = np.array([0.15, 0.25, 0.30, 0.30])
_REPEATS = np.array([2, 3])
_REPEAT_ODDS = np.array([0.3, 0.7])  # without this, threes would be too rare to balance
_REPEATED = (0.40, 0.70)  # below the first: a colour is repeated; below the second: a shape
_GAP = 1  # pixels between the boxes of two shapes
_SPREAD = 10.0  # pixels around the middle of a cluster
_TRIES = 40  # places tried for a shape before the picture is begun anew


@dataclass(frozen=True)
class Thing:
    """x to the right and y downwards, the centre; within `radius` pixels of it along both axes."""

    shape: str
    colour: str
    x: int
    y: int
    radius: int


@dataclass(frozen=True)
class Scene:
    layout: str
    things: tuple[Thing, ...]


def stream(seed: int, part: Part, step: Step) -> np.random.Generator:
    """Its own random numbers for each step of each part: no part repeats another's pictures."""
    key = [VERSION, seed, PARTS.index(part), STEPS.index(step)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def scenes(count: int, seed: int = 0, part: Part = "train") -> list[Scene]:
    """Of the pictures 0 to count - 1 of a part; the layouts take turns."""
    rng = stream(seed, part, "scene")
    return [_scene(LAYOUTS[number % 2], rng) for number in range(count)]


def _scene(layout: str, rng: np.random.Generator) -> Scene:
    count = int(rng.choice(_COUNTS, p=_COUNT_ODDS))
    kind = rng.random()
    colours = _names(COLOURS, count, kind < _REPEATED[0], rng)
    shapes = _names(SHAPES, count, _REPEATED[0] <= kind < _REPEATED[1], rng)
    radii = rng.integers(RADII[0], RADII[-1] + 1, count).tolist()
    centres = None
    while centres is None:
        centres = _centres(layout, radii, rng)
    looks = zip(shapes, colours, centres, radii, strict=True)
    return Scene(layout, tuple(Thing(s, c, x, y, r) for s, c, (x, y), r in looks))


def _names(
    known: tuple[str, ...], count: int, repeated: bool, rng: np.random.Generator
) -> list[str]:
    """Names drawn evenly; if repeated, one of them 2 or 3 times and the rest from the others."""
    if not repeated:
        return [known[place] for place in rng.integers(0, len(known), count)]
    chosen = known[rng.integers(len(known))]
    times = min(count, int(rng.choice(_REPEATS, p=_REPEAT_ODDS)))
    others = [name for name in known if name != chosen]
    rest = [others[place] for place in rng.integers(0, len(others), count - times)]
    names = [chosen] * times + rest
    return [names[place] for place in rng.permutation(count)]


def _centres(
    layout: str, radii: list[int], rng: np.random.Generator
) -> list[tuple[int, int]] | None:
    """None if one of the shapes found no place."""
    anchors = _anchors(len(radii), rng) if layout == "clustered" else None
    centres: list[tuple[int, int]] = []
    for place, radius in enumerate(radii):
        if anchors is None:
            tried = _anywhere(radius, rng)
        else:
            tried = _around(anchors[place % len(anchors)], rng)
        centre = _first_free(tried, radius, centres, radii)
        if centre is None:
            return None
        centres.append(centre)
    return centres


def _anchors(count: int, rng: np.random.Generator) -> list[tuple[float, float]]:
    """The middles of one or two clusters; two need at least two shapes each."""
    if count < 4 or rng.random() < 0.5:
        x, y = rng.uniform(16, SIDE - 16, 2)
        return [(float(x), float(y))]
    angle = rng.uniform(0, 2 * np.pi)
    x, y = 19 * float(np.cos(angle)), 19 * float(np.sin(angle))
    return [(SIDE / 2 + x, SIDE / 2 + y), (SIDE / 2 - x, SIDE / 2 - y)]


def _anywhere(radius: int, rng: np.random.Generator) -> Iterable[tuple[int, int]]:
    yield from rng.integers(radius + 1, SIDE - 1 - radius, (_TRIES, 2)).tolist()


def _around(anchor: tuple[float, float], rng: np.random.Generator) -> Iterable[tuple[int, int]]:
    """The nearest to the anchor first, so that a cluster is as tight as its shapes allow."""
    steps = _SPREAD * rng.standard_normal((_TRIES, 2))
    order = np.argsort((steps**2).sum(1), kind="stable")
    yield from np.rint(steps[order] + anchor).astype(np.int64).tolist()


def _first_free(
    tried: Iterable[tuple[int, int]],
    radius: int,
    taken: list[tuple[int, int]],
    radii: list[int],
) -> tuple[int, int] | None:
    low, high = radius + 1, SIDE - 2 - radius
    for x, y in tried:
        if not (low <= x <= high and low <= y <= high):
            continue
        others = zip(taken, radii, strict=False)  # radii goes on with those still to come
        if all(max(abs(x - a), abs(y - b)) > radius + r + _GAP for (a, b), r in others):
            return x, y
    return None
