"""Densities on R^d that solve max E_p[f] - Omega_alpha(p) for a quadratic score f.

    f(t) = -(t - mean)' scale^-1 (t - mean) / 2

`Gaussian` is alpha = 1 (continuous softmax), `Paraboloid` alpha = 2 (continuous sparsemax), whose
support is an ellipsoid, and `TsallisGaussian` any alpha from 1 to 4. See `tsallis.py` for formulas.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from fenchel._numerics import certificate_dtype, check_finite, check_tensor, compute_dtype, has
from fenchel.continuous import matrices, tsallis
from fenchel.continuous.support import Ellipsoid

_LARGEST_ALPHA = 4.0
NO_CDF = "there is no cdf here; count samples below the value: (sample((n,)) <= value).all(-1)"


class Density(Distribution):
    """What the members share. mean (..., d), scale (..., d, d), alpha a number or (...)."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}  # checked here, with reasons
    has_rsample = True

    def __init__(self, mean: Tensor, scale: Tensor, alpha: float | Tensor) -> None:
        _check(mean, scale, "scale")
        dtype = compute_dtype(torch.promote_types(mean.dtype, scale.dtype))
        self.alpha = _checked_alpha(alpha)
        eps = torch.as_tensor(self.alpha, dtype=dtype, device=mean.device) - 1
        d = mean.shape[-1]
        batch = torch.broadcast_shapes(mean.shape[:-1], scale.shape[:-2], eps.shape)
        self._eps = eps
        self._mean = mean.to(dtype).expand(*batch, d)
        self._scale = scale.to(dtype).expand(*batch, d, d)
        # Factored before it is spread over the batch,
        # and in float64: in float32 a thin ellipse loses its digits.
        wide = matrices.cholesky(scale.to(certificate_dtype(scale.device)))
        self._factor = wide.to(dtype).expand(*batch, d, d)
        self._half_log_det = matrices.half_log_det(wide).to(dtype).expand(batch)
        super().__init__(batch, torch.Size([d]), validate_args=False)

    # ---- what it is

    @property
    def dim(self) -> int:
        return int(self.event_shape[0])

    @property
    def mean(self) -> Tensor:
        """(..., d)"""
        return self._mean

    @property
    def mode(self) -> Tensor:
        """(..., d)"""
        return self._mean

    @property
    def scale(self) -> Tensor:
        """(..., d, d)"""
        return self._scale

    @property
    def log_peak(self) -> Tensor:
        """log of the density at its mean. (...)"""
        peak = tsallis.log_peak(self._eps, self.dim, self._half_log_det)
        return peak.expand(self.batch_shape)

    @property
    def level(self) -> Tensor:
        """Where the score is above -level there is mass; infinite for alpha = 1. (...)"""
        return (self._eps * self.log_peak).exp() / self._eps

    @property
    def covariance_matrix(self) -> Tensor:
        """(..., d, d)"""
        factor = tsallis.covariance_factor(self._eps, self.dim, self.log_peak)
        return matrices.symmetric(self._scale) * factor[..., None, None]

    @property
    def variance(self) -> Tensor:
        """(..., d)"""
        return self.covariance_matrix.diagonal(dim1=-2, dim2=-1)

    @property
    def support(self) -> Ellipsoid:
        """{t : (t - mean)' scale^-1 (t - mean) / 2 < level}."""
        return Ellipsoid(self._mean, self._factor, self.level)

    def projection(self) -> tuple[Tensor, Tensor]:
        """The interval that the support covers on each axis: (low, high), each (..., d)."""
        reach = (2 * self.level).sqrt().unsqueeze(-1)
        half = reach * self._scale.diagonal(dim1=-2, dim2=-1).sqrt()
        return self._mean - half, self._mean + half

    # ---- what it does

    def log_prob(self, value: Tensor) -> Tensor:
        """-inf off the support. value (..., d)."""
        check_tensor(value, "value")
        if value.shape[-1:] != self.event_shape:
            raise ValueError(f"value must be (..., {self.dim}), got {tuple(value.shape)}")
        squared = matrices.squared_length(self._factor, value - self._mean)
        return tsallis.log_density(self._eps, self.log_peak, squared)

    def prob(self, value: Tensor) -> Tensor:
        """The density itself; 0 off the support."""
        return self.log_prob(value).exp()

    def entropy(self) -> Tensor:
        """Tsallis entropy of this alpha, (1 - integral of p^alpha) / (alpha (alpha - 1)). (...)"""
        return -tsallis.negative_entropy(self._eps, self.dim, self.log_peak)

    def cdf(self, value: Tensor) -> Tensor:
        """Refused: in more than one dimension it has no closed form."""
        raise NotImplementedError(NO_CDF)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """mean + L n sqrt(rho / (eps (|n|^2 / 2 + G))), n normal and G of shape 1 / eps + 1.

        |n|^2 / (|n|^2 + 2 G) is the Beta variable of the squared radius; eps G goes to 1 with eps.
        The derivative in alpha is unbiased, and noisy near alpha = 1.
        """
        shape = self._extended_shape(torch.Size(sample_shape))
        normal = torch.randn(shape, dtype=self._mean.dtype, device=self._mean.device)
        # Closer to 1 the law differs by as little, and the derivative in alpha loses its digits.
        eps = self._eps + (self._eps.clamp_min(1e-5) - self._eps).detach()
        gamma = torch._standard_gamma((1 / eps + 1).expand(shape[:-1]))
        size = eps * (normal.square().sum(-1) / 2 + gamma)
        stretch = (self._eps * self.log_peak / 2).exp() / size.sqrt()
        return self._mean + matrices.multiply(self._factor, normal) * stretch.unsqueeze(-1)

    def fenchel_young(self, target: Density) -> Tensor:
        """Omega*(f) + Omega(target) - E_target[f] >= 0, zero where target is this density. (...)

        For alpha = 1 it is the Kullback–Leibler divergence of the target from this density.
        """
        if not isinstance(target, Density):
            raise TypeError(f"target must be a density of this module, got {type(target).__name__}")
        # 1.3 is not the same number in float32 and float64
        slack = 4 * max(torch.finfo(x.dtype).eps for x in (self._eps, target._eps))
        if target.dim != self.dim or has((target._eps - self._eps).abs() > slack):
            raise ValueError(
                f"target must have the dimension and alpha of the prediction, {self.dim} and "
                f"{self.alpha}, got {target.dim} and {target.alpha}"
            )
        omega_target, omega_self = -target.entropy(), -self.entropy()
        return omega_target - omega_self + self._mean_score(self) - self._mean_score(target)

    def _mean_score(self, of: Density) -> Tensor:
        """E_of[f], f the score of this density. (...)"""
        shift = matrices.squared_length(self._factor, of._mean - self._mean)
        inner = tsallis.covariance_factor(of._eps, of.dim, of.log_peak)
        columns = matrices.solve_lower(self._factor.unsqueeze(-3), of._factor.mT)
        return -0.5 * (shift + inner * columns.square().sum((-1, -2)))

    def expect(self, basis: Any, tolerance: float | None = None) -> Tensor:
        """E_p[psi_j] for every function of a basis. (..., N)

        `tolerance`: error relative to 1 + |value|, from 1e-14 to 0.01; by default 1e-9 in float64
        and 1e-6 in float32.
        """
        if not hasattr(basis, "expectation"):
            raise TypeError(
                f"basis must be a GaussianBasis or ParaboloidBasis, got {type(basis).__name__}"
            )
        expected: Tensor = basis.expectation(self, tolerance)
        return expected

    # ---- how others make one

    @classmethod
    def _like(cls, mean: Tensor, scale: Tensor, alpha: float | Tensor) -> Self:
        raise NotImplementedError

    @classmethod
    def _of_covariance(cls, mean: Tensor, covariance: Tensor, alpha: float | Tensor) -> Self:
        _check(mean, covariance, "covariance")
        dtype = compute_dtype(torch.promote_types(mean.dtype, covariance.dtype))
        covariance, d = covariance.to(dtype), mean.shape[-1]
        eps = torch.as_tensor(_checked_alpha(alpha), dtype=dtype, device=mean.device) - 1
        # In float64: in float32 a thin ellipse loses its digits.
        factor64 = matrices.cholesky(covariance.to(certificate_dtype(covariance.device)))
        half_log_det = matrices.half_log_det(factor64).to(dtype)
        of_scale = tsallis.half_log_det_of_scale(eps, d, half_log_det)
        factor = tsallis.covariance_factor(eps, d, tsallis.log_peak(eps, d, of_scale))
        density = cls._like(mean, covariance / factor[..., None, None], alpha)
        # Rounded to float32 a thin scale has another determinant: the one meant is kept.
        density._half_log_det = of_scale.expand(density.batch_shape)
        return density

    @classmethod
    def _of_canonical(cls, theta1: Tensor, theta2: Tensor, alpha: float | Tensor) -> Self:
        """f(t) = theta1' t + t' theta2 t: scale = (-2 theta2)^-1, mean = scale theta1."""
        check_tensor(theta2, "theta2")
        _check(theta1, -theta2, "-theta2", "theta1")
        dtype = compute_dtype(torch.promote_types(theta1.dtype, theta2.dtype))
        theta1, theta2 = theta1.to(dtype), theta2.to(dtype)
        inverse = matrices.inverse_of_factor(matrices.cholesky(-2 * theta2))
        scale = inverse.mT @ inverse
        return cls._like(matrices.multiply(scale, theta1), scale, alpha)

    def canonical(self) -> tuple[Tensor, Tensor]:
        """theta1 (..., d) and theta2 (..., d, d) with f(t) = theta1' t + t' theta2 t + constant."""
        inverse = matrices.inverse_of_factor(self._factor)
        precision = inverse.mT @ inverse
        return matrices.multiply(precision, self._mean), -precision / 2

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """A view with more batch axes in front."""
        shape = torch.Size(batch_shape)
        alpha = self.alpha.expand(shape) if isinstance(self.alpha, Tensor) else self.alpha
        mean, scale = (
            self._mean.expand(*shape, self.dim),
            self._scale.expand(*shape, *self._scale.shape[-2:]),
        )
        density = type(self)._like(mean, scale, alpha)
        density._half_log_det = self._half_log_det.expand(shape)
        return density

    def __getitem__(self, index: Any) -> Self:
        """Some of the batch, indexed as a tensor of the batch's shape is."""
        batch, d = self.batch_shape, self.dim
        chosen = torch.arange(batch.numel(), device=self._mean.device).reshape(batch)[index]
        alpha = self.alpha
        if isinstance(alpha, Tensor):
            alpha = alpha.expand(batch).reshape(-1)[chosen]
        scale = self._scale.reshape(-1, d, d)[chosen]
        density = type(self)._like(self._mean.reshape(-1, d)[chosen], scale, alpha)
        density._half_log_det = self._half_log_det.reshape(-1)[chosen]
        return density

    def __repr__(self) -> str:
        batch = tuple(self.batch_shape)
        return f"{type(self).__name__}(batch {batch}, d {self.dim}, alpha {self.alpha})"


class Gaussian(Density):
    """Continuous softmax: alpha = 1. mean (..., d), scale = covariance (..., d, d).

    >>> Gaussian(torch.zeros(2), torch.eye(2)).log_prob(torch.zeros(2))
    tensor(-1.8379)
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__(mean, scale, 1.0)

    @classmethod
    def _like(cls, mean: Tensor, scale: Tensor, alpha: float | Tensor) -> Self:
        return cls(mean, scale)

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor) -> Self:
        return cls(mean, covariance)

    @classmethod
    def from_canonical(cls, theta1: Tensor, theta2: Tensor) -> Self:
        return cls._of_canonical(theta1, theta2, 1.0)


class Paraboloid(Density):
    """Continuous sparsemax: alpha = 2, p(t) = [level - (t - mean)' scale^-1 (t - mean) / 2]_+.

    >>> low, high = Paraboloid(torch.zeros(1), torch.eye(1)).projection()
    >>> high
    tensor([1.1447])
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__(mean, scale, 2.0)

    @classmethod
    def _like(cls, mean: Tensor, scale: Tensor, alpha: float | Tensor) -> Self:
        return cls(mean, scale)

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor) -> Self:
        return cls._of_covariance(mean, covariance, 2.0)

    @classmethod
    def from_canonical(cls, theta1: Tensor, theta2: Tensor) -> Self:
        return cls._of_canonical(theta1, theta2, 2.0)


class TsallisGaussian(Density):
    """Any alpha from 1 to 4, one for all or one for each density of the batch.

    >>> TsallisGaussian(torch.zeros(2), torch.eye(2), 1.5).covariance_matrix.diagonal()
    tensor([0.3102, 0.3102])
    """

    def __init__(self, mean: Tensor, scale: Tensor, alpha: float | Tensor) -> None:
        super().__init__(mean, scale, alpha)

    @classmethod
    def _like(cls, mean: Tensor, scale: Tensor, alpha: float | Tensor) -> Self:
        return cls(mean, scale, alpha)

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor, alpha: float | Tensor) -> Self:
        return cls._of_covariance(mean, covariance, alpha)

    @classmethod
    def from_canonical(cls, theta1: Tensor, theta2: Tensor, alpha: float | Tensor) -> Self:
        return cls._of_canonical(theta1, theta2, alpha)


def _check(mean: Tensor, matrix: Tensor, name: str, vector: str = "mean") -> None:
    check_tensor(mean, vector)
    check_tensor(matrix, name)
    if mean.dim() < 1 or not mean.is_floating_point():
        raise ValueError(
            f"{vector} must be floating point (..., d), got {mean.dtype} {tuple(mean.shape)}"
        )
    matrices.check_positive_definite(matrix, name)
    size = matrix.shape[-1]
    if mean.shape[-1] != size:
        raise ValueError(f"{vector} has d = {mean.shape[-1]} but {name} is {size} x {size}")
    check_finite(mean, vector)


def _checked_alpha(alpha: float | Tensor) -> float | Tensor:
    if isinstance(alpha, Tensor):
        outside = has(~((alpha.detach() >= 1) & (alpha.detach() <= _LARGEST_ALPHA)))
    elif isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha must be a number or a tensor, got {alpha!r}")
    else:
        outside = not 1 <= alpha <= _LARGEST_ALPHA
    if outside:
        raise ValueError(f"alpha must be between 1 and {_LARGEST_ALPHA:g}, got {alpha}")
    return alpha
