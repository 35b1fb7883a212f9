"""The vision transformer of the paper's section 9, and its variants: only how the class token looks
at the patches in the last layer differs. CLAIMS D-Tab1, D-Tab2"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fenchel.nn as fnn
from fenchel.regularizers import Regularizer, Shannon, Tsallis
from papers.checks import check_whole
from papers.experiments.layers import Dropout, FeedForward, check_dropout

ATTENTIONS = ("softmax", "entmax", "sparsemax", "transport", "transport-head", "continuous")
_REGULARIZERS: dict[str, Regularizer] = {
    "softmax": Shannon(),
    "entmax": Tsallis(1.5),
    "sparsemax": Tsallis(2.0),
}


@dataclass(frozen=True)
class Size:
    """width of the model, of its feed-forward layers, and into how many heads it is cut."""

    width: int
    inner: int
    layers: int
    heads: int
    patch: int = 4
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name in ("width", "inner", "layers", "heads", "patch"):
            check_whole(getattr(self, name), name, 1)
        check_dropout(self.dropout)


class Layer(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x)."""

    def __init__(self, size: Size, attention: nn.Module) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = attention
        self.forward_layers = FeedForward(size.width, size.inner, size.dropout)
        self.dropout = Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, token, width)"""
        seen = self.before(x)
        return self.rest(x, self.attention(seen, seen))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.dropout(attended)
        output: Tensor = x + self.dropout(self.forward_layers(self.between(x)))
        return output


class Looking(nn.Module):
    """Multi-head attention of queries to tokens."""

    def __init__(self, size: Size, regularizer: Regularizer) -> None:
        super().__init__()
        self.heads = fnn.MultiheadAttention(
            size.width, size.heads, batch_first=True, regularizer=regularizer
        )

    def forward(self, query: Tensor, tokens: Tensor, partner: Tensor | None = None) -> Tensor:
        if partner is not None:
            tokens = torch.cat([tokens, tokens[partner]], 1)
        output: Tensor = self.heads(query, tokens, tokens, need_weights=False)[0]
        return output


class Transporting(nn.Module):
    """M = C - <a, b>, reliability 1, gamma the root of a width, to first order. The paper has that
    of the model; of a head it is the scale of the other attentions."""

    def __init__(self, size: Size, width: int) -> None:
        super().__init__()
        self.transport = fnn.TransportAttention(
            size.width, size.heads, gamma=math.sqrt(width), reliability=1.0
        )

    def forward(self, query: Tensor, tokens: Tensor, partner: Tensor | None = None) -> Tensor:
        output: Tensor = self.transport(query, tokens, partner=partner)
        return output


class Spreading(nn.Module):
    """A density over the image in each head: a paraboloid, zero outside an ellipse."""

    def __init__(self, size: Size, side: int) -> None:
        super().__init__()
        self.size, self.side = size, side
        self.query, self.key, self.value, self.out = (
            nn.Linear(size.width, size.width) for _ in range(4)
        )
        self.density = fnn.ContinuousAttention2d((side, side), Tsallis(2.0), functions=36)

    def forward(self, query: Tensor, tokens: Tensor, partner: Tensor | None = None) -> Tensor:
        if partner is not None:
            raise ValueError("two images have no common plane; train with sharing = 0")
        patches = tokens[:, -(self.side**2) :]  # without the class token
        q, k, v = (self._by_head(f(x)) for f, x in self._inputs(query, patches))
        scores = (q @ k.mT).squeeze(-2) / math.sqrt(q.shape[-1])  # (batch, head, patch)
        context = self.density(v, scores).context  # (batch, head, head_dim)
        output: Tensor = self.out(context.flatten(1)).unsqueeze(1)
        return output

    def _inputs(self, query: Tensor, patches: Tensor) -> list[tuple[nn.Module, Tensor]]:
        return [(self.query, query), (self.key, patches), (self.value, patches)]

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, token, width) -> (batch, head, token, head_dim)"""
        by_head: Tensor = x.unflatten(-1, (self.size.heads, -1))
        return by_head.transpose(1, 2)


class VisionTransformer(nn.Module):
    """Patches to tokens, layers of softmax attention, and a last one in which only the class token
    looks, by `attention`; then a linear classifier.

    side, channels: of the square images. classes: of the answer.
    """

    def __init__(
        self, size: Size, attention: str, *, side: int, channels: int, classes: int
    ) -> None:
        super().__init__()
        check_attention(attention)
        if side % size.patch:
            raise ValueError(f"patches of {size.patch} do not tile images of {side} pixels")
        cells = side // size.patch
        self.patches = nn.Conv2d(channels, size.width, size.patch, size.patch)
        self.place = nn.Parameter(torch.randn(1, cells**2 + 1, size.width) * 0.02)
        self.reader = nn.Parameter(torch.zeros(1, 1, size.width))
        self.dropout = Dropout(size.dropout)
        self.layers = nn.ModuleList(
            Layer(size, Looking(size, Shannon())) for _ in range(size.layers - 1)
        )
        self.last = Layer(size, _reading(size, attention, cells))
        self.norm = nn.LayerNorm(size.width)
        self.answer = nn.Linear(size.width, classes)

    def forward(self, images: Tensor, partner: Tensor | None = None) -> Tensor:
        """(batch, channels, side, side) -> (batch, classes).

        partner: (batch), the place in the batch of another image of the same class whose tokens
        join those that the class token looks at.
        """
        tokens = self.tokens(images)
        seen = self.last.before(tokens)
        attended = self.last.attention(seen[:, :1], seen, partner)
        read = self.last.rest(tokens[:, :1], attended)
        output: Tensor = self.answer(self.norm(read[:, 0]))
        return output

    def tokens(self, images: Tensor) -> Tensor:
        """(batch, 1 + patches, width), before the last layer."""
        patches = self.patches(images).flatten(2).mT
        first = self.reader.expand(len(images), -1, -1)
        x: Tensor = self.dropout(torch.cat([first, patches], 1) + self.place)
        for layer in self.layers:
            x = layer(x)
        return x


def check_attention(attention: str) -> None:
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be of {', '.join(ATTENTIONS)}, got {attention!r}")


def shares(attention: str) -> bool:
    """Whether it may look at the tokens of another image."""
    return attention.startswith("transport")


def _reading(size: Size, attention: str, cells: int) -> nn.Module:
    if shares(attention):
        return Transporting(
            size, size.width if attention == "transport" else size.width // size.heads
        )
    if attention == "continuous":
        return Spreading(size, cells)
    return Looking(size, _REGULARIZERS[attention])
