"""The matrix that takes the heads of an attention to the layer's output, found by what it is fed.

Names differ (`out_proj`, `o`, `c_proj`, `dense` of a neighbour): the linear map whose input is,
number for number, the heads' outputs side by side is the one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fenchel.lens.capture.calls import Call, watch
from fenchel.lens.families import Kind


@dataclass(frozen=True, eq=False)
class Projection:
    """o = sum_h y_h weight_h + bias; weight (H, e, width), bias (width), float64."""

    weight: Tensor
    bias: Tensor

    def select(self, heads: Sequence[int]) -> Projection:
        return Projection(self.weight[list(heads)], self.bias)

    def apply(self, outputs: Tensor) -> Tensor:
        """(B, H, Q, e) -> (B, Q, width)"""
        return torch.einsum("bhqe,hew->bqw", outputs, self.weight) + self.bias

    def grams(self) -> Tensor:
        """|y weight_h|^2 = y gram_h y. (H, e, e)"""
        return self.weight @ self.weight.mT


Projections = dict[tuple[Kind, int], Projection]


@dataclass(frozen=True, eq=False)
class _Mapped:
    """A linear map that was given the heads' outputs, and what it returned."""

    module: nn.Module
    output: Any


def find_projections(model: Any, arguments: Mapping[str, Tensor]) -> Projections:
    """Of every attention whose output goes straight into a linear map; the others are left out.

    arguments: of one pass of the model.
    """
    outputs: dict[tuple[Kind, int], Tensor] = {}  # (B, Q, H, e)
    projections: Projections = {}
    mapped: dict[tuple[Kind, int], _Mapped] = {}

    def record(call: Call) -> None:
        outputs[call.kind, call.layer] = call.output

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        for place, heads in outputs.items():
            side_by_side = heads.flatten(-2)  # (B, Q, H e)
            if args[0].shape != side_by_side.shape or not torch.equal(args[0], side_by_side):
                continue
            if place in mapped:
                if _wraps(module, args, mapped[place], output):
                    projections.pop(place, None)
            elif (matrix := _matrix(module)) is not None:
                mapped[place] = _Mapped(module, output)
                projection = _projection(module, matrix, heads)
                if _gives(projection, heads, output):
                    projections[place] = projection

    hook = register_module_forward_hook(compare)
    try:
        with watch(model, record):
            model(**arguments)
    finally:
        hook.remove()
    return projections


def _gives(projection: Projection, heads: Tensor, output: Any) -> bool:
    """Whether the map is its matrix and bias: a quantised one, say, is more."""
    expected = projection.apply(heads.double().transpose(1, 2))
    room = 100 * torch.finfo(output.dtype).eps * float(expected.abs().max())
    return bool(((output.double() - expected).abs() <= room).all())


def _wraps(module: nn.Module, args: Any, inner: _Mapped, output: Any) -> bool:
    """Whether the layer's output is not the inner map's, as with low-rank adapters around it."""
    around = len(args) == 1 and any(part is inner.module for part in module.modules())
    return around and not (isinstance(output, Tensor) and torch.equal(output, inner.output))


def _matrix(module: nn.Module) -> Tensor | None:
    """(in, out)"""
    from fenchel.hf.library import Conv1D

    if isinstance(module, nn.Linear):
        return module.weight.detach().mT
    if isinstance(module, Conv1D):
        weight: Tensor = module.weight.detach()
        return weight
    return None


def _projection(module: nn.Module, matrix: Tensor, heads: Tensor) -> Projection:
    weight = matrix.double().unflatten(0, heads.shape[-2:])  # (H e, width) -> (H, e, width)
    bias = getattr(module, "bias", None)
    zero = weight.new_zeros(weight.shape[-1])
    return Projection(weight, zero if bias is None else bias.detach().double())
