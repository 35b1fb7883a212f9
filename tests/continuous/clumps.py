"""Mixtures of three modes, and points around two places."""

import numpy as np
import torch

from tests.continuous import reference
from tests.continuous.families import DOUBLE, make

MIXING = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)


def modes(alpha, d=2):
    rng = np.random.default_rng(0)
    scale = np.stack([reference.random_spd(rng, d, 0.1, 0.5) for _ in range(3)])
    return make(rng.normal(0, 1, (3, d)), scale, alpha)


def clumps(seed=0, count=60, apart=4.0):
    """Positions (count, 2) around two places, and weights."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randn(count, 2, dtype=DOUBLE, generator=generator)
    positions[count // 2 :] += torch.tensor([apart, 0.5 * apart], dtype=DOUBLE)
    return torch.rand(count, dtype=DOUBLE, generator=generator) + 0.1, positions
