"""Maps of single points: matrices, affine maps, and anything callable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_tensor

Map = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Affine:
    """x -> matrix x + offset, matrix (d', d), offset (d',); x (..., d).

    >>> Affine(torch.tensor([[2.0]]), torch.tensor([1.0]))(torch.tensor([[3.0]]))
    tensor([[7.]])
    """

    matrix: Tensor
    offset: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor(self.matrix, "matrix")
        if self.matrix.dim() != 2:
            raise ValueError(f"a matrix must be (d', d), got {tuple(self.matrix.shape)}")
        if self.offset is None:
            return
        check_tensor(self.offset, "offset")
        if self.offset.shape != self.matrix.shape[:1]:
            raise ValueError(
                f"offset must be ({self.matrix.shape[0]},), got {tuple(self.offset.shape)}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.matrix.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(_two_dtypes(x.dtype, self.matrix.dtype, "the matrix"))
        if x.shape[-1] != self.matrix.shape[1]:
            raise ValueError(
                f"the matrix {tuple(self.matrix.shape)} maps points of dimension "
                f"{self.matrix.shape[1]}, got {x.shape[-1]}; a matrix is (d', d) and acts as W x"
            )
        image = x @ self.matrix.mT
        return image if self.offset is None else image + self.offset

    def __repr__(self) -> str:
        rows, columns = self.matrix.shape
        return f"Affine({columns} -> {rows})"


def as_map(transform: Map | None, name: str) -> Callable[[Tensor], Tensor]:
    """A matrix becomes x -> matrix x, nothing the identity; callables stay."""
    if transform is None:
        return identity
    if isinstance(transform, Tensor):
        return Affine(transform)
    if not callable(transform):
        raise TypeError(
            f"{name} must be a matrix (d', d) or a callable such as torch.nn.Linear, got "
            f"{type(transform).__name__}"
        )
    return transform


def identity(x: Tensor) -> Tensor:
    return x


def apply_map(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x); where a module fails on points of another dtype than its own, say so."""
    try:
        return function(x)
    except RuntimeError as problem:
        dtypes = _dtypes(function)
        if not dtypes or x.dtype in dtypes:
            raise
        name = f"the {type(function).__name__}"
        raise TypeError(_two_dtypes(x.dtype, dtypes[0], name)) from problem


def _dtypes(function: object) -> list[torch.dtype]:
    if not isinstance(function, torch.nn.Module):
        return []
    return [p.dtype for p in function.parameters() if p.is_floating_point()]


def _two_dtypes(points: torch.dtype, other: torch.dtype, name: str) -> str:
    return (
        f"the points are {points} and {name} is {other}; bring both to one dtype, with "
        f".to({points}) on the layer or the matrix, or .to({other}) on the points"
    )


def map_name(function: object) -> str:
    """Short, for a repr."""
    if isinstance(function, Affine):
        return repr(function)
    return getattr(function, "__name__", type(function).__name__)


def affine_of(function: Callable[[Tensor], Tensor]) -> Affine | None:
    """The matrix and offset, of a map that is known to have them."""
    if isinstance(function, Affine):
        return function
    # not of a subclass that computes something else
    if isinstance(function, torch.nn.Linear) and type(function).forward is torch.nn.Linear.forward:
        return Affine(function.weight, function.bias)
    return None


def check_settled(function: object) -> None:
    """Refuse modules that draw at random or look at other tokens in training."""
    if not isinstance(function, torch.nn.Module):
        return
    for part in function.modules():
        dropped = isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0
        pooled = isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
        if part.training and (dropped or pooled):
            raise ValueError(
                f"{type(part).__name__} in training is no map of single points; call .eval() on "
                f"the {type(function).__name__}"
            )
