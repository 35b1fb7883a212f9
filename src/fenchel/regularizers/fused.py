"""Fused: Omega(p) = |p|^2 / 2 + strength * total variation of p.

On a line its map is fusedmax (Niculae and Blondel, 2017), on a grid TVmax (Martins et al., 2020).
Both are sparsemax of the total-variation proximal point of the scores, because [x - t]_+ is a
monotone function of x and keeps every sign of every difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fenchel._kernels import total_variation as tv
from fenchel._numerics import check_whole, dot, exported_to_onnx, masked_max, readable, where
from fenchel.priors.measure import Base
from fenchel.regularizers.contract import (
    Curvature,
    Dual,
    Maximum,
    Regularizer,
    check_parameter,
    exactly,
    in_range,
    mass_gap,
    normalize,
    per_row,
    weigh_natively,
)
from fenchel.regularizers.tsallis import Tsallis


@dataclass(frozen=True)
class Fused(Regularizer):
    """max_p <s, p> - |p|^2 / 2 - strength * sum over neighbours |p_i - p_j|.

    >>> fl.solve(scores, fl.Fused(0.1)).weights                   # runs of equal weight
    >>> fl.solve(scores, fl.Fused(0.1, grid=(14, 14))).weights    # patches, keys in row order

    strength: >= 0, a number or a tensor that broadcasts over the rows, differentiable.
    grid: (height, width) with height * width keys; None is a line. A masked key cuts the chain.
    tolerance, max_steps: the grid only, which is iterated until its duality gap, relative to the
    spread of the scores, is below the tolerance (default 1e-14; groups are decided in float64);
    rows that are not there after max_steps (default 10000) get the status MAX_STEPS.
    """

    strength: float | Tensor
    grid: tuple[int, int] | None = None
    tolerance: float | None = None
    max_steps: int | None = None
    gap_is_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_parameter(self.strength, "strength", 0.0)
        if self.tolerance is not None:
            check_parameter(self.tolerance, "tolerance", 0.0, strict=True)
        if self.max_steps is not None:
            check_whole(self.max_steps, "max_steps", 1)
        if self.grid is not None:
            _check_grid(self.grid)
        elif self.tolerance is not None or self.max_steps is not None:
            raise ValueError(
                "tolerance and max_steps are for a grid; a line is solved exactly. Leave them out"
            )

    def value(self, weights: Tensor, base: Base) -> Tensor:
        strength = per_row(self.strength, weights, "strength").squeeze(-1)
        outside = ((weights > 0) & ~base.allowed).any(-1)
        variation = self._differences(weights, base.allowed).abs().sum((-2, -1))
        return where(~outside, dot(weights, weights) / 2 + strength * variation, math.inf)

    def weigh(self, scores: Tensor) -> Tensor | None:
        if isinstance(self.strength, Tensor) or self.grid is not None or not _is_moderate(scores):
            return None
        return weigh_natively(scores, "fused", self.strength)

    def maximize(self, scores: Tensor, base: Base) -> Maximum:
        if exported_to_onnx():
            raise NotImplementedError(
                "Fused cannot be exported to ONNX: its groups are found by an operator of fenchel; "
                "use torch.export, or another regulariser"
            )
        strength = per_row(self.strength, scores, "strength")
        scores = base.keep(scores, 0.0)
        labels, signs, edges, settled = self._partition(scores, strength, base.allowed)
        smooth = tv.group_means(scores - strength * signs, labels)
        # Smoothing lowers the maximum; sparsemax wants it at zero again.
        peak = where(base.alive, masked_max(smooth, base.allowed), 0.0).detach()
        inner = Tsallis(2.0).maximize(base.keep(smooth - peak, 0.0), base)
        threshold = inner.threshold + peak.squeeze(-1)
        potential = dot(scores, inner.weights) - self.value(inner.weights, base)
        assert inner.dual.centre is not None
        offset = inner.dual.centre + inner.dual.offset + exactly(peak).squeeze(-1)
        dual = Dual(offset, edges=edges)
        return Maximum(inner.weights, threshold, potential, dual, settled=settled)

    def curvature(self, weights: Tensor, base: Base) -> Curvature:
        on = weights > 0
        cut = (self._differences(weights, base.allowed) != 0) | ~self._edges(on)
        return FusedCurvature(
            on.to(weights.dtype),
            normalize(on.to(weights.dtype)),
            tv.components(~self._on_grid(cut), self.grid is not None),
        )

    def gap(self, scores: Tensor, weights: Tensor, dual: Dual, base: Base) -> Tensor:
        """Sparsemax's terms at the smoothed scores s - D^T w, plus strength |Dp| - w Dp on every
        edge: both are non-negative for any |w| <= strength."""
        assert dual.edges is not None
        p, w = exactly(weights), exactly(dual.edges)
        strength = exactly(per_row(self.strength, scores, "strength"))
        w = torch.minimum(torch.maximum(w, -strength.unsqueeze(-2)), strength.unsqueeze(-2))
        y = exactly(scores) - self._adjoint(w) - exactly(dual.offset).unsqueeze(-1)
        c = y.clamp(min=0)
        keys = where(base.allowed, (p - c) ** 2 / 2 + (p - c) * (c - y), 0.0).sum(-1)
        slope = self._differences(p, base.allowed)
        bent = (strength.unsqueeze(-2) * slope.abs() - w * slope).sum((-2, -1))
        outside = (((p > 0) & ~base.allowed) | (p < 0)).any(-1)
        return where(~outside, keys + bent + mass_gap(p), math.inf)

    def valid_rows(self, like: Tensor) -> Tensor:
        return in_range(per_row(self.strength, like, "strength"), 0.0)

    def _partition(
        self, scores: Tensor, strength: Tensor, allowed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Groups of equal value, the sum of signs at each key, edge multipliers, settled."""
        s, lam = scores.detach(), strength.detach()
        if self.grid is None:
            labels, signs = tv.tv_chain(s, lam, allowed)
            exact, bound = exactly(s), exactly(lam)
            smooth = tv.group_means(exact - bound * exactly(signs), labels)
            edges = tv.chain_dual(exact, smooth, bound, allowed, exactly(signs)).unsqueeze(-2)
            return labels, signs, edges, None
        labels, signs, right, down, settled = tv.tv_grid(
            self._on_grid(s),
            lam.unsqueeze(-1),
            self._on_grid(allowed),
            self.tolerance or 1e-14,
            self.max_steps or 10_000,
        )
        edges = torch.stack([right.flatten(-2), down.flatten(-2)], -2)
        return labels.flatten(-2), signs.flatten(-2), edges, settled

    # -- the graph: an edge from each key to its right neighbour and, on a grid, the one below.
    #    Edge tensors are (..., directions, n), zero or False where a key has no such neighbour.

    def _on_grid(self, rows: Tensor) -> Tensor:
        """(..., n) -> (..., height, width); a line stays a line."""
        if self.grid is None:
            return rows
        height, width = self.grid
        if height * width != rows.shape[-1]:
            raise ValueError(
                f"grid {height} x {width} has {height * width} keys, the scores have "
                f"{rows.shape[-1]}; keys are the grid's cells in row order"
            )
        return rows.reshape(*rows.shape[:-1], height, width)

    def _neighbours(self, rows: Tensor) -> Tensor:
        """The value at the end of each edge; a key at the border meets zero (False)."""
        field = self._on_grid(rows)
        shifted = [_next(field, -1)] if self.grid is None else [_next(field, -1), _next(field, -2)]
        return torch.stack([x.reshape(rows.shape) for x in shifted], -2)

    def _edges(self, allowed: Tensor) -> Tensor:
        return self._neighbours(allowed) & allowed.unsqueeze(-2)

    def _differences(self, rows: Tensor, allowed: Tensor) -> Tensor:
        """D rows: neighbour minus key on every edge."""
        return where(self._edges(allowed), self._neighbours(rows) - rows.unsqueeze(-2), 0.0)

    def _adjoint(self, edges: Tensor) -> Tensor:
        """D^T edges: what leaves by the edges before a key, less what leaves by its own."""
        total = -edges.sum(-2)
        for direction, axis in enumerate((-1, -2)[: edges.shape[-2]]):
            field = self._on_grid(edges[..., direction, :])
            total = total + _previous(field, axis).reshape(total.shape)
        return total


@dataclass(frozen=True)
class FusedCurvature(Curvature):
    """Sparsemax's curvature after averaging over groups of equal weight."""

    labels: Tensor

    def apply(self, direction: Tensor) -> Tensor:
        return tv.group_means(self.response * self.advantage(direction), self.labels)


# Sums along the chain keep their digits within this range; beyond it the slower search is exact.
_WIDEST = 1e4


def _is_moderate(scores: Tensor) -> bool:
    """Seen to be finite, none masked, and of one size."""
    if not readable(scores) or scores.numel() == 0:
        return False
    low, high = scores.detach().aminmax()
    return bool(high - low < _WIDEST)  # False for NaN too


def _check_grid(grid: object) -> None:
    pair = isinstance(grid, (tuple, list)) and len(grid) == 2
    if not pair or not all(isinstance(size, int) and size >= 1 for size in grid):  # type: ignore[attr-defined]
        raise ValueError(f"grid must be (height, width), whole numbers >= 1, got {grid!r}")


def _next(field: Tensor, axis: int) -> Tensor:
    """Shift towards the start, zeros entering at the end."""
    if field.shape[axis] == 0:
        return field
    return torch.cat([field.narrow(axis, 1, field.shape[axis] - 1), _border(field, axis)], axis)


def _previous(field: Tensor, axis: int) -> Tensor:
    if field.shape[axis] == 0:
        return field
    return torch.cat([_border(field, axis), field.narrow(axis, 0, field.shape[axis] - 1)], axis)


def _border(field: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(field.narrow(axis, 0, 1))
