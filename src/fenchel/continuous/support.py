"""The ellipsoid on which a density lives."""

from __future__ import annotations

from torch import Tensor
from torch.distributions import constraints

from fenchel.continuous import matrices


class Ellipsoid(constraints.Constraint):
    """{t : |L^-1 (t - centre)|^2 / 2 < level}; all of R^d where the level is infinite."""

    event_dim = 1

    def __init__(self, centre: Tensor, factor: Tensor, level: Tensor) -> None:
        self.centre = centre  # (..., d)
        self.factor = factor  # L, (..., d, d)
        self.level = level  # (...)

    def check(self, value: Tensor) -> Tensor:
        """Which points lie inside. value (..., d) -> bool (...)"""
        return matrices.squared_length(self.factor, value - self.centre) < 2 * self.level

    def __repr__(self) -> str:
        return f"Ellipsoid(batch {tuple(self.level.shape)}, d {self.centre.shape[-1]})"


class Union(constraints.Constraint):
    """Where some of the modes with weight live. mixing (..., K), ellipsoids of batch (..., K)."""

    event_dim = 1

    def __init__(self, mixing: Tensor, ellipsoids: Ellipsoid) -> None:
        self.mixing = mixing
        self.ellipsoids = ellipsoids

    def check(self, value: Tensor) -> Tensor:
        """Which points lie inside. value (..., d) -> bool (...)"""
        return (self.ellipsoids.check(value.unsqueeze(-2)) & (self.mixing > 0)).any(-1)

    def __repr__(self) -> str:
        return f"Union(of {self.mixing.shape[-1]}, {self.ellipsoids!r})"
