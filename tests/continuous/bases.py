"""Basis functions at random, as ours and in numpy."""

import numpy as np
import torch

import fenchel.continuous as fc
from tests.continuous import reference
from tests.continuous.families import DOUBLE

ALPHAS = (1.05, 1.25, 1.5, 2.0, 3.0, 4.0)


def gaussians(centre, covariance, dtype=DOUBLE):
    return fc.GaussianBasis(
        torch.as_tensor(centre, dtype=dtype), torch.as_tensor(covariance, dtype=dtype)
    )


def functions(d, seed, count=4, low=0.1):
    """Centres (N, d) and covariances (N, d, d) at random, in numpy."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(1.0, 0.7, (count, d))
    return centres, np.stack([reference.random_spd(rng, d, low, 1.0) for _ in range(count)])


def at(centres, covariances):
    """As a function of points (K, d). (K, N)"""
    each = list(zip(centres, covariances, strict=True))
    return lambda t: np.stack([reference.normal(t, c, v) for c, v in each], -1)
