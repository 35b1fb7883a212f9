"""Random inputs, each fixed by its seed, and bounds made wrong on purpose."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fenchel.bounds import Bound

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


def shrunk(bound: Bound, factor: float = 0.9) -> Bound:
    """The same with a bound that is too small, where the true one is tight."""
    return replace(bound, value=factor * bound.value)
