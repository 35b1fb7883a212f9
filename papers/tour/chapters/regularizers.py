"""The same scores through every regulariser."""

from __future__ import annotations

import math

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

import fenchel as fl
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Figure, Table, Tour
from papers.tour.gallery import GALLERY, bumpy_scores

ORDER = 20

_INTRO = """
One row of scores, eight choices of Ω. Above, the scores with the threshold: keys at or below it
get exactly nothing. Below, the weights; a ring on the line is a weight that is zero, not merely
small.
"""

_CURVES: tuple[tuple[str, fl.Regularizer], ...] = (
    ("softmax", fl.Shannon()),
    ("entmax 1.25", fl.Tsallis(1.25)),
    ("entmax 1.5", fl.Tsallis(1.5)),
    ("sparsemax", fl.Tsallis(2.0)),
    ("alpha = 3", fl.Tsallis(3.0)),
)

_ROWS = (
    ("Shannon()", "Σ p log p", "softmax: every key gets something"),
    ("Tsallis(alpha)", "Σ (p^α − p) / (α(α − 1))", "entmax: exact zeros; sparsemax at 2"),
    ("Norm(alpha)", "‖p‖_α", "normmax: near-equal weights on few keys"),
    ("Budget(k)", "‖p‖² / 2 on 0 ≤ p ≤ 1, Σ p = k", "picks about k keys, none above one"),
    ("Fused(strength)", "‖p‖² / 2 + strength Σ |p_i − p_j|", "equal weights on runs or patches"),
)


def chapter(tour: Tour) -> Chapter:
    figures = (_multiples(tour), _two_keys(), _line(tour), _grid(tour))
    rows = tuple((f"`{name}`", omega, effect) for name, omega, effect in _ROWS)
    caption = "The regularisers of this version, at temperature one and without a base measure."
    table = Table(caption, ("regulariser", "Ω(p)", "its map"), rows, words=True)
    return Chapter("The same scores, different regularisers", _INTRO, figures, (table,))


def _multiples(tour: Tour) -> Figure:
    scores = bumpy_scores(tour)
    solutions = [(name, fl.solve(scores, omega)) for name, omega in GALLERY]
    panels = tuple(_small(name, scores, solution) for name, solution in solutions)
    sizes = ", ".join(f"{name} {int(sol.support_size)}" for name, sol in solutions)
    caption = (
        f"Read the rings: zeros appear and spread as alpha grows. Keys with weight, out of "
        f"{len(scores)}: {sizes}. Fused cuts smoothed scores, so no line is drawn on the raw "
        "ones; the weights of Budget sum to three. Each panel has its own scale of weights."
    )
    alt = "For each regulariser, the 20 scores with its threshold, and the 20 weights as bars."
    return Figure(panels, caption, alt, "small")


def _small(name: str, scores: Tensor, solution: fl.Solution) -> str:
    weights, support = solution.weights.tolist(), solution.support
    threshold = float(solution.threshold)
    drawn = math.isfinite(threshold) and not isinstance(solution.regularizer, fl.Fused)
    keys = torch.arange(len(scores))

    def paint(canvas: Canvas) -> None:
        upper, lower = canvas.subplots(2, 1, height_ratios=(2, 3), sharex=True)
        upper.set_title(name)
        on, off = keys[support], keys[~support]
        upper.plot(on, scores[on], "o", color=draw.BLUE, markersize=3)
        upper.plot(off, scores[off], "o", color=draw.FAINT, markersize=3, markerfacecolor="none")
        if drawn:
            upper.axhline(threshold, color=draw.VERMILION, linewidth=1, linestyle=(0, (4, 2)))
        upper.set_yticks([0, 1])
        upper.set_ylabel("score")
        upper.tick_params(bottom=False)
        draw.bars(lower, weights)
        lower.set_ylabel("weight")
        lower.locator_params(axis="y", nbins=4)
        draw.keys_only(lower)

    return draw.panel(paint, "small", 2.3)


def _two_keys() -> Figure:
    t = torch.linspace(-3, 3, 241, dtype=torch.float64)
    scores = torch.stack([t, torch.zeros_like(t)], -1)
    series = [(name, fl.solve(scores, omega).weights[:, 0].tolist()) for name, omega in _CURVES]

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        draw.lines(ax, t.tolist(), series, place="upper left")
        ax.set_xlabel("score t of the first key (the second scores 0)")
        ax.set_ylabel("weight of the first key")

    caption = (
        "Two keys with scores (t, 0): softmax never reaches 0 or 1; each sparse map reaches them "
        "at a finite t, which comes nearer as alpha grows, and it bends there without a jump."
    )
    alt = "Weight of the first of two keys against its score, for five maps."
    return Figure((draw.panel(paint, "wide", 2.8),), caption, alt, "wide")


def _line(tour: Tour) -> Figure:
    n = 60
    place = torch.arange(n)
    noise = torch.randn(n, generator=tour.generator(), dtype=torch.float64)
    truth = torch.where((place >= 12) & (place < 26), 1.0, 0.0)
    truth = truth + torch.where((place >= 38) & (place < 44), 1.0, 0.0)
    # Weights differ by as much as scores do: two steps survive only at this scale.
    scores = 0.2 * truth + 0.06 * noise
    plain = fl.solve(scores, fl.Tsallis(2.0)).weights
    fused = fl.solve(scores, fl.Fused(0.1)).weights
    runs = int((fused.diff() != 0).sum()) + 1

    def paint(canvas: Canvas) -> None:
        top, middle, bottom = canvas.subplots(3, 1, sharex=True)
        top.set_title("scores: two steps (line) and noise")
        top.plot(place, scores, "o", color=draw.BLUE, markersize=2.5)
        top.step(place, 0.2 * truth, where="mid", color=draw.INK, linewidth=0.9)
        for ax, weights, title in ((middle, plain, "Tsallis(2)"), (bottom, fused, "Fused(0.1)")):
            ax.set_title(title)
            draw.bars(ax, weights.tolist())
            ax.locator_params(axis="y", nbins=3)
        draw.keys_only(bottom, label=f"{n} keys in a line")

    caption = (
        f"Sparsemax gives {int((plain > 0).sum())} keys weight, ragged as the noise; Fused "
        f"gives {int((fused > 0).sum())} keys weight, and the row falls into {runs} runs of equal "
        "weight (zeros included)."
    )
    alt = "Noisy scores on a line, and the weights of sparsemax and of Fused on them."
    return Figure((draw.panel(paint, "wide", 3.6),), caption, alt, "wide")


def _grid(tour: Tour) -> Figure:
    side = 16
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    patch = ((x - 4) ** 2 + (y - 5) ** 2 < 10) | ((x >= 9) & (x < 14) & (y >= 9) & (y < 13))
    noise = torch.randn(side, side, generator=tour.generator(), dtype=torch.float64)
    scores = (0.1 * patch + 0.035 * noise).flatten()
    plain = fl.solve(scores, fl.Tsallis(2.0)).weights
    smooth = fl.solve(scores, fl.Fused(0.04, grid=(side, side))).weights
    pictures = (
        ("scores, 16 × 16", scores - scores.min()),
        ("Tsallis(2)", plain),
        ("Fused(0.04, grid)", smooth),
    )
    panels = tuple(_image(title, values.reshape(side, side)) for title, values in pictures)
    caption = (
        f"A disc and a rectangle under noise. Sparsemax keeps {int((plain > 0).sum())} scattered "
        f"cells; total variation on the grid (TVmax) keeps {int((smooth > 0).sum())} cells in "
        "patches of equal weight; edges are counted along rows and columns, so that round shapes "
        "come out square. Full colour is the largest value of each panel."
    )
    alt = "Heat maps of noisy scores on a grid and of the weights of sparsemax and TVmax."
    return Figure(panels, caption, alt, "square")


def _image(title: str, values: Tensor) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        draw.heat(ax, values.numpy(), top=float(values.max()))

    return draw.panel(paint, "square", 3.0)
