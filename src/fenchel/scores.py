"""Scores of keys for queries: (..., query, d) and (..., key, d) in, (..., query, key) out.

    fl.solve(fl.scores.negative_squared_distance(q, k), fl.Tsallis(1.5))

Nothing here normalises: the regulariser does.
"""

from __future__ import annotations

import math

from torch import Tensor


def scaled_dot(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """scale * <q, k>; the scale defaults to 1 / sqrt(d), as in `scaled_dot_product_attention`."""
    return (query * default_scale(query, scale)) @ key.mT


def bilinear(query: Tensor, key: Tensor, form: Tensor) -> Tensor:
    """q^T form k, with form (..., d_query, d_key) (Luong, Pham and Manning, 2015)."""
    return (query @ form) @ key.mT


def additive(query: Tensor, key: Tensor, direction: Tensor) -> Tensor:
    """<direction, tanh(q + k)> (Bahdanau, Cho and Bengio, 2015). Memory: query * key * d."""
    return (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() @ direction


def negative_squared_distance(query: Tensor, key: Tensor, scale: float = 0.5) -> Tensor:
    """-scale * |q - k|^2: softmax of it is the Nadaraya–Watson estimate with a Gaussian kernel."""
    middle = key.detach().mean(-2, keepdim=True)  # lengths far from zero would cancel
    query, key = query - middle, key - middle
    product = query @ key.mT
    lengths = query.square().sum(-1, keepdim=True) + key.square().sum(-1).unsqueeze(-2)
    negative_distances = 2 * product - lengths
    return scale * (
        negative_distances - negative_distances.detach().clamp(min=0.0)
    )  # rounding above zero; all derivatives


def default_scale(query: Tensor, scale: float | None) -> float:
    """1 / sqrt(d) unless given; one for vectors of no components, whose products are all zero."""
    if scale is not None:
        return scale
    return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
