"""Random stacks of layers, each with fresh weights: attention alone, the layer as it is used, and
two whose constants are certified."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fenchel import measures as fm
from fenchel.bounds.modules import mixed_constant
from fenchel.nn import LipschitzAttention, LipschitzFeedForward

_HEADS = 4


class Stack(ABC):
    """A way to make layers at random."""

    name: str

    @abstractmethod
    def run(
        self, start: Tensor, layers: int, generator: torch.Generator
    ) -> tuple[Tensor, list[float] | None]:
        """start (2, n, d) -> (layers + 1, 2, n, d), and the certified constant of each layer."""


class _Kernels(Stack):
    def __init__(self, name: str, layer: Callable[[int, torch.Generator], fm.NonlinearKernel]):
        self.name, self.layer = name, layer

    def run(
        self, start: Tensor, layers: int, generator: torch.Generator
    ) -> tuple[Tensor, list[float] | None]:
        kernels = [self.layer(start.shape[-1], generator) for _ in range(layers)]
        measures = fm.flow(fm.Empirical(start), kernels)
        return torch.stack([measure.points for measure in measures]), None


class _Certified(Stack):
    """Attention f, then feed-forward f, each as x -> (1 - mixing) x + mixing f(x), and each f
    divided by what its bound has in excess of the constant."""

    def __init__(self, name: str, constant: float, mixing: float) -> None:
        self.name, self.constant, self.mixing = name, constant, mixing

    def run(
        self, start: Tensor, layers: int, generator: torch.Generator
    ) -> tuple[Tensor, list[float] | None]:
        _, n, width = start.shape
        a, states, constants = self.mixing, [start], []
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(generator.initial_seed())  # modules take their weights from there
            for _ in range(layers):
                heads = _HEADS if width % _HEADS == 0 else 1
                attention = LipschitzAttention(width, heads, self.constant).double()
                feedforward = LipschitzFeedForward(width, constant=self.constant).double()
                x = (1 - a) * states[-1] + a * attention(states[-1])
                states.append((1 - a) * x + a * feedforward(x))
                parts = (part.bound(n).value for part in (attention, feedforward))
                constants.append(math.prod(mixed_constant(value, a) for value in parts))
        return torch.stack(states), constants


def attention_alone(width: int, generator: torch.Generator) -> fm.AttentionKernel:
    """Scores of variance about one for normal tokens. Values are turned, not shrunk: what becomes
    of the spread is the doing of the averages alone."""
    query, key = (_normal(width, width, generator) / width**0.5 for _ in range(2))
    turned: Tensor = torch.linalg.qr(_normal(width, width, generator))[0]
    return fm.AttentionKernel(fm.ScaledDot(query=query, key=key), fm.Lookup(turned))


def usual_layer(width: int, generator: torch.Generator) -> fm.TransformerKernel:
    """The same attention, a feed-forward map, both with residual and layer norm after the sum."""
    attention = attention_alone(width, generator)
    inner = _normal(4 * width, width, generator) / width**0.5
    outer = _normal(width, 4 * width, generator) / (2 * width**0.5)

    def feed_forward(x: Tensor) -> Tensor:
        output: Tensor = (x @ inner.mT).relu() @ outer.mT
        return output

    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (width,))

    return fm.TransformerKernel(attention, feed_forward, residual=True, norms=(norm, norm))


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


STACKS: tuple[Stack, ...] = (
    _Kernels("attention alone", attention_alone),
    _Kernels("with residual and layer norm", usual_layer),
    _Certified("certified, constant 0.97", 0.97, 1.0),
    _Certified("certified, constant 0.5, mixed by 0.1", 0.5, 0.1),
)
