"""How far a model's attention is from the exact estimates, query by query."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fenchel._solution import Status

MEASURES = ("multiplier", "mean", "mean_shift", "parameter")
PADDING = -1  # in `codes`, where a query is no word


@dataclass(frozen=True, eq=False)
class Deviations:
    """Of a model's attention from the exact estimates; padding, and what has no solution, is NaN.

    Each measure is (layer, batch, head, query), also for one sentence, so that `multiplier[layer]`
    is (batch, head, query).
    multiplier: |lam - lam*| / |lam*|, lam = reliability z the model's, lam* exact.
    mean: |h - h*| / |h*| of the estimates, in units of their distance to the origin;
    mean_shift: |h - h*| / |h* - mean_u|, in units of what attention does to the prior mean.
    parameter: reliability |Sigma z| / |z|, Sigma the covariance of the templates under u; the
        deviation of the multiplier to leading order, and of its size also where scores are large.
    Since lam* - lam = reliability (mean_u - h*), a small deviation of the multiplier says that the
    evidence is long beside what attention does to the mean; the weights may still be far off, which
    `mean` and `mean_shift` tell.
    codes: of `fenchel.Status`; -1: padding.
    model, attention, scaling (of the templates), reliability: the settings. Deviations depend on
        the scaling, the layer does not.
    """

    multiplier: Tensor = field(repr=False)
    mean: Tensor = field(repr=False)
    mean_shift: Tensor = field(repr=False)
    parameter: Tensor = field(repr=False)
    codes: Tensor = field(repr=False)
    model: str
    attention: str
    scaling: float
    reliability: float

    @property
    def layers(self) -> int:
        return self.codes.shape[0]

    @property
    def heads(self) -> int:
        return self.codes.shape[2]

    @property
    def sentences(self) -> int:
        return self.codes.shape[1]

    @property
    def queries(self) -> int:
        """Words that ask, in all sentences together."""
        return int((self.codes[0, :, 0] != PADDING).sum())

    @property
    def status(self) -> dict[str, int]:
        """How many problems, of all layers, heads and queries, ended how."""
        codes, counts = torch.unique(self.codes[self.codes != PADDING], return_counts=True)
        pairs = zip(codes.tolist(), counts.tolist(), strict=True)
        return {Status(code).name: count for code, count in pairs}
