"""Value functions: features at positions become a function of t, V(t) = B psi(t).

Ridge regression gives B = H' G with G = F' (F F' + ridge I)^-1, F the basis at the positions
(Farinhas, 2021, eq. 3.17). Under a density the context is E[V] = H' (G E[psi]), eq. 3.16: a
weighted sum of the features whose weights need neither B nor the channels.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import (
    certificate_dtype,
    check_finite,
    check_tensor,
    compute_dtype,
    full_precision,
    has,
)
from fenchel.continuous.bases import Basis


class ValueFit:
    """The regression, made once for positions (L, d) and a basis, and used for any features.

    `padding` doubles the box of the positions with points that hold zero, so that the function
    goes to zero beyond the border: the positions are taken to fill [0, 1]^d.
    """

    def __init__(
        self, positions: Tensor, basis: Basis, ridge: float = 0.01, padding: bool = False
    ) -> None:
        _check_positions(positions, basis)
        if not 0 <= ridge < float("inf"):
            raise ValueError(f"ridge must be a finite number >= 0, got {ridge}")
        if padding and has((positions.detach() < 0) | (positions.detach() > 1)):
            raise ValueError(
                "padding needs positions in [0, 1]^d; scale them, or use padding=False"
            )
        positions = positions.to(compute_dtype(positions.dtype))
        self.positions, self.basis, self.ridge, self.padding = positions, basis, ridge, padding
        self.at_positions = basis(positions)  # F', (L, N)
        self.operator = self._operator(self.at_positions.to(certificate_dtype(positions.device)))

    def masked(self, mask: Tensor) -> Tensor:
        """G of the regression on those positions alone where mask (..., L) holds. (..., L, N)

        Its rows are zero elsewhere; without any position all of it is.
        """
        at = self.at_positions.to(certificate_dtype(self.positions.device))
        return self._operator(at * mask.unsqueeze(-1))

    def _operator(self, at: Tensor) -> Tensor:
        """G, from F' at the positions, with rows of zeros for those left out. (..., L, N)"""
        gram = at.mT @ at
        if self.padding and not at.is_meta:  # on meta the border cannot be found, nor seen
            around = self.basis(border(self.positions)).to(at.dtype)
            gram = gram + around.mT @ around
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        factor, info = torch.linalg.cholesky_ex(gram + self.ridge * eye)
        if self.ridge == 0 and has(_is_singular(gram)):
            border_too = " and the border of the padding" if self.padding else ""
            raise ValueError(
                f"without a ridge {len(self.positions)} positions{border_too} do not determine "
                f"{gram.shape[-1]} basis functions; give a ridge > 0, more positions or fewer "
                "functions"
            )
        if has(info != 0):
            raise ValueError(
                f"the regression is singular at ridge {self.ridge}; use a larger ridge"
            )
        return torch.cholesky_solve(at.mT, factor).mT.to(self.positions.dtype)

    def __call__(self, features: Tensor) -> Values:
        """features (..., L, channels)"""
        return Values(features, self)

    def __repr__(self) -> str:
        last = f"ridge {self.ridge}{', padding' if self.padding else ''}"
        return f"ValueFit({len(self.positions)} positions, {self.basis}, {last})"


class Values:
    """A function of t fitted to features (..., L, channels)."""

    def __init__(self, features: Tensor, fit: ValueFit) -> None:
        check_tensor(features, "features")
        if not features.is_floating_point():
            raise TypeError(f"features must be floating point, got {features.dtype}; use .float()")
        if features.dim() < 2 or features.shape[-2] != len(fit.positions):
            raise ValueError(
                f"features must be (..., {len(fit.positions)}, channels), one for each position, "
                f"got {tuple(features.shape)}"
            )
        self.features, self.fit = features, fit

    @property
    def coefficients(self) -> Tensor:
        """B', (..., N, channels)"""
        return average_features(self.fit.operator.mT, self.features)

    def __call__(self, points: Tensor) -> Tensor:
        """V at points (P, d). (..., P, channels)"""
        operator = self.fit.operator
        at = self.fit.basis(points).to(operator.dtype)
        with full_precision(at):
            weights = at @ operator.mT  # (P, L)
        return average_features(weights, self.features)

    def expect(self, density: Any, tolerance: float | None = None) -> Tensor:
        """E[V] under each density; its batch broadcasts with the features'. (..., channels)

        For several densities of each example give the features an axis for them:
        features[:, None] (B, 1, L, channels) with densities (B, Q) gives (B, Q, channels).
        """
        _check_batches(density.batch_shape, self.features)
        return self.combine(density.expect(self.fit.basis, tolerance))

    def combine(self, expected: Tensor) -> Tensor:
        """From expected basis functions (..., N). (..., channels)"""
        _check_batches(expected.shape[:-1], self.features)
        with full_precision(expected):
            weights = expected.to(self.fit.operator.dtype) @ self.fit.operator.mT  # (..., L)
        return average_features(weights.unsqueeze(-2), self.features).squeeze(-2)

    def __repr__(self) -> str:
        return f"Values(features {tuple(self.features.shape)}, {self.fit})"


def average_features(weights: Tensor, features: Tensor) -> Tensor:
    """weights (..., P, L) @ features (..., L, channels), in the features' dtype.

    Half precision is computed in float32, as everywhere.
    """
    dtype = compute_dtype(features.dtype)
    with full_precision(features):
        return (weights.to(dtype) @ features.to(dtype)).to(features.dtype)


def fit_values(
    features: Tensor, positions: Tensor, basis: Basis, ridge: float = 0.01, padding: bool = False
) -> Values:
    """The value function of features (..., L, channels) at positions (L, d).

    To fit many features at the same positions make one `ValueFit` and call it.

    >>> import fenchel.continuous as fc
    >>> positions = fc.cell_centers(14, 14)
    >>> values = fit_values(positions, positions, fc.GaussianBasis.grid(7, 0.01, 2))
    >>> values.expect(fc.Gaussian(torch.tensor([0.5, 0.5]), 0.01 * torch.eye(2)))
    tensor([0.5000, 0.5000])
    """
    check_tensor(features, "features")
    return ValueFit(positions, basis, ridge, padding)(features)


def border(positions: Tensor) -> Tensor:
    """Points around [0, 1]^d, spaced as the positions are, out to [-1/2, 3/2]^d. (M, d)"""
    moves = [move for move in itertools.product((-1, 0, 1), repeat=positions.shape[1]) if any(move)]
    shifts = torch.tensor(moves, dtype=positions.dtype, device=positions.device)
    copies = (positions + shifts.unsqueeze(1)).flatten(0, 1)
    near = ((copies >= -0.5) & (copies <= 1.5)).all(-1)
    return copies[near]


def _check_positions(positions: Tensor, basis: Basis) -> None:
    check_tensor(positions, "positions")
    d = basis.centers.shape[1]
    if positions.dim() != 2 or positions.shape[1] != d or not len(positions):
        raise ValueError(f"positions must be (L, {d}) with L >= 1, got {tuple(positions.shape)}")
    if not positions.is_floating_point():
        raise TypeError(f"positions must be floating point, got {positions.dtype}")
    check_finite(positions, "positions")


def _check_batches(batch: torch.Size, features: Tensor) -> None:
    try:
        torch.broadcast_shapes(batch, features.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"densities of batch {tuple(batch)} do not broadcast with features "
            f"{tuple(features.shape)}, whose batch is {tuple(features.shape[:-2])}; for several "
            "densities of each example pass features[:, None]"
        ) from None


def _is_singular(gram: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(gram)
    return values[..., 0] <= gram.shape[-1] * torch.finfo(gram.dtype).eps * values[..., -1]
