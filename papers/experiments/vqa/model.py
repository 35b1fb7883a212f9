"""A modular co-attention network (Yu et al. 2019), whose last reading of the picture is swapped.

Words of the question attend to each other, then cells of the picture to each other and to the
words. CLAIMS F-S6.2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fenchel.continuous import Density, Mixture, cell_centers
from papers.checks import check_whole
from papers.experiments.layers import Attending, Dropout, FeedForward, check_dropout
from papers.experiments.vqa.reading import BLIND, Reading

_STRIDES = (2, 2, 2)  # of the convolutions that halve


@dataclass(frozen=True)
class Size:
    """words: width of their embedding. width: of the network; inner: of its feed-forward layers;
    flat: of what scores cells and words; fused: where question and picture meet. halvings: of the
    sides of a picture, from pixels to cells. head: width of a layer between there and the answers;
    None: none, as in the thesis."""

    words: int
    width: int
    inner: int
    layers: int
    heads: int
    flat: int
    fused: int
    dropout: float = 0.1
    halvings: int = 3
    head: int | None = None

    def __post_init__(self) -> None:
        for name in ("words", "width", "inner", "layers", "heads", "flat", "fused", "halvings"):
            check_whole(getattr(self, name), name, 1)
        if self.head is not None:
            check_whole(self.head, "head", 1)
        check_dropout(self.dropout)


@dataclass(frozen=True)
class Shapes:
    """Of the data. channels: of grid features; None: pictures, which a small CNN makes features of.
    grid: its rows and columns."""

    vocabulary: int
    answers: int
    grid: tuple[int, int]
    channels: int | None = None


class Answered(NamedTuple):
    """scores (batch, answers), and how the picture was read: weights or a density."""

    scores: Tensor
    attention: Tensor | Density | Mixture | None


class Unit(nn.Module):
    """Attention to itself, to a guide where there is one, and a feed-forward layer."""

    def __init__(self, size: Size, guided: bool) -> None:
        super().__init__()
        shape = (size.width, size.heads, size.dropout)
        self.own = Attending(*shape)
        self.guided = Attending(*shape) if guided else None
        self.norm = nn.LayerNorm(size.width)
        self.forward_layers = FeedForward(size.width, size.inner, size.dropout)
        self.dropout = Dropout(size.dropout)

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        """ignored: bool (batch, token)"""
        return self.rest(self.own(x, None, ignored))

    def guided_by(self, x: Tensor, guide: tuple[Tensor, Tensor], which: Tensor | None) -> Tensor:
        """guide: its tokens and which of them are none; which: row of x of each, where several
        share one, for which attention to itself is then made once."""
        assert self.guided is not None
        x = self.own(x, None, None)
        return self.rest(self.guided(x if which is None else x[which], *guide))

    def rest(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.dropout(self.forward_layers(self.norm(x)))
        return output


class Seeing(nn.Sequential):
    """Pixels to cells: three convolutions that halve the sides, one that looks around, and where
    the cells are to be larger, the largest of four."""

    def __init__(self, width: int, halvings: int) -> None:
        if halvings < len(_STRIDES):
            raise ValueError(f"halvings must be at least {len(_STRIDES)}, got {halvings}")
        layers: list[nn.Module] = []
        channels = (3, width // 2, width, width, width)
        for (before, after), stride in zip(pairwise(channels), (*_STRIDES, 1), strict=True):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(4, after)]
            layers.append(nn.GELU())
        layers += [nn.MaxPool2d(2) for _ in range(halvings - len(_STRIDES))]
        super().__init__(*layers)


class CoAttention(nn.Module):
    """Question and picture to scores of the answers. attention: as in `reading.KNOWN`."""

    waves: Tensor

    def __init__(self, size: Size, shapes: Shapes, attention: str) -> None:
        super().__init__()
        self.shapes = shapes
        self.embedding = nn.Embedding(shapes.vocabulary, size.words, padding_idx=0)
        self.recurrent = nn.LSTM(size.words, size.width, batch_first=True)
        self.question = nn.ModuleList(Unit(size, guided=False) for _ in range(size.layers))
        self.question_norm = nn.LayerNorm(size.width)
        self.ask = Reading(size.width, size.flat, (1, 1), "softmax")
        self.from_question = nn.Linear(size.width, size.fused)
        self.blind = attention == BLIND
        if not self.blind:
            self._see(size, shapes, attention)
        self.fused_norm = nn.LayerNorm(size.fused)
        self.answer = _answers(size, shapes.answers)

    def _see(self, size: Size, shapes: Shapes, attention: str) -> None:
        self.seeing = Seeing(size.width, size.halvings) if shapes.channels is None else None
        self.features = nn.Linear(shapes.channels or size.width, size.width)
        self.register_buffer("waves", _waves(*shapes.grid), persistent=False)
        self.place = nn.Linear(self.waves.shape[-1], size.width, bias=False)
        self.picture = nn.ModuleList(Unit(size, guided=True) for _ in range(size.layers))
        self.picture_norm = nn.LayerNorm(size.width)
        self.read = Reading(size.width, size.flat, shapes.grid, attention)
        self.from_picture = nn.Linear(size.width, size.fused)

    def forward(self, words: Tensor, pictures: Tensor, which: Tensor) -> Answered:
        """words (batch, longest); pictures, uint8 or features, each once; which (batch): of them
        each question is about."""
        none = words == 0
        with torch.autocast(words.device.type, enabled=False):  # not every CPU has it in bf16
            asked, _ = self.recurrent(self.embedding(words))
        for unit in self.question:
            asked = unit(asked, none)
        asked = self.question_norm(asked)
        fused = self.from_question(self._asked(asked, none))
        attention = None
        if not self.blind:
            seen, attention = self.read(self._seen(pictures, which, (asked, none)))
            fused = fused + self.from_picture(seen)
        return Answered(self.answer(self.fused_norm(fused)), attention)

    def _asked(self, asked: Tensor, none: Tensor) -> Tensor:
        scores = self.ask.score(asked).squeeze(-1).masked_fill(none, -torch.inf)
        weights = scores.softmax(-1).masked_fill(none, 0.0)  # a question of no words: all zero
        output: Tensor = (weights.unsqueeze(1) @ asked).squeeze(1)
        return output

    def _seen(self, pictures: Tensor, which: Tensor, guide: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, cell, width)"""
        if self.seeing is not None:
            scaled = pictures.float() / 127.5 - 1
            # so laid out, the convolutions take a fifth less time on a CPU
            seen = self.seeing(scaled.contiguous(memory_format=torch.channels_last))
            pictures = seen.permute(0, 2, 3, 1)
        cells = self.features(pictures.flatten(1, 2)) + self.place(self.waves)
        for number, unit in enumerate(self.picture):
            assert isinstance(unit, Unit)
            cells = unit.guided_by(cells, guide, None if number else which)
        normed: Tensor = self.picture_norm(cells)
        return normed


def _answers(size: Size, count: int) -> nn.Module:
    if size.head is None:
        return nn.Linear(size.fused, count)
    first, second = nn.Linear(size.fused, size.head), nn.Linear(size.head, count)
    return nn.Sequential(first, nn.GELU(), second)


def _waves(rows: int, columns: int) -> Tensor:
    """(cell, feature): where each cell is, for "left of" and "topmost": its row and column in
    [-1, 1] and three octaves of waves of them."""
    place = 2 * cell_centers(rows, columns, dtype=torch.float32) - 1
    octaves = [torch.pi * 2**k * place for k in range(3)]
    return torch.cat([place, *map(torch.sin, octaves), *map(torch.cos, octaves)], -1)
