"""What a density integrates to, by quadrature."""

import math

import numpy as np
import torch

from tests.continuous import reference
from tests.continuous.checks import assert_near

BAR = 1e-8


def statistics(density, points):
    """1, t, t t' and what the entropy integrates, times the density. (K, 1 + d + d^2 + 1)"""
    log_p = density.log_prob(torch.from_numpy(points)).numpy()
    p, alpha = np.exp(log_p), density.alpha
    inner = np.where(p > 0, log_p, 0) if alpha == 1 else p ** (alpha - 1)
    squares = (points[:, :, None] * points[:, None, :]).reshape(len(points), -1)
    return p[:, None] * np.concatenate(
        [np.ones_like(p)[:, None], points, squares, inner[:, None]], 1
    )


def assert_integrals(density, totals):
    d, alpha = density.dim, density.alpha
    mean = totals[1 : 1 + d]
    covariance = totals[1 + d : -1].reshape(d, d) - np.outer(mean, mean)
    omega = totals[-1] if alpha == 1 else (totals[-1] - 1) / (alpha * (alpha - 1))
    assert_near(totals[0], 1.0, BAR)
    assert_near(density.mean, mean, BAR)
    assert_near(density.covariance_matrix, covariance, BAR)
    assert_near(density.entropy(), -omega, BAR)


def half_width(scale, alpha):
    """Of the support along the first axis; twelve deviations of a Gaussian."""
    radius = 12.0 if alpha == 1 else reference.peak_and_radius(scale, alpha)[1]
    return radius * math.sqrt(scale[0, 0])
