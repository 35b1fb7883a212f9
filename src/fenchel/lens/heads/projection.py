"""The matrix that takes the heads of an attention to the layer's output, found by what it is fed.

Names differ (`out_proj`, `o`, `c_proj`, `dense` of a neighbour): the linear map whose input is,
number for number, the joined outputs of the heads is the one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fenchel.lens.heads.capture import Call, watch
from fenchel.lens.heads.material import Prepared
from fenchel.lens.recognise import Kind


@dataclass(frozen=True, eq=False)
class Projection:
    """o = sum_h y_h weight_h + bias; weight (H, e, width), bias (width), float64."""

    weight: Tensor
    bias: Tensor

    def only(self, heads: Sequence[int]) -> Projection:
        return Projection(self.weight[list(heads)], self.bias)

    def whole(self, outputs: Tensor) -> Tensor:
        """(B, H, Q, e) -> (B, Q, width)"""
        return torch.einsum("bhqe,hew->bqw", outputs, self.weight) + self.bias

    def grams(self) -> Tensor:
        """|y weight_h|^2 = y gram_h y. (H, e, e)"""
        return self.weight @ self.weight.mT


Projections = dict[tuple[Kind, int], Projection]


def projections(model: Any, prepared: Prepared) -> Projections:
    """Of every attention whose output goes straight into a linear map; the others are left out."""
    waiting: dict[tuple[Kind, int], Tensor] = {}
    sizes: dict[tuple[Kind, int], tuple[int, int]] = {}
    found: Projections = {}

    def note(call: Call) -> None:
        place = call.kind, call.layer
        waiting[place] = call.output.flatten(-2)  # (B, Q, H e)
        sizes[place] = call.output.shape[-2], call.output.shape[-1]

    made: dict[tuple[Kind, int], tuple[nn.Module, Any]] = {}

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        for place, joined in waiting.items():
            if args[0].shape != joined.shape or not torch.equal(args[0], joined):
                continue
            if place not in made:
                matrix = _matrix(module)
                if matrix is not None:
                    found[place] = _projection(module, matrix, sizes[place])
                    made[place] = (module, output)
                    if not _gives(found[place], joined, output):
                        del found[place]
            elif _wraps(module, args, *made[place], output):
                found.pop(place, None)

    hook = register_module_forward_hook(compare)
    try:
        with watch(model, note):
            model(**prepared.given)
    finally:
        hook.remove()
    return found


def _gives(projection: Projection, joined: Tensor, output: Any) -> bool:
    """Whether the map is its matrix and bias: a quantised one, say, is more."""
    heads = joined.double().unflatten(-1, projection.weight.shape[:2]).transpose(1, 2)
    wanted = projection.whole(heads)
    room = 100 * torch.finfo(output.dtype).eps * float(wanted.abs().max())
    return bool(((output.double() - wanted).abs() <= room).all())


def _wraps(module: nn.Module, args: Any, inner: nn.Module, given: Tensor, output: Any) -> bool:
    """Whether the layer's output is not the inner map's, as with low-rank adapters around it."""
    around = len(args) == 1 and any(part is inner for part in module.modules())
    return around and not (isinstance(output, Tensor) and torch.equal(output, given))


def _matrix(module: nn.Module) -> Tensor | None:
    """(in, out)"""
    from fenchel.hf.library import Conv1D

    if isinstance(module, nn.Linear):
        return module.weight.detach().mT
    if isinstance(module, Conv1D):
        weight: Tensor = module.weight.detach()
        return weight
    return None


def _projection(module: nn.Module, matrix: Tensor, sizes: tuple[int, int]) -> Projection:
    weight = matrix.double().unflatten(0, sizes)  # (H e, width) -> (H, e, width)
    bias = getattr(module, "bias", None)
    none = weight.new_zeros(weight.shape[-1])
    return Projection(weight, none if bias is None else bias.detach().double())
