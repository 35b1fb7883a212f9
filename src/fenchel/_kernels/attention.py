"""Fused attention with Tsallis weights: the native operators and what torch needs to know of them.

Operands are laid out (batch, head, token, component); masks and biases broadcast as views
(batch, head, query, key), eps = alpha - 1 as (batch, head, query) in float64. The forward operator
returns the output and what the backward one needs: the offset of each row, how many keys carry
weight, and, in a pool of fixed size for each block of rows, which keys and how far from the offset.
A block that overflows its pool is computed again from the offsets.

No derivative is registered: `fenchel.attention` joins the two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.library import BLOCK, AttentionGradient, AttentionProblem, run, view
from fenchel._numerics import compute_dtype

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


def _problem(operands: tuple[Tensor | None, ...], numbers: Numbers) -> AttentionProblem:
    query, key, value, eps, mask, bias, mass, seed = operands
    assert query is not None
    assert key is not None
    assert value is not None
    p = AttentionProblem()
    p.batch, p.heads, p.queries, p.dim = query.shape
    p.kv_heads, p.keys, p.value_dim = key.shape[1], key.shape[2], value.shape[3]
    p.query, p.key, p.value, p.eps = view(query), view(key), view(value), view(eps)
    p.mask, p.bias, p.mass = view(mask), view(bias), view(mass)
    p.scale, p.bias_scale, p.mass_is_log = numbers.scale, numbers.bias_scale, numbers.mass_is_log
    p.causal, p.first, p.dropout = numbers.causal, numbers.first, numbers.dropout
    p.seed = 0 if seed is None else int(seed)
    p.queries_in_all, p.threads = numbers.queries, torch.get_num_threads()
    return p


def _keep(
    p: AttentionProblem, offset: Tensor, count: Tensor, saved_key: Tensor, saved_distance: Tensor
) -> None:
    p.offset, p.count = offset.data_ptr(), count.data_ptr()
    p.capacity = saved_key.numel() // (p.batch * p.heads * -(-p.queries // BLOCK) or 1)
    p.saved_key, p.saved_distance = saved_key.data_ptr(), saved_distance.data_ptr()


def _forward(*arguments: object) -> tuple[Tensor, ...]:
    operands, numbers, save = arguments[:8], Numbers(*arguments[8:15]), bool(arguments[15])  # type: ignore[arg-type]
    query, key, value = operands[:3]
    outputs = _forward_outputs(query, key, value, save)  # type: ignore[arg-type]
    p = _problem(operands, numbers)  # type: ignore[arg-type]
    p.output = outputs[0].data_ptr()
    _keep(p, *outputs[1:])
    run("attention", p)
    return outputs


def _forward_shapes(*arguments: object) -> tuple[Tensor, ...]:
    query, key, value = arguments[:3]
    return _forward_outputs(query, key, value, bool(arguments[15]))  # type: ignore[arg-type]


def _parts(query: Tensor, key: Tensor) -> int:
    """Fixed by the shapes, never by the number of threads: sums must not depend on it."""
    heads = key.shape[0] * key.shape[1]
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


def _backward(*arguments: object) -> tuple[Tensor, ...]:
    gradient, *operands = arguments[:9]
    numbers, saved, wanted = Numbers(*arguments[9:16]), arguments[16:20], arguments[20]  # type: ignore[arg-type]
    query, key, value = operands[:3]
    parts = _parts(query, key)  # type: ignore[arg-type]
    outputs = _backward_outputs(query, key, value, wanted, parts)  # type: ignore[arg-type]
    p = _problem(tuple(operands), numbers)  # type: ignore[arg-type]
    _keep(p, *saved)  # type: ignore[arg-type]
    g = AttentionGradient(view(gradient), parts)  # type: ignore[arg-type]
    g.query, g.key, g.value = (output.data_ptr() for output in outputs[:3])
    for name, output in zip(("eps", "scores", "log_mass"), outputs[3:], strict=True):
        setattr(g, name, output.data_ptr() if output.numel() else None)
    run("attention_gradient", p, g)
    return _finish(outputs, query, key, value)  # type: ignore[arg-type]


def _finish(outputs: tuple[Tensor, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    """Partial sums added in order, results in the operands' precision."""
    query, key, value, *rest = outputs
    sums = (query, *(x[0] if x.shape[0] == 1 else x.sum(0) for x in (key, value)))
    return *(x.to(like.dtype) for x, like in zip(sums, operands, strict=True)), *rest


def _backward_shapes(*arguments: object) -> tuple[Tensor, ...]:
    query, key, value = arguments[1:4]
    wanted = arguments[20]
    made = _backward_outputs(query, key, value, wanted, 1)  # type: ignore[arg-type]
    return _finish(made, query, key, value)  # type: ignore[arg-type]


_LIBRARY.impl("tsallis_attention", _forward, "CPU")
_LIBRARY.impl("tsallis_attention_backward", _backward, "CPU")
torch.library.register_fake("fenchel::tsallis_attention", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("fenchel::tsallis_attention_backward", _backward_shapes, lib=_LIBRARY)

tsallis_attention = torch.ops.fenchel.tsallis_attention.default
tsallis_attention_backward = torch.ops.fenchel.tsallis_attention_backward.default
