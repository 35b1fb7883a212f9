"""Functions psi_1 .. psi_N over R^d, in which value functions are written.

A basis knows its values at points and its expectations under the densities of this room.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from fenchel._numerics import check_finite, check_tensor, check_whole, compute_dtype, has
from fenchel.continuous import expectations, matrices
from fenchel.continuous.densities import Density, Paraboloid
from fenchel.continuous.overlap import under_tsallis as overlap


class Basis(Protocol):
    """What value functions and densities ask of a basis."""

    centers: Tensor  # (N, d)

    def __call__(self, points: Tensor) -> Tensor: ...

    def expectation(self, density: Density, tolerance: float | None = None) -> Tensor: ...


class ExpectationWithError(NamedTuple):
    """Expected basis functions and how wrong they may be, both (..., N)."""

    value: Tensor
    error: Tensor


def expect_with_error(
    density: Any, basis: Basis, tolerance: float | None = None
) -> ExpectationWithError:
    """`density.expect(basis)` with an estimate of its error: the distance to a finer computation.

    >>> basis = GaussianBasis.grid(10, 0.001, 2)
    >>> density = Paraboloid(torch.tensor([0.5, 0.5]), 0.1 * torch.eye(2))
    >>> found = expect_with_error(density, basis, 1e-4)
    >>> bool((found.error <= 1e-4 * (1 + found.value)).all())
    True
    """
    tolerance = _tolerance(tolerance, density)
    value = density.expect(basis, tolerance)
    with torch.no_grad():
        finer = density.expect(basis, max(1e-3 * tolerance, _LEAST_TOLERANCE))
    return ExpectationWithError(value, (value.detach() - finer).abs())


class GaussianBasis:
    """psi_j(t) = N(t; centers_j, covariances_j). centers (N, d), covariances (N, d, d) or (d, d).

    >>> basis = GaussianBasis(torch.tensor([[0.0], [1.0]]), 0.1 * torch.eye(1))
    >>> from fenchel.continuous import Gaussian
    >>> Gaussian(torch.zeros(1), torch.eye(1)).expect(basis)
    tensor([0.3804, 0.2414])
    """

    def __init__(self, centers: Tensor, covariances: Tensor) -> None:
        self.centers, self.covariances = _read_basis(centers, covariances, "covariances")

    @classmethod
    def grid(
        cls, count: int, variance: float, dim: int, low: float = 0.0, high: float = 1.0
    ) -> Self:
        """count^dim equal functions in the cells' centres of [low, high]^dim."""
        _check_variance(variance)
        return cls(cell_centers(*[count] * dim, low=low, high=high), variance * torch.eye(dim))

    def __call__(self, points: Tensor) -> Tensor:
        """points (..., d) -> (..., N)"""
        factor = matrices.cholesky(self.covariances)
        return matrices.normal_log_density(_apart(points, self.centers), factor).exp()

    def __len__(self) -> int:
        return int(self.centers.shape[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} functions, d {self.centers.shape[1]})"

    def to(self, *target: Any, **options: Any) -> Self:
        """As `Tensor.to`."""
        move = (x.to(*target, **options) for x in (self.centers, self.covariances))
        return type(self)(*move)

    def expectation(self, density: Density, tolerance: float | None = None) -> Tensor:
        """E[psi_j] under each density of the batch. (..., N)"""
        _check_dim(density, self.centers)
        tolerance = _tolerance(tolerance, density)
        mean, scale = density.mean.unsqueeze(-2), density.scale.unsqueeze(-3)
        centre, covariance = self.centers.to(mean.device), self.covariances.to(mean.device)
        if _is(density, 1.0):
            return expectations.under_gaussian(mean, scale, centre, covariance)
        if _is(density, 2.0):
            return expectations.under_paraboloid(mean, scale, centre, covariance, tolerance)
        eps = _eps(density).unsqueeze(-1)
        operands = (mean, scale, centre, covariance)
        expectation = expectations.under_tsallis(
            *operands, _away_from_zero(eps, _SMALLEST), tolerance
        )
        if not has(eps < _SMALLEST):
            return expectation
        # The value and derivatives of the Gaussian, and the derivative in alpha of the others.
        fixed = (mean.detach(), scale.detach(), centre.detach(), covariance.detach())
        slope = expectations.under_tsallis(*fixed, _away_from_zero(eps, _SMALLEST), tolerance)
        gaussian = expectations.under_gaussian(*operands).to(expectation.dtype) + (
            slope - slope.detach()
        )
        return torch.where(eps < _SMALLEST, gaussian, expectation)


class ParaboloidBasis:
    """psi_j = the truncated paraboloid of centre and scale j. centers (N, d), scales (N, d, d).

    Under a Gaussian any dimension up to 3; under sparse densities 1 (exact) and 2 (to 1e-6).
    """

    def __init__(self, centers: Tensor, scales: Tensor) -> None:
        self.centers, self.scales = _read_basis(centers, scales, "scales")

    @classmethod
    def grid(
        cls, count: int, variance: float, dim: int, low: float = 0.0, high: float = 1.0
    ) -> Self:
        """count^dim equal functions of that variance, centred in the cells of [low, high]^dim."""
        _check_variance(variance)
        centers = cell_centers(*[count] * dim, low=low, high=high)
        one = Paraboloid.from_covariance(centers[0], variance * torch.eye(dim))
        return cls(centers, one.scale)

    def __call__(self, points: Tensor) -> Tensor:
        """points (..., d) -> (..., N)"""
        return Paraboloid(self.centers, self.scales).prob(points.unsqueeze(-2))

    def __len__(self) -> int:
        return int(self.centers.shape[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} functions, d {self.centers.shape[1]})"

    def to(self, *target: Any, **options: Any) -> Self:
        """As `Tensor.to`."""
        move = (x.to(*target, **options) for x in (self.centers, self.scales))
        return type(self)(*move)

    def expectation(self, density: Density, tolerance: float | None = None) -> Tensor:
        """E[psi_j] under each density of the batch. (..., N)"""
        _check_dim(density, self.centers)
        tolerance = _tolerance(tolerance, density)
        mean, scale = density.mean.unsqueeze(-2), density.scale.unsqueeze(-3)
        centre, basis_scale = self.centers.to(mean.device), self.scales.to(mean.device)
        if _is(density, 1.0):  # the integral of a product does not mind which factor is the density
            return expectations.under_paraboloid(centre, basis_scale, mean, scale, tolerance)
        if density.dim > 2:
            raise ValueError(
                f"paraboloids under a sparse density need d <= 2, got {density.dim}; "
                "use GaussianBasis, or a Gaussian density"
            )
        eps = _eps(density).unsqueeze(-1)
        expectation = overlap(mean, scale, eps.clamp_min(_NEAR), centre, basis_scale, tolerance)
        if not has(eps < _NEAR):
            return expectation
        # Next to alpha = 1 a straight line from the Gaussian: the bend is of the order of _NEAR^2.
        gaussian = expectations.under_paraboloid(centre, basis_scale, mean, scale, tolerance)
        part = (eps / _NEAR).to(expectation.dtype)
        return torch.where(eps < _NEAR, gaussian + part * (expectation - gaussian), expectation)


_LEAST_TOLERANCE = 1e-14
_NEAR = 1e-4
_SMALLEST = 1e-9  # alpha - 1 below it is computed as a Gaussian, which differs by as little


def _away_from_zero(eps: Tensor, least: float) -> Tensor:
    """Moved to `least` where it is less, with the derivative of what it was."""
    return eps + (eps.clamp_min(least) - eps).detach()


def cell_centers(
    *counts: int,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Centres of the cells of [low, high]^d cut into so many along each axis, the last one fastest.

    >>> cell_centers(2)
    tensor([[0.2500],
            [0.7500]])
    """
    if not counts or not low < high:
        raise ValueError(f"need a count for each axis and low < high, got {counts}, {low}, {high}")
    for count in counts:
        check_whole(count, "counts", 1)
    lines = ([low + (high - low) * (i + 0.5) / count for i in range(count)] for count in counts)
    return torch.tensor(list(itertools.product(*lines)), dtype=dtype, device=device)


def _read_basis(centers: Tensor, squares: Tensor, name: str) -> tuple[Tensor, Tensor]:
    check_tensor(centers, "centers")
    check_tensor(squares, name)
    if centers.dim() != 2 or not centers.is_floating_point() or 0 in centers.shape:
        raise ValueError(f"centers must be (N, d) and not empty, got {tuple(centers.shape)}")
    matrices.check_positive_definite(squares, name)
    n, d = centers.shape
    if squares.shape not in ((d, d), (n, d, d)):
        raise ValueError(
            f"{name} must be ({d}, {d}) or ({n}, {d}, {d}), got {tuple(squares.shape)}"
        )
    check_finite(centers, "centers")
    centers = centers.to(compute_dtype(centers.dtype))  # half precision: in float32, as everywhere
    return centers, squares.to(centers.dtype).expand(n, d, d)


def _check_variance(variance: float) -> None:
    if not 0 < variance < math.inf:
        raise ValueError(f"variance must be a finite number > 0, got {variance}")


def _check_dim(density: Density, centers: Tensor) -> None:
    if density.dim != centers.shape[1]:
        raise ValueError(f"the density has d = {density.dim}, the basis d = {centers.shape[1]}")


def _apart(points: Tensor, centers: Tensor) -> Tensor:
    """(..., N, d)"""
    if points.shape[-1] != centers.shape[1]:
        raise ValueError(f"points must be (..., {centers.shape[1]}), got {tuple(points.shape)}")
    return points.unsqueeze(-2) - centers


def _tolerance(tolerance: float | None, density: Any) -> float:
    if tolerance is None:
        return expectations.default_tolerance(density.mean.dtype)
    if not _LEAST_TOLERANCE <= tolerance <= 1e-2:
        raise ValueError(f"tolerance must be between {_LEAST_TOLERANCE} and 0.01, got {tolerance}")
    return float(tolerance)


def _is(density: Density, alpha: float) -> bool:
    return not isinstance(density.alpha, Tensor) and density.alpha == alpha


def _eps(density: Density) -> Tensor:
    return density._eps.expand(density.batch_shape)
