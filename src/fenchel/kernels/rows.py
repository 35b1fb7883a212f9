"""Tsallis weights of rows of scores in one native pass, and their derivative.

`tsallis_weights(scores, eps)` maps (rows, keys) to weights for eps = alpha - 1 in [0, 1]. A row
with NaN or +inf gives NaN, a row of -inf zeros, as `solve` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel.kernels.library import RowsGradient, RowsProblem, code, run
from fenchel.kernels.operands import FULL, Axis, check, check_keys, on_one_device

_LIBRARY = torch.library.Library("fenchel", "FRAGMENT")
_LIBRARY.define("tsallis_weights(Tensor scores, float eps) -> Tensor")
_LIBRARY.define("tsallis_weights_backward(Tensor gradient, Tensor weights, float eps) -> Tensor")


def _weights(scores: Tensor, eps: float) -> Tensor:
    _check("scores", scores, eps)
    scores = scores.contiguous()
    rows, keys = scores.shape
    weights = torch.empty_like(scores)
    offset = scores.new_empty((rows, 2), dtype=torch.float64)
    column = torch.tensor([eps], dtype=torch.float64)
    problem = RowsProblem(
        *(rows, keys, code(scores.dtype), scores.data_ptr(), column.data_ptr(), 0),
        *(weights.data_ptr(), offset.data_ptr(), torch.get_num_threads()),
    )
    run("row_map", problem)
    return weights


_AXES = (Axis("row"), Axis("key"))


def _check(name: str, rows: Tensor, eps: float) -> None:
    check(rows, name, _AXES, FULL)
    check_keys(rows.shape[1])
    if not 0 <= eps <= 1:
        raise ValueError(f"eps = alpha - 1 must be between 0 and 1, got {eps}; `solve` takes any")


def _weights_backward(gradient: Tensor, weights: Tensor, eps: float) -> Tensor:
    _check("weights", weights, eps)
    check(gradient, "gradient", weights.shape, (weights.dtype,))
    gradient, weights = gradient.contiguous(), weights.contiguous()
    scores = torch.empty_like(weights)
    problem = RowsGradient(
        *(*weights.shape, code(weights.dtype), weights.data_ptr(), gradient.data_ptr()),
        *(eps, scores.data_ptr(), torch.get_num_threads()),
    )
    run("row_map_gradient", problem)
    return scores


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.eps = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (weights,) = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _differentiable(gradient, weights, ctx.eps), None
    return tsallis_weights_backward(gradient, weights, ctx.eps), None


def _differentiable(gradient: Tensor, weights: Tensor, eps: float) -> Tensor:
    """r (g - <r, g> / sum r), r = p^(1 - eps): plain operations, with derivatives of their own."""
    on = weights != 0  # NaN stays NaN
    response = where(on, where(on, weights, 1.0) ** (1 - eps), 0.0)
    total = response.sum(-1, keepdim=True)
    mean = (response * gradient).sum(-1, keepdim=True) / where(total != 0, total, 1.0)
    return response * (gradient - mean)


_LIBRARY.impl("tsallis_weights", _weights, "CPU")
_LIBRARY.impl("tsallis_weights_backward", _weights_backward, "CPU")
torch.library.register_fake(
    "fenchel::tsallis_weights", lambda scores, eps: torch.empty_like(scores), lib=_LIBRARY
)
torch.library.register_fake(
    "fenchel::tsallis_weights_backward",
    on_one_device(lambda gradient, weights, eps: torch.empty_like(weights)),
    lib=_LIBRARY,
)
torch.library.register_autograd("fenchel::tsallis_weights", _backward, setup_context=_save)

tsallis_weights = torch.ops.fenchel.tsallis_weights.default
tsallis_weights_backward = torch.ops.fenchel.tsallis_weights_backward.default
