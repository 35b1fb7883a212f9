"""The sparsest alpha of every head that leaves the output where it is, up to a tolerance.

Of each head, over a grid of alphas: how far it moves its layer's output when it is switched alone,
and which share of its links it keeps. An alpha is allowed if it moves the layer by no more than the
tolerance; among those a head takes the one with the most links saved, less a price on the square of
the move. The price is found by bisection: the lowest at which, all heads switched together, the
embedding of every text of the probe stays within the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fenchel.lens.capture.calls import Call, Choice
from fenchel.lens.capture.output_projections import Projections
from fenchel.lens.families import Kind, place_name
from fenchel.lens.heads.batch_tallies import batches, count_calls
from fenchel.lens.heads.counting import CountedCall
from fenchel.lens.heads.datasets import Dataset, PreparedBatch
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.heads.switching import run
from fenchel.lens.heads.tallies import AttentionTally, MoveTally, RecipeTally, Tallies, add
from fenchel.regularizers import Tsallis

_GRID = 1 + torch.exp2(torch.arange(-6.0, 0.5, 0.5, dtype=torch.float64))  # up to sparsemax
_PRICES = (-4.0, 24.0)  # log2, from none to one at which no head moves
_STEPS = 9  # of the bisection of the price
_MARGIN = 0.7  # of the tolerance on the probe, so that unseen texts stay within it

Place = tuple[Kind, int]
Alphas = dict[Place, Tensor]  # (H), all heads of the attention
Curves = dict[Place, tuple[Tensor, Tensor]]  # squared move and links saved, (H, A) each


@dataclass(frozen=True, eq=False)
class _CurveTally:
    """Over queries, for each alpha: squared move of the layer's output, share of links kept (H, A).
    size: of the layer's output, squared."""

    queries: Tensor
    apart: Tensor
    kept: Tensor
    size: Tensor


@dataclass(frozen=True, eq=False)
class Search:
    """What the recipe is found on. probe: texts to find it on; unseen: to verify it on."""

    model: Any
    dataset: Dataset
    settings: AuditSettings
    projections: Projections
    sizes: dict[Place, int]
    probe: Sequence[int]
    unseen: Sequence[int]

    def tallies(self) -> Tallies:
        """The recipe of every head; how far it moves the texts of the probe, and others."""
        alphas, moves = self._search(self.curves())
        tallies = Tallies(self._count_links(alphas), recipe={"probe": _count_moves(moves)})
        if len(self.unseen):
            tallies.recipe["unseen"] = _count_moves(self.moves(alphas, self.unseen))
        return tallies

    def _search(self, curves: Curves) -> tuple[Alphas, Tensor]:
        """Bisection of the price; the alphas, and how far the texts of the probe move with them."""
        low, high = _PRICES
        alphas, moves = self.alphas_at(curves, high), None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            candidate = self.alphas_at(curves, middle)
            apart = self.moves(candidate, self.probe)
            if float(apart.max()) <= _MARGIN * self.settings.tolerance:
                high, alphas, moves = middle, candidate, apart
            else:
                low = middle
        return alphas, self.moves(alphas, self.probe) if moves is None else moves

    def curves(self) -> Curves:
        """For each head and alpha: (move of the layer's output)^2, and links saved. (H, A)"""
        total: dict[str, _CurveTally] = {}
        for prepared in self._batches(self.probe):
            total = add(total, count_calls(self.model, prepared, partial(self._count, prepared)))
        curves: Curves = {}
        for kind, layer in self.sizes:
            if self.settings.includes_layer(layer):
                tally = total[place_name(kind, layer)]
                saved = 1 - tally.kept / tally.queries[:, None]
                curves[kind, layer] = tally.apart / tally.size.clamp_min(1e-300), saved
        return curves

    def _count(self, prepared: PreparedBatch, call: Call) -> _CurveTally | None:
        if not self.settings.includes_layer(call.layer):
            return None
        heads = self.settings.choose_heads(call.heads)
        counted = CountedCall(call, *prepared.sides(call.kind), heads)
        projection = self.projections.get((call.kind, call.layer))
        _, values = counted.call.repeat_groups()
        output = counted.weights @ values
        apart, kept = [], []
        for alpha in _GRID.tolist():
            weights = counted.weights_at(alpha)
            moved = weights @ values - output
            # without a projection the heads' outputs, side by side, stand for the layer's
            far = moved if projection is None else moved @ projection.select(heads).grams()
            apart.append(counted.total((far * moved).sum(-1)))
            kept.append(counted.total(counted.visible_share(weights)))
        queries = counted.queries().clamp_min(1)
        size = self._size(counted)
        return _CurveTally(queries, torch.stack(apart, 1), torch.stack(kept, 1), size)

    def _size(self, counted: CountedCall) -> Tensor:
        projection = self.projections.get((counted.call.kind, counted.call.layer))
        if projection is None:
            every = counted.whole.output.double().square().sum((-2, -1))
        else:
            every = counted.layer_output(projection).square().sum(-1)  # (B, Q)
        return torch.where(counted.counts.any(1), every, 0.0).sum()

    def alphas_at(self, curves: Curves, price: float) -> Alphas:
        """What every head takes at this price (log2) on the square of its move."""
        alphas: Alphas = {}
        for place, count in self.sizes.items():
            alphas[place] = torch.ones(count, dtype=torch.float64)
            if place in curves:
                apart, saved = curves[place]
                worth = saved - 2.0**price * apart
                worth = torch.where(apart <= self.settings.tolerance**2, worth, 0.0)
                best, at = worth.max(1)
                chosen = torch.where(best > 0, _GRID[at], 1.0)
                alphas[place][self.settings.choose_heads(count)] = chosen
        return alphas

    def moves(self, alphas: Alphas, places: Sequence[int]) -> Tensor:
        """|e' - e| / |e| of every text, all heads switched."""
        choice = switch(alphas)
        pairs = (
            (run(self.model, prepared), run(self.model, prepared, choice))
            for prepared in self._batches(places)
        )
        return torch.cat([before.move_to(after) for before, after in pairs])

    def _count_links(self, alphas: Alphas) -> dict[str, AttentionTally]:
        """The share of links with a weight, with the heads as in the recipe."""
        total: dict[str, AttentionTally] = {}
        for prepared in self._batches(self.probe):
            count = partial(self._count_kept, prepared, alphas)
            total = add(total, count_calls(self.model, prepared, count, switch(alphas)))
        return total

    def _count_kept(
        self, prepared: PreparedBatch, alphas: Alphas, call: Call
    ) -> AttentionTally | None:
        if not self.settings.includes_layer(call.layer):
            return None
        heads = self.settings.choose_heads(call.heads)
        alpha = alphas[call.kind, call.layer][heads].double()
        counted = CountedCall(call, *prepared.sides(call.kind), heads)
        kept = counted.total(counted.visible_share(counted.weights_at(alpha[:, None])))
        return AttentionTally(recipe=RecipeTally(counted.queries(), kept, alpha))

    def _batches(self, places: Sequence[int]) -> Iterator[PreparedBatch]:
        return batches(self.model, self.dataset, places)


def switch(alphas: Alphas) -> Choice:
    """Every head on its own alpha."""
    omegas = {place: Tsallis(alpha.float()[:, None]) for place, alpha in alphas.items()}
    return lambda kind, layer: omegas.get((kind, layer))


def _count_moves(moves: Tensor) -> MoveTally:
    return MoveTally(
        texts=torch.tensor([float(len(moves))], dtype=torch.float64),
        square=moves.square().sum()[None],
        largest=moves.max()[None],
    )
