"""Base measures: how much room each key has."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

import fenchel as fl
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Figure, Tour, number
from papers.tour.gallery import bumpy_scores

ORDER = 30

_INTRO = """
A base measure ν says how much room each key has before any score is seen. It is used as given:
all ones is the ordinary map, zero is a mask, and Ω becomes Σ ν ω(p / ν). A prior makes ν from
positions, and priors multiply:

    base = fl.priors.Causal() * fl.priors.ALiBi(heads=8)
    fl.solve(scores, fl.Tsallis(1.5), base=base)      # scores (8, query, key)

For softmax a mass is the same as adding its logarithm to the score. For sparse maps it is not:
a mass scales what a key gets, but who gets anything is still decided by the scores, against one
threshold for all keys.
"""


def chapter(tour: Tour) -> Chapter:
    return Chapter("Base measures", _INTRO, (_heads(tour), _row(tour)))


def _heads(tour: Tour) -> Figure:
    heads, n = 8, 24
    scores = torch.randn(heads, n, n, generator=tour.generator(), dtype=torch.float64)
    causal = fl.priors.Causal()
    plain = fl.solve(scores, fl.Tsallis(1.5), base=causal).weights
    alibi = fl.solve(scores, fl.Tsallis(1.5), base=causal * fl.priors.ALiBi(heads)).weights
    slopes = fl.priors.alibi_slopes(heads)
    pictures = (
        ("causal", plain[0]),
        (f"× ALiBi, slope {number(slopes[0])}", alibi[0]),
        (f"× ALiBi, slope {number(slopes[3])}", alibi[3]),
    )
    panels = tuple(_attention(title, weights) for title, weights in pictures)
    caption = (
        "Weights of Tsallis(1.5), queries down and keys across, on random scores. Nothing lies "
        "above the diagonal. A steep slope keeps the mass near the query, a gentle one lets it "
        "spread. Most cells are exact zeros; the palest are small weights. Full colour is one."
    )
    alt = "Heat maps of causal attention weights without and with ALiBi at two slopes."
    return Figure(panels, caption, alt, "square")


def _attention(title: str, weights: Tensor) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        draw.heat(ax, weights.numpy(), top=1.0)
        ax.set_xlabel("key")
        ax.set_ylabel("query")

    return draw.panel(paint, "square", 3.1)


def _row(tour: Tour) -> Figure:
    scores = bumpy_scores(tour, 16)
    mass = torch.linspace(2.0, 0.1, len(scores), dtype=torch.float64)
    omega = fl.Tsallis(1.5)
    rows = (
        ("base=None", fl.solve(scores, omega).weights),
        ("base=mass", fl.solve(scores, omega, base=mass).weights),
        ("scores + log(mass)", fl.solve(scores + mass.log(), omega).weights),
    )
    top = max(float(weights.max()) for _, weights in rows)
    mass_panel = _bars("the mass", mass, 2.1, draw.AMBER)
    panels = (mass_panel, *(_bars(title, weights, top, draw.BLUE) for title, weights in rows))
    sizes = [int((weights > 0).sum()) for _, weights in rows]
    caption = (
        "The same 16 scores with Tsallis(1.5). A mass that falls from left to right moves weight "
        "to the left, and keys still enter in the order of their scores; adding its logarithm to "
        f"the scores changes that order. Keys with weight: {sizes[0]}, {sizes[1]} and {sizes[2]}."
    )
    alt = "A falling mass, and the weights without it, with it, and with its logarithm as bias."
    return Figure(panels, caption, alt, "small")


def _bars(title: str, values: Tensor, top: float, color: str) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        draw.bars(ax, values.tolist(), color)
        ax.set_ylim(0, 1.08 * top)
        ax.locator_params(axis="y", nbins=4)
        draw.keys_only(ax, label="key")

    return draw.panel(paint, "small", 1.7)
