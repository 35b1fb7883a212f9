"""Numbers of the Tsallis family on R^d, smooth in eps = alpha - 1 down to eps = 0.

With z = |L^-1 (t - mean)| and L L' = scale, the density that maximises E[-z^2 / 2] - Omega_alpha is

    p(t) = peak (1 - eps z^2 / (2 rho))_+^(1/eps),     rho = peak^eps,

which is exp(-z^2 / 2) up to a factor for eps = 0 and rho - z^2 / 2 for eps = 1. Integrating over
the ball z^2 < 2 rho / eps (a Beta integral) gives, with s = 1 / eps and k = 2 / (2 + d eps),

    log peak = k (log Gamma(s + 1 + d/2) / Gamma(s + 1) - d/2 log(2 pi s) - 1/2 log det scale),
    covariance = 2 rho / (2 + (d + 2) eps) scale,
    integral of p^alpha = rho (2 + 2 eps) / (2 + (d + 2) eps).

For alpha = 2 these are eq. 3.14 and theorem 1 of Farinhas (2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._numerics import expm1_ratio, log1p_ratio, where

# 1 / (12 x) - 1 / (360 x^3) + ...: what Stirling's formula leaves out, in powers of 1 / x.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_DIRECT = 0.1  # below it the logarithms of Gamma are larger than their difference


def log_gamma_ratio(eps: Tensor, d: int) -> Tensor:
    """log Gamma(s + 1 + d/2) / Gamma(s + 1) - d/2 log s, s = 1 / eps; 0 at eps = 0."""
    half = d / 2
    near = eps < _DIRECT
    far, small = where(~near, eps, 1.0), where(near, eps, 0.0)
    s = 1 / far
    direct = torch.lgamma(s + 1 + half) - torch.lgamma(s + 1) - half * s.log()
    return torch.where(near, _by_stirling(small, half), direct)


def _by_stirling(eps: Tensor, half: float) -> Tensor:
    w = eps / (1 + eps)  # 1 / x, x = s + 1
    v = half * w
    ratio = log1p_ratio(v)
    # (x + half - 1/2) log(1 + half / x) - half, with log(1 + v) - v = -v^2 times a smooth function
    main = half * (ratio - 1) + (half - 0.5) * v * ratio
    return main + half * torch.log1p(eps) + _stirling_rest(w / (1 + v)) - _stirling_rest(w)


def _stirling_rest(w: Tensor) -> Tensor:
    total = torch.zeros_like(w)
    for coefficient in reversed(_STIRLING):
        total = total * w.square() + coefficient
    return total * w


def log_peak(eps: Tensor, d: int, half_log_det: Tensor) -> Tensor:
    """Of the density at its mean."""
    whole = log_gamma_ratio(eps, d) - 0.5 * d * math.log(2 * math.pi) - half_log_det
    return 2 / (2 + d * eps) * whole


def covariance_factor(eps: Tensor, d: int, peak: Tensor) -> Tensor:
    """covariance / scale, from log peak."""
    return (eps * peak).exp() * 2 / (2 + (d + 2) * eps)


def half_log_det_of_scale(eps: Tensor, d: int, half_log_det: Tensor) -> Tensor:
    """From the covariance's: |V| = f^d |scale|, and f depends on |scale| alone."""
    log_f = eps * log_peak(eps, d, torch.zeros_like(half_log_det)) - torch.log1p((d + 2) * eps / 2)
    return (2 + d * eps) / 2 * (half_log_det - d / 2 * log_f)


def negative_entropy(eps: Tensor, d: int, peak: Tensor) -> Tensor:
    """Omega = (integral of p^alpha - 1) / (alpha (alpha - 1)), Shannon's at eps = 0."""
    part = d / (2 + (d + 2) * eps)
    exponent = peak - part * log1p_ratio(-part * eps)  # log of the integral, over eps
    return exponent * expm1_ratio(eps * exponent) / (1 + eps)


def log_density(eps: Tensor, peak: Tensor, squared: Tensor) -> Tensor:
    """log p where z^2 = squared; -inf off the support."""
    q = squared / 2 * (-eps * peak).exp()
    inside = ~(eps * q >= 1)  # NaN stays NaN
    shown = where(inside, q, 0.0)
    return where(inside, peak - shown * log1p_ratio(-eps * shown), -torch.inf)
