"""The regularisers under test, each with Omega written a second time from the textbook."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import fenchel as fl

Omega = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """`make(n, live)` gives the regulariser for n keys of which `live` are not masked.

    omega: its value on weights over n unmasked keys of mass one, written independently.
    exponent: weights answer to scores like |ds|^exponent: 1 is Lipschitz; for alpha > 2 a key next
        to the edge of the support has unbounded slope and the map is only Hoelder continuous.
    curved: Omega is 1-strongly convex on the simplex.
    """

    name: str
    make: Callable[[int, int], fl.Regularizer]
    omega: Omega
    temperature: float = 1.0
    exponent: float = 1.0
    curved: bool = True
    symmetric: bool = True
    iterated: bool = False

    def solve(self, scores: Tensor, mass: Tensor | None = None) -> fl.Solution:
        regularizer = self.regularizer(scores, mass)
        return fl.solve(scores, regularizer, base=self.base(mass, scores))

    def regularizer(self, scores: Tensor, mass: Tensor | None = None) -> fl.Regularizer:
        n = scores.shape[-1]
        return self.make(n, n if mass is None else int((mass > 0).sum()))

    def base(self, mass: Tensor | None, like: Tensor) -> Tensor | None:
        """The mass where it has a meaning, else the mask that it draws."""
        if mass is None:
            return None
        takes = self.make(mass.shape[-1], 1).takes_base
        return mass.to(like.dtype) if takes else mass > 0

    def total(self, scores: Tensor, mass: Tensor | None = None) -> float:
        return float(self.regularizer(scores, mass).total(scores).max())


def shannon(temperature: float) -> Family:
    def omega(p: Tensor) -> Tensor:
        return temperature * torch.special.xlogy(p, p).sum(-1)

    return Family(
        f"shannon({temperature})",
        lambda n, live: fl.Shannon(temperature),
        omega,
        temperature,
        curved=temperature >= 1,
    )


def tsallis(alpha: float, temperature: float = 1.0) -> Family:
    def omega(p: Tensor) -> Tensor:
        if alpha == 1:
            return shannon(temperature).omega(p)
        return temperature * (p**alpha - p).sum(-1) / (alpha * (alpha - 1))

    return Family(
        f"tsallis({alpha},{temperature})",
        lambda n, live: fl.Tsallis(alpha, temperature),
        omega,
        temperature,
        exponent=min(1.0, 1 / (alpha - 1)) if alpha > 1 else 1.0,
        curved=alpha <= 2 and temperature >= 1,
    )


def norm(alpha: float) -> Family:
    def omega(p: Tensor) -> Tensor:
        return (p**alpha).sum(-1) ** (1 / alpha)

    exponent = min(1.0, 1 / (alpha - 1))
    return Family(
        f"norm({alpha})", lambda n, live: fl.Norm(alpha), omega, exponent=exponent, curved=False
    )


def half_square(p: Tensor) -> Tensor:
    return (p * p).sum(-1) / 2


def budget(share: float) -> Family:
    """A budget of this share of the unmasked keys."""
    return Family(f"budget({share})", lambda n, live: fl.Budget(share * live), half_square)


def fused(strength: float) -> Family:
    def omega(p: Tensor) -> Tensor:
        return half_square(p) + strength * p.diff(dim=-1).abs().sum(-1)

    return Family(f"fused({strength})", lambda n, live: fl.Fused(strength), omega, symmetric=False)


def fused_grid(strength: float) -> Family:
    def omega(p: Tensor) -> Tensor:
        field = p.unflatten(-1, grid_shape(p.shape[-1]))  # (..., n) -> (..., h, w)
        variation = sum(field.diff(dim=axis).abs().sum((-2, -1)) for axis in (-1, -2))
        return half_square(p) + strength * variation

    return Family(
        f"grid({strength})",
        lambda n, live: fl.Fused(strength, grid=grid_shape(n)),
        omega,
        symmetric=False,
        iterated=True,
    )


def grid_shape(n: int) -> tuple[int, int]:
    """The squarest grid of n cells."""
    height = max(h for h in range(1, math.isqrt(n) + 1) if n % h == 0)
    return height, n // height


TSALLIS = [
    tsallis(1.0),
    tsallis(1.2),
    tsallis(1.5),
    tsallis(1.5, 0.3),
    tsallis(2.0),
    tsallis(3.0),
]
WITH_BASE = [shannon(1.0), shannon(0.3), *TSALLIS]
SYMMETRIC = [*WITH_BASE, norm(1.5), norm(2.0), norm(4.0), budget(0.4)]
FUSED = [fused(0.3), fused_grid(0.3)]
ALL = [*SYMMETRIC, *FUSED]


def each(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)
