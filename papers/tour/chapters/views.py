"""What the curvature says about one row."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

import fenchel as fl
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Figure, Tour, number
from papers.tour.gallery import bumpy_scores

ORDER = 60

_INTRO = """
Suppose each key has a utility: for attention, the inner product of its value with the gradient
that arrives. The gradient in the scores then has two factors. The advantage is the utility less
its mean under the escort distribution: which keys a step would favour. The response says how much
each weight moves when its score does.

    solution.advantage(utility), solution.gradient(utility)
    solution.fisher(), solution.hessian()
"""


def chapter(tour: Tour) -> Chapter:
    scores = bumpy_scores(tour, 12)
    utility = 1 + torch.randn(12, generator=tour.generator(), dtype=torch.float64)
    solution = fl.solve(scores, fl.Tsallis(1.5))
    return Chapter("Views", _INTRO, (_advantage(solution, utility), _matrices(solution)))


def _advantage(solution: fl.Solution, utility: Tensor) -> Figure:
    rows = (
        ("weights", solution.weights, draw.BLUE),
        ("utility", utility, draw.AMBER),
        ("advantage", solution.advantage(utility), draw.PURPLE),
        ("gradient in the scores", solution.gradient(utility), draw.GREEN),
    )
    panels = tuple(_signed(title, values, color) for title, values, color in rows)
    mean = float((solution.escort() * utility).sum())
    caption = (
        f"Advantage is utility less {number(mean, 3)}, its escort mean. The gradient follows the "
        "sign of the advantage, is exactly zero (rings) where the key has no weight, and sums to "
        "zero."
    )
    alt = "Bars over twelve keys: weights, utility, advantage, gradient."
    return Figure(panels, caption, alt, "small")


def _signed(title: str, values: Tensor, color: str) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        ax.axhline(0, color=draw.FAINT, linewidth=0.6)
        draw.bars(ax, values.tolist(), color)
        ax.locator_params(axis="y", nbins=4)
        draw.keys_only(ax, label="key")

    return draw.panel(paint, "small", 1.7)


def _matrices(solution: fl.Solution) -> Figure:
    pictures = (("hessian: d p / d s", solution.hessian()), ("fisher", solution.fisher()))
    panels = tuple(_matrix(title, values) for title, values in pictures)
    caption = (
        "Keys by keys, blue above zero and vermilion below. Rows and columns of keys without "
        "weight are empty: their scores can move a little and nothing changes. Full colour is "
        "the largest entry of each matrix."
    )
    alt = "Heat maps of the Hessian and of the Fisher matrix of one row."
    return Figure(panels, caption, alt, "square")


def _matrix(title: str, values: Tensor) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        top = float(values.abs().max())
        ax.set_title(f"{title}, up to {number(top, 2)}")
        draw.diverging_heat(ax, values.numpy(), top=top)

    return draw.panel(paint, "square", 3.0)
