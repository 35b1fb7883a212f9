"""E_p[psi] where the density p and psi, a truncated paraboloid, both live on ellipsoids, d <= 2.

In the ball of the density, psi lives on an ellipse. For a given second coordinate the first runs
over an interval, on which the product is a polynomial (alpha = 2: three nodes are exact) or smooth;
the second runs by its angle, with kinks where the two boundaries cross, which bound the error in
the plane by 1e-6.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, transformed, where
from fenchel.continuous import ball, matrices, tsallis

_INNER = 64
_REACH = 9.0  # deviations of exp(-|u|^2 / eps), which bounds the density


def under_tsallis(
    mean: Tensor, scale: Tensor, eps: Tensor, centre: Tensor, basis_scale: Tensor, tolerance: float
) -> Tensor:
    """Operands broadcast; eps = alpha - 1 > 0 (...). (...)

    In the plane the tolerance picks the number of nodes, and is reached down to about 1e-6.
    """
    dtype = torch.promote_types(mean.dtype, centre.dtype)
    inner = certificate_dtype(mean.device)
    mean, scale, eps, centre, basis_scale = (
        x.to(inner) for x in (mean, scale, eps, centre, basis_scale)
    )
    d = mean.shape[-1]
    factor, one = matrices.cholesky(scale), torch.ones((), dtype=inner, device=mean.device)
    half_log_det = matrices.half_log_det(factor)
    peak = tsallis.log_peak(eps, d, half_log_det)
    radius = (2 * (eps * peak).exp() / eps).sqrt()
    back = matrices.inverse_of_factor(factor) / radius[..., None, None]
    at = matrices.multiply(back, centre - mean)
    shape = back @ matrices.symmetric(basis_scale) @ back.mT
    level = tsallis.log_peak(one, d, matrices.half_log_det(matrices.cholesky(basis_scale))).exp()
    bound = torch.where(eps < 1, (_REACH * (eps / 2).sqrt()).clamp_max(1.0), 1.0).detach()
    exact = not transformed() and bool((eps == 1).all())
    volume = half_log_det + d * radius.log()
    operands = (at, shape, level, eps, bound, exact)
    nodes = math.ceil(120 - 8 * math.log10(tolerance))
    whole = _on_a_line(*operands) if d == 1 else _on_a_plane(*operands, nodes)
    return ((peak + volume).exp() * whole).to(dtype)


def _density(eps: Tensor, squared: Tensor) -> Tensor:
    """(1 - |u|^2)_+^(1/eps)"""
    rest = (1 - squared).clamp_min(0)
    safe = where(rest > 0, rest, 1.0)
    return where(rest > 0, (safe.log() / eps).exp(), 0.0)


def _root(x: Tensor) -> Tensor:
    """Square root, 0 with derivative 0 below zero."""
    return where(x > 0, where(x > 0, x, 1.0).sqrt(), 0.0)


def _inner_rule(exact: bool, like: Tensor) -> tuple[Tensor, Tensor]:
    if exact:
        return ball.legendre(3, like)
    x, w = ball.legendre(_INNER, like)
    return 1.5 * x - 0.5 * x**3, w * 1.5 * (1 - x.square())


def _between(low: Tensor, high: Tensor, rule: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Nodes of [low, high] and weights, none where it is empty; a new last axis."""
    middle, half = ((low + high) / 2).unsqueeze(-1), ((high - low) / 2).clamp_min(0).unsqueeze(-1)
    return middle + half * rule[0], half * rule[1]


def _on_a_line(
    at: Tensor, shape: Tensor, level: Tensor, eps: Tensor, bound: Tensor, exact: bool
) -> Tensor:
    variance, middle = shape[..., 0, 0], at[..., 0]
    half = (2 * level * variance).sqrt()
    low, high = torch.maximum(middle - half, -bound), torch.minimum(middle + half, bound)
    x, w = _between(low, high, _inner_rule(exact, at))
    psi = level.unsqueeze(-1) - (x - at).square() / (2 * variance.unsqueeze(-1))
    return (w * psi.clamp_min(0) * _density(eps.unsqueeze(-1), x.square())).sum(-1)


def _on_a_plane(
    at: Tensor,
    shape: Tensor,
    level: Tensor,
    eps: Tensor,
    bound: Tensor,
    exact: bool,
    nodes: int,
) -> Tensor:
    var_x, var_y, mixed = shape[..., 0, 0], shape[..., 1, 1], shape[..., 0, 1]
    half = (2 * level * var_y).sqrt()
    low, high = torch.maximum(at[..., 1] - half, -bound), torch.minimum(at[..., 1] + half, bound)
    angle, w = ball.legendre(nodes, at)
    turned = (angle * torch.pi / 2).sin(), w * torch.pi / 2 * (angle * torch.pi / 2).cos()
    y, w_y = _between(low, high, turned)  # (..., n)
    far = y - at[..., 1:2]
    slope = (mixed / var_y).unsqueeze(-1)
    var_x_given_y = (var_x - mixed.square() / var_y).unsqueeze(-1)
    left = (level.unsqueeze(-1) - far.square() / (2 * var_y.unsqueeze(-1))).clamp_min(0)
    middle, half = at[..., 0:1] + slope * far, _root(2 * left * var_x_given_y)
    ball_half = torch.minimum(_root(1 - y.square()), bound.unsqueeze(-1))
    ends = torch.maximum(middle - half, -ball_half), torch.minimum(middle + half, ball_half)
    x, w_x = _between(*ends, _inner_rule(exact, at))  # (..., n, n')
    psi = left.unsqueeze(-1) - (x - middle.unsqueeze(-1)).square() / (
        2 * var_x_given_y.unsqueeze(-1)
    )
    product = psi.clamp_min(0) * _density(
        eps[..., None, None], x.square() + y.square().unsqueeze(-1)
    )
    return (w_y * (w_x * product).sum(-1)).sum(-1)
