"""Striped squares, told apart by the direction of the stripes: what needs no files."""

from __future__ import annotations

import math

import torch

from papers.experiments.data.images import ImageData, Split

_SIDE, _CLASSES, _PERIOD = 16, 4, 5.0


def load_toy(seed: int = 0, train: int = 512, test: int = 256) -> ImageData:
    """Grey images 16 x 16 of four directions, with a random phase and noise."""
    generator = torch.Generator().manual_seed(seed)
    return ImageData("toy", _split(train, generator), _split(test, generator), _CLASSES)


def _split(count: int, generator: torch.Generator) -> Split:
    labels = torch.arange(count) % _CLASSES
    angle = labels * (math.pi / _CLASSES)
    phase = 2 * math.pi * torch.rand(count, generator=generator)
    place = torch.arange(_SIDE)
    along = angle.cos()[:, None, None] * place + angle.sin()[:, None, None] * place[:, None]
    wave = torch.sin(2 * math.pi / _PERIOD * along + phase[:, None, None])
    noise = torch.randn(count, _SIDE, _SIDE, generator=generator)
    grey = (128 + 50 * wave + 40 * noise).clamp(0, 255).to(torch.uint8)
    return Split(grey.unsqueeze(1), labels)
