"""From scores to the density that belongs to a regulariser: weights, their moments, the member."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._numerics import compute_dtype, where
from fenchel._solve import solve
from fenchel.continuous import (
    Density,
    Gaussian,
    Mixture,
    Paraboloid,
    TsallisGaussian,
    match_moments,
)
from fenchel.regularizers import Regularizer, Shannon, Tsallis


class Member:
    """The density that belongs to a regulariser of the discrete map."""

    def __init__(self, regularizer: Regularizer) -> None:
        if isinstance(regularizer, Shannon):
            self.alpha: float | Tensor = 1.0
        elif isinstance(regularizer, Tsallis):
            self.alpha = regularizer.alpha
        else:
            raise TypeError(
                f"continuous attention knows Shannon() and Tsallis(alpha), got {regularizer!r}"
            )
        if not (isinstance(regularizer.temperature, float | int) and regularizer.temperature == 1):
            raise ValueError("the temperature must be 1: divide the scores by it")

    def _of(self, batch: torch.Size) -> float | Tensor:
        """alpha for a batch of densities: a number, or a tensor that broadcasts to it."""
        alpha = self.alpha
        if not isinstance(alpha, Tensor):
            return alpha
        while alpha.dim() > len(batch) and alpha.shape[0] == 1:  # (1, 1) of LearnedTsallis(1)
            alpha = alpha[0]
        # One alpha per head is (heads, 1), for scores (..., heads, queries, L).
        if alpha.dim() > len(batch) or any(
            size not in (1, whole)
            for size, whole in zip(reversed(alpha.shape), reversed(batch), strict=False)
        ):
            raise ValueError(
                f"alpha must broadcast to the batch of the scores, {tuple(batch)}, "
                f"got {tuple(self.alpha.shape)}"  # type: ignore[union-attr]
            )
        return alpha

    def match(self, weights: Tensor, positions: Tensor) -> Density:
        """With the moments of the weights."""
        density: Density
        if isinstance(self.alpha, Tensor) or self.alpha not in (1.0, 2.0):
            alpha = self._of(weights.shape[:-1])
            density = match_moments(weights, positions, TsallisGaussian, alpha=alpha)
        else:
            family = Gaussian if self.alpha == 1.0 else Paraboloid
            density = match_moments(weights, positions, family)
        return density

    def mixture(self, gaussians: Mixture) -> Mixture:
        """The same moments in every mode."""
        alpha = self._of(gaussians.batch_shape)
        mean, covariance = gaussians.components.mean, gaussians.components.covariance_matrix
        if isinstance(alpha, Tensor):
            alpha = alpha.unsqueeze(-1) if alpha.dim() else alpha  # the axis of modes comes last
        elif alpha == 1.0:
            return gaussians
        elif alpha == 2.0:
            return Mixture(gaussians.mixing, Paraboloid.from_covariance(mean, covariance))
        modes = TsallisGaussian.from_covariance(mean, covariance, alpha)
        return Mixture(gaussians.mixing, modes)


def even_where_empty(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over what is visible; even over all positions where nothing is. (..., L)"""
    scores = scores.to(compute_dtype(scores.dtype))
    weights = solve(scores, Shannon(), base=visible).weights
    if visible is None:
        return weights
    return where(visible.any(-1, keepdim=True), weights, 1 / scores.shape[-1])
