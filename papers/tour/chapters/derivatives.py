"""Derivatives, checked while the page is written."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

import fenchel as fl
from benchmarks import machine
from fenchel.lens.pictures import draw
from papers.tour import derivative_checks as derivatives
from papers.tour.chapter import Chapter, Figure, Mark, Table, Tour, number
from papers.tour.derivative_checks import Check
from papers.tour.gallery import GALLERY

ORDER = 50

_INTRO = """
Weights are differentiable in the scores and in every parameter, in reverse and forward mode, more
than once, and under `vmap` and `torch.compile`. The table gives the largest difference that this
run measured between two ways to the same numbers, in float64; a mark says whether it is within
what rounding allows (for differences, within their own truncation).

First: reverse mode against central differences. Second: the Hessian of a combination of the
weights against central differences of its gradient. Then forward against reverse mode, `vmap`
against a loop, and compiled against eager code. Generating C++ takes seconds for each map, so
it is measured for one, and only where a compiler is found.
"""

_ALPHAS = (1.0, 1 + 1e-8, 1 + 1e-4, 1.5)
_NATIVE = "Tsallis(1.5)"

# A weaker Fused than the gallery's, which would join all these keys: their derivative is zero.
CHECKED: tuple[tuple[str, fl.Regularizer], ...] = (
    *(entry for entry in GALLERY if not isinstance(entry[1], fl.Fused)),
    ("Fused(0.05)", fl.Fused(0.05)),
    ("Fused(0.05, grid)", fl.Fused(0.05, grid=(3, 3))),
)


def chapter(tour: Tour) -> Chapter:
    rows = check_scores(tour)
    scores = torch.tensor([1.0, 0.6, 0.2, -0.4, -1.2], dtype=torch.float64)
    native = not tour.quick and machine.compiles()
    return Chapter(
        "Derivatives",
        _INTRO,
        (_alpha_figure(scores),),
        (_table(rows, native), _alpha_table(scores)),
    )


def check_scores(tour: Tour) -> Tensor:
    """Close scores: under every regulariser several keys share the weight, so it can move."""
    return 0.25 * torch.randn(3, 9, generator=tour.generator(), dtype=torch.float64)


def _table(scores: Tensor, native: bool) -> Table:
    names = [derivatives.FIRST, derivatives.SECOND, derivatives.MODES]
    names += [derivatives.VMAP, derivatives.COMPILE]
    names += [derivatives.NATIVE_COMPILE] if native else []
    rows = []
    for name, omega in CHECKED:
        checks = derivatives.checks(omega, scores, native=native and name == _NATIVE)
        cells: list[str | Mark] = [_mark(check) for check in checks]
        keys = str(int(fl.solve(scores[0], omega).support_size))
        rows.append((f"`{name}`", keys, *cells, *["–"] * (len(names) - len(cells))))
    missing = "" if native else " C++ compilation was not measured."
    caption = f"Largest difference; {scores.shape[-1]} scores, of which `keys` get weight.{missing}"
    return Table(caption, ("regulariser", "keys", *names), tuple(rows))


def _alpha_table(scores: Tensor) -> Table:
    checks = [derivatives.alpha_check(scores, alpha) for alpha in _ALPHAS]
    slopes = derivatives.alpha_derivative(scores, torch.tensor(_ALPHAS, dtype=scores.dtype))
    labels = ("1", "1 + 1e−8", "1 + 1e−4", "1.5")
    rows = tuple(
        (label, number(float(slope[0]), 10), _mark(check))
        for label, slope, check in zip(labels, slopes, checks, strict=True)
    )
    caption = "Derivative of the first weight in alpha, and its difference from differences."
    return Table(caption, ("alpha", "d p₁ / d alpha", "largest difference"), rows)


def _mark(check: Check) -> Mark:
    if check.error:
        return Mark(False, "raised", check.error)
    return Mark(check.passed, number(check.difference, 2), f"allowed: {check.tolerance:.1g}")


def _alpha_figure(scores: Tensor) -> Figure:
    alphas = torch.linspace(1, 2.5, 151, dtype=torch.float64)
    slopes = derivatives.alpha_derivative(scores, alphas)
    series = [(number(float(s)), slopes[:, key].tolist()) for key, s in enumerate(scores)]
    distances = torch.logspace(-10, 0, 41, dtype=torch.float64)
    near = derivatives.alpha_derivative(scores, 1 + distances)
    limit = derivatives.alpha_derivative(scores, torch.ones(1, dtype=torch.float64))
    change = (near - limit).abs().amax(-1).tolist()
    panels = (_slope_panel(alphas.tolist(), series), _limit_panel(distances.tolist(), change))
    caption = (
        "Left: the derivative of each weight in alpha for five scores; each curve starts at "
        "softmax (alpha = 1) without a break; where a key leaves, its own curve ends in zero and "
        "the others bend, more sharply the nearer alpha is to 2. Right: the distance from the "
        "value at alpha = 1 falls in proportion to "
        "alpha − 1 over nine decades: the limit is reached, not patched in."
    )
    alt = "Derivative of entmax weights in alpha, and its convergence as alpha tends to one."
    return Figure(panels, caption, alt)


def _slope_panel(alphas: list[float], series: list[tuple[str, list[float]]]) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("d p / d alpha, by score")
        draw.lines(ax, alphas, series, "lower center")
        ax.set_ylim(-0.85, 0.45)  # room for the legend
        ax.set_xlabel("alpha")

    return draw.panel(paint, "medium", 2.5)


def _limit_panel(distances: list[float], change: list[float]) -> str:
    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("distance from the limit at 1")
        ax.loglog(distances, change, color=draw.BLUE, marker="o", markersize=2.5, linewidth=1)
        ax.grid(True, color=draw.FAINT, alpha=0.35, linewidth=0.5)
        ax.set_xlabel("alpha − 1")

    return draw.panel(paint, "medium", 2.5)
