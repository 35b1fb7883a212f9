"""Registration shared by the operators: numbers in, numbers out, rows independent.

A search whose length depends on the data cannot be traced, so it lives in an opaque operator:
`torch.compile` sees its shapes, `vmap` adds one more leading axis. The operators carry no
derivative: callers pass detached tensors and rebuild the derivative in plain operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def row_operator(name: str, columns: int) -> Callable[[Callable[..., Any]], Any]:
    """Register `function(scores, ...) -> columns tensors (..., 1)` as `fenchel::name`.

    Every tensor operand has the same number of axes, keys or a single column last.
    """

    def register(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"fenchel::{name}", function, mutates_args=())

        def shapes(scores: Tensor, *others: Any) -> Any:
            rows = torch.broadcast_shapes(
                *(t.shape[:-1] for t in (scores, *others) if isinstance(t, Tensor))
            )
            outputs = tuple(scores.new_empty((*rows, 1)) for _ in range(columns))
            return outputs if columns > 1 else outputs[0]

        operator.register_fake(shapes)
        register_vmap(operator, columns)
        return operator

    return register


def register_vmap(operator: Any, outputs: int) -> None:
    """Batching for an operator whose operands' leading axes are independent problems."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *operands: Any) -> Any:
        rank = operands[0].ndim - (in_dims[0] is not None)
        pairs = zip(operands, in_dims, strict=True)
        moved = [_batch_first(x, axis, info.batch_size, rank) for x, axis in pairs]
        return operator(*moved), (0,) * outputs if outputs > 1 else 0

    operator.register_vmap(rule)


def _batch_first(operand: Any, axis: int | None, size: int, rank: int) -> Any:
    """Move or make a leading batch axis, and give the rest `rank` axes so that it stays leading."""
    if not isinstance(operand, Tensor):
        return operand
    moved = operand.expand(size, *operand.shape) if axis is None else operand.movedim(axis, 0)
    missing = rank + 1 - moved.ndim
    return moved.reshape(size, *[1] * missing, *moved.shape[1:])
