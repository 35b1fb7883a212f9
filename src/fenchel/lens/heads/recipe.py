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
from fenchel.lens.families import Kind
from fenchel.lens.heads.batch_tallies import batches, over_calls
from fenchel.lens.heads.datasets import Dataset, PreparedBatch
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.heads.switching import run
from fenchel.lens.heads.tallies import Counted, Tallies, added
from fenchel.regularizers import Tsallis

_GRID = 1 + torch.exp2(torch.arange(-6.0, 0.5, 0.5, dtype=torch.float64))  # up to sparsemax
_PRICES = (-4.0, 24.0)  # log2, from none to one at which no head moves
_STEPS = 9  # of the bisection of the price
_MARGIN = 0.7  # of the tolerance on the probe, so that unseen texts stay within it

Place = tuple[Kind, int]
Alphas = dict[Place, Tensor]  # (H), all heads of the attention


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
        """recipe_alpha and recipe_kept of every head; how far texts moved, those of the probe and
        those that were not used to find it."""
        curves = self.curves()
        low, high = _PRICES
        alphas, moved = self.priced(curves, high), None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            tried = self.priced(curves, middle)
            apart = self.moved(tried, self.probe)
            if float(apart.max()) <= _MARGIN * self.settings.tolerance:
                high, alphas, moved = middle, tried, apart
            else:
                low = middle
        moved = self.moved(alphas, self.probe) if moved is None else moved
        made = self._kept(alphas) | _summary("probe", moved)
        if len(self.unseen):
            made |= _summary("unseen", self.moved(alphas, self.unseen))
        return made

    def curves(self) -> dict[Place, tuple[Tensor, Tensor]]:
        """For each head and alpha: (move of the layer's output)^2, and links saved. (H, A)"""
        total: Tallies = {}
        for prepared in self._batches(self.probe):
            make = partial(self._change, prepared)
            total = added(total, over_calls(self.model, prepared, make))
        made: dict[Place, tuple[Tensor, Tensor]] = {}
        for kind, layer in self.sizes:
            if self.settings.includes_layer(layer):
                apart, size, kept, queries = (
                    total[f"{kind}/{layer}/{name}"] for name in ("apart", "size", "kept", "queries")
                )
                made[kind, layer] = apart / size.clamp_min(1e-300), 1 - kept / queries[:, None]
        return made

    def _change(self, prepared: PreparedBatch, call: Call) -> Tallies:
        """Sums over queries, for each alpha (H, A); size: of the layer's own output, squared."""
        if not self.settings.includes_layer(call.layer):
            return {}
        heads = self.settings.choose_heads(call.heads)
        counted = Counted(call, *prepared.sides(call.kind), heads)
        projection = self.projections.get((call.kind, call.layer))
        _, values = counted.call.repeat_groups()
        output = counted.weights @ values
        apart, kept = [], []
        for alpha in _GRID.tolist():
            weights = counted.switched(alpha)
            moved = weights @ values - output
            # without a projection the heads' outputs, joined, stand for the layer's
            far = moved if projection is None else moved @ projection.select(heads).grams()
            apart.append(counted.total((far * moved).sum(-1)))
            share = (weights > 0).double().sum(-1) / counted.seen.sum(-1).clamp_min(1)
            kept.append(counted.total(share))
        return {
            "apart": torch.stack(apart, 1),
            "kept": torch.stack(kept, 1),
            "queries": counted.counts.double().sum((0, 2)).clamp_min(1),
            "size": self._size(counted),
        }

    def _size(self, counted: Counted) -> Tensor:
        projection = self.projections.get((counted.call.kind, counted.call.layer))
        if projection is None:
            every = counted.whole.output.double().square().sum((-2, -1))
        else:
            every = counted.layer_output(projection).square().sum(-1)  # (B, Q)
        return torch.where(counted.counts.any(1), every, 0.0).sum()

    def priced(self, curves: dict[Place, tuple[Tensor, Tensor]], price: float) -> Alphas:
        """What every head takes at this price (log2) on the square of its move."""
        made: Alphas = {}
        for place, count in self.sizes.items():
            alphas = torch.ones(count, dtype=torch.float64)
            if place in curves:
                apart, saved = curves[place]
                worth = saved - 2.0**price * apart
                worth = torch.where(apart <= self.settings.tolerance**2, worth, 0.0)
                best, at = worth.max(1)
                chosen = torch.where(best > 0, _GRID[at], 1.0)
                alphas[self.settings.choose_heads(count)] = chosen
            made[place] = alphas
        return made

    def moved(self, alphas: Alphas, places: Sequence[int]) -> Tensor:
        """|e' - e| / |e| of every text, all heads switched."""
        choice = switch(alphas)
        pairs = (
            (run(self.model, prepared), run(self.model, prepared, choice))
            for prepared in self._batches(places)
        )
        return torch.cat([before.moved(after) for before, after in pairs])

    def _kept(self, alphas: Alphas) -> Tallies:
        """The share of links with a weight, with the heads as in the recipe."""
        total: Tallies = {}
        for prepared in self._batches(self.probe):
            make = partial(self._links, prepared, alphas)
            total = added(total, over_calls(self.model, prepared, make, switch(alphas)))
        return total

    def _links(self, prepared: PreparedBatch, alphas: Alphas, call: Call) -> Tallies:
        if not self.settings.includes_layer(call.layer):
            return {}
        heads = self.settings.choose_heads(call.heads)
        alpha = alphas[call.kind, call.layer][heads].double()
        counted = Counted(call, *prepared.sides(call.kind), heads)
        weights = counted.switched(alpha[:, None])
        share = (weights > 0).double().sum(-1) / counted.seen.sum(-1).clamp_min(1)
        return {
            "recipe_kept": counted.total(share),
            "recipe_queries": counted.counts.double().sum((0, 2)),
            "largest_recipe_alpha": alpha,
        }

    def _batches(self, places: Sequence[int]) -> Iterator[PreparedBatch]:
        return batches(self.model, self.dataset, places)


def switch(alphas: Alphas) -> Choice:
    """Every head on its own alpha."""
    omegas = {place: Tsallis(alpha.float()[:, None]) for place, alpha in alphas.items()}
    return lambda kind, layer: omegas.get((kind, layer))


def _summary(name: str, moved: Tensor) -> Tallies:
    return {
        f"recipe/0/{name}_square": moved.square().sum()[None],
        f"recipe/0/{name}_texts": torch.tensor([float(len(moved))], dtype=torch.float64),
        f"recipe/0/largest_{name}": moved.max()[None],
    }
