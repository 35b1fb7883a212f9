"""Fused attention with Tsallis weights: the operators and what torch needs to know of them.

They run in native code, or where the call says so (`Arguments.gpu`) in Triton (`gpu/launch.py`).

The native forward operator returns the output and what the backward one needs: the offset of each
row, how many keys carry weight, and, in a pool of fixed size for each block of rows, which keys and
how far from the offset. A block that overflows its pool is computed again from the offsets.

The derivative calls the backward operator; one that is to be differentiated again is handed in by
`register_derivative`, from the room that has the same attention in torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.attention_call import (
    TENSORS,
    TRAINED,
    Arguments,
    Saved,
    check_arguments,
    check_saved,
    forward_outputs,
    problem,
)
from fenchel._kernels.gpu.device import load
from fenchel._kernels.library import BLOCK, AttentionGradient, run, view
from fenchel._kernels.operands import register_native
from fenchel._numerics import compute_dtype, transformed

_PARTS = 8  # partial sums of key gradients, so that few heads still fill several cores

_LIBRARY = torch.library.Library("fenchel", "FRAGMENT")
_OPERANDS = ", ".join(f"Tensor{'' if there else '?'} {name}" for name, there in TENSORS.items())
_NUMBERS = (
    "float scale, float bias_scale, bool mass_is_log, SymInt lowest, SymInt highest, "
    "float softcap, SymInt first, float dropout, SymInt queries, SymInt longest_query, "
    "SymInt longest_key, bool gpu, float uniform_eps"
)
_LIBRARY.define(
    f"tsallis_attention({_OPERANDS}, {_NUMBERS}, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"tsallis_attention_backward(Tensor gradient, {_OPERANDS}, {_NUMBERS}, Tensor offset, "
    "Tensor support_size, Tensor saved_key, Tensor saved_distance, bool[] output_mask) "
    f"-> ({', '.join(['Tensor'] * (3 + len(TRAINED)))})"
)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *both, save = arguments
    x = Arguments(*both)
    check_arguments(x)
    if x.gpu:
        results: tuple[Tensor, ...] = load("launch:forward")(x, save)
        return results
    outputs = forward_outputs(x, save)
    p, _kept = problem(x, Saved(*outputs[1:]))
    p.output = view(outputs[0])
    run("attention", p)
    return outputs


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    *both, save = arguments
    return forward_outputs(Arguments(*both), save)


def key_parts(heads: int, kv_heads: int, queries: int) -> int:
    """Partial sums of key gradients. Fixed by the shape of one sequence, never by the number of
    threads or of other sequences: sums must not depend on them."""
    blocks = -(-queries // BLOCK) * (heads // kv_heads)
    return max(1, min(-(-_PARTS // kv_heads), blocks // 2))


def _backward_outputs(x: Arguments, output_mask: list[bool], parts: int) -> tuple[Tensor, ...]:
    dtype = compute_dtype(x.query.dtype)
    batch, heads, queries, _ = x.query.shape
    keys, packed = x.key.shape[2], x.query_start is not None
    rows, scores = x.query.shape[:3], (batch, heads, queries, keys)
    positions = queries + keys if packed else queries + keys - 1
    shapes = {
        "eps": (rows, torch.float64),
        "sink": (rows, torch.float64),
        "sink_log_mass": (rows, torch.float64),
        "bias": (scores, dtype),
        "mass": (scores, dtype),
        "relative": ((parts, batch, heads, positions), dtype),
        "of_key": ((parts, batch, heads, keys), dtype),
    }

    def optional(name: str, wanted: bool) -> Tensor:
        shape, kind = shapes.get(name) or shapes[name.removesuffix("_log_mass")]
        return x.query.new_zeros(shape if wanted else (0,), dtype=kind)

    new = x.query.new_zeros if packed else x.query.new_empty  # a short sequence has fewer parts
    return (
        x.query.new_empty(x.query.shape, dtype=dtype),
        new((parts, *x.key.shape), dtype=dtype),
        new((parts, *x.value.shape), dtype=dtype),
        *map(optional, TRAINED, output_mask),
    )


_FIELDS = {"bias": "scores", "mass": "log_mass"}  # of the native struct, where they differ


def _backward(gradient: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, saved, output_mask = _read_backward(arguments)
    check_arguments(x)
    check_saved(x, gradient, saved)
    if x.gpu:
        gradients: tuple[Tensor, ...]
        gradients = load("launch:backward")(gradient, x, saved, output_mask)
        return gradients
    saved = Saved(*(tensor.contiguous() for tensor in saved))
    if len(output_mask) != len(TRAINED):
        raise ValueError(
            f"output_mask must have one entry each for {', '.join(TRAINED)}, got {output_mask}"
        )
    parts = key_parts(x.query.shape[1], x.key.shape[1], x.longest_query)
    outputs = _backward_outputs(x, output_mask, parts)
    p, _kept = problem(x, saved)
    g: Any = AttentionGradient(output=view(gradient), parts=parts)
    g.query, g.key, g.value = (output.data_ptr() for output in outputs[:3])
    for name, output in zip(TRAINED, outputs[3:], strict=True):
        setattr(g, _FIELDS.get(name, name), output.data_ptr() if output.numel() else None)
    run("attention_gradient", p, g)
    return _finish(outputs, x)


def _finish(outputs: tuple[Tensor, ...], x: Arguments) -> tuple[Tensor, ...]:
    """Partial sums added in order, results in the operands' precision."""
    query, key, value, *rest = outputs
    sums = (query, sum_parts(key), sum_parts(value))
    operands = (x.query, x.key, x.value)
    results = dict(zip(TRAINED, rest, strict=True))
    for name in ("sink", "sink_log_mass"):
        results[name] = results[name].sum(-1) if results[name].numel() else results[name]
    for name in TRAINED[5:]:
        if results[name].numel():
            results[name] = sum_parts(results[name])
            if name.startswith("relative"):
                results[name] = _sum_sequences(results[name], x)
    return *(g.to(like.dtype) for g, like in zip(sums, operands, strict=True)), *results.values()


def sum_parts(partial: Tensor) -> Tensor:
    return partial[0] if partial.shape[0] == 1 else partial.sum(0)


def _sum_sequences(positions: Tensor, x: Arguments) -> Tensor:
    """Relative positions of packed sequences, end to end, added up: (1, head, positions)."""
    if x.query_start is None or x.key_start is None:
        return positions
    lengths = x.query_start.diff() + x.key_start.diff()
    first = x.longest_query - x.query_start.diff()  # of this sequence among all positions
    before = torch.repeat_interleave(lengths.cumsum(0) - lengths - first, lengths)
    place = torch.arange(len(before), device=before.device) - before
    # One more than there are: each sequence has a gap of one entry, which is zero.
    total = positions.new_zeros((*positions.shape[:2], x.longest_query + x.longest_key))
    return total.index_add(2, place, positions)[..., :-1].contiguous()


def _read_backward(arguments: tuple[Any, ...]) -> tuple[Arguments, Saved, list[bool]]:
    """All but the gradient: arguments of the forward operator, what it saved, mask of outputs."""
    count = len(Arguments._fields)
    *saved, output_mask = arguments[count:]
    return Arguments(*arguments[:count]), Saved(*saved), output_mask


def _backward_shapes(gradient: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, _, output_mask = _read_backward(arguments)
    outputs = _backward_outputs(x, output_mask, 1)
    if x.query_start is not None:
        outputs = tuple(
            o.new_zeros((1, 1, o.shape[2], x.longest_query + x.longest_key - 1))
            if name.startswith("relative") and o.numel()
            else o
            for name, o in zip(("query", "key", "value", *TRAINED), outputs, strict=True)
        )
        x = x._replace(query_start=None)
    return _finish(outputs, x)


tsallis_attention = register_native(_LIBRARY, "tsallis_attention", _forward, _forward_shapes)
tsallis_attention_backward = register_native(
    _LIBRARY, "tsallis_attention_backward", _backward, _backward_shapes
)


_LIBRARY.impl("tsallis_attention", _forward, "CUDA")
_LIBRARY.impl("tsallis_attention_backward", _backward, "CUDA")

# ---- the derivative

Gradients = dict[str, Tensor | None]
Differentiable = Callable[[Arguments, Tensor, dict[str, bool]], Gradients]
_NAMES = tuple(TENSORS)


def register_derivative(differentiable: Differentiable) -> None:
    """Join the two operators. differentiable: (arguments, gradient, which are needed) -> gradients
    by name, in operations that can be differentiated again."""
    _Attention.differentiable = staticmethod(differentiable)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, Arguments(*inputs[:-1]), output)

    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return *_differentiate(ctx, gradient, tsallis_attention_backward), None

    torch.library.register_autograd("fenchel::tsallis_attention", backward, setup_context=save)


def attend(x: Arguments, save: bool) -> Tensor:
    """The operator, or what it does, without torch's dispatcher, where nobody listens to that."""
    if save and not torch.compiler.is_compiling() and not _is_watched(x):
        output: Tensor = _Attention.apply(*x)  # type: ignore[no-untyped-call]
        return output
    output = tsallis_attention(**x._asdict(), save=save)[0]
    return output


def _is_watched(x: Arguments) -> bool:
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    tensors = [tensor for tensor in x.tensors.values() if tensor is not None]
    unusual = any(type(t) not in _USUAL or t.is_neg() for t in tensors)
    return unusual or torch._C._get_tracing_state() is not None


_USUAL = (Tensor, torch.nn.Parameter)


class _Attention(torch.autograd.Function):
    """Both operators called as functions, which takes a third of the time."""

    differentiable: Differentiable

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x = Arguments(*arguments)
        outputs = _forward(*x, True)
        _save(ctx, x, outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, gradient, _backward_by_name)


def _backward_by_name(gradient: Tensor, *, output_mask: list[bool], **rest: Any) -> Any:
    x = (rest[name] for name in Arguments._fields)
    gradient = gradient.resolve_neg()  # as the dispatcher would
    return _backward(gradient, *x, *(rest[name] for name in Saved._fields), output_mask)


def _save(ctx: Any, x: Arguments, outputs: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # what is kept for the backward pass is no result
    ctx.save_for_backward(*x.tensors.values(), *outputs[1:])
    ctx.arguments = x._replace(**dict.fromkeys(_NAMES))  # type: ignore[arg-type]


def _differentiate(ctx: Any, gradient: Tensor | None, operator: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # read once: a checkpoint makes them again at each reading
    if gradient is None:
        return (None,) * len(Arguments._fields)
    x = ctx.arguments._replace(**dict(zip(_NAMES, tensors, strict=False)))
    needed = dict(zip(Arguments._fields, ctx.needs_input_grad, strict=False))
    gradients = differentiate(x, Saved(*tensors[len(_NAMES) :]), gradient, needed, operator)
    return tuple(gradients.get(name) if needed[name] else None for name in Arguments._fields)


def differentiate(
    x: Arguments, saved: Saved, gradient: Tensor, needed: dict[str, bool], operator: Any = None
) -> Gradients:
    """Gradients by name, from the kernel; in torch's operations if they are to be followed, too."""
    if torch.compiler.is_compiling():
        return _gradients(operator or _backward_by_name, saved, x, gradient, needed)
    if is_followed(gradient):
        with torch.enable_grad():
            return _Attention.differentiable(x, gradient, needed)
    return _gradients(operator or _backward_by_name, saved, x, gradient, needed)


def is_followed(gradient: Tensor) -> bool:
    """The derivative is itself differentiated or transformed."""
    return torch.is_grad_enabled() or transformed() or not _has_storage(gradient)


def _has_storage(gradient: Tensor) -> bool:
    """Not so of a batch of gradients (`is_grads_batched`), whose vmap leaves no other trace."""
    if type(gradient) is not Tensor or torch._C._len_torch_dispatch_stack():
        return True  # fake tensors go to the operator
    try:
        gradient.data_ptr()
    except RuntimeError:
        return False
    return True


def _gradients(
    operator: Any, saved: Saved, x: Arguments, gradient: Tensor, needed: dict[str, bool]
) -> Gradients:
    """By the backward operator."""
    query, key, value, *others = operator(
        gradient,
        **x._asdict(),
        **saved._asdict(),
        output_mask=[needed[name] for name in TRAINED],
    )
    gradients: Gradients = {"query": query, "key": key, "value": value}
    gradients |= dict(zip(TRAINED, others, strict=True))
    if x.bias is not None and needed["bias"]:
        of_scores: Tensor = others[TRAINED.index("bias")]
        gradients["bias"] = (of_scores * x.bias_scale).to(x.bias.dtype)
    return gradients
