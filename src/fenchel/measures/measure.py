"""What every measure of this room answers: its mean, its covariance, an expectation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fenchel._numerics import check_finite, check_tensor

Function = Callable[[Tensor], Tensor]


class Measure(ABC):
    """A probability measure on R^d, or a batch of them: one for each entry of the leading axes."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """d"""

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size:
        """The leading axes."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """(..., d)"""

    @property
    @abstractmethod
    def covariance(self) -> Tensor:
        """(..., d, d)"""

    @abstractmethod
    def expectation(self, function: Function) -> Tensor:
        """E[function], for a function of points, (..., n, d) -> (..., n) or (..., n, e)."""

    @abstractmethod
    def translate(self, offset: Tensor) -> Measure:
        """The law of X + offset, offset (..., d)."""


def check_points(points: object, name: str, axes: int = 2) -> None:
    """Refuse anything but finite numbers in float32 or float64, (..., n, d) or (..., d)."""
    check_tensor(points, name)
    assert isinstance(points, Tensor)
    if points.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name} must be float32 or float64, got {points.dtype}; use {name}.double()"
        )
    if points.dim() < axes:
        shape = "(..., n, d)" if axes == 2 else "(..., d)"
        raise ValueError(
            f"{name} must be {shape}, got {tuple(points.shape)}; use {_more_axes(points, name)}"
        )
    check_finite(points, name)


def _more_axes(points: Tensor, name: str) -> str:
    """How to make points of too few axes into one point, or into several on the line."""
    if points.dim() == 0:
        return f"{name}.reshape(1, 1) or .reshape(1) for one point on the line"
    d = points.shape[0]
    line = f"{name}.unsqueeze(-1) for {d} points on the line"
    return f"{name}.unsqueeze(0) for one point of R^{d}, {line}"


def average(weights: Tensor, values: Tensor) -> Tensor:
    """sum_i weights_i values_i, (..., n) and (..., n, e) -> (..., e).

    Values that all rows of the last batch axis share, (..., 1, n, e), are not copied for each.
    """
    if weights.dim() > 1 and (values.dim() < 3 or values.shape[-3] == 1):
        shared = values if values.dim() < 3 else values.squeeze(-3)
        return weights @ shared  # (..., m, n) (..., n, e)
    return (weights.unsqueeze(-2) @ values).squeeze(-2)


def check_offset(offset: object) -> None:
    """Refuse what has no coordinates."""
    check_tensor(offset, "offset")
    assert isinstance(offset, Tensor)
    if offset.dim() < 1:
        raise ValueError(
            f"offset must be (..., d), got the number {offset}; use offset.reshape(1) on the line"
        )


def valued(function: Function, points: Tensor) -> tuple[Tensor, bool]:
    """function(points) and whether it gives vectors.

    A function that says so itself, by a method `valued`, may have more leading axes than points.
    """
    valued_of = getattr(function, "valued", None)
    if valued_of is None:
        values = values_of(function, points)
        return values, values.dim() == points.dim()
    valued: tuple[Tensor, bool] = valued_of(points)
    return valued


def values_of(function: Function, points: Tensor) -> Tensor:
    """function(points), refused unless there is one value, or one vector, for each point."""
    if not callable(function):
        raise TypeError(f"the function must be callable, got {type(function).__name__}")
    values = function(points)
    check_tensor(values, "what the function returns")
    if values.dim() > points.dim() or values.shape[: points.dim() - 1] != points.shape[:-1]:
        raise ValueError(
            "a function of points must give one value or one vector for each of the points "
            f"{tuple(points.shape)}, got {tuple(values.shape)}"
        )
    return values
