"""Softmax attention of which only an average over the queries is wanted, in native code.

`average_attention(query, key, value, share)`: (g, r, q, d), (g, n, d), (g, n, e), (g, r, q) to
(g, r, e), sum_j share_j sum_t softmax_t(<query_j, key_t>) value_t, without the matrix of weights.
"""

from __future__ import annotations

from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.library import AverageProblem, code, run
from fenchel._kernels.operands import FULL, Axis, check, register_native

Four = tuple[Tensor, Tensor, Tensor, Tensor]

_LIBRARY = torch.library.Library("fenchel", "FRAGMENT")
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor share"
_LIBRARY.define(f"average_attention({_OPERANDS}) -> Tensor")
_LIBRARY.define(
    f"average_attention_backward(Tensor slope, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _problem(query: Tensor, value: Tensor, *pointers: int | None) -> Structure:
    groups, rows, queries, dim = query.shape
    sizes = (groups, rows, queries, value.shape[-2], dim, value.shape[-1])
    return AverageProblem(*sizes, code(query.dtype), torch.get_num_threads(), *pointers)


_AXES = (Axis("group"), Axis("row"), Axis("query"), Axis("component"))
_KEY, _COMPONENT = Axis("key"), Axis("component")


def _check(query: Tensor, key: Tensor, value: Tensor, share: Tensor) -> None:
    check(query, "query", _AXES, FULL)
    dtype, (groups, _, _, dim) = (query.dtype,), query.shape
    check(key, "key", (groups, _KEY, dim), dtype)
    check(value, "value", (groups, key.shape[1], _COMPONENT), dtype)
    check(share, "share", query.shape[:3], dtype)


def _average(query: Tensor, key: Tensor, value: Tensor, share: Tensor) -> Tensor:
    _check(query, key, value, share)
    operands = [x.contiguous() for x in (query, key, value, share)]
    output = _average_shape(*operands)
    pointers = [x.data_ptr() for x in (*operands, output)]
    run("average", _problem(query, value, *pointers, *[None] * 5))
    return output


def _average_shape(query: Tensor, key: Tensor, value: Tensor, share: Tensor) -> Tensor:
    return value.new_empty(*query.shape[:2], value.shape[-1])


def _average_backward(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, share: Tensor
) -> Four:
    _check(query, key, value, share)
    check(slope, "slope", (*query.shape[:2], value.shape[2]), (query.dtype,))
    slope, *operands = (x.contiguous() for x in (slope, query, key, value, share))
    gradients = _backward_shapes(slope, *operands)
    pointers = [*(x.data_ptr() for x in operands), None]
    pointers += [x.data_ptr() for x in (slope, *gradients)]
    run("average", _problem(query, value, *pointers))
    return gradients


def _backward_shapes(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, share: Tensor
) -> Four:
    first, second, third, fourth = (x.new_empty(x.shape) for x in (query, key, value, share))
    return first, second, third, fourth


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, slope: Tensor) -> Four:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _differentiable(slope, *ctx.saved_tensors)
    gradients: Four = average_attention_backward(slope, *ctx.saved_tensors)
    return gradients


def _differentiable(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, share: Tensor
) -> Four:
    """The formulas of native/average.h in plain operations, with derivatives of their own."""
    weights = (query @ key.unsqueeze(1).mT).softmax(-1)  # (g, r, q, n)
    along = (slope @ value.mT).unsqueeze(2)  # (g, r, 1, n)
    reward = (weights * along).sum(-1, keepdim=True)
    to_scores = share.unsqueeze(-1) * weights * (along - reward)
    mean = (share.unsqueeze(2) @ weights).squeeze(2)  # (g, r, n)
    to_query = to_scores @ key.unsqueeze(1)
    to_key = (to_scores.mT @ query).sum(1)
    return to_query, to_key, mean.mT @ slope, reward.squeeze(-1)


average_attention = register_native(_LIBRARY, "average_attention", _average, _average_shape)
average_attention_backward = register_native(
    _LIBRARY, "average_attention_backward", _average_backward, _backward_shapes
)
torch.library.register_autograd("fenchel::average_attention", _backward, setup_context=_save)
