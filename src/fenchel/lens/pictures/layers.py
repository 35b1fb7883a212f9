"""What is drawn over an image, as numbers: a field of attention per unit of area, and lines.

Positions are (row, column) in [0, 1]^2 from the upper left, row downwards. The image has area 1, so
that a density of 1 is even attention, for weights on a grid and for densities alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fenchel.continuous import Density, Mixture
from fenchel.nn.continuous import Expectation

Numbers = NDArray[np.float64]

MASSES = (0.5, 0.9)
SIDE = 320  # points along each axis of a density's field
_EQUAL_SHARES = 4096  # points of each component from which a mixture's levels are read
_MOSTLY = 0.5  # with less of its mass on the image a density lies beside it


@dataclass(frozen=True)
class Layer:
    """Attention over one image.

    title: for a panel without one. values: density in each cell, (rows, columns). peak: the
    largest on the image. mass: for each share of `MASSES`, the border of the smallest region that
    holds so much. edge: the border of the support, where it has one. Lines are (P, 2), their
    pieces divided by rows of NaN. on_image: the share of the mass that lies on the image.
    """

    title: str
    values: Numbers
    peak: float
    smooth: bool = False
    mass: dict[float, Numbers] = field(default_factory=dict)
    edge: Numbers = field(default_factory=lambda: np.empty((0, 2)))
    on_image: float = 1.0

    @property
    def note(self) -> str:
        """For attention that lies for the most part beside the image, where nobody sees it."""
        if self.on_image >= _MOSTLY:
            return ""
        share = f"{100 * self.on_image:.0f}" if self.on_image >= 0.01 else "less than 1"
        return f"{share} % of it on the image"


def layer_of(what: Any, name: str = "what") -> Layer:
    """Weights on a grid, or a density: see `attention_map`. name: of the argument, for errors."""
    if isinstance(what, Expectation):  # what a continuous layer returns
        what, name = what.density, f"{name}.density"
    if isinstance(what, Density | Mixture):
        return _of_density(what, name)
    return _of_grid(as_array(what, name), name)


def as_array(values: Any, name: str) -> NDArray[Any]:
    """A tensor from any device, or whatever numpy takes for an array of numbers."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError as uneven:  # rows of several lengths
        raise TypeError(f"{name} must be an array of numbers: {uneven}") from None
    if array.dtype.kind not in "buif":
        raise TypeError(f"{name} must hold real numbers, got {type(values).__name__}")
    return array


# ---- weights on a grid


def _of_grid(weights: NDArray[Any], name: str) -> Layer:
    if weights.ndim != 2 or 0 in weights.shape:
        raise ValueError(
            f"{name} must be weights (rows, columns) on a grid, got {weights.shape}; "
            "use reshape(rows, columns)"
        )
    weights = weights.astype(np.float64)
    if not np.isfinite(weights).all():
        raise ValueError(f"{name} must be finite; the weights hold NaN or infinity")
    if (weights < 0).any():
        raise ValueError(f"{name} must be >= 0; pass attention weights, not scores")
    if not weights.sum() > 0:
        raise ValueError(f"{name} must not sum to zero: there is no attention to draw")
    values = weights / weights.sum() * weights.size  # a cell's area is 1 / size
    rows, columns = weights.shape
    title = f"weights, {rows} × {columns}"
    return Layer(title, values, float(values.max()), edge=_outline(weights > 0))


def _outline(on: NDArray[np.bool_]) -> Numbers:
    """Sides between cells with and without weight; nothing where every cell has some."""
    if on.all():
        return np.empty((0, 2))
    rows, columns = on.shape
    padded = np.pad(on, 1)
    below, right = padded[1:, 1:-1] != padded[:-1, 1:-1], padded[1:-1, 1:] != padded[1:-1, :-1]
    sides = [np.array([[r, c], [r, c + 1]]) for r, c in np.argwhere(below)]
    sides += [np.array([[r, c], [r + 1, c]]) for r, c in np.argwhere(right)]
    return _join([side / (rows, columns) for side in sides])


# ---- densities


@dataclass(frozen=True)
class _Parts:
    """The components that carry weight: mixing, eps and level (K,), centre (K, 2), factor."""

    mixing: Numbers
    centre: Numbers
    factor: Numbers
    level: Numbers
    eps: Numbers

    def squared_radius(self, mass: Numbers | float) -> Numbers:
        """Of the ellipse that holds so much of a component, in its own coordinates. (K, ...)

        In the plane the density p0 (1 - v)^(1/eps), v = z^2 / (2 level) in [0, 1], leaves
        (1 - v)^(1/eps + 1) outside; for a Gaussian exp(-z^2 / 2) (chi-square of two degrees).
        """
        outside = np.log1p(-np.asarray(mass, dtype=np.float64))  # (...)
        shape = (-1, *(1,) * outside.ndim)
        eps, level = self.eps.reshape(shape), self.level.reshape(shape)
        sparse = eps > 0
        bounded = np.where(sparse, level, 1.0) * np.expm1(outside * eps / (1 + eps))
        return np.asarray(-2 * np.where(sparse, bounded, outside))

    def points(self, squared: Numbers, angle: Numbers) -> Numbers:
        """In the image, from squared radii (K, P) and angles (P,). (K, P, 2)"""
        circle = np.stack([np.cos(angle), np.sin(angle)], -1)  # (P, 2)
        turned = circle @ self.factor.mT  # (K, P, 2)
        points: Numbers = self.centre[:, None] + np.sqrt(squared)[..., None] * turned
        return points

    def ellipses(self, squared: Numbers) -> Numbers:
        """squared (K,) -> (K, P, 2)"""
        angle = np.radians(np.arange(362))  # a little beyond where it began, to close the line
        return self.points(np.repeat(squared[:, None], len(angle), 1), angle)


def _of_density(density: Density | Mixture, name: str) -> Layer:
    _check(density, name)
    parts = _parts(density)
    values = _prob(density, _centres(SIDE)).reshape(SIDE, SIDE)
    if not all(np.isfinite(x).all() for x in (parts.mixing, parts.centre, parts.factor, values)):
        raise ValueError(f"{name} must be finite; the density holds NaN or infinity")
    on_image = parts.centre[((parts.centre >= 0) & (parts.centre <= 1)).all(-1)]
    peak = max(float(values.max()), *_prob(density, on_image).tolist(), 0.0)
    if not peak > 0:
        raise ValueError(
            f"{name} has no mass on the image; positions are (row, column) in [0, 1], not pixels"
        )
    if len(parts.mixing) == 1:
        mass = {share: parts.ellipses(parts.squared_radius(share))[0] for share in MASSES}
    else:
        mass = {share: _contour(values, level) for share, level in _levels(density, parts)}
    return Layer(_title(density), values, peak, True, mass, _union(parts), _on_image(parts))


def _check(density: Density | Mixture, name: str) -> None:
    if density.dim != 2:
        raise ValueError(f"{name} must be a density over the plane, d = 2, got d = {density.dim}")
    if density.batch_shape:
        way = f"{name}[0]"
        if isinstance(density, Mixture):
            way = f"Mixture({name}.mixing[0], {name}.components[0])"
        shape = tuple(density.batch_shape)
        raise ValueError(f"{name} must be one density, got a batch {shape}; take one: {way}")


def _title(density: Density | Mixture) -> str:
    if isinstance(density, Mixture):
        return f"{int(density.modes)} × {type(density.components).__name__}"
    return type(density).__name__


def _parts(density: Density | Mixture) -> _Parts:
    inner = density.components if isinstance(density, Mixture) else density
    mixing = density.mixing if isinstance(density, Mixture) else torch.ones(1)
    support = inner.support
    alpha = torch.as_tensor(inner.alpha, dtype=inner.mean.dtype)  # rounded as the level was
    share, centre, factor, level, eps = (
        x.detach().cpu().double().numpy()
        for x in (mixing, support.centre, support.factor, support.level, alpha - 1)
    )
    k, on = len(share), ~(share <= 0)  # NaN is seen later
    level, eps = np.broadcast_to(level, k), np.broadcast_to(eps, k)
    centre, factor = centre.reshape(k, 2), factor.reshape(k, 2, 2)
    return _Parts(share[on], centre[on], factor[on], level[on], eps[on])


def _centres(side: int) -> Numbers:
    """Of the cells of the image cut into side x side, columns fastest. (side^2, 2)"""
    line = (np.arange(side) + 0.5) / side
    return np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)


def _prob(density: Density | Mixture, points: Numbers) -> Numbers:
    """(P, 2) -> (P,)"""
    with torch.no_grad():
        values = density.prob(torch.as_tensor(points).to(density.mean))
    array: Numbers = values.cpu().double().numpy()
    return array


def _equal_shares(parts: _Parts) -> Numbers:
    """Points of which each stands for the same mass of its component. (K, n, 2)

    A sunflower's spiral in each component: n radii that hold equal masses, each turned by the
    golden angle against the one before.
    """
    share = (np.arange(_EQUAL_SHARES) + 0.5) / _EQUAL_SHARES
    angle = np.arange(_EQUAL_SHARES, dtype=np.float64) * (math.pi * (3 - math.sqrt(5)))
    return parts.points(parts.squared_radius(share), angle)


def _on_image(parts: _Parts) -> float:
    """The share of the mass in [0, 1]^2, to about 0.1 %."""
    points = _equal_shares(parts)
    inside = ((points >= 0) & (points <= 1)).all(-1).mean(-1)  # (K,)
    return float((parts.mixing * inside).sum() / parts.mixing.sum())


def _levels(density: Density | Mixture, parts: _Parts) -> list[tuple[float, float]]:
    """Densities above which so much of a mixture lies, from points with equal shares of it."""
    values = _prob(density, _equal_shares(parts).reshape(-1, 2))
    weight = np.repeat(parts.mixing / _EQUAL_SHARES, _EQUAL_SHARES)
    order = np.argsort(-values)
    above = np.cumsum(weight[order]) / weight.sum()
    return [(mass, float(values[order][np.searchsorted(above, mass)])) for mass in MASSES]


def _contour(values: Numbers, level: float) -> Numbers:
    from contourpy import contour_generator  # comes with matplotlib

    line = (np.arange(SIDE) + 0.5) / SIDE
    pieces = contour_generator(line, line, values).lines(level)
    return _join([np.asarray(piece)[:, ::-1] for piece in pieces])  # x is the column


def _union(parts: _Parts) -> Numbers:
    """The border of the union of the supports; nothing if a component lives everywhere."""
    if np.isinf(parts.level).any():
        return np.empty((0, 2))
    pieces = parts.ellipses(2 * parts.level)
    for k, piece in enumerate(pieces):
        for other in range(len(pieces)):
            if other != k:
                apart = np.linalg.solve(parts.factor[other], (piece - parts.centre[other]).T)
                # A little inside, lest of two equal components neither be drawn.
                hidden = (apart**2).sum(0) < 2 * parts.level[other] * (1 - 1e-9)
                piece[hidden] = np.nan
    return _join(list(pieces))


def _join(pieces: list[Numbers]) -> Numbers:
    """One line, with a row of NaN after each piece: one path has one halo."""
    gap = np.full((1, 2), np.nan)
    return np.concatenate([part for piece in pieces for part in (piece, gap)] or [gap[:0]])
