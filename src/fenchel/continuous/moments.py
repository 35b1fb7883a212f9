"""From discrete weights at positions to the density with the same mean and covariance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import check_finite, check_tensor, compute_dtype, dot, full_precision, has
from fenchel.continuous import matrices
from fenchel.continuous.densities import Gaussian, Paraboloid, TsallisGaussian

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
    origin = positions.detach().mean(0)  # far from zero, squares would lose the digits
    mean, covariance = moments_with_floor(
        normalise(weights), positions - origin, least_variance(positions, floor)
    )
    return mean + origin, covariance


def normalise(weights: Tensor) -> Tensor:
    """Divided by their sum, which may be beyond the largest float."""
    weights = weights / weights.detach().amax(-1, keepdim=True)
    return weights / weights.sum(-1, keepdim=True)


def least_variance(positions: Tensor, floor: float) -> Tensor:
    """`floor` times the mean variance of the positions. ()"""
    if not floor > 0:
        raise ValueError(
            f"floor must be > 0, got {floor}: weights on one position have no variance"
        )
    spread = (positions - positions.mean(0)).square().mean().detach()
    return floor * torch.where(spread > 0, spread, torch.ones_like(spread))


def moments_with_floor(share: Tensor, positions: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Under weights (..., L) that sum to one. (..., d), (..., d, d)"""
    with full_precision(positions):
        mean = share @ positions
    # By coordinates (..., L): their products in turn are faster than many small matrix products.
    apart = [
        line - centre.unsqueeze(-1)
        for line, centre in zip(positions.mT, mean.unbind(-1), strict=True)
    ]
    scaled = [share * line for line in apart]
    rows = [torch.stack([dot(left, right) for right in apart], -1) for left in scaled]
    covariance = torch.stack(rows, -2)
    smallest = matrices.smallest_eigenvalue(covariance.detach())
    raised = (least - smallest).clamp_min(0)
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
    if family not in (Gaussian, Paraboloid, TsallisGaussian):
        raise TypeError(f"family must be Gaussian, Paraboloid or TsallisGaussian, got {family!r}")
    needs_alpha = issubclass(family, TsallisGaussian)
    if needs_alpha and alpha is None:
        raise ValueError("TsallisGaussian needs alpha, from 1 to 4: pass alpha=1.5")
    if not needs_alpha and alpha is not None:
        raise ValueError(
            f"{family.__name__} has an alpha of its own; alpha={alpha} goes with TsallisGaussian"
        )
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
        check_finite(values, name)
    if has(weights.detach() < 0):
        raise ValueError("weights must be >= 0; pass attention weights, not scores")
    if has(weights.detach().sum(-1) <= 0):
        raise ValueError("weights must not sum to zero; leave out rows without any weight")
    dtype = compute_dtype(torch.promote_types(weights.dtype, positions.dtype))
    return weights.to(dtype), positions.to(dtype)
