"""The regularisers that the tour shows, and the scores it shows them on."""

from __future__ import annotations

import torch
from torch import Tensor

import fenchel as fl
from papers.tour.chapter import Tour

GALLERY: tuple[tuple[str, fl.Regularizer], ...] = (
    ("Shannon()", fl.Shannon()),
    ("Tsallis(1.25)", fl.Tsallis(1.25)),
    ("Tsallis(1.5)", fl.Tsallis(1.5)),
    ("Tsallis(2)", fl.Tsallis(2.0)),
    ("Tsallis(3)", fl.Tsallis(3.0)),
    ("Norm(2)", fl.Norm(2.0)),
    ("Budget(3)", fl.Budget(3)),
    ("Fused(0.3)", fl.Fused(0.3)),
)


def bumpy_scores(tour: Tour, length: int = 20) -> Tensor:
    """Two hills and noise, float64: neighbours resemble each other, as Fused assumes."""
    place = torch.linspace(0, 1, length, dtype=torch.float64)
    hills = 1.6 * (-((place - 0.3) ** 2) / 0.02).exp() + 1.1 * (-((place - 0.8) ** 2) / 0.01).exp()
    noise = torch.randn(length, generator=tour.generator(), dtype=torch.float64)
    return hills + 0.3 * noise - 0.5
