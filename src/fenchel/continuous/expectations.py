"""E_p[N(t; centre, covariance)] for the densities of this room: numbers only, any batch shape.

Gaussian: closed form. Tsallis: pulled back to the unit ball, t = mean + radius L u,

    E = integral of peak (1 - |u|^2)^(1/eps) N(t(u); centre, covariance) |radius L| du,

whose domain does not depend on the parameters: differentiating under the integral gives every
derivative, without terms from the boundary. The paraboloid (eps = 1) has its last axis in closed
form, and its first derivatives are the generalised covariances
of Farinhas (2021), eqs. 3.20, A.24 and A.25.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fenchel._kernels import continuous as kernels
from fenchel._kernels.route import against_continuous
from fenchel._numerics import certificate_dtype, log1p_ratio, readable, transformed
from fenchel.continuous import ball, matrices, tsallis
from fenchel.continuous.ball import Rule

_MOST_AXES = 3  # the number of nodes grows as a power of it
_MOST = 2**22  # nodes worked on at a time


def default_tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-6


def under_gaussian(mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor) -> Tensor:
    """N(mean; centre, scale + covariance) (Farinhas, 2021, eqs. 4.7 to 4.10). (...)"""
    dtype = torch.promote_types(mean.dtype, centre.dtype)
    inner = certificate_dtype(mean.device)
    factor = matrices.cholesky(scale.to(inner) + covariance.to(inner))
    apart = mean.to(inner) - centre.to(inner)
    return matrices.normal_log_density(apart, factor).exp().to(dtype)


def under_paraboloid(
    mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor, tolerance: float
) -> Tensor:
    """alpha = 2. Operands (..., d) and (..., d, d) broadcast. (...)"""
    operands, dtype = _pairs(mean, scale, centre, covariance)
    if transformed():
        value = _pulled_back(*operands, torch.ones_like(operands[0][..., 0]), tolerance)
    else:
        value = _Paraboloid.apply(*operands, tolerance)  # type: ignore[no-untyped-call]
    return value.to(dtype)


def under_tsallis(
    mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor, eps: Tensor, tolerance: float
) -> Tensor:
    """Any alpha > 1, eps = alpha - 1 (...). (...)"""
    operands, dtype = _pairs(mean, scale, centre, covariance)
    eps = eps.to(operands[0].dtype).expand(operands[0].shape[:-1])
    return _in_parts(_pulled_back, (*operands, eps), tolerance).to(dtype)


def _pairs(
    mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], torch.dtype]:
    """One batch shape for all, in float64 where there is one: closed forms cancel."""
    if mean.shape[-1] > _MOST_AXES:
        raise ValueError(
            f"expectations under sparse densities need d <= {_MOST_AXES}, got {mean.shape[-1]}; "
            "use a Gaussian density, whose expectations are in closed form"
        )
    dtype = torch.promote_types(mean.dtype, centre.dtype)
    inner, d = certificate_dtype(mean.device), mean.shape[-1]
    batch = torch.broadcast_shapes(
        mean.shape[:-1], scale.shape[:-2], centre.shape[:-1], covariance.shape[:-2]
    )
    vectors = (x.to(inner).expand(*batch, d) for x in (mean, centre))
    squares = (matrices.symmetric(x.to(inner)).expand(*batch, d, d) for x in (scale, covariance))
    (mean, centre), (scale, covariance) = vectors, squares
    return (mean, scale, centre, covariance), dtype


class _Frame:
    """The unit ball's coordinates, turned to the principal axes of the Gaussian seen in them."""

    def __init__(
        self, mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor, eps: Any
    ) -> None:
        d = mean.shape[-1]
        self.factor = matrices.cholesky(scale)
        self.half_log_det = matrices.half_log_det(self.factor)
        eps = torch.as_tensor(eps, dtype=mean.dtype, device=mean.device)
        self.peak = tsallis.log_peak(eps, d, self.half_log_det)
        self.radius = (2 * (eps * self.peak).exp() / eps).sqrt()
        inverse = matrices.inverse_of_factor(self.factor) / self.radius[..., None, None]
        variances, self.axes = matrices.principal_axes(inverse @ covariance @ inverse.mT)
        at = matrices.multiply(inverse, centre - mean)
        self.inverse = inverse
        self.centre = matrices.multiply(self.axes.mT, at)
        tiny = torch.finfo(mean.dtype).tiny
        self.deviation = variances.clamp_min(tiny).sqrt()


class _Paraboloid(torch.autograd.Function):
    """c (M0 - trace M2), c = level and M the moments of the Gaussian over the ellipsoid.

    From dp = dc + (t - mean)' P dmean - (t - mean)' dP (t - mean) / 2, P = scale^-1, and the
    normalisation, which gives dc / c = -trace(P dscale) / (d + 2):
        d mean  = radius L^-T M1,
        d scale = c L^-T (M2 - M0 / (d + 2)) L^-1.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor, tolerance: float
    ) -> Tensor:
        ctx.tolerance = tolerance
        operands, rule = (mean, scale, centre, covariance), Rule.closed(tolerance)
        if against_continuous(mean) is None:
            differentiate = any(ctx.needs_input_grad[:2])
            value, *slopes = kernels.paraboloid_expectation(
                *operands, rule.reach, -math.log10(tolerance), differentiate
            )
        else:
            value, *slopes = by_moments(*operands, rule)
        ctx.save_for_backward(*operands, *slopes)
        expectation: Tensor = value
        return expectation

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *operands, to_mean, to_scale = ctx.saved_tensors
        if torch.is_grad_enabled() or any(ctx.needs_input_grad[2:4]):
            return *_again(operands, gradient, ctx.needs_input_grad, ctx.tolerance), None
        return (
            gradient.unsqueeze(-1) * to_mean,
            gradient[..., None, None] * to_scale,
            None,
            None,
            None,
        )


def by_moments(
    mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The value, and its derivatives in mean and scale, in torch's operations."""
    d = mean.shape[-1]
    frame = _Frame(mean, scale, centre, covariance, 1.0)
    moments = ball.gaussian_moments(frame.centre, frame.deviation, rule)
    level = frame.radius.square() / 2
    trace = moments.second.diagonal(dim1=-2, dim2=-1).sum(-1)
    inverse = (frame.inverse * frame.radius[..., None, None]).mT @ frame.axes  # L^-T axes
    eye = torch.eye(d, dtype=mean.dtype, device=mean.device)
    inner = moments.second - moments.zeroth[..., None, None] / (d + 2) * eye
    to_mean = matrices.multiply(inverse, moments.first) * frame.radius.unsqueeze(-1)
    to_scale = inverse @ inner @ inverse.mT * level[..., None, None]
    return level * (moments.zeroth - trace), to_mean, to_scale


def _again(
    operands: list[Tensor], gradient: Tensor, needs: tuple[bool, ...], tolerance: float
) -> list[Tensor | None]:
    """The first derivative as a function that can be differentiated itself."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [
            x if create and x.requires_grad else x.detach().requires_grad_() for x in operands
        ]
        ones = torch.ones_like(leaves[0][..., 0])
        value = _in_parts(_pulled_back, (*leaves, ones), tolerance)
        chosen = [leaf for leaf, needed in zip(leaves, needs, strict=False) if needed]
        slopes = iter(torch.autograd.grad(value, chosen, gradient, create_graph=create))
    return [next(slopes) if needed else None for needed in needs[:4]]


def _pulled_back(
    mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor, eps: Tensor, tolerance: float
) -> Tensor:
    """Plain operations on fixed points of the ball."""
    d = mean.shape[-1]
    with torch.no_grad():
        fixed = [x.detach() for x in (mean, scale, centre, covariance, eps)]  # of tangents too
        frame = _Frame(*fixed)
        power, rule = 1 / fixed[-1], Rule.pulled_back(tolerance)
        turned, weight = ball.nodes(frame.centre, frame.deviation, power, rule, not _is_smooth(eps))
        u = matrices.multiply(frame.axes.unsqueeze(-3), turned)  # (..., K, d)
    factor = matrices.cholesky(scale)
    half_log_det = matrices.half_log_det(factor)
    peak = tsallis.log_peak(eps, d, half_log_det)
    # Near alpha = 1 the ball grows without bound: there its size is held fixed instead, and the
    # density, which vanishes at its edge to a high order, is differentiated where it stands.
    size = torch.where(eps < 0.1, eps.detach(), eps)
    stretch = (eps * peak).exp() * 2 / size
    q = u.square().sum(-1) / size.unsqueeze(-1)
    log_p = peak.unsqueeze(-1) - q * log1p_ratio((-eps.unsqueeze(-1) * q).clamp_min(-1 + 1e-15))
    shift = matrices.multiply(factor.unsqueeze(-3), u) * stretch.sqrt()[..., None, None]
    at = (mean - centre).unsqueeze(-2) + shift
    log_normal = matrices.normal_log_density(at, matrices.cholesky(covariance).unsqueeze(-3))
    volume = half_log_det + d / 2 * stretch.log()
    return (weight * (log_p + log_normal + volume.unsqueeze(-1)).exp()).sum(-1)


def _is_smooth(eps: Tensor) -> bool:
    """Whether the density is smooth in the angles: a power of cosines, whole or so high that its
    kink where they vanish is not seen."""
    if not readable(eps):
        return False
    twice = 2 / eps.detach()
    whole = (twice - twice.round()).abs() < 1e-9 * twice
    return bool((whole | (twice > 12)).all())


def _in_parts(
    work: Callable[..., Tensor], operands: tuple[Tensor, ...], tolerance: float
) -> Tensor:
    """So many pairs at a time that their nodes fit into memory, made again for the derivative."""
    d = operands[0].shape[-1]
    batch = operands[0].shape[:-1]
    each = max(1, _MOST // (3 * Rule.pulled_back(tolerance).nodes) ** d)
    if batch.numel() <= each or transformed():
        return work(*operands, tolerance)
    flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in operands]
    parts = zip(*(x.split(each) for x in flat), strict=True)
    values = [checkpoint(work, *part, tolerance, use_reentrant=False) for part in parts]
    return torch.cat(values).reshape(batch)
