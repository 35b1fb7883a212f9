"""The threshold of normmax: |[z - t]_+|_q = 1 with 1/alpha + 1/q = 1, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._kernels.operators import row_operator

_MAX_STEPS = 200
_UNROLLED = 32  # steps of a search that cannot stop by itself


@row_operator("norm_threshold", columns=1)
def norm_threshold(scores: Tensor, eps: Tensor) -> Tensor:
    """t (..., 1), eps = alpha - 1 (..., 1), for scores with row maximum 0 and dead keys at -inf."""
    return _search(scores, eps, None)


def unrolled_threshold(scores: Tensor, eps: Tensor) -> Tensor:
    """`norm_threshold` in steps whose number no value decides."""
    return _search(scores, eps, _UNROLLED)


def _search(scores: Tensor, eps: Tensor, unrolled: int | None) -> Tensor:
    """Newton on the norm from t = -1, where the largest key alone has norm one. A norm of an affine
    function is convex, so that every step stays left of the root and the sequence grows."""
    rows = torch.broadcast_shapes(scores.shape[:-1], eps.shape[:-1])
    z, q = scores.expand(*rows, -1), ((1 + eps) / eps).expand(*rows, 1)
    alive = (z > -torch.inf).any(-1, keepdim=True)
    t = torch.full((*rows, 1), -1.0, dtype=z.dtype, device=z.device)
    for _ in range(unrolled or _MAX_STEPS):
        y = (z - t).clamp(min=0)  # at most one: t >= -1
        norm = y.pow(q).sum(-1, keepdim=True).pow(1 / q)
        slope = (y / norm).pow(q - 1).sum(-1, keepdim=True)
        following = t + (norm - 1) / slope
        grown = alive & (following > t)
        if unrolled is None and not bool(grown.any()):
            break
        t = torch.where(grown, following, t)
    return t
