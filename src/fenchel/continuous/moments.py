"""From discrete weights at positions to the density with the same mean and covariance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import check_tensor, compute_dtype, has
from fenchel.continuous import matrices
from fenchel.continuous.densities import Density, Gaussian, Paraboloid, TsallisGaussian

# Of the spread of the positions: the least variance along any direction.
FLOOR = 1e-6


def weighted_moments(
    weights: Tensor, positions: Tensor, floor: float = FLOOR
) -> tuple[Tensor, Tensor]:
    """Mean (..., d) and covariance (..., d, d) of weights (..., L) at positions (L, d).

    The weights are divided by their sum. Where the covariance is smaller than `floor` times the
    mean variance of the positions along some direction (weights on one position, or on a line), it
    is raised to that by a multiple of the identity, which counts as a constant in derivatives.
    """
    weights, positions = checked_weights(weights, positions)
    share = weights / weights.sum(-1, keepdim=True)
    mean = share @ positions
    apart = positions - mean.unsqueeze(-2)  # (..., L, d)
    covariance = (share.unsqueeze(-1) * apart).mT @ apart
    centred = positions - positions.mean(0)
    spread = centred.square().mean()
    least = floor * torch.where(spread > 0, spread, torch.ones_like(spread))
    with torch.no_grad():
        raised = (least - matrices.smallest_eigenvalue(covariance)).clamp_min(0)
    eye = torch.eye(positions.shape[-1], dtype=positions.dtype, device=positions.device)
    return mean, covariance + raised[..., None, None] * eye


def match_moments(
    weights: Tensor,
    positions: Tensor,
    family: type[Gaussian] | type[Paraboloid] | type[TsallisGaussian],
    *,
    alpha: float | Tensor | None = None,
    floor: float = FLOOR,
) -> Any:
    """The density of that family with the weights' mean and covariance.

    weights (..., L) >= 0, positions (L, d) -> batch (...). `alpha` for `TsallisGaussian` alone.

    >>> weights = torch.tensor([0.25, 0.5, 0.25])
    >>> match_moments(weights, torch.tensor([[-1.0], [0.0], [1.0]]), Paraboloid).variance
    tensor([0.5000])
    """
    if not (isinstance(family, type) and issubclass(family, Density)):
        raise TypeError(f"family must be a class of densities such as Paraboloid, got {family!r}")
    needs_alpha = issubclass(family, TsallisGaussian)
    if needs_alpha != (alpha is not None):
        raise ValueError("alpha goes with TsallisGaussian, and with it alone")
    mean, covariance = weighted_moments(weights, positions, floor)
    if needs_alpha:
        return family.from_covariance(mean, covariance, alpha)  # type: ignore[call-arg, arg-type]
    return family.from_covariance(mean, covariance)  # type: ignore[call-arg]


def checked_weights(weights: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the precision of the computation; an error says what is wrong with them."""
    check_tensor(weights, "weights")
    check_tensor(positions, "positions")
    if positions.dim() != 2 or 0 in positions.shape:
        raise ValueError(f"positions must be (L, d) and not empty, got {tuple(positions.shape)}")
    if weights.dim() < 1 or weights.shape[-1] != len(positions):
        raise ValueError(
            f"weights must be (..., {len(positions)}), one for each position, "
            f"got {tuple(weights.shape)}"
        )
    for name, values in (("weights", weights), ("positions", positions)):
        if not values.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {values.dtype}")
        if has(~values.detach().isfinite()):
            raise ValueError(f"{name} must be finite; they hold NaN or infinity")
    if has(weights.detach() < 0):
        raise ValueError("weights must be >= 0; pass attention weights, not scores")
    if has(weights.detach().sum(-1) <= 0):
        raise ValueError("weights must not sum to zero; leave out rows without any weight")
    dtype = compute_dtype(torch.promote_types(weights.dtype, positions.dtype))
    return weights.to(dtype), positions.to(dtype)
