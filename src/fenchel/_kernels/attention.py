"""Fused attention with Tsallis weights: the native operators and what torch needs to know of them.

Operands are laid out (batch, head, token, component); masks and biases broadcast as views
(batch, head, query, key), eps = alpha - 1 as (batch, head, query) in float64. Packed sequences are
one batch with the tokens of all of them, and the number of tokens before each. The forward operator
returns the output and what the backward one needs: the offset of each row, how many keys carry
weight, and, in a pool of fixed size for each block of rows, which keys and how far from the offset.
A block that overflows its pool is computed again from the offsets.

The derivative calls the backward operator; one that is to be differentiated again is handed in by
`register_derivative`, from the room that has the same attention in torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
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
_TENSORS = {
    "query": True,
    "key": True,
    "value": True,
    "eps": True,
    "mask": False,
    "bias": False,
    "mass": False,
    "seed": False,
    "start": False,
    "stop": False,
    "relative": False,
    "relative_log_mass": False,
    "of_key": False,
    "of_key_log_mass": False,
    "sink": False,
    "sink_log_mass": False,
    "query_start": False,
    "key_start": False,
}  # by name; True: always there
_OPERANDS = ", ".join(f"Tensor{'' if there else '?'} {name}" for name, there in _TENSORS.items())
_NUMBERS = (
    "float scale, float bias_scale, bool mass_is_log, SymInt lowest, SymInt highest, "
    "float softcap, SymInt first, float dropout, SymInt queries, SymInt longest_query, "
    "SymInt longest_key"
)
_LIBRARY.define(
    f"tsallis_attention({_OPERANDS}, {_NUMBERS}, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# What has a derivative beside query, key and value, in the order of the operator's outputs.
TRAINED = (
    "eps",
    "sink",
    "sink_log_mass",
    "bias",
    "mass",
    "relative",
    "relative_log_mass",
    "of_key",
    "of_key_log_mass",
)
_LIBRARY.define(
    f"tsallis_attention_backward(Tensor gradient, {_OPERANDS}, {_NUMBERS}, Tensor offset, "
    "Tensor support_size, Tensor saved_key, Tensor saved_distance, bool[] output_mask) "
    f"-> ({', '.join(['Tensor'] * (3 + len(TRAINED)))})"
)
FAR = 2**40  # as `lowest` or `highest`: no bound


class Arguments(NamedTuple):
    """What both operators take, in their order."""

    query: Tensor
    key: Tensor
    value: Tensor
    eps: Tensor
    mask: Tensor | None = None  # bool (batch, head, query, key), True = attend
    bias: Tensor | None = None  # (batch, head, query, key)
    mass: Tensor | None = None  # likewise; log mass where mass_is_log
    seed: Tensor | None = None
    start: Tensor | None = None  # int64 (batch, head, query): first key that is seen
    stop: Tensor | None = None  # likewise: first one that is not
    relative: Tensor | None = None  # bias at key - query + longest_query - 1: (batch, head, ...)
    relative_log_mass: Tensor | None = None
    of_key: Tensor | None = None  # bias (batch, head, key)
    of_key_log_mass: Tensor | None = None
    sink: Tensor | None = None  # float64 (batch, head): score of a null key
    sink_log_mass: Tensor | None = None
    query_start: Tensor | None = None  # int64 (sequences + 1,)
    key_start: Tensor | None = None
    scale: float = 1.0
    bias_scale: float = 1.0
    mass_is_log: bool = False
    lowest: int = -FAR  # query i sees keys i + lowest .. i + highest
    highest: int = FAR
    softcap: float = 0.0
    first: int = 0
    dropout: float = 0.0
    queries: int = 0
    longest_query: int = 0
    longest_key: int = 0

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in _TENSORS}

    @property
    def sequences(self) -> int:
        return self.query.shape[0] if self.query_start is None else len(self.query_start) - 1


class Saved(NamedTuple):
    """What the forward operator keeps for the backward one."""

    offset: Tensor
    support_size: Tensor
    saved_key: Tensor
    saved_distance: Tensor


def _blocks(x: Arguments) -> int:
    """Pools of saved supports."""
    batch, heads, queries, _ = x.query.shape
    if x.query_start is not None:
        return heads * (queries // BLOCK + x.sequences)
    return batch * heads * -(-queries // BLOCK)


def _forward_outputs(x: Arguments, save: bool) -> tuple[Tensor, ...]:
    batch, heads, queries, _ = x.query.shape
    # Flat, because an axis of blocks may have length one, for which compilers make code of its own.
    pool = _blocks(x) * BLOCK * torch.sym_min(ROOM, x.longest_key) if save else 0
    shape = (batch, heads, queries, x.value.shape[3])
    if x.query_start is None:
        output = x.query.new_empty(shape)
    else:  # (tokens, head, component), as it came
        output = x.query.new_empty((1, queries, heads, shape[3])).transpose(1, 2)
    return (
        output,
        x.query.new_empty((batch, heads, queries, 2) if save else 0, dtype=torch.float64),
        x.query.new_empty((batch, heads, queries) if save else 0, dtype=torch.int32),
        x.query.new_empty(pool, dtype=torch.int32),
        x.query.new_empty(pool, dtype=compute_dtype(x.query.dtype)),
    )


_AXES = (Axis("batch"), Axis("head"), Axis("query"), Axis("component"))
_KV_HEAD, _KEY, _COMPONENT, _ENTRY = map(Axis, ("kv_head", "key", "component", "entry"))
_WHOLE = (torch.int64,)


def _check(x: Arguments) -> None:
    check(x.query, "query", _AXES, REAL)
    batch, heads, queries, dim = x.query.shape
    check(x.key, "key", (batch, _KV_HEAD, _KEY, dim), REAL)
    _, kv_heads, keys, _ = x.key.shape
    scores, positions = (batch, heads, queries, keys), x.longest_query + x.longest_key - 1
    computed = (compute_dtype(x.query.dtype),)
    expected: dict[str, tuple[tuple[int | Axis, ...], tuple[torch.dtype, ...]]] = {
        "value": ((batch, kv_heads, keys, _COMPONENT), REAL),
        "eps": (scores[:3], DOUBLE),
        "mask": (scores, (torch.bool,)),
        "bias": (scores, REAL),
        "mass": (scores, REAL),
        "seed": ((), _WHOLE),
        "start": (scores[:3], _WHOLE),
        "stop": (scores[:3], _WHOLE),
        "relative": ((batch, heads, positions), computed),
        "relative_log_mass": ((batch, heads, positions), computed),
        "of_key": ((batch, heads, keys), computed),
        "of_key_log_mass": ((batch, heads, keys), computed),
        "sink": ((batch, heads), DOUBLE),
        "sink_log_mass": ((batch, heads), DOUBLE),
        "query_start": ((_ENTRY,), _WHOLE),
        "key_start": ((_ENTRY,), _WHOLE),
    }
    for name, (shape, dtypes) in expected.items():
        tensor = getattr(x, name)
        if tensor is not None:
            check(tensor, name, shape, dtypes)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query must have a multiple of key's {kv_heads} heads, got {heads}")
    if not 0 <= x.dropout <= 1:
        raise ValueError(f"dropout must be between 0 and 1, got {x.dropout}")
    if x.sink is None and x.sink_log_mass is not None:
        raise ValueError("sink_log_mass needs a sink")
    check_keys(keys)
    _check_sequences(x)


def _check_sequences(x: Arguments) -> None:
    """Memory is read by these numbers."""
    if (x.query_start is None) != (x.key_start is None):
        raise ValueError("packed sequences need query_start and key_start")
    longest = (x.longest_query, x.longest_key)
    if x.query_start is None or x.key_start is None:
        if longest != (x.query.shape[2], x.key.shape[2]):
            raise ValueError(f"longest_query and longest_key must be the lengths, got {longest}")
        return
    if x.query.shape[0] != 1 or x.query_start.shape != x.key_start.shape:
        raise ValueError("packed sequences are one batch with equally many starts on both sides")
    if x.mask is not None or x.bias is not None or x.mass is not None:
        raise ValueError("packed sequences take no mask, bias or mass of every query and key")
    pairs = ((x.query_start, x.query, longest[0]), (x.key_start, x.key, longest[1]))
    for start, tensor, most in pairs:
        lengths = start.diff()
        ends = (int(start[0]), int(start[-1])) if len(start) else None
        if ends != (0, tensor.shape[2]) or bool(((lengths < 0) | (lengths > most)).any()):
            raise ValueError(
                f"starts of sequences must rise from 0 to the {tensor.shape[2]} tokens, in steps "
                f"of {most} at most"
            )


def _check_saved(x: Arguments, gradient: Tensor, saved: Saved) -> None:
    rows = x.query.shape[:3]
    check(gradient, "gradient", (*rows, x.value.shape[3]), REAL)
    check(saved.offset, "offset", (*rows, 2), DOUBLE)
    check(saved.support_size, "support_size", rows, (torch.int32,))
    check(saved.saved_key, "saved_key", (_ENTRY,), (torch.int32,))
    dtypes = (compute_dtype(x.query.dtype),)
    check(saved.saved_distance, "saved_distance", saved.saved_key.shape, dtypes)


class Problem(NamedTuple):
    """The struct, and the tensors that it points to."""

    struct: Any
    tensors: list[Tensor]


def _problem(x: Arguments, saved: Saved) -> Problem:
    p: Any = AttentionProblem()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    _, p.heads, _, p.dim = x.query.shape
    p.batch, p.queries, p.keys = x.sequences, x.longest_query, x.longest_key
    p.kv_heads, p.value_dim = x.key.shape[1], x.value.shape[3]
    p.query, p.key, p.value, p.eps = view(x.query), view(x.key), view(x.value), view(x.eps)
    p.mask, p.bias, p.mass = view(x.mask), view(x.bias), view(x.mass)
    p.start, p.stop = view(x.start), view(x.stop)
    for name in ("relative", "of_key"):
        table, log_mass = getattr(x, name), getattr(x, f"{name}_log_mass")
        if table is not None:
            setattr(p, name, view(keep(_rows_in_order(table))))
        if log_mass is not None:
            setattr(p, f"{name}_mass", view(keep(_rows_in_order(log_mass).exp())))
    p.sink = view(x.sink)
    if x.sink_log_mass is not None:
        p.sink_mass = view(keep(x.sink_log_mass.exp()))
    if x.query_start is not None and x.key_start is not None:
        p.query_start = keep(x.query_start.contiguous()).data_ptr()
        p.key_start = keep(x.key_start.contiguous()).data_ptr()
    p.scale, p.bias_scale, p.mass_is_log = x.scale, x.bias_scale, x.mass_is_log
    p.lowest, p.highest, p.softcap = x.lowest, x.highest, x.softcap
    p.first, p.dropout = x.first, x.dropout
    p.seed = 0 if x.seed is None else int(x.seed)
    p.queries_in_all, p.threads = x.queries, torch.get_num_threads()
    if saved.offset.numel():
        p.offset, p.count = saved.offset.data_ptr(), saved.support_size.data_ptr()
    p.capacity = saved.saved_key.numel() // (_blocks(x) or 1)
    p.saved_key, p.saved_distance = saved.saved_key.data_ptr(), saved.saved_distance.data_ptr()
    return Problem(p, kept)


def _rows_in_order(table: Tensor) -> Tensor:
    """Its last axis contiguous; axes that broadcast stay as they are."""
    if table.stride(-1) == 1 or table.shape[-1] <= 1:
        return table
    small = table[:1] if table.stride(0) == 0 else table
    small = small[:, :1] if table.stride(1) == 0 else small
    return small.contiguous().expand(table.shape)


class Description:
    """A call, checked and laid out for the kernel, that runs with any operands of these shapes."""

    def __init__(self, x: Arguments, save: bool) -> None:
        _check(x)
        outputs = _forward_outputs(x, save)
        self._problem, self._kept = _problem(x, Saved(*outputs[1:]))
        self._kept.append(x.eps)
        self._problem.output = view(outputs[0])
        self._outputs = [(output.shape, output.dtype) for output in outputs]
        self._save = save

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """What the operator returns."""
        p: Any = AttentionProblem.from_buffer_copy(self._problem)
        wanted = self._outputs if self._save else self._outputs[:1]
        outputs = tuple(query.new_empty(shape, dtype=dtype) for shape, dtype in wanted)
        p.query.data, p.key.data = query.data_ptr(), key.data_ptr()
        p.value.data, p.output.data = value.data_ptr(), outputs[0].data_ptr()
        if self._save:
            saved = Saved(*outputs[1:])
            p.offset, p.count = saved.offset.data_ptr(), saved.support_size.data_ptr()
            p.saved_key = saved.saved_key.data_ptr()
            p.saved_distance = saved.saved_distance.data_ptr()
        p.threads = torch.get_num_threads()
        run("attention", p)
        return outputs


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *both, save = arguments
    x = Arguments(*both)
    _check(x)
    outputs = _forward_outputs(x, save)
    p, _kept = _problem(x, Saved(*outputs[1:]))
    p.output = view(outputs[0])
    run("attention", p)
    return outputs


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    *both, save = arguments
    return _forward_outputs(Arguments(*both), save)


def _parts(x: Arguments) -> int:
    """Fixed by the shape of one sequence, never by the number of threads or of other sequences:
    sums must not depend on them."""
    heads, kv_heads = x.query.shape[1], x.key.shape[1]
    blocks = -(-x.longest_query // BLOCK) * (heads // kv_heads)
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
    _check(x)
    _check_saved(x, gradient, saved)
    saved = Saved(*(tensor.contiguous() for tensor in saved))
    if len(output_mask) != len(TRAINED):
        raise ValueError(
            f"output_mask must have one entry each for {', '.join(TRAINED)}, got {output_mask}"
        )
    parts = _parts(x)
    outputs = _backward_outputs(x, output_mask, parts)
    p, _kept = _problem(x, saved)
    g: Any = AttentionGradient(output=view(gradient), parts=parts)
    g.query, g.key, g.value = (output.data_ptr() for output in outputs[:3])
    for name, output in zip(TRAINED, outputs[3:], strict=True):
        setattr(g, _FIELDS.get(name, name), output.data_ptr() if output.numel() else None)
    run("attention_gradient", p, g)
    return _finish(outputs, x)


def _finish(outputs: tuple[Tensor, ...], x: Arguments) -> tuple[Tensor, ...]:
    """Partial sums added in order, results in the operands' precision."""
    query, key, value, *rest = outputs
    sums = (query, _sum_parts(key), _sum_parts(value))
    operands = (x.query, x.key, x.value)
    results = dict(zip(TRAINED, rest, strict=True))
    for name in ("sink", "sink_log_mass"):
        results[name] = results[name].sum(-1) if results[name].numel() else results[name]
    for name in TRAINED[5:]:
        if results[name].numel():
            results[name] = _sum_parts(results[name])
            if name.startswith("relative"):
                results[name] = _sum_sequences(results[name], x)
    return *(g.to(like.dtype) for g, like in zip(sums, operands, strict=True)), *results.values()


def _sum_parts(partial: Tensor) -> Tensor:
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
    return total.index_add(2, place, positions)[..., :-1]


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


# ---- the derivative

Gradients = dict[str, Tensor | None]
Differentiable = Callable[[Arguments, Tensor, dict[str, bool]], Gradients]
_NAMES = tuple(_TENSORS)


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
    return any(t is not None and type(t) not in _USUAL for t in x[: len(_NAMES)])


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
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _differentiate(ctx, gradient, _backward_by_name)


def _backward_by_name(gradient: Tensor, *, output_mask: list[bool], **rest: Any) -> Any:
    x = (rest[name] for name in Arguments._fields)
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
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Attention.differentiable(x, gradient, needed)
    return _gradients(operator or _backward_by_name, saved, x, gradient, needed)


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
        gradients["bias"] = (gradients["bias"] * x.bias_scale).to(x.bias.dtype)
    return gradients
