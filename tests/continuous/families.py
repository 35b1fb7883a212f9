"""Densities to test with: one of each kind, and parameters at random."""

import numpy as np
import torch

import fenchel.continuous as fc
from tests.continuous import reference

DOUBLE = torch.float64
ALPHAS = (1.0, 1.25, 1.5, 2.0, 3.0)


def make(mean, scale, alpha):
    """Of the class that is made for this alpha."""
    mean, scale = torch.as_tensor(mean), torch.as_tensor(scale)
    if not isinstance(alpha, torch.Tensor) and alpha in (1, 2):
        return (fc.Gaussian if alpha == 1 else fc.Paraboloid)(mean, scale)
    return fc.TsallisGaussian(mean, scale, alpha)


def parameters(d, seed=0, low=0.1, high=2.0):
    """A mean away from zero and a scale that is no multiple of the identity, in numpy."""
    rng = np.random.default_rng(100 * d + seed)
    return rng.normal(1.0, 0.7, d), reference.random_spd(rng, d, low, high)


def random_density(d, alpha, seed=0):
    return make(*parameters(d, seed), alpha)


def positive(root):
    """A positive definite matrix from any square one, so that derivatives may move it."""
    return root @ root.mT + 0.3 * torch.eye(root.shape[-1], dtype=root.dtype)


def root(d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(d, d, dtype=DOUBLE, generator=generator).requires_grad_()
