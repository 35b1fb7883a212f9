"""Distances |x_i - y_j|_p of points, without powers that overflow or vanish."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._numerics import has

_SMALL = 1e-140  # its square has lost digits


def between(x: Tensor, y: Tensor, p: float) -> Tensor:
    """(..., n, d), (..., m, d) -> (..., n, m), p >= 1. At a distance of zero slopes are zero."""
    if p == 2:
        return _euclidean(x, y)
    if p in (1.0, math.inf):
        return _cdist(x, y, p)
    return _from_largest(x, y, p)


def _cdist(x: Tensor, y: Tensor, p: float) -> Tensor:
    # from differences: products would lose half of the digits
    distances: Tensor = torch.cdist(x, y, p=p, compute_mode="donot_use_mm_for_euclid_dist")
    return distances


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[-1] == 0 or 0 in x.shape[:-2] or 0 in y.shape[:-2]:
        return _cdist(x, y, 2.0)
    unit = _unit(x, y)  # (..., 1, 1)
    cost = _cdist(x / unit, y / unit, 2.0)
    near = cost.detach() < _SMALL
    if has(near) and has(near & (_cdist(x.detach(), y.detach(), math.inf) > 0)):
        return _from_largest(x, y, 2.0)  # some are tiny beside others
    return cost * unit


def _unit(x: Tensor, y: Tensor) -> Tensor:
    """A power of two of the size of the largest coordinate, problem by problem."""
    large = torch.maximum(
        x.detach().abs().amax((-2, -1), keepdim=True), y.detach().abs().amax((-2, -1), keepdim=True)
    )
    exponent = torch.frexp(large).exponent.clamp(-1000, 1000) - 1
    return torch.ldexp(torch.ones_like(large), exponent)


def _from_largest(x: Tensor, y: Tensor, p: float) -> Tensor:
    """top (sum_k (|x_k - y_k| / top)^p)^(1/p), top the largest |x_k - y_k| of a pair.

    One coordinate after the other: memory n m, not n m d. The top has no derivative: the value does
    not depend on it.
    """
    top = _cdist(x.detach(), y.detach(), math.inf)
    apart = top > 0
    safe = torch.where(apart, top, 1.0)
    total = torch.where(apart, 0.0, torch.ones_like(top))
    for k in range(x.shape[-1]):
        share = (x[..., :, None, k] - y[..., None, :, k]).abs() / safe
        total = total + share**p
    return torch.where(apart, top * total ** (1 / p), 0.0)
