"""Registration shared by the row operators: numbers in, one number a row out.

A search whose length depends on the data cannot be traced, so it lives in an opaque operator.
Every tensor operand has the same number of axes, keys or a single column last; `torch.compile`
sees the shapes, `vmap` adds one more leading axis. The operators carry no derivative: callers
pass detached tensors and rebuild the derivative in plain operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def row_operator(name: str, columns: int) -> Callable[[Callable[..., Any]], Any]:
    """Register `function(scores, ...) -> columns tensors (..., 1)` as `fenchel::name`."""

    def register(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"fenchel::{name}", function, mutates_args=())

        def shapes(scores: Tensor, *others: Any) -> Any:
            rows = torch.broadcast_shapes(
                *(t.shape[:-1] for t in (scores, *others) if isinstance(t, Tensor))
            )
            made = tuple(scores.new_empty((*rows, 1)) for _ in range(columns))
            return made if columns > 1 else made[0]

        def batched(info: Any, in_dims: tuple[int | None, ...], *operands: Any) -> Any:
            moved = [_lead(x, d) for x, d in zip(operands, in_dims, strict=True)]
            result = operator(*moved)
            return result, (0,) * columns if columns > 1 else 0

        operator.register_fake(shapes)
        torch.library.register_vmap(operator, batched)
        return operator

    return register


def _lead(operand: Any, axis: int | None) -> Any:
    if not isinstance(operand, Tensor):
        return operand
    return operand.unsqueeze(0) if axis is None else operand.movedim(axis, 0)
