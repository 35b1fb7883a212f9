"""What an audit found, and its summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._solution import Status

MEASURES = ("multiplier", "mean", "mean_shift", "parameter")
QUANTILES = (0.05, 0.25, 0.75, 0.95)
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

    def values(self, measure: str, layer: int, head: int | None = None) -> Tensor:
        """One for each query that was solved; head None: the average over the heads. (N,)"""
        if measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
        found: Tensor = getattr(self, measure)[layer]
        one = found.mean(1) if head is None else found[:, head]
        return one[~one.isnan()]

    def summary(self) -> list[dict[str, Any]]:
        """For each layer and measure the mean, the median and quantiles over heads and queries,
        and the mean of each head."""
        made = []
        for layer in range(self.layers):
            entry: dict[str, Any] = {"layer": layer}
            for name in MEASURES:
                entry[name] = _summary(getattr(self, name)[layer])
            made.append(entry)
        return made

    def as_json(self) -> dict[str, Any]:
        """Settings, counts and the summary.

        `layer` of the summary counts from `first_layer` = 0, as in `multiplier[layer]`; tables and
        pictures count from 1.
        """
        return {
            "model": self.model,
            "attention": self.attention,
            "scaling": self.scaling,
            "reliability": self.reliability,
            "sentences": self.sentences,
            "queries": self.queries,
            "layers": self.layers,
            "first_layer": 0,
            "heads": self.heads,
            "status": self.status,
            "summary": self.summary(),
        }


def _summary(values: Tensor) -> dict[str, Any]:
    """values (batch, head, query)"""
    found = values.double().cpu().numpy()
    flat = found[~np.isnan(found)]
    if not flat.size:
        return {"mean": None, "median": None, "max": None, "head_means": []}
    marks = {f"q{round(100 * q):02d}": _rounded(np.quantile(flat, q)) for q in QUANTILES}
    return {
        "mean": _rounded(flat.mean()),
        "median": _rounded(np.median(flat)),
        **marks,
        "max": _rounded(flat.max()),
        "head_means": [_rounded(np.nanmean(found[:, h])) for h in range(found.shape[1])],
    }


def _rounded(value: Any) -> float:
    """Five digits."""
    return float(f"{float(value):.5g}")
