"""The story in one screen: the sentence, and four pictures of what follows from it."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure as Canvas

import fenchel as fl
import fenchel.continuous as fc
from fenchel import bounds, dual
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Figure, Tour, number
from papers.tour.gallery import bumpy_scores

ORDER = 10

_INTRO = """
Attention is the expectation of values under the distribution that solves a regularised problem:

    p* = argmax_p  <scores, p> − Ω(p)          output = Σ p*_i values_i

Change Ω, the base measure or the domain, and you have softmax, exact zeros, a density over an
image, an estimate, transport. With every answer comes a certificate: how far from the best it can
be.

    import fenchel as fl
    solution = fl.solve(scores, fl.Tsallis(1.5))
    solution.weights, solution.support, solution.gap
"""

_SIDE = 28


def chapter(tour: Tour) -> Chapter:
    parts = (_zeros(tour), _density(), _estimate(tour), _moved(tour))
    caption = "From left to right. " + " ".join(words for _, words in parts)
    alt = (
        "Weights of softmax and entmax as bars; a density of two ellipses over a square; the error "
        "of ordinary attention against reliability; how far an output moved against its bound."
    )
    figure = Figure(tuple(panel for panel, _ in parts), caption, alt, "small")
    return Chapter("Attention in one screen", _INTRO, (figure,))


def _zeros(tour: Tour) -> tuple[str, str]:
    scores = bumpy_scores(tour)
    dense, sparse = fl.softmax(scores), fl.solve(scores, fl.Tsallis(1.5))

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("exact zeros")
        ax.bar(range(len(dense)), dense.tolist(), width=0.9, color=draw.FAINT, alpha=0.5)
        draw.bars(ax, sparse.weights.tolist())
        draw.keys_only(ax, label="keys")

    words = (
        f"Softmax (grey) gives all {len(scores)} keys something, entmax (blue) {_count(sparse)} of "
        f"them, with a duality gap of {number(float(sparse.gap), 2)}."
    )
    return draw.panel(paint, "small", 2.0), words


def _count(solution: fl.Solution) -> int:
    return int(solution.support_size)


def _density() -> tuple[str, str]:
    """Two hills of weights on a grid, as a mixture of as many paraboloids as pay."""
    places = fc.cell_centers(_SIDE, _SIDE, dtype=torch.float64)
    hills = torch.tensor([[0.3, 0.65], [0.7, 0.3]], dtype=torch.float64)
    weights = (-((places[:, None] - hills) ** 2).sum(-1) / 0.02).exp().sum(-1)
    selection = fc.select_mixture(weights / weights.sum(), places, 4, 10.0, start=fc.Regions())
    shapes = (selection.components.mean, selection.components.covariance_matrix)
    mixture = fc.Mixture(selection.mixing, fc.Paraboloid.from_covariance(*shapes))
    shown = mixture.prob(places).reshape(_SIDE, _SIDE).numpy()

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("a density over an image")
        draw.heat(ax, shown, top=float(shown.max()))

    words = (
        f"Over an image attention is a density, here with {int(selection.modes)} modes, as many as "
        f"pay, and zero on {(shown == 0).mean():.0%} of it."
    )
    return draw.panel(paint, "small", 2.0), words


def _estimate(tour: Tour) -> tuple[str, str]:
    generator = tour.generator()
    templates = torch.randn(1, 12, 4, generator=generator, dtype=torch.float64)
    evidence = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    reliabilities = torch.logspace(-2, 0.5, 11, dtype=torch.float64).tolist()
    errors = []
    for reliability in reliabilities:
        exact = dual.estimate(templates, None, evidence, reliability)
        ordinary = dual.first_order(templates, None, evidence, reliability)
        errors.append(float(ordinary.compare(exact).mean))

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("attention as an estimate")
        ax.plot(reliabilities, errors, color=draw.BLUE, marker="o", markersize=3)
        ax.set(xscale="log", yscale="log", xlabel="reliability", ylabel="error of attention")

    words = (
        "Ordinary attention is the first step of an estimate; its mean is off by "
        f"{errors[0]:.1%} at reliability {reliabilities[0]:g} and by {errors[-1]:.0%} at "
        f"{reliabilities[-1]:.2g}, and fenchel solves it to the end."
    )
    return draw.panel(paint, "small", 2.0), words


def _moved(tour: Tour) -> tuple[str, str]:
    generator = tour.generator()
    keys, values = (torch.randn(24, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    limit = bounds.query_lipschitz(keys, values, fl.Shannon(8**0.5))
    attacked = bounds.attack(limit, budget=300 if tour.quick else 2_000, generator=generator)
    apart = torch.logspace(-1, 1.5, 9, dtype=torch.float64)
    query = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    way = torch.nn.functional.normalize(query.flip(0), dim=-1)
    start = fl.attention(query, keys, values)
    ends = [fl.attention(query + step * way, keys, values) for step in apart]
    moved = [float((end - start).norm(dim=-1).max()) for end in ends]
    bound = (limit.value * apart).tolist()

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("how far an output moves")
        ax.plot(apart, bound, color=draw.VERMILION, linestyle="--", label="bound")
        ax.plot(apart, moved, color=draw.BLUE, marker="o", markersize=3, label="seen")
        ax.set(xscale="log", yscale="log", xlabel="move of the query", ylabel="of the output")
        ax.legend(labelcolor=draw.INK)

    words = (
        "No query can move the output beyond the bound (dashed); an attack comes to "
        f"{attacked.ratio:.3f} of it."
    )
    return draw.panel(paint, "small", 2.0), words
