"""From scenes to pixels, and to which shape each pixel belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from papers.experiments.data.shapes.scene import RADII, SHAPES, SIDE, Scene, Thing

Array = np.ndarray[Any, Any]

PALETTE = {  # distances: 130 and more between them, 75 and more to what is behind
    "red": (220, 35, 40),
    "green": (30, 160, 50),
    "blue": (35, 65, 230),
    "yellow": (245, 225, 40),
}
_JITTER = 10  # of a shape's colour
_NOISE = 5  # of every pixel
_GREY = (95, 150)
_TINT = 8
_RELIEF = (8, 16)  # of the texture
_KNOTS = 9  # of smooth noise, along a side


def drawn(scenes: Sequence[Scene], rng: np.random.Generator) -> tuple[Array, Array]:
    """images: uint8 (n, 3, side, side). owners: uint8 (n, side, side), 0 behind the shapes, else
    1 + the place of the thing in its scene."""
    images = np.empty((len(scenes), 3, SIDE, SIDE), np.uint8)
    owners = np.zeros((len(scenes), SIDE, SIDE), np.uint8)
    for scene, image, owner in zip(scenes, images, owners, strict=True):
        values = _background(rng)
        for number, thing in enumerate(scene.things, start=1):
            _put(thing, number, values, owner, rng)
        values += rng.integers(-_NOISE, _NOISE + 1, values.shape, dtype=np.int8)
        image[:] = np.rint(values).clip(0, 255)
    return images, owners


def _put(thing: Thing, number: int, values: Array, owner: Array, rng: np.random.Generator) -> None:
    reach = thing.radius
    rows = slice(thing.y - reach, thing.y + reach + 1)
    columns = slice(thing.x - reach, thing.x + reach + 1)
    inside = _STENCILS[thing.shape, reach]
    colour = PALETTE[thing.colour] + rng.integers(-_JITTER, _JITTER + 1, 3)
    values[:, rows, columns][:, inside] = colour[:, None]
    owner[rows, columns][inside] = number


def _stencil(shape: str, radius: int) -> Array:
    """bool (2 radius + 1, 2 radius + 1)."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    far = np.maximum(abs(x), abs(y))
    if shape == "circle":
        inside = x**2 + y**2 <= (radius + 0.3) ** 2
    elif shape == "square":
        inside = far <= radius - 1  # so that it is no larger than the circle
    else:
        inside = 2 * abs(x) <= y + radius
    return np.asarray(inside)


_STENCILS = {(shape, radius): _stencil(shape, radius) for shape in SHAPES for radius in RADII}


def _background(rng: np.random.Generator) -> Array:
    """float (3, side, side): a grey with a little tint, and a texture of low contrast."""
    texture = _TEXTURES[rng.integers(len(_TEXTURES))](rng)
    base = rng.uniform(*_GREY) + rng.uniform(-_TINT, _TINT, 3)
    relief = rng.uniform(*_RELIEF) * rng.uniform(0.6, 1, 3)
    values: Array = base[:, None, None] + relief[:, None, None] * texture
    return values


def _smooth(rng: np.random.Generator) -> Array:
    """Values at knots, linear between them."""
    return _BETWEEN @ rng.uniform(-1, 1, (_KNOTS, _KNOTS)) @ _BETWEEN.T


def _stripes(rng: np.random.Generator) -> Array:
    return np.sin(2 * np.pi * (rng.uniform(3, 9) * _along(rng) + rng.random()))


def _gradient(rng: np.random.Generator) -> Array:
    return 1.4 * _along(rng)


def _along(rng: np.random.Generator) -> Array:
    """(side, side), about -0.7 to 0.7 in a random direction."""
    angle = rng.uniform(0, 2 * np.pi)
    line = np.linspace(-0.5, 0.5, SIDE)
    places: Array = np.cos(angle) * line[None, :] + np.sin(angle) * line[:, None]
    return places


def _between() -> Array:
    """(side, knots), the weights of linear interpolation."""
    place = np.linspace(0, _KNOTS - 1, SIDE)
    weights: Array = np.maximum(0, 1 - abs(place[:, None] - np.arange(_KNOTS)))
    return weights


_BETWEEN = _between()
_TEXTURES = (_smooth, _stripes, _gradient)
