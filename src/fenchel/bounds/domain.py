"""Where a bound holds: everywhere, or with every token in a ball or a box."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_positive


@dataclass(frozen=True)
class Everywhere:
    """All of R^d."""

    def sample(
        self, count: int, shape: torch.Size, unit: float, generator: torch.Generator
    ) -> Tensor:
        """Normal, of sizes from a hundredth of `unit` to a hundred of it. (count, *shape)"""
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        size = 10 ** (4 * torch.rand(count, generator=generator, dtype=torch.float64) - 2)
        return unit * x * size.reshape(-1, *(1,) * len(shape))

    def project(self, x: Tensor) -> Tensor:
        return x

    def __str__(self) -> str:
        return "all inputs"


@dataclass(frozen=True)
class Ball:
    """Every token (the last axis) within `radius` of `centre`, in the l2 norm.

    centre: what broadcasts to the input; None: zero.
    """

    radius: float
    centre: Tensor | None = None

    def __post_init__(self) -> None:
        check_positive(self.radius, "radius")

    def sample(
        self, count: int, shape: torch.Size, unit: float, generator: torch.Generator
    ) -> Tensor:
        """Half of the tokens on the sphere, where constants are largest. (count, *shape)"""
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        share = 2 * torch.rand(*x.shape[:-1], 1, generator=generator, dtype=torch.float64)
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        return self._from(self.radius * share.clamp(max=1.0) * x)

    def project(self, x: Tensor) -> Tensor:
        about = x if self.centre is None else x - self.centre
        size = about.norm(dim=-1, keepdim=True)
        # a hair inside, so that rounding does not leave the ball
        inside = about * (self.radius * (1 - 1e-15) / size.clamp_min(1e-300)).clamp(max=1.0)
        return self._from(inside)

    def _from(self, about: Tensor) -> Tensor:
        return about if self.centre is None else about + self.centre

    def __str__(self) -> str:
        return f"tokens within {self.radius:g}" + ("" if self.centre is None else " of a point")


@dataclass(frozen=True)
class Box:
    """Every coordinate within `radius` of zero."""

    radius: float

    def __post_init__(self) -> None:
        check_positive(self.radius, "radius")

    def sample(
        self, count: int, shape: torch.Size, unit: float, generator: torch.Generator
    ) -> Tensor:
        """Half of the coordinates on the boundary. (count, *shape)"""
        x = 4 * torch.rand(count, *shape, generator=generator, dtype=torch.float64) - 2
        return self.radius * x.clamp(-1, 1)

    def project(self, x: Tensor) -> Tensor:
        return x.clamp(-self.radius, self.radius)

    def __str__(self) -> str:
        return f"coordinates within {self.radius:g}"


Domain = Everywhere | Ball | Box
