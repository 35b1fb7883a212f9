"""One call of fused attention: its arguments, checked, and as the native code reads them.

Operands are laid out (batch, head, token, component); masks and biases broadcast as views
(batch, head, query, key), eps = alpha - 1 as (batch, head, query) in float64. Packed sequences are
one batch with the tokens of all of them, and the number of tokens before each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.gpu.device import load
from fenchel._kernels.library import BLOCK, AttentionProblem, view
from fenchel._kernels.operands import DOUBLE, REAL, Axis, check, check_keys
from fenchel._numerics import compute_dtype

ROOM = 512  # keys a row may save on average; untouched pages of the pool take no memory

TENSORS = {
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
    gpu: bool = False  # computed by the kernels in Triton, on a device or in its interpreter
    uniform_eps: float = -1.0  # what all of eps holds, where that is one known number

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def sequences(self) -> int:
        return self.query.shape[0] if self.query_start is None else self.query_start.shape[0] - 1


class Saved(NamedTuple):
    """What the forward operator keeps for the backward one."""

    offset: Tensor
    support_size: Tensor
    saved_key: Tensor
    saved_distance: Tensor


def blocks(x: Arguments) -> int:
    """Pools of saved supports."""
    batch, heads, queries, _ = x.query.shape
    if x.query_start is not None:
        return heads * (queries // BLOCK + x.sequences)
    return batch * heads * -(-queries // BLOCK)


def forward_outputs(x: Arguments, save: bool) -> tuple[Tensor, ...]:
    batch, heads, queries, _ = x.query.shape
    # Flat, because an axis of blocks may have length one, for which compilers make code of its own.
    pool = blocks(x) * BLOCK * torch.sym_min(ROOM, x.longest_key + 1) if not x.gpu else 0
    sizes = (load("shapes:kept")(x) if x.gpu else (pool, pool)) if save else (0, 0)
    shape = (batch, heads, queries, x.value.shape[3])
    if x.query_start is None:
        output = x.query.new_empty(shape)
    else:  # (tokens, head, component), as it came
        output = x.query.new_empty((1, queries, heads, shape[3])).transpose(1, 2)
    return (
        output,
        x.query.new_empty((batch, heads, queries, 2) if save else 0, dtype=torch.float64),
        x.query.new_empty((batch, heads, queries) if save else 0, dtype=torch.int32),
        x.query.new_empty(sizes[0], dtype=torch.int32),
        x.query.new_empty(sizes[1], dtype=compute_dtype(x.query.dtype)),
    )


_AXES = (Axis("batch"), Axis("head"), Axis("query"), Axis("component"))
_KV_HEAD, _KEY, _COMPONENT, _ENTRY = map(Axis, ("kv_head", "key", "component", "entry"))
_WHOLE = (torch.int64,)


def check_arguments(x: Arguments) -> None:
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
    if x.gpu:  # which reads no more than there is, and looks at no value on the host
        return
    if x.query.device.type != "cpu":
        raise ValueError(f"native code reads the CPU, the query is on {x.query.device}; set gpu")
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


def check_saved(x: Arguments, gradient: Tensor, saved: Saved) -> None:
    rows = x.query.shape[:3]
    check(gradient, "gradient", (*rows, x.value.shape[3]), REAL)
    check(saved.offset, "offset", (*rows, 2), DOUBLE)
    check(saved.support_size, "support_size", rows, (torch.int32,))
    tiles, entries = load("shapes:kept")(x) if x.gpu else (_ENTRY, saved.saved_key.numel())
    check(saved.saved_key, "saved_key", (tiles,), (torch.int32,))
    dtypes = (compute_dtype(x.query.dtype),)
    check(saved.saved_distance, "saved_distance", (entries,), dtypes)


class Problem(NamedTuple):
    """The struct, and the tensors that it points to."""

    struct: Any
    tensors: list[Tensor]


def problem(x: Arguments, saved: Saved) -> Problem:
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
    p.capacity = saved.saved_key.numel() // (blocks(x) or 1)
    p.saved_key, p.saved_distance = saved.saved_key.data_ptr(), saved.saved_distance.data_ptr()
    return Problem(p, kept)


def _rows_in_order(table: Tensor) -> Tensor:
    """Its last axis contiguous; axes that broadcast stay as they are."""
    if table.stride(-1) == 1 or table.shape[-1] <= 1:
        return table
    small = table[:1] if table.stride(0) == 0 else table
    small = small[:, :1] if table.stride(1) == 0 else small
    return small.contiguous().expand(table.shape)
