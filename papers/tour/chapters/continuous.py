"""Continuous attention: densities over a photograph, and how exactly their expectations come."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from torch import Tensor

import fenchel as fl
import fenchel.continuous as fc
from benchmarks import integrals_methods
from benchmarks.integrals import PIECES, largest_error
from fenchel.continuous.ball import Rule
from fenchel.lens.pictures import draw, overlay
from fenchel.lens.pictures.attention_map import Thing, checked_image
from fenchel.lens.pictures.layers import Layer, Numbers, layer_of
from papers.tour.chapter import Chapter, Figure, Table, Tour, number

ORDER = 96

_INTRO = """
Over an image attention can be a density instead of a weight for each cell. With a quadratic score
the same problem as before gives a Gaussian for Shannon's Ω, and for Tsallis(2) a paraboloid cut off
at zero, which lives on an ellipse; mixtures have several modes. Values become functions of the
place, and the output is still their expectation.

    import fenchel.continuous as fc
    places = fc.cell_centers(14, 14)
    density = fc.match_moments(weights, places, fc.Paraboloid)
    context = fc.fit_values(features, places, basis).expect(density)
    fenchel.lens.pictures.attention_map(image, {"sparsemax": density})
"""

_GRID = 14
_TEMPERATURE = 0.02


def chapter(tour: Tour) -> Chapter:
    scene = photograph()
    things = attentions(scene, tour)
    layers = {title: layer_of(thing) for title, thing in things.items()}
    intro = f"{_INTRO}\n{scene.note}\n" if scene.note else _INTRO
    sparse = things["Paraboloid"]
    assert isinstance(sparse, fc.Paraboloid)
    figures = (_maps(scene, layers), _errors(sparse, tour))
    return Chapter("Continuous attention", intro, figures, (_areas(layers),))


# ---- attention over a photograph


@dataclass(frozen=True)
class Scene:
    """image (H, W, 3) in [0, 1]; cell: whose colour is sought; note: for the reader."""

    image: Numbers
    cell: tuple[int, int]
    note: str = ""


def photograph() -> Scene:
    """scikit-learn's photograph of a tower above a lake, or a drawing where there is none."""
    try:
        image = importlib.import_module("sklearn.datasets").load_sample_image("china.jpg")
    except ImportError:
        return drawing()
    return Scene(checked_image(image), (11, 12))


def drawing() -> Scene:
    """Two dark trees, a field and the sky."""
    rows, columns = np.mgrid[0:140, 0:210] / 140
    image = np.stack([0.55 + 0.3 * rows, 0.7 + 0.2 * rows, 0.95 - 0.1 * rows], -1)
    image[rows > 0.7] = (0.55, 0.6, 0.3)
    for row, column, radius in ((0.6, 0.3, 0.2), (0.45, 1.15, 0.25)):
        image[(rows > row) & (rows < 0.85) & (abs(columns - column) < 0.03)] = (0.35, 0.25, 0.15)
        image[(rows - row) ** 2 + (columns - column) ** 2 < radius**2] = (0.1, 0.3, 0.15)
    note = "scikit-learn, whose photograph this chapter shows, is missing: a drawing stands in."
    return Scene(image, (6, 10), note)


def attentions(scene: Scene, tour: Tour) -> dict[str, Thing]:
    """Softmax of how alike the cells' mean colours are, and densities with its moments."""
    pixels = torch.from_numpy(scene.image).movedim(-1, 0)
    color = torch.nn.functional.adaptive_avg_pool2d(pixels, _GRID).movedim(0, -1)
    scores = -(color - color[scene.cell]).square().sum(-1).flatten() / _TEMPERATURE
    weights = fl.softmax(scores)
    positions = fc.cell_centers(_GRID, _GRID).to(weights.dtype)
    start = fc.Random(3, tour.generator())
    two = fc.fit_mixture(weights, positions, 2, iterations=50, start=start)
    modes = two.components
    sparse = fc.Paraboloid.from_covariance(modes.mean, modes.covariance_matrix)
    return {
        "softmax on cells": weights.reshape(_GRID, _GRID),
        "Gaussian": fc.match_moments(weights, positions, fc.Gaussian),
        "Paraboloid": fc.match_moments(weights, positions, fc.Paraboloid),
        "two Gaussians": two,
        "two paraboloids": fc.Mixture(two.mixing, sparse),
    }


def _maps(scene: Scene, layers: dict[str, Layer]) -> Figure:
    top = max(layer.peak for layer in layers.values())
    panels = [_original(scene)]
    panels += [_overlaid(scene, title, layer, top) for title, layer in layers.items()]
    caption = (
        f"Scores on {_GRID} × {_GRID} cells: minus the squared distance of a cell's mean colour "
        f"from that of the marked cell, over a temperature of {_TEMPERATURE}. The densities have "
        "the mean and the covariance of the softmax weights; the mixtures come from weighted EM. "
        f"All share one scale of colours, the fullest is {number(top, 3)} times even attention. "
        "Thin lines hold 50 % (solid) and 90 % (dashed) of the mass; the thick one is the edge of "
        "the support. One mode also covers what lies between; two need not."
    )
    alt = "A picture, and over it softmax weights on cells, a Gaussian, a paraboloid and mixtures."
    return Figure(tuple(panels), caption, alt, "medium")


def _original(scene: Scene) -> str:
    row, column = scene.cell
    square = np.array([[0, 0], [0, 1], [1, 1], [1, 0], [0, 0]])

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("the image and the marked cell")
        overlay.show_image(ax, scene.image)
        overlay.show_line(ax, (np.array([row, column]) + square) / _GRID)

    return draw.panel(paint, "medium", _height(scene))


def _overlaid(scene: Scene, title: str, layer: Layer, top: float) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        overlay.show_layer(ax, scene.image, layer, top)

    return draw.panel(paint, "medium", _height(scene))


def _height(scene: Scene) -> float:
    height, width = scene.image.shape[:2]
    return 0.28 + draw.WIDTHS["medium"] * float(height / width)


def _areas(layers: dict[str, Layer]) -> Table:
    header = ("attention", "image with weight", "image for 90 %", "mass off the image")
    caption = (
        "Shares in per cent: of the image, where there is any weight; the smallest part that holds "
        "nine tenths of the mass on the image; and of the mass, what falls beyond the border."
    )
    rows = [(title, *map(_percent, shares(layer.values))) for title, layer in layers.items()]
    return Table(caption, header, tuple(rows))


def shares(values: Numbers) -> tuple[float, float, float]:
    """Of densities (rows, columns): the area above 0, that of 90 %, the mass off the image."""
    mass = np.sort(values.ravel())[::-1].cumsum() / values.size
    most = (np.searchsorted(mass, 0.9 * mass[-1]) + 1) / values.size
    return float((values > 0).mean()), float(most), float(1 - mass[-1])


def _percent(share: float) -> str:
    return number(100 * max(share, 0.0), 3) if share > 5e-5 else "0"


# ---- how exact the expectations are

_DEVIATIONS = (0.1, 0.03, 0.01)
_COLORS = (draw.BLUE, draw.VERMILION, draw.GREEN)
_RULES = (("angle", draw.DASHES[3], "o"), ("expect", "-", "s"))
_WANTED = 1e-9


Errors = dict[int, float]  # by the number of nodes


def _errors(density: fc.Paraboloid, tour: Tour) -> Figure:
    steps = [2**k for k in range(3, 8 if tour.quick else 11)]
    curves = {d: errors(density, functions(density, d), steps) for d in _DEVIATIONS}
    needed = [", ".join(_first(pair[k]) for pair in curves.values()) for k in (0, 1)]
    caption = (
        "The largest error, relative to 1 + |value|, of the expectations of Gaussian functions on "
        "a grid under the paraboloid above. Equal steps of the angle (dotted), each with its ray "
        "in closed form, suit wide functions and need more nodes the narrower they are; `expect` "
        "(solid, the three together) places its nodes where the function is, in up to three "
        "pieces, here counted as three. "
        f"For an error of {number(_WANTED)} at deviations of "
        f"{', '.join(map(str, _DEVIATIONS))} the first needs {needed[0]} nodes (powers of two were "
        f"tried), the second {needed[1]}."
    )
    alt = "Error against the number of nodes, for two rules and functions of three widths."
    return Figure((_error_panel(curves),), caption, alt, "wide")


def functions(density: fc.Paraboloid, deviation: float) -> fc.GaussianBasis:
    return fc.GaussianBasis.grid(8, deviation**2, 2).to(density.mean)


def errors(
    density: fc.Paraboloid, basis: fc.GaussianBasis, steps: list[int]
) -> tuple[Errors, Errors]:
    """Of equal steps of the angle, and of `expect`, whose nodes follow from the tolerance.

    Exact is what far more steps of the angle give.
    """
    exact = trapezoid(density, basis, 4 * max(*steps, 1024))
    angle = {n: largest_error(trapezoid(density, basis, n), exact) for n in steps}
    tolerances = [10.0**-k for k in range(2, 14)]
    one = integrals_methods.Problem(density.expand(torch.Size([1])), basis)
    rules = [Rule.closed(t) for t in tolerances]
    ours = {
        PIECES * rule.nodes: largest_error(integrals_methods.by_rule(one, rule)[0], exact)
        for rule in rules
    }
    return angle, ours


def _first(errors: Errors) -> str:
    """The fewest nodes from which on the error is as wanted."""
    nodes = sorted(errors)
    enough = [n for k, n in enumerate(nodes) if all(errors[m] <= _WANTED for m in nodes[k:])]
    return str(enough[0]) if enough else f"over {nodes[-1]}"


def trapezoid(density: fc.Paraboloid, basis: fc.GaussianBasis, nodes: int) -> Tensor:
    """E[psi_j] by equal steps of the angle (CLAIMS F-A.23, F-NAIVE). (N,)"""
    one = density.expand(torch.Size([1]))
    return integrals_methods.trapezoid(integrals_methods.Problem(one, basis), nodes)[0]


def _error_panel(curves: dict[float, tuple[Errors, Errors]]) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        for (deviation, pair), color in zip(curves.items(), _COLORS, strict=True):
            for errors, (name, dash, marker) in zip(pair, _RULES, strict=True):
                shown = [max(error, 1e-17) for error in errors.values()]  # zero has no logarithm
                look: Any = {"color": color, "linestyle": dash, "marker": marker, "markersize": 3}
                ax.plot(list(errors), shown, label=f"{name}, deviation {deviation}", **look)
        sizes = sorted(next(iter(curves.values()))[0])
        ax.xaxis.set_major_locator(FixedLocator(sizes))
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("nodes (logarithmic)")
        ax.set_ylabel("error (logarithmic)")
        ax.grid(True, color=draw.FAINT, alpha=0.35, linewidth=0.5)
        canvas.legend(loc="outside lower center", ncols=3, handlelength=3, labelcolor=draw.INK)

    return draw.panel(paint, "wide", 3.3)
