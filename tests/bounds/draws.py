"""Random inputs, each fixed by its seed, and certificates made wrong on purpose."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fenchel.bounds import Certificate

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


def shrunk(certificate: Certificate, factor: float = 0.9) -> Certificate:
    """The same with a bound that is too small, where the certificate is tight."""
    return replace(certificate, bound=factor * certificate.bound)
