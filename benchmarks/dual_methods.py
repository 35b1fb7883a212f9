"""Four ways to the multipliers of many estimation problems that share their templates.

All maximise <lam, z> - |lam|^2 / (2 a) - log mean_i e^<t_i - mu, lam>, whose gradient
g = z - h(lam) - lam / a gives the gap a |g|^2 / 2, and stop when every row's is small enough.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import extras
from fenchel import dual
from fenchel.lens.families import family_of
from fenchel.lens.loading import load
from fenchel.lens.tokenizing import token_limit

_MEMORY = 10  # pairs that L-BFGS keeps
_MOST = 6000  # iterations


@dataclass(frozen=True)
class Layer:
    """Templates (n, d) of one attention layer and evidence (rows, d): heads times queries."""

    templates: Tensor
    evidence: Tensor
    source: str

    @property
    def squared_diameter(self) -> float:
        return float(torch.cdist(self.templates, self.templates).max()) ** 2


class Outcome(NamedTuple):
    iterations: int
    gap: float  # the largest


Method = Callable[[Layer, float, float], Outcome]


def synthetic(tokens: int, width: int, heads: int, seed: int) -> Layer:
    """Sizes and lengths like those of a small BERT: templates over sqrt(head width)."""
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(width, generator=g, dtype=torch.float64)
    hidden = common + torch.randn(tokens, width, generator=g, dtype=torch.float64)
    hidden = 0.5 * torch.nn.functional.layer_norm(hidden, (width,))
    size = width // heads
    maps = torch.randn(2, heads, size, width, generator=g, dtype=torch.float64) / 16
    query, key = maps
    evidence = torch.einsum("hed,hef,nf->hnd", key, query, hidden)
    return Layer(hidden / size**0.5, evidence.flatten(0, 1), "random, sizes as in MiniLM")


def of_model(folder: Path, text: str, layer: int, tokens: int) -> Layer:
    """Of a BERT in a local folder: t_i = x_i / sqrt(d'), z = K' Q x, first order the layer itself.

    layer: counted from 0, as in `model.encoder.layer[layer]`.
    """
    extras.load("transformers")
    model, tokenizer = load(folder)
    count = _layers(model)  # CLAIMS D-E19a
    if not 0 <= layer < count:
        raise ValueError(
            f"layer must be 0..{count - 1} for the {count} layers of {folder.name}, got {layer}"
        )
    model = model.double()
    most = token_limit(model, tokenizer, tokens)
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=most)
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states[layer][0]
        attention = model.encoder.layer[layer].attention.self
        heads = model.config.num_attention_heads
        query = attention.query(hidden).unflatten(-1, (heads, -1))
        key = attention.key.weight.unflatten(0, (heads, -1))  # (heads, d', d)
        evidence = torch.einsum("hed,nhe->hnd", key, query)
    size = key.shape[1]
    source = f"{folder.name}, layer {layer} of 0 to {count - 1}"
    return Layer(hidden / size**0.5, evidence.flatten(0, 1), source)


def _layers(model: Any) -> int:
    """How many layers a BERT has; anything else is refused."""
    if family_of(model).pair:
        raise ValueError(
            f"the benchmark needs a BERT or its kin, got {type(model).__name__}; of a T5 "
            "`fenchel audit --measures deviation` solves every layer"
        )
    return len(model.encoder.layer)


# ---- the methods


class _Dual:
    """The dual of all rows, about the templates' mean."""

    def __init__(self, layer: Layer, reliability: float) -> None:
        self.templates = layer.templates - layer.templates.mean(0)
        self.evidence, self.reliability = layer.evidence, reliability
        self.steepest = 1 / reliability + layer.squared_diameter / 4  # of the gradient

    def slope(self, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Value (rows) and gradient (rows, d)."""
        scores = lam @ self.templates.mT
        potential = torch.logsumexp(scores, -1) - math.log(len(self.templates))
        gradient = self.evidence - scores.softmax(-1) @ self.templates - lam / self.reliability
        price = lam.square().sum(-1) / (2 * self.reliability)
        return (lam * self.evidence).sum(-1) - price - potential, gradient

    def gap(self, gradient: Tensor) -> float:
        return float(self.reliability / 2 * gradient.square().sum(-1).max())


def ascent(layer: Layer, reliability: float, gap: float) -> Outcome:
    """Gradient ascent with the step that cannot fail, 1 / (1 / a + diameter^2 / 4)."""
    return _first_order(layer, reliability, gap, 0.0)


def nesterov(layer: Layer, reliability: float, gap: float) -> Outcome:
    """The same with the momentum for strongly concave functions."""
    problem = _Dual(layer, reliability)
    ratio = (problem.steepest * reliability) ** -0.5
    return _first_order(layer, reliability, gap, (1 - ratio) / (1 + ratio))


def _first_order(layer: Layer, reliability: float, gap: float, momentum: float) -> Outcome:
    problem = _Dual(layer, reliability)
    lam = ahead = torch.zeros_like(layer.evidence)
    for iterations in range(_MOST + 1):
        _, gradient = problem.slope(ahead)
        outcome = Outcome(iterations, problem.gap(gradient))
        if outcome.gap <= gap:
            break
        before, lam = lam, ahead + gradient / problem.steepest
        ahead = lam + momentum * (lam - before)
    return outcome


def lbfgs(layer: Layer, reliability: float, gap: float) -> Outcome:
    """Batched L-BFGS: every row its own curvature and its own step, halved by Armijo's rule."""
    problem = _Dual(layer, reliability)
    lam = torch.zeros_like(layer.evidence)
    value, gradient = problem.slope(lam)
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_MEMORY)
    for iterations in range(_MOST + 1):
        outcome = Outcome(iterations, problem.gap(gradient))
        if outcome.gap <= gap:
            break
        step = _two_loops(gradient, pairs, 1 / problem.steepest)
        gain = (gradient * step).sum(-1)
        size = torch.ones_like(gain)
        for _ in range(30):
            moved = lam + size.unsqueeze(-1) * step
            new_value, new_gradient = problem.slope(moved)
            short = new_value < value + 1e-4 * size * gain - 1e-13 * (1 + value.abs())
            if not bool(short.any()):
                break
            size = torch.where(short, size / 2, size)
        pairs.append((moved - lam, gradient - new_gradient))
        lam, value, gradient = moved, new_value, new_gradient
    return outcome


def _two_loops(gradient: Tensor, pairs: deque[tuple[Tensor, Tensor]], first: float) -> Tensor:
    direction, kept = gradient, []
    for moved, turned in reversed(pairs):
        inner = (moved * turned).sum(-1, keepdim=True)
        curved = inner > 1e-12 * moved.norm(dim=-1, keepdim=True) * turned.norm(
            dim=-1, keepdim=True
        )
        inner = torch.where(curved, inner, torch.inf)  # a pair without curvature counts nothing
        share = (moved * direction).sum(-1, keepdim=True) / inner
        direction = direction - share * turned
        kept.append((moved, turned, inner, share))
    if kept:
        moved, turned, inner, _ = kept[0]
        size = inner / turned.square().sum(-1, keepdim=True).clamp_min(1e-300)
        direction = direction * torch.where(size < torch.inf, size, first)
    else:
        direction = direction * first
    for moved, turned, inner, share in reversed(kept):
        direction = direction + moved * (share - (turned * direction).sum(-1, keepdim=True) / inner)
    return direction


def ours(layer: Layer, reliability: float, gap: float) -> Outcome:
    solution = dual.estimate(layer.templates, None, layer.evidence, reliability, tolerance=gap / 10)
    return Outcome(int(solution.steps.max()), float(solution.gap.max()))


def ours_whole(layer: Layer, reliability: float, gap: float) -> Outcome:
    """To the last digit, as by default."""
    solution = dual.estimate(layer.templates, None, layer.evidence, reliability)
    return Outcome(int(solution.steps.max()), float(solution.gap.max()))


OURS = "fl estimate"
METHODS: dict[str, Method] = {
    "gradient ascent": ascent,
    "Nesterov": nesterov,
    "L-BFGS, batched": lbfgs,
    OURS: ours,
    f"{OURS}, to rounding": ours_whole,
}
