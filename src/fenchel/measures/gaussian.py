"""The normal law as a measure: exact under sums and affine maps, by quadrature for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, check_tensor, check_whole, has
from fenchel.continuous import matrices
from fenchel.continuous.densities import Gaussian
from fenchel.measures.measure import Function, Measure, check_offset, check_points

if TYPE_CHECKING:
    from fenchel.measures.empirical import Empirical

_MOST_AXES = 3  # of a tensor rule: order^d points


@dataclass(frozen=True, eq=False)
class GaussianMeasure(Measure):
    """N(mean, covariance), mean (..., d), covariance (..., d, d) positive semidefinite.

    A measure and not a density: a covariance of zero is a Dirac. For densities, with log_prob, see
    `fenchel.continuous.Gaussian`, which `density` gives.

    >>> g = GaussianMeasure(torch.tensor([1.0, 0.0]), torch.eye(2))
    >>> g.expectation(lambda x: x.square().sum(-1)).round()  # |mean|^2 + trace
    tensor(3.)
    """

    _mean: Tensor
    _covariance: Tensor

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        check_points(mean, "mean", axes=1)
        _check_covariance(covariance, mean)
        dtype = torch.promote_types(mean.dtype, covariance.dtype)
        object.__setattr__(self, "_mean", mean.to(dtype))
        object.__setattr__(self, "_covariance", covariance.to(dtype))

    @classmethod
    def _unchecked(cls, mean: Tensor, covariance: Tensor) -> GaussianMeasure:
        """Of a covariance that is right by construction."""
        measure = object.__new__(cls)
        object.__setattr__(measure, "_mean", mean)
        object.__setattr__(measure, "_covariance", matrices.symmetric(covariance))
        return measure

    @property
    def dim(self) -> int:
        return self._mean.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        shape: torch.Size = torch.broadcast_shapes(
            self._mean.shape[:-1], self._covariance.shape[:-2]
        )
        return shape

    @property
    def mean(self) -> Tensor:
        return self._mean.expand(*self.batch_shape, self.dim)

    @property
    def covariance(self) -> Tensor:
        return self._covariance.expand(*self.batch_shape, self.dim, self.dim)

    @property
    def density(self) -> Gaussian:
        """As a `fenchel.continuous.Gaussian`; the covariance must be positive definite."""
        return Gaussian(self.mean, self.covariance)

    # ---- integrals

    def expectation(self, function: Function, order: int = 20) -> Tensor:
        """By the tensor rule of Gauss and Hermite: exact for degrees up to 2 order - 1 an axis.

        function: (..., n, d) -> (..., n) or (..., n, e). Up to three dimensions.
        """
        return self.quadrature(order).expectation(function)

    def quadrature(self, order: int = 20) -> Empirical:
        """The rule itself: order^d weighted points with the same moments up to degree 2 order - 1.

        Derivatives in the covariance need it positive definite.
        """
        from fenchel.measures.empirical import Empirical

        check_whole(order, "order", 1)
        if self.dim > _MOST_AXES:
            raise ValueError(
                f"quadrature takes order^d points and is for d <= {_MOST_AXES}, got d = {self.dim};"
                " use .sample(n, generator), which returns an Empirical"
            )
        nodes, weights = _hermite(order, self._mean)
        grid = torch.cartesian_prod(*[nodes] * self.dim).reshape(-1, self.dim)
        product = torch.cartesian_prod(*[weights] * self.dim).reshape(-1, self.dim).prod(-1)
        return Empirical._unchecked(self._carry(grid), product / product.sum())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Empirical:
        """n independent draws, each of weight 1 / n; differentiable in mean and covariance."""
        from fenchel.measures.empirical import Empirical

        check_whole(n, "n", 1)
        shape = (*self.batch_shape, n, self.dim)
        like = self._mean
        normal = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        return Empirical(self._carry(normal))

    def _carry(self, standard: Tensor) -> Tensor:
        """mean + root z for standard normal z. (..., n, d) -> (..., n, d)"""
        return self.mean.unsqueeze(-2) + standard @ _root(self.covariance).mT

    # ---- what can be made of it

    def translate(self, offset: Tensor) -> GaussianMeasure:
        check_offset(offset)
        if offset.shape[-1] != self.dim:
            raise ValueError(
                f"offset lives in dimension {offset.shape[-1]}, the measure in {self.dim}"
            )
        return GaussianMeasure._unchecked(self._mean + offset, self._covariance)

    def push(self, matrix: Tensor, offset: Tensor | None = None) -> GaussianMeasure:
        """The law of matrix X + offset, exactly; matrix (..., e, d), offset (..., e).

        >>> GaussianMeasure(torch.ones(2), torch.eye(2)).push(torch.tensor([[1.0, 1.0]])).covariance
        tensor([[2.]])
        """
        check_tensor(matrix, "matrix")
        if matrix.dim() < 2 or matrix.shape[-1] != self.dim:
            raise ValueError(f"matrix must be (..., e, {self.dim}), got {tuple(matrix.shape)}")
        mean = matrices.multiply(matrix, self._mean)
        mean = mean if offset is None else mean + offset
        return GaussianMeasure._unchecked(mean, matrix @ self._covariance @ matrix.mT)

    def convolve(self, other: Measure) -> GaussianMeasure:
        """The law of X + Y for independent X and Y: means and covariances add."""
        # Vuckovic et al. (2020), definition 13
        if not isinstance(other, Measure):
            raise TypeError(f"other must be a measure, got {type(other).__name__}")
        if other.dim != self.dim:
            raise ValueError(f"other lives in dimension {other.dim}, the measure in {self.dim}")
        if isinstance(other, GaussianMeasure):
            spread = self._covariance + other._covariance
            return GaussianMeasure._unchecked(self._mean + other._mean, spread)
        if getattr(other, "size", 0) != 1:
            raise ValueError(
                f"a Gaussian convolved with {getattr(other, 'size', 'many')} points is a mixture "
                "of Gaussians, which is no measure of this room; use fenchel.continuous.Mixture "
                "with their means, or convolve a .quadrature(order) of it"
            )
        return self.translate(other.mean)

    def __repr__(self) -> str:
        return f"GaussianMeasure(batch {tuple(self.batch_shape)}, d {self.dim})"


def _check_covariance(covariance: object, mean: Tensor) -> None:
    check_points(covariance, "covariance", axes=0)
    assert isinstance(covariance, Tensor)
    d = mean.shape[-1]
    if d == 0:
        raise ValueError(f"a Gaussian needs a dimension, got a mean {tuple(mean.shape)}")
    if covariance.shape[-2:] != (d, d):
        raise ValueError(
            f"covariance must be (..., {d}, {d}), got {tuple(covariance.shape)}; of variances use "
            "torch.diag_embed(variances)"
        )
    values = covariance.detach()
    slack = 64 * d * torch.finfo(values.dtype).eps * values.abs().amax((-1, -2))
    if has((values - values.mT).abs().amax((-1, -2)) > slack):
        raise ValueError("covariance must be symmetric; use (A + A.mT) / 2")
    smallest = torch.linalg.eigvalsh(values.to(certificate_dtype(values.device)))[..., 0]
    if has(smallest < -slack):
        raise ValueError(
            "covariance must be positive semidefinite, its smallest eigenvalue is "
            f"{float(smallest.min()):.3g}; add a multiple of the identity"
        )


def _root(covariance: Tensor) -> Tensor:
    """R with R R' = covariance: Cholesky's, or, where some are singular, the symmetric one."""
    if not has(torch.linalg.cholesky_ex(covariance.detach()).info != 0):
        return matrices.cholesky(covariance)
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def _hermite(order: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the standard normal law, by Golub and Welsch: eigenvalues of the Jacobi
    matrix, with off-diagonal sqrt(k), and squares of the vectors' first entries."""
    dtype = certificate_dtype(like.device)
    beside = torch.arange(1, order, dtype=dtype, device=like.device).sqrt()
    jacobi = torch.diag(beside, 1) + torch.diag(beside, -1)
    nodes, vectors = torch.linalg.eigh(jacobi)
    return nodes.to(like.dtype), vectors[0].square().to(like.dtype)
