"""The heads of `LipschitzAttention`, before the output matrix.

Weights and tokens are divided by powers of two of their size, and what the scores lack for it is
multiplied to their distance from the largest: nothing that a result does not hold overflows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.init import xavier_uniform_

from fenchel._numerics import where
from fenchel.bounds.modules import (
    DotWeights,
    dot_bound,
    gaussian_bound,
    into_ball,
    of_size_one,
    size_of_sequence,
)
from fenchel.nn.heads import join_heads, split_heads
from fenchel.scores import negative_squared_distance


class Heads(Module):
    """All heads, side by side."""

    @abstractmethod
    def forward(self, x: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(batch, n, d) -> (batch, n, head * size), and what to multiply it by, (batch, 1, 1) in
        float64; allowed: bool (batch, 1, n, n)."""

    @abstractmethod
    def bound(self, output: Tensor, tokens: Sequence[int]) -> Tensor:
        """With that output matrix, one for each of `tokens`, in float64, of a layer that computes
        in the dtype of `output`."""

    @abstractmethod
    def search_region(self) -> tuple[float, float | None]:
        """For an attack: size of inputs that matter, and radius of a ball to look into."""


class GaussianHeads(Heads):
    def __init__(self, embed_dim: int, num_heads: int, temperature: float) -> None:
        super().__init__()
        self.projection = Parameter(torch.empty(embed_dim, embed_dim))
        self.log_temperature = Parameter(torch.full((num_heads,), math.log(temperature)))
        xavier_uniform_(self.projection)

    def forward(self, x: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        projection, unit = of_size_one(self.projection)
        size = size_of_sequence(x)  # (batch, 1, 1)
        z = split_heads(x / size.to(x.dtype) @ projection.to(x.dtype).mT, len(self.log_temperature))
        unit = unit * size
        heat = self.log_temperature.to(unit.dtype).reshape(-1, 1, 1)  # (head, 1, 1)
        log_scale = 2 * unit.log().unsqueeze(1) - heat
        return _average(negative_squared_distance(z, z, 1.0), log_scale, z, allowed), unit

    def bound(self, output: Tensor, tokens: Sequence[int]) -> Tensor:
        return gaussian_bound(self.projection, output, tokens)

    def search_region(self) -> tuple[float, float | None]:
        with torch.no_grad():
            parts = self.projection.double().unflatten(0, (len(self.log_temperature), -1))
            size = torch.linalg.matrix_norm(parts, 2).clamp_min(1e-30)
            unit = (self.log_temperature.double() / 2 - size.log()).mean().exp()
        return float(unit), None


class DotHeads(Heads):
    def __init__(self, embed_dim: int, num_heads: int, radius: float) -> None:
        super().__init__()
        self.num_heads, self.radius = num_heads, radius
        self.temperature = math.sqrt(embed_dim // num_heads)
        self.query = Parameter(torch.empty(embed_dim, embed_dim))
        self.key = Parameter(torch.empty(embed_dim, embed_dim))
        self.value = Parameter(torch.empty(embed_dim, embed_dim))
        for matrix in (self.query, self.key, self.value):
            xavier_uniform_(matrix)

    def forward(self, x: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        x, size = into_ball(x, self.radius)
        pairs = [of_size_one(m) for m in (self.query, self.key, self.value)]
        query, key, value = (split_heads(x @ m.to(x.dtype).mT, self.num_heads) for m, _ in pairs)
        of_query, of_key, of_value = (unit for _, unit in pairs)
        log_scale = of_query.log() + of_key.log() + 2 * size.log() - math.log(self.temperature)
        average = _average(query @ key.mT, log_scale.unsqueeze(1), value, allowed)
        return average, of_value * size

    def bound(self, output: Tensor, tokens: Sequence[int]) -> Tensor:
        # (head * m, d) -> (head, m, d)
        query, key, value = (
            m.unflatten(0, (self.num_heads, -1)) for m in (self.query, self.key, self.value)
        )
        weights = DotWeights(query, key, value, output)
        return dot_bound(weights, self.radius, self.temperature, tokens)

    def search_region(self) -> tuple[float, float | None]:
        return self.radius, self.radius


def _average(scores: Tensor, log_scale: Tensor, values: Tensor, allowed: Tensor | None) -> Tensor:
    """(batch, head, n, n), (batch, head or 1, 1, 1), (batch, head, n, size)
    -> (batch, n, head * size), with the softmax of exp(log_scale) scores."""
    # A larger scale than the dtype holds leaves only the largest scores, as it would itself.
    top = math.log(torch.finfo(scores.dtype).max) - 1e-9
    scale = log_scale.clamp_max(top).exp().to(scores.dtype)
    if scores.shape[-1]:
        live = scores.detach()
        live = live if allowed is None else where(allowed, live, -math.inf)
        scores = (scores - live.amax(-1, keepdim=True)) * scale
    if allowed is not None:
        scores = where(allowed, scores, -math.inf)
    return join_heads(scores.softmax(-1) @ values)
