"""Fused attention with Tsallis weights: the native operators and what torch needs to know of them.

Operands are laid out (batch, head, token, component); masks and biases broadcast as views
(batch, head, query, key), eps = alpha - 1 as (batch, head, query) in float64. The forward operator
returns the output and what the backward one needs: the offset of each row, how many keys carry
weight, and, in a pool of fixed size for each block of rows, which keys and how far from the offset.
A block that overflows its pool is computed again from the offsets.

No derivative is registered: `fenchel.attention` joins the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._numerics import compute_dtype
from fenchel.kernels.library import (
    BLOCK,
    AttentionGradient,
    AttentionProblem,
    run,
    view,
)
from fenchel.kernels.operands import DOUBLE, REAL, Axis, check, check_keys, on_one_device

ROOM = 384  # keys a row may save on average; untouched pages of the pool take no memory
_PARTS = 8  # partial sums of key gradients, so that few heads still fill several cores

_LIBRARY = torch.library.Library("fenchel", "FRAGMENT")
_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor eps, Tensor? mask, Tensor? bias, "
    "Tensor? mass, Tensor? seed"
)
_NUMBERS = (
    "float scale, float bias_scale, bool mass_is_log, bool causal, SymInt first, float dropout, "
    "SymInt queries"
)
_LIBRARY.define(
    f"tsallis_attention({_OPERANDS}, {_NUMBERS}, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"tsallis_attention_backward(Tensor gradient, {_OPERANDS}, {_NUMBERS}, Tensor offset, "
    "Tensor count, Tensor saved_key, Tensor saved_distance, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Operands(NamedTuple):
    """The operators' tensors, in their order."""

    query: Tensor
    key: Tensor
    value: Tensor
    eps: Tensor
    mask: Tensor | None
    bias: Tensor | None
    mass: Tensor | None
    seed: Tensor | None


class Numbers(NamedTuple):
    """The operators' arguments that are not tensors, in their order."""

    scale: float
    bias_scale: float
    mass_is_log: bool
    causal: bool
    first: int
    dropout: float
    queries: int


def _forward_outputs(query: Tensor, key: Tensor, value: Tensor, save: bool) -> tuple[Tensor, ...]:
    batch, heads, queries, _ = query.shape
    # Flat, because an axis of blocks may have length one, for which compilers make code of its own.
    a_block = BLOCK * torch.sym_min(ROOM, key.shape[2])
    pool = batch * heads * -(-queries // BLOCK) * a_block if save else 0
    return (
        query.new_empty((batch, heads, queries, value.shape[3])),
        query.new_empty((batch, heads, queries, 2), dtype=torch.float64),
        query.new_empty((batch, heads, queries), dtype=torch.int32),
        query.new_empty(pool, dtype=torch.int32),
        query.new_empty(pool, dtype=compute_dtype(query.dtype)),
    )


_AXES = (Axis("batch"), Axis("head"), Axis("query"), Axis("component"))
_KV_HEAD, _KEY, _COMPONENT, _ENTRY = map(Axis, ("kv_head", "key", "component", "entry"))


def _check(x: Operands, dropout: float) -> None:
    check(x.query, "query", _AXES, REAL)
    batch, heads, queries, dim = x.query.shape
    check(x.key, "key", (batch, _KV_HEAD, _KEY, dim), REAL)
    _, kv_heads, keys, _ = x.key.shape
    check(x.value, "value", (batch, kv_heads, keys, _COMPONENT), REAL)
    check(x.eps, "eps", (batch, heads, queries), DOUBLE)
    if x.mask is not None:
        check(x.mask, "mask", (batch, heads, queries, keys), (torch.bool,))
    if x.bias is not None:
        check(x.bias, "bias", (batch, heads, queries, keys), REAL)
    if x.mass is not None:
        check(x.mass, "mass", (batch, heads, queries, keys), REAL)
    if x.seed is not None:
        check(x.seed, "seed", (), (torch.int64,))
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query must have a multiple of key's {kv_heads} heads, got {heads}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
    check_keys(keys)


def _check_saved(
    x: Operands,
    gradient: Tensor,
    offset: Tensor,
    count: Tensor,
    saved_key: Tensor,
    saved_distance: Tensor,
) -> None:
    rows = x.query.shape[:3]
    check(gradient, "gradient", (*rows, x.value.shape[3]), REAL)
    check(offset, "offset", (*rows, 2), DOUBLE)
    check(count, "count", rows, (torch.int32,))
    check(saved_key, "saved_key", (_ENTRY,), (torch.int32,))
    check(saved_distance, "saved_distance", saved_key.shape, (compute_dtype(x.query.dtype),))


def _problem(x: Operands, numbers: Numbers) -> AttentionProblem:
    p = AttentionProblem()
    p.batch, p.heads, p.queries, p.dim = x.query.shape
    p.kv_heads, p.keys, p.value_dim = x.key.shape[1], x.key.shape[2], x.value.shape[3]
    p.query, p.key, p.value, p.eps = view(x.query), view(x.key), view(x.value), view(x.eps)
    p.mask, p.bias, p.mass = view(x.mask), view(x.bias), view(x.mass)
    p.scale, p.bias_scale, p.mass_is_log = numbers.scale, numbers.bias_scale, numbers.mass_is_log
    p.causal, p.first, p.dropout = numbers.causal, numbers.first, numbers.dropout
    p.seed = 0 if x.seed is None else int(x.seed)
    p.queries_in_all, p.threads = numbers.queries, torch.get_num_threads()
    return p


def _keep(
    p: AttentionProblem, offset: Tensor, count: Tensor, saved_key: Tensor, saved_distance: Tensor
) -> None:
    p.offset, p.count = offset.data_ptr(), count.data_ptr()
    p.capacity = saved_key.numel() // (p.batch * p.heads * -(-p.queries // BLOCK) or 1)
    p.saved_key, p.saved_distance = saved_key.data_ptr(), saved_distance.data_ptr()


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    x, numbers, save = Operands(*arguments[:8]), Numbers(*arguments[8:15]), arguments[15]
    _check(x, numbers.dropout)
    outputs = _forward_outputs(x.query, x.key, x.value, save)
    p = _problem(x, numbers)
    p.output = outputs[0].data_ptr()
    _keep(p, *outputs[1:])
    run("attention", p)
    return outputs


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, value = arguments[:3]
    return _forward_outputs(query, key, value, arguments[15])


def _parts(query: Tensor, key: Tensor) -> int:
    """Fixed by the shapes, never by the number of threads: sums must not depend on it."""
    heads = max(1, key.shape[0] * key.shape[1])
    blocks = -(-query.shape[2] // BLOCK) * (query.shape[1] // key.shape[1])
    return max(1, min(-(-_PARTS // heads), blocks // 2))


def _backward_outputs(
    query: Tensor, key: Tensor, value: Tensor, wanted: list[bool], parts: int
) -> tuple[Tensor, ...]:
    dtype = compute_dtype(query.dtype)
    rows = query.shape[:3]
    scores = (*rows, key.shape[2])

    def optional(index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return query.new_zeros(shape if wanted[index] else (0,), dtype=dtype)

    return (
        query.new_empty(query.shape, dtype=dtype),
        query.new_empty((parts, *key.shape), dtype=dtype),
        query.new_empty((parts, *value.shape), dtype=dtype),
        optional(0, rows, torch.float64),
        optional(1, scores, dtype),
        optional(2, scores, dtype),
    )


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    gradient, x, numbers = arguments[0], Operands(*arguments[1:9]), Numbers(*arguments[9:16])
    saved, wanted = arguments[16:20], arguments[20]
    _check(x, numbers.dropout)
    _check_saved(x, gradient, *saved)
    saved = tuple(tensor.contiguous() for tensor in saved)
    if len(wanted) != 3:
        raise ValueError(f"wanted must have one entry each for eps, bias and mass, got {wanted}")
    parts = _parts(x.query, x.key)
    outputs = _backward_outputs(x.query, x.key, x.value, wanted, parts)
    p = _problem(x, numbers)
    _keep(p, *saved)
    g = AttentionGradient(view(gradient), parts)
    g.query, g.key, g.value = (output.data_ptr() for output in outputs[:3])
    for name, output in zip(("eps", "scores", "log_mass"), outputs[3:], strict=True):
        setattr(g, name, output.data_ptr() if output.numel() else None)
    run("attention_gradient", p, g)
    return _finish(outputs, x.query, x.key, x.value)


def _finish(outputs: tuple[Tensor, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    """Partial sums added in order, results in the operands' precision."""
    query, key, value, *rest = outputs
    sums = (query, *(x[0] if x.shape[0] == 1 else x.sum(0) for x in (key, value)))
    return *(x.to(like.dtype) for x, like in zip(sums, operands, strict=True)), *rest


def _backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, value = arguments[1:4]
    made = _backward_outputs(query, key, value, arguments[20], 1)
    return _finish(made, query, key, value)


_LIBRARY.impl("tsallis_attention", _forward, "CPU")
_LIBRARY.impl("tsallis_attention_backward", _backward, "CPU")
torch.library.register_fake(
    "fenchel::tsallis_attention", on_one_device(_forward_shapes), lib=_LIBRARY
)
torch.library.register_fake(
    "fenchel::tsallis_attention_backward", on_one_device(_backward_shapes), lib=_LIBRARY
)

tsallis_attention = torch.ops.fenchel.tsallis_attention.default
tsallis_attention_backward = torch.ops.fenchel.tsallis_attention_backward.default
