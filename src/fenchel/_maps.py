"""The three maps people ask for by name. Each is `solve(...).weights`, in one native pass where
that is possible: numbers for alpha in [1, 2], no base, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._kernels.library import native
from fenchel._kernels.rows import tsallis_weights
from fenchel._numerics import compute_dtype, transformed
from fenchel._solve import solve
from fenchel.priors import Prior
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def softmax(scores: Tensor, *, base: Tensor | Prior | None = None, dim: int = -1) -> Tensor:
    """argmax_p <scores, p> - sum p log(p / base): every key gets something.

    >>> fl.softmax(torch.tensor([1.0, 0.0]))
    tensor([0.7311, 0.2689])
    """
    return solve(scores, Shannon(), base=base, dim=dim).weights


def sparsemax(scores: Tensor, *, base: Tensor | Prior | None = None, dim: int = -1) -> Tensor:
    """argmax_p <scores, p> - |p|^2 / 2: the Euclidean projection on the simplex.

    >>> fl.sparsemax(torch.tensor([1.0, 0.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    return _weights(scores, Tsallis(2.0), base, dim)


def entmax(
    scores: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    base: Tensor | Prior | None = None,
    dim: int = -1,
) -> Tensor:
    """argmax_p <scores, p> - Omega_alpha(p): softmax at alpha = 1, sparsemax at 2.

    >>> fl.entmax(torch.tensor([1.0, 0.5, -1.0]), alpha=1.5)
    tensor([0.6485, 0.3515, 0.0000])

    alpha: >= 1, a number or a tensor that broadcasts over the rows; differentiable.
    """
    return _weights(scores, Tsallis(alpha), base, dim)


def _weights(scores: Tensor, regularizer: Tsallis, base: Tensor | Prior | None, dim: int) -> Tensor:
    alpha = regularizer.alpha
    ordinary = base is None and not isinstance(alpha, Tensor) and 1 < alpha <= 2
    if not ordinary or not _fits(scores, dim):
        return solve(scores, regularizer, base=base, dim=dim).weights
    rows = scores.movedim(dim, -1)
    flat = rows.reshape(-1, rows.shape[-1]).to(compute_dtype(scores.dtype))
    weights: Tensor = tsallis_weights(flat, float(alpha) - 1.0)
    return weights.to(scores.dtype).reshape(rows.shape).movedim(-1, dim)


def _fits(scores: Tensor, dim: int) -> bool:
    """Whatever `solve` would refuse or mend is left to it."""
    if native() is None or not isinstance(scores, Tensor) or scores.device.type != "cpu":
        return False
    if not scores.is_floating_point() or scores.layout != torch.strided or scores.numel() == 0:
        return False
    if type(dim) is not int or not -scores.ndim <= dim < scores.ndim:
        return False
    return scores.dtype in _DTYPES and not transformed()
