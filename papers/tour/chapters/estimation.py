"""Attention as estimation: what it approximates, how well, and what the exact answer costs."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from fenchel import dual
from fenchel.lens.pictures import draw
from fenchel.lens.pictures.estimation import paint_estimate
from papers.tour.chapter import Chapter, Figure, Table, Tour, number

ORDER = 97

_INTRO = """
Attention also estimates a mean. There is a preference u over templates t, evidence z about how far
the true mean lies from that of u, and a reliability α of this evidence:

    minimise over p   α/2 |mean of u + z − Σ p t|² + KL(p, u)

Its dual has one vector λ, and p = softmax(log u + ⟨t, λ⟩). Ordinary attention takes λ = αz, its
query times the scale: the first step towards the answer, good where α |Cov z| / |z| is small.
fenchel solves for λ to the last digit, with a duality gap, and differentiates through the solution.

    from fenchel import dual
    problem = (templates, preference, evidence, reliability)
    exact = dual.estimate(*problem)
    dual.first_order(*problem).compare(exact)
"""

_SHOWN = (4.0, 1.0, 0.25)
_HALVES = tuple(2.0**-k for k in range(-2, 8))


def chapter(tour: Tour) -> Chapter:
    problem = scene(tour)
    figures = (_plane(problem), _orders(problem))
    return Chapter("Attention as estimation", _INTRO, figures, (_deviations(problem),))


Problem = tuple[Tensor, Tensor, Tensor]


def scene(tour: Tour) -> Problem:
    """Templates in the plane, a preference that favours some, evidence that points elsewhere."""
    generator = tour.generator()
    templates = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    preference = torch.rand(9, generator=generator, dtype=torch.float64) ** 2 + 0.05
    return templates, preference / preference.sum(), torch.tensor([0.9, 0.6], dtype=torch.float64)


def _plane(problem: Problem) -> Figure:
    panels = []
    for reliability in _SHOWN:

        def paint(canvas: Canvas, reliability: float = reliability) -> None:
            ax = canvas.subplots()
            ax.set_title(f"reliability {reliability:g}")
            paint_estimate(ax, *problem, reliability)
            if reliability == _SHOWN[0]:
                ax.legend(fontsize=6, loc="lower left", labelcolor=draw.INK)

        panels.append(draw.panel(paint, "medium", 2.6))
    caption = (
        "Grey discs: the preference over nine templates; blue rings: the exact weights; the arrow: "
        "the evidence, from the prior mean (+). The more reliable it is, the farther the exact "
        "mean goes along it. Ordinary attention overshoots where the reliability is large and "
        "agrees where it is small."
    )
    alt = "Templates in the plane with the exact and two approximate means, at three reliabilities."
    return Figure(tuple(panels), caption, alt, "medium")


def errors(problem: Problem) -> dict[str, list[float]]:
    """At every reliability of `_HALVES`: how far off multiplier and mean are."""
    distances: dict[str, list[float]] = {}
    for reliability in _HALVES:
        exact = dual.estimate(*problem, reliability)
        for name, solve in (("first", dual.first_order), ("second", dual.second_order)):
            near = solve(*problem, reliability)
            pairs = {"λ": (near.multiplier, exact.multiplier), "mean": (near.mean, exact.mean)}
            for what, (one, other) in pairs.items():
                distances.setdefault(f"{what}, {name} order", []).append(
                    float((one - other).norm())
                )
    return distances


def _orders(problem: Problem) -> Figure:
    curves = errors(problem)
    looks = zip(
        curves, (draw.VERMILION, draw.VERMILION, draw.GREEN, draw.GREEN), "sosD", strict=True
    )

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for name, color, marker in looks:
            dash = "-" if name.startswith("λ") else draw.DASHES[1]
            ax.plot(_HALVES, curves[name], color=color, linestyle=dash, marker=marker,
                    markersize=3.2, label=name)  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel="reliability", ylabel="error")
        ax.legend(fontsize=7, labelcolor=draw.INK)

    slopes = "; ".join(f"{name}: {number(slope(values), 3)}" for name, values in curves.items())
    caption = (
        "How far off the approximations are as the reliability falls. Slopes of the last halvings: "
        f"{slopes}. First order is ordinary attention; second order adds the covariance of the "
        "templates, and is one Newton step."
    )
    alt = "Errors of multiplier and mean over the reliability, two lines of slope 2 and two of 3."
    return Figure((draw.panel(paint, "wide", 2.6),), caption, alt, "wide")


def slope(values: list[float]) -> float:
    """Of the logarithm over the last two halvings."""
    first, last = torch.tensor(values[-3]).log2(), torch.tensor(values[-1]).log2()
    return float(first - last) / 2


def _deviations(problem: Problem) -> Table:
    header = ("reliability", "λ off by", "mean off by", "of its shift", "gap of the exact", "steps")
    rows = []
    for reliability in _HALVES[:7]:
        exact = dual.estimate(*problem, reliability)
        off = dual.first_order(*problem, reliability).compare(exact)
        shares = (off.multiplier, off.mean, off.mean_shift)
        cells = (*(number(100 * float(x), 3) + " %" for x in shares), number(float(exact.gap), 2))
        rows.append((number(reliability), *cells, str(int(exact.steps))))
    caption = (
        "Ordinary attention against the exact estimate: the multiplier relative to the exact one, "
        "the mean relative to itself and to its distance from the prior mean; then the certificate."
    )
    return Table(caption, header, tuple(rows))
