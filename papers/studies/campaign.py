"""The long attack: every kind of bound, in settings drawn at random, until each has stood so
many trials. Dimensions 1 to 64, sets of 2 to 128, temperatures 0.05 to 10."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import GELU, LayerNorm, Module, ReLU, SiLU, Tanh, TransformerEncoderLayer

from fenchel.bounds import contraction, layers, perturbation, query, self_attention
from fenchel.bounds.attack import attack
from fenchel.bounds.bound import Bound
from fenchel.bounds.contraction import Setting
from fenchel.bounds.domain import Ball, Box, Everywhere
from fenchel.bounds.norms import LongestToken
from fenchel.measures import Dot, GaussianPotential
from fenchel.regularizers import Shannon, Tsallis

T = TypeVar("T")


class Draw:
    """One random setting after the other."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def power(self, low: float, high: float) -> float:
        """Between the two, even in its logarithm."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def dim(self, most: int = 64) -> int:
        return min(most, int(self.power(1, most + 1)))

    def size(self, most: int = 128) -> int:
        return min(most, int(self.power(2, most + 1)))

    def temperature(self) -> float:
        return self.power(0.05, 10)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Of any rank and size."""
        rank = min(self.dim(rows), columns)
        size = self.power(0.1, 3) / math.sqrt(rank * columns)
        return size * self.normal(rows, rank) @ self.normal(rank, columns)

    def choice(self, *options: T) -> T:
        return options[int(self.uniform(0, len(options) - 1e-9))]


def _query(draw: Draw, regularizer: Shannon | Tsallis, norm: float = 2.0) -> Bound:
    n, d = draw.size(), draw.dim()
    keys, values = draw.normal(n, d) * draw.power(0.1, 10), draw.normal(n, draw.dim())
    return query.query_lipschitz(keys, values, regularizer, norm=norm)


def query_softmax(draw: Draw) -> Bound:
    return _query(draw, Shannon(draw.temperature()))


def query_other_norms(draw: Draw) -> Bound:
    norm = 1.0 if draw.uniform() < 0.5 else math.inf
    return _query(draw, Shannon(draw.temperature()), norm)


def query_entmax(draw: Draw) -> Bound:
    alpha = 2.0 if draw.uniform() < 0.3 else draw.uniform(1.0, 2.0)
    return _query(draw, Tsallis(alpha, draw.temperature()))


def query_ball(draw: Draw) -> Bound:
    n, d, temperature = draw.size(), draw.dim(), draw.temperature()
    keys, values = draw.normal(n, d), draw.normal(n, draw.dim())
    around = draw.normal(d) * draw.power(0.01, 10)
    radius = temperature * draw.power(1e-3, 1)
    return query.query_lipschitz(keys, values, Shannon(temperature), around=around, radius=radius)


def _head(draw: Draw, d: int) -> self_attention.Head:
    inner = draw.dim(16)
    bias = draw.normal(inner) if draw.uniform() < 0.5 else None
    parts = (draw.matrix(inner, d), draw.matrix(inner, d), draw.matrix(draw.dim(16), d))
    return self_attention.Head(*parts, draw.temperature(), query_bias=bias)


def self_attention_dot(draw: Draw) -> Bound:
    norm = 2.0 if draw.uniform() < 0.5 else LongestToken()
    head, radius = _head(draw, draw.dim()), draw.power(0.1, 3)
    return self_attention.self_attention_lipschitz(head, draw.size(), radius, norm=norm)


def multi_head(draw: Draw) -> Bound:
    d = draw.dim()
    heads = [_head(draw, d) for _ in range(1 + draw.dim(4))]
    output = draw.matrix(draw.dim(16), sum(len(head.value) for head in heads))
    return self_attention.self_attention_lipschitz(
        heads, draw.size(32), draw.power(0.1, 3), output=output
    )


def self_attention_gaussian(draw: Draw) -> Bound:
    norm = 2.0 if draw.uniform() < 0.5 else LongestToken()
    d, inner = draw.dim(), draw.dim(16)
    return self_attention.gaussian_attention_lipschitz(
        draw.matrix(inner, d),
        draw.matrix(draw.dim(16), inner),
        draw.size(),
        temperature=draw.temperature(),
        norm=norm,
    )


def feed_forward(draw: Draw) -> Bound:
    d, inner = draw.dim(), draw.dim()
    matrices = [draw.matrix(inner, d), draw.matrix(draw.dim(), inner)]
    biases = [draw.normal(inner), None]
    activation: Module = draw.choice(ReLU(), GELU(), SiLU(), Tanh())
    domain = Ball(draw.power(0.1, 9))
    return layers.feed_forward_lipschitz(matrices, biases, activation, 2, domain)


def layer_norm(draw: Draw) -> Bound:
    layer = LayerNorm(1 + draw.dim(), eps=draw.power(1e-6, 1e-2), dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(draw.normal(*layer.weight.shape))
    return layers.layer_norm_lipschitz(layer, 2, Everywhere())


def _layer(draw: Draw) -> TransformerEncoderLayer:
    d = 2 ** int(draw.uniform(1, 6))
    with torch.random.fork_rng():
        torch.manual_seed(int(draw.uniform(0, 2**31)))
        layer = TransformerEncoderLayer(
            d,
            2,
            2 * d,
            activation=str(draw.choice("relu", "gelu")),
            norm_first=draw.uniform() < 0.5,
            batch_first=True,
            dtype=torch.float64,
        )
    return layer.eval()


def encoder_layer(draw: Draw) -> Bound:
    return layers.encoder_layer_lipschitz(_layer(draw), draw.size(16), draw.power(0.3, 3))


def stack(draw: Draw) -> Bound:
    layer = _layer(draw)
    return layers.stack_lipschitz([layer, layer], draw.size(16), draw.power(0.3, 3))


def _tokens(draw: Draw) -> tuple[Tensor, Tensor]:
    n = draw.size()
    return draw.normal(n) * draw.power(0.1, 10), draw.normal(n, draw.dim())


def dropped(draw: Draw) -> Bound:
    scores, values = _tokens(draw)
    return perturbation.dropped(scores, values, min(draw.dim(), len(scores) - 1))


def subsampled(draw: Draw) -> Bound:
    scores, values = _tokens(draw)
    return perturbation.subsampled(scores, values, draw.dim(len(scores)))


def added(draw: Draw) -> Bound:
    scores, values = _tokens(draw)
    largest, radius = 5 * draw.uniform(-1, 1), draw.power(0.1, 10)
    return perturbation.added(scores, values, draw.dim(8), largest_score=largest, radius=radius)


def replaced(draw: Draw) -> Bound:
    scores, values = _tokens(draw)
    count, largest = min(draw.dim(8), len(scores)), 5 * draw.uniform(-1, 1)
    radius = draw.power(0.1, 10)
    return perturbation.replaced(scores, values, count, largest_score=largest, radius=radius)


def _setting(draw: Draw) -> Setting:
    kind = Dot if draw.uniform() < 0.5 else GaussianPotential
    shape = Ball if draw.uniform() < 0.5 else Box
    # mostly small: a trial solves transport problems of this size exactly
    size = draw.size(128) if draw.uniform() < 0.02 else draw.size(8)
    return Setting(kind(draw.temperature()), shape(draw.power(0.1, 1)), draw.dim(), size)


def softmatch_query(draw: Draw) -> Bound:
    return contraction.in_query(_setting(draw))


def softmatch_measure(draw: Draw) -> Bound:
    return contraction.in_measure(_setting(draw))


def projection(draw: Draw) -> Bound:
    return contraction.projection(_setting(draw))


def attention_of_measures(draw: Draw) -> Bound:
    setting = _setting(draw)
    return contraction.attention(setting, draw.matrix(setting.dim, setting.dim))


def attention_query(draw: Draw) -> Bound:
    setting = _setting(draw)
    return contraction.attention_query(setting, draw.matrix(setting.dim, setting.dim))


def neighbourhood(draw: Draw) -> Bound:
    setting = _setting(draw)
    return contraction.neighbourhood(setting, draw.matrix(setting.dim, setting.dim))


MAPS: tuple[Callable[[Draw], Bound], ...] = (
    query_softmax,
    query_other_norms,
    query_entmax,
    query_ball,
    self_attention_dot,
    multi_head,
    self_attention_gaussian,
    feed_forward,
    layer_norm,
    encoder_layer,
    stack,
    dropped,
    subsampled,
    added,
    replaced,
    attention_query,
)
TRANSPORT: tuple[Callable[[Draw], Bound], ...] = (
    softmatch_query,
    softmatch_measure,
    projection,
    attention_of_measures,
    neighbourhood,
)


@dataclass(frozen=True)
class Stand:
    """How one kind of bound stood: over `settings`, `trials` in all."""

    kind: str
    settings: int
    trials: int
    worst: float
    median: float
    exceeded: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def stand(
    make: Callable[[Draw], Bound],
    trials: int,
    *,
    each: int | None = None,
    seed: int = 0,
    tell: Callable[[int], object] = lambda count: None,
) -> Stand:
    """Attack bounds of one kind, `each` trials in every setting, `trials` in all.

    each: a hundredth of all if None, but no fewer than 600, below which an attack is none.

    worst, median: of observed / bound over the settings.
    """
    each = max(600, trials // 100) if each is None else each
    draw, ratios, done = Draw(seed), list[float](), 0
    while done < trials:
        outcome = attack(make(draw), min(each, trials - done), generator=draw.generator)
        done += outcome.trials
        tell(outcome.trials)
        ratios.append(outcome.ratio)
    sizes = torch.tensor(ratios, dtype=torch.float64)
    exceeded = sum(ratio > 1 + 1e-9 for ratio in ratios)
    name = make.__name__.replace("_", " ")
    return Stand(name, len(ratios), done, float(sizes.max()), float(sizes.median()), exceeded)
