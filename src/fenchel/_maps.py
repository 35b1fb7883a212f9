"""The three maps people ask for by name: `solve(...).weights`, and as fast."""

from __future__ import annotations

from torch import Tensor

from fenchel._solve import solve
from fenchel.priors import Prior
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis


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
    return solve(scores, Tsallis(2.0), base=base, dim=dim).weights


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
    return solve(scores, Tsallis(alpha), base=base, dim=dim).weights
