"""Fused attention with Tsallis weights: the native operators and what torch needs to know of them.

Operands are laid out (batch, head, token, component); masks and biases broadcast as views
(batch, head, query, key), eps = alpha - 1 as (batch, head, query) in float64. The forward operator
returns the output and what the backward one needs: the offset of each row, how many keys carry
weight, and, in a pool of fixed size for each block of rows, which keys and how far from the offset.
A block that overflows its pool is computed again from the offsets.

The derivative calls the backward operator; one that is to be differentiated again is handed in by
`register_derivative`, from the room that has the same attention in torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.library import (
    BLOCK,
    AttentionGradient,
    AttentionProblem,
    run,
    view,
)
from fenchel._kernels.operands import DOUBLE, REAL, Axis, check, check_keys, register_native
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
    "Tensor support_size, Tensor saved_key, Tensor saved_distance, bool[] output_mask) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Arguments(NamedTuple):
    """What both operators take, in their order."""

    query: Tensor
    key: Tensor
    value: Tensor
    eps: Tensor
    mask: Tensor | None
    bias: Tensor | None
    mass: Tensor | None
    seed: Tensor | None
    scale: float
    bias_scale: float
    mass_is_log: bool
    causal: bool
    first: int
    dropout: float
    queries: int

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in _TENSORS}


_TENSORS = ("query", "key", "value", "eps", "mask", "bias", "mass", "seed")


class Saved(NamedTuple):
    """What the forward operator keeps for the backward one."""

    offset: Tensor
    support_size: Tensor
    saved_key: Tensor
    saved_distance: Tensor


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


def _check(x: Arguments) -> None:
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
    if not 0 <= x.dropout <= 1:
        raise ValueError(f"dropout must be between 0 and 1, got {x.dropout}")
    check_keys(keys)


def _check_saved(x: Arguments, gradient: Tensor, saved: Saved) -> None:
    rows = x.query.shape[:3]
    check(gradient, "gradient", (*rows, x.value.shape[3]), REAL)
    check(saved.offset, "offset", (*rows, 2), DOUBLE)
    check(saved.support_size, "support_size", rows, (torch.int32,))
    check(saved.saved_key, "saved_key", (_ENTRY,), (torch.int32,))
    dtypes = (compute_dtype(x.query.dtype),)
    check(saved.saved_distance, "saved_distance", saved.saved_key.shape, dtypes)


def _problem(x: Arguments, saved: Saved) -> Any:
    p: Any = AttentionProblem()
    p.batch, p.heads, p.queries, p.dim = x.query.shape
    p.kv_heads, p.keys, p.value_dim = x.key.shape[1], x.key.shape[2], x.value.shape[3]
    p.query, p.key, p.value, p.eps = view(x.query), view(x.key), view(x.value), view(x.eps)
    p.mask, p.bias, p.mass = view(x.mask), view(x.bias), view(x.mass)
    p.scale, p.bias_scale, p.mass_is_log = x.scale, x.bias_scale, x.mass_is_log
    p.causal, p.first, p.dropout = x.causal, x.first, x.dropout
    p.seed = 0 if x.seed is None else int(x.seed)
    p.queries_in_all, p.threads = x.queries, torch.get_num_threads()
    p.offset, p.count = saved.offset.data_ptr(), saved.support_size.data_ptr()
    p.capacity = saved.saved_key.numel() // (p.batch * p.heads * -(-p.queries // BLOCK) or 1)
    p.saved_key, p.saved_distance = saved.saved_key.data_ptr(), saved.saved_distance.data_ptr()
    return p


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *both, save = arguments
    x = Arguments(*both)
    _check(x)
    outputs = _forward_outputs(x.query, x.key, x.value, save)
    p = _problem(x, Saved(*outputs[1:]))
    p.output = outputs[0].data_ptr()
    run("attention", p)
    return outputs


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    *both, save = arguments
    x = Arguments(*both)
    return _forward_outputs(x.query, x.key, x.value, save)


def _parts(query: Tensor, key: Tensor) -> int:
    """Fixed by the shapes, never by the number of threads: sums must not depend on it."""
    heads = max(1, key.shape[0] * key.shape[1])
    blocks = -(-query.shape[2] // BLOCK) * (query.shape[1] // key.shape[1])
    return max(1, min(-(-_PARTS // heads), blocks // 2))


def _backward_outputs(
    query: Tensor, key: Tensor, value: Tensor, output_mask: list[bool], parts: int
) -> tuple[Tensor, ...]:
    dtype = compute_dtype(query.dtype)
    rows = query.shape[:3]
    scores = (*rows, key.shape[2])

    def optional(index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return query.new_zeros(shape if output_mask[index] else (0,), dtype=dtype)

    return (
        query.new_empty(query.shape, dtype=dtype),
        query.new_empty((parts, *key.shape), dtype=dtype),
        query.new_empty((parts, *value.shape), dtype=dtype),
        optional(0, rows, torch.float64),
        optional(1, scores, dtype),
        optional(2, scores, dtype),
    )


def _backward(gradient: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, saved, output_mask = _read_backward(arguments)
    _check(x)
    _check_saved(x, gradient, saved)
    saved = Saved(*(tensor.contiguous() for tensor in saved))
    if len(output_mask) != 3:
        raise ValueError(
            f"output_mask must have one entry each for eps, bias and mass, got {output_mask}"
        )
    parts = _parts(x.query, x.key)
    outputs = _backward_outputs(x.query, x.key, x.value, output_mask, parts)
    p = _problem(x, saved)
    g: Any = AttentionGradient(output=view(gradient), parts=parts)
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


def _read_backward(arguments: tuple[Any, ...]) -> tuple[Arguments, Saved, list[bool]]:
    """All but the gradient: arguments of the forward operator, what it saved, mask of outputs."""
    count = len(Arguments._fields)
    *saved, output_mask = arguments[count:]
    return Arguments(*arguments[:count]), Saved(*saved), output_mask


def _backward_shapes(gradient: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, _, output_mask = _read_backward(arguments)
    outputs = _backward_outputs(x.query, x.key, x.value, output_mask, 1)
    return _finish(outputs, x.query, x.key, x.value)


tsallis_attention = register_native(_LIBRARY, "tsallis_attention", _forward, _forward_shapes)
tsallis_attention_backward = register_native(
    _LIBRARY, "tsallis_attention_backward", _backward, _backward_shapes
)


# ---- the derivative

Gradients = dict[str, Tensor | None]
Differentiable = Callable[[Arguments, Tensor, dict[str, bool]], Gradients]


def register_derivative(differentiable: Differentiable) -> None:
    """Join the two operators. differentiable: (arguments, gradient, which are needed) -> gradients
    by name, in operations that can be differentiated again."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x = Arguments(*inputs[:-1])
        ctx.set_materialize_grads(False)  # what is kept for the backward pass is no result
        ctx.save_for_backward(*x.tensors.values(), *output[1:])
        ctx.arguments = x._replace(**dict.fromkeys(_TENSORS))  # type: ignore[arg-type]

    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (len(Arguments._fields) + 1)
        tensors = ctx.saved_tensors  # read once: a checkpoint makes them again at each reading
        if gradient is None:
            return nothing
        x = ctx.arguments._replace(**dict(zip(_TENSORS, tensors, strict=False)))
        needed = dict(zip(Arguments._fields, ctx.needs_input_grad, strict=False))
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        compute = differentiable if again else partial(_gradients, Saved(*tensors[len(_TENSORS) :]))
        gradients = compute(x, gradient, needed)
        per_argument = (gradients.get(name) if needed[name] else None for name in Arguments._fields)
        return *per_argument, None

    torch.library.register_autograd("fenchel::tsallis_attention", backward, setup_context=save)


def _gradients(saved: Saved, x: Arguments, gradient: Tensor, needed: dict[str, bool]) -> Gradients:
    """By the backward operator."""
    output_mask = [needed[name] for name in ("eps", "bias", "mass")]
    query, key, value, eps, scores, log_mass = tsallis_attention_backward(
        gradient, **x._asdict(), **saved._asdict(), output_mask=output_mask
    )
    bias = None
    if x.bias is not None and needed["bias"]:
        bias = (scores * x.bias_scale).to(x.bias.dtype)
    gradients = {"query": query, "key": key, "value": value, "eps": eps, "mass": log_mass}
    return {**gradients, "bias": bias}
