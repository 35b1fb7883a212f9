"""Norms of differences: a number p for the l_p norm of all coordinates together, or an object.

For the power method each norm also has the functional that is largest on an image, and the
direction that is longest for a functional.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LongestToken:
    """The l2 length of the longest token, tokens being the last axis: max_i |x_i|."""

    def __str__(self) -> str:
        return "max |token|"


@dataclass(frozen=True)
class Wasserstein1:
    """The distance W1 between measures, with the l1 norm between points."""

    def __str__(self) -> str:
        return "W1 (l1)"


VectorNorm = float | LongestToken


def length(x: Tensor, norm: VectorNorm, axes: int) -> Tensor:
    """Of x (count, ..., *shape of `axes` axes). (count, ...)"""
    if isinstance(norm, LongestToken):
        tokens: Tensor = torch.linalg.vector_norm(x, dim=-1)
        return tokens.flatten(1 - axes).amax(-1) if axes > 1 else tokens
    size: Tensor = torch.linalg.vector_norm(x.flatten(-axes), norm, dim=-1)
    return size


def top_functional(image: Tensor, norm: VectorNorm) -> Tensor:
    """Of dual norm one, up to a factor, and largest on the image (count, ...)."""
    flat = image.flatten(1)
    if isinstance(norm, LongestToken):
        size: Tensor = torch.linalg.vector_norm(image, dim=-1)
        longest = size == size.flatten(1).amax(-1).reshape(-1, *(1,) * (size.dim() - 1))
        return image * longest.unsqueeze(-1)
    if norm == 1:
        return image.sign()
    if norm == 2:
        return image
    largest = flat.abs() == flat.abs().amax(-1, keepdim=True)
    return (flat.sign() * largest).view_as(image)


def top_direction(functional: Tensor, norm: VectorNorm) -> Tensor:
    """Of norm one, up to a factor, and with the largest product with the functional (count, ...)"""
    flat = functional.flatten(1)
    if isinstance(norm, LongestToken):
        size: Tensor = torch.linalg.vector_norm(functional, dim=-1, keepdim=True)
        return functional / size.clamp_min(1e-300)
    if norm == 1:
        largest = flat.abs() == flat.abs().amax(-1, keepdim=True)
        return (flat.sign() * largest).view_as(functional)
    if norm == 2:
        return functional
    return functional.sign()


def check_token_norm(norm: object) -> None:
    """For maps of sequences only two norms are proved."""
    if norm != 2 and not isinstance(norm, LongestToken):
        raise ValueError(f"norm must be 2 or LongestToken(), got {norm!r}")
