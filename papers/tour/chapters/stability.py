"""How far an output can move: bounds, the attack on them, and depth."""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from fenchel import bounds
from fenchel import measures as fm
from fenchel.bounds import Bound
from fenchel.lens import head_bounds
from fenchel.lens.head_bounds import HeadInputs
from fenchel.lens.pictures import draw
from papers.claims.theory import printed
from papers.studies.stability_pictures import paint_heads
from papers.tour.chapter import Chapter, Figure, Mark, Table, Tour, number

ORDER = 98

_INTRO = """
If the query of a head moves by δ, how far can its output move? With scores ⟨q, k⟩/τ the derivative
is a covariance of values and keys, and the largest covariance that any weights can have belongs to
two keys that share them evenly. So for all queries at once

    |y(q) − y(q′)| ≤ |q − q′| max over i, j of |vᵢ − vⱼ| |kᵢ − kⱼ| / (4τ)

and no smaller number will do where that pair is an edge of the keys' hull. Every bound of
fenchel says what it assumes, and can be attacked: random search, then gradient ascent, from where
its proof is tight.

    from fenchel import bounds
    c = bounds.query_lipschitz(keys, values, fl.Shannon(τ))
    c.value, bounds.attack(c, budget=10_000).ratio
"""


def chapter(tour: Tour) -> Chapter:
    layer, words = _layer(tour)
    figures = (_card(layer, words, tour), _depth(tour))
    tables = (_attacked(layer, tour), _refuted(tour))
    return Chapter("How far an output can move", _INTRO, figures, tables)


# ---- the card of a layer


def _layer(tour: Tour) -> tuple[HeadInputs, str]:
    """Layer 2, from 0, of a model that reads this sentence, or one of random weights."""
    if tour.model is not None:
        from fenchel import lens

        model, tokenizer = lens.load(tour.model)
        text = " ".join(_INTRO.split()[:90])
        layers = head_bounds.capture_head_inputs(model, lens.encode(tokenizer, [text], model=model))
        number = min(2, len(layers) - 1)
        return layers[number], f"layer {number} of {tour.model.name}"
    generator = tour.generator()
    heads, n, size = (3, 8, 4) if tour.quick else (12, 64, 32)
    width = heads * size
    tokens = torch.randn(n, width, generator=generator, dtype=torch.float64)

    def projected() -> Tensor:
        weight = torch.randn(width, width, generator=generator, dtype=torch.float64)
        per_head: Tensor = (tokens @ weight / math.sqrt(width)).unflatten(-1, (heads, size))
        return per_head.transpose(0, 1)

    words = f"a layer of {heads} heads with random weights, {n} tokens"
    return HeadInputs(projected(), projected(), projected(), tokens, math.sqrt(size)), words


def _card(layer: HeadInputs, words: str, tour: Tour) -> Figure:
    budget = 300 if tour.quick else 1000
    rows = []
    for head in range(len(layer.keys)):
        head_bound = head_bounds.head_bound(layer, head)
        operands = layer.queries[head], layer.keys[head], layer.values[head], layer.temperature
        rows.append(
            (
                head_bound.value,
                bounds.attack(head_bound, budget).observed,
                head_bounds.largest_local_constant(*operands),
            )
        )
    bound, attacked, local = torch.tensor(rows, dtype=torch.float64).unbind(-1)

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        paint_heads(ax, bound, attacked, local)
        ax.set(xlabel="head", ylabel="|Δoutput| / |Δquery|")
        ax.legend(fontsize=7, labelcolor=draw.INK, loc="lower left", ncols=3)

    tight = bound / attacked
    caption = (
        f"The bounds of {words}. Bars: the constant that holds for all queries. Crosses: "
        f"the largest that an attack of {budget} trials found; certified / found is "
        f"{number(float(tight.median()), 6)} in the median and {number(float(tight.max()), 6)} at "
        "worst. Dots: the largest at the layer's own queries, which no bound for all queries "
        "can undercut."
    )
    alt = "For every head a bar for the bound, a cross on it for the attack, a dot below."
    return Figure((draw.panel(paint, "wide", 2.7),), caption, alt, "wide")


# ---- depth


def _depth(tour: Tour) -> Figure:
    count, depth, dim = (6, 3, 4) if tour.quick else (16, 12, 8)
    generator = tour.generator()
    curves = {}
    for name, whole in (("no residual, no norm", False), ("with both", True)):
        kernels = [_encoder(dim, whole, seed) for seed in range(depth)]
        start = [torch.randn(count, dim, generator=generator, dtype=torch.float64) for _ in "ab"]
        with torch.no_grad():
            one, other = (fm.flow(fm.Empirical(points), kernels) for points in start)
        pairs = zip(one, other, strict=True)
        apart = [float(fm.wasserstein1(a, b, norm=2)) for a, b in pairs]
        spread = [float((a.points - a.mean).norm(dim=-1).mean()) for a in one]
        curves[name] = (apart, spread)

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for (name, (apart, spread)), color in zip(
            curves.items(), (draw.VERMILION, draw.BLUE), strict=True
        ):
            layers = range(len(apart))
            ax.plot(layers, apart, color=color, marker="o", markersize=3, label=f"W₁, {name}")
            ax.plot(layers, spread, color=color, linestyle=draw.DASHES[1], label=f"spread, {name}")
        ax.set(yscale="log", xlabel="layer", ylabel="distance")
        ax.legend(fontsize=7, labelcolor=draw.INK, loc="upper right", bbox_to_anchor=(1, 0.88))

    caption = (
        "Two inputs through the layers of a random transformer, as measures: the Wasserstein "
        "distance between them (lines) and how far the tokens of the first are from their mean "
        "(dashes). Without residual and layer norm these layers draw the tokens of an input "
        "together to the last digit, and then both inputs; with them everything stays apart."
    )
    alt = "Distance and spread over depth: falling without residual and norm, level with both."
    return Figure((draw.panel(paint, "wide", 2.6),), caption, alt, "wide")


def _encoder(dim: int, whole: bool, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = torch.nn.TransformerEncoderLayer(
            dim, 2, 2 * dim, dropout=0.0, batch_first=True, dtype=torch.float64
        ).eval()
    return fm.TransformerKernel.from_layer(layer, residual=whole, norm=whole)


# ---- tables


def _attacked(layer: HeadInputs, tour: Tour) -> Table:
    generator = tour.generator()
    scores = layer.queries[0, 0] @ layer.keys[0].mT / layer.temperature
    eye = torch.eye(4, dtype=torch.float64)
    setting = bounds.Setting(fm.Dot(50.0), bounds.Box(1.0), dim=2)
    named_bounds: list[tuple[str, Bound]] = [
        ("query → output, softmax", head_bounds.head_bound(layer, 0)),
        (
            "query → output, sparsemax",
            bounds.query_lipschitz(layer.keys[0], layer.values[0], _sparse(layer)),
        ),
        (
            "tokens → outputs, in a ball",
            bounds.self_attention_lipschitz(bounds.Head(eye, eye, eye, 4.0), 8, radius=1.0),
        ),
        (
            "tokens → outputs, Gaussian, everywhere",
            bounds.gaussian_attention_lipschitz(eye, eye, 8),
        ),
        ("one token dropped", bounds.perturbation.dropped(scores, layer.values[0], 1)),
        ("measure → measure, W₁", bounds.contraction.attention(setting)),
    ]
    budget = 300 if tour.quick else 1000
    rows = []
    for name, bound in named_bounds:
        outcome = bounds.attack(bound, budget, generator=generator)
        mark = Mark(outcome.holds, "holds" if outcome.holds else "exceeded")
        cells = (number(bound.value), number(outcome.observed), number(outcome.tightness, 3))
        rows.append((name, *cells, mark))
    caption = f"Bounds under attack, {budget} trials each."
    header = ("of", "bound", "strongest attack", "bound / attack", "")
    return Table(caption, header, tuple(rows))


def _sparse(layer: HeadInputs) -> Any:
    from fenchel.regularizers import Tsallis

    return Tsallis(2.0, layer.temperature)


def _refuted(tour: Tour) -> Table:
    refutations = printed.refute(generator=tour.generator())
    rows = tuple(
        (name, words, number(one.bound.value, 3), number(one.observed, 3), number(one.ratio, 3))
        for name, (words, one) in refutations.items()
    )
    caption = (
        "Constants as printed in A Mathematical Theory of Attention (2020) that the same search "
        "exceeds: true quotients above what is claimed. fenchel ships the corrected ones."
    )
    header = ("result", "where", "printed bound", "observed", "observed / printed")
    return Table(caption, header, rows)
