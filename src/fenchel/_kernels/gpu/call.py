"""A call of fused attention as the kernels read it: tensors, strides and numbers in one tuple.

What is absent is None, for which Triton compiles a kernel without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.attention_call import FAR, Arguments

GENERAL, SQUARE, RAMP = 0, 1, 2  # any alpha up to 2 by row; alpha = 1.5; alpha = 2
_FAMILIES = {0.5: SQUARE, 1.0: RAMP}

Strides = tuple[int, ...]


class Dense(NamedTuple):
    """A view (batch, head, query, key)."""

    data: Tensor
    strides: Strides


class Table(NamedTuple):
    """A view (batch, head, place) in float32, its last axis contiguous."""

    data: Tensor
    strides: Strides  # of the first two
    size: int


class Operand(NamedTuple):
    """A view (batch, head, token, component), its last axis contiguous."""

    data: Tensor
    strides: Strides  # of the first three


class Dropout(NamedTuple):
    """Hash of (seed, row, key), see `_kernels/dropout.py`. A key survives if it is >= limit."""

    seed: Tensor
    limit: int
    factor: float
    first: int  # of the queries, among `queries` in all
    queries: int


class Sink(NamedTuple):
    """A null key in float32, (batch * head)."""

    score: Tensor
    mass: Tensor | None


class Call(NamedTuple):
    """See `Arguments`. Packed sequences are one batch whose rows see their own sequence's keys."""

    query: Operand
    key: Operand
    value: Operand
    eps: Tensor | None  # float32 (batch, head, query); None where the family is SQUARE or RAMP
    limits: Table  # int32, four rows: see `row_limits`
    mask: Dense | None
    bias: Dense | None
    mass: Dense | None
    log_mass: Dense | None
    relative: Table | None
    relative_log_mass: Table | None
    of_key: Table | None
    of_key_log_mass: Table | None
    has_mass: int | None  # 1 where a key has a mass other than one
    sink: Sink | None
    dropout: Dropout | None
    softcap: float | None
    scale: float
    bias_scale: float
    heads: int
    repeats: int  # query heads that read one key head
    queries: int
    keys: int


def family(x: Arguments) -> int:
    """How weights come from distances."""
    return _FAMILIES.get(x.uniform_eps, GENERAL)


def read_call(x: Arguments, kind: int) -> Call:
    """The kernels' view of a call; small tensors are made anew, no value is looked at.

    kind: the family to compute with.
    """
    _, heads, queries, _ = x.query.shape
    kv_heads, keys = x.key.shape[1:3]
    tables = {
        name: None if tensor is None else _table(tensor)
        for name, tensor in x.tensors.items()
        if name.startswith(("relative", "of_key"))
    }
    masses = (x.mass, x.relative_log_mass, x.of_key_log_mass)
    return Call(
        query=operand(x.query),
        key=operand(x.key),
        value=operand(x.value),
        eps=None if kind != GENERAL else x.eps.to(torch.float32).contiguous(),
        limits=_limits(x),
        mask=None if x.mask is None else _dense(x.mask.view(torch.uint8)),
        bias=_dense(x.bias),
        mass=None if x.mass_is_log else _dense(x.mass),
        log_mass=_dense(x.mass) if x.mass_is_log else None,
        has_mass=None if all(mass is None for mass in masses) else 1,
        sink=_sink(x),
        dropout=_dropout(x),
        softcap=x.softcap if x.softcap > 0 else None,
        scale=x.scale,
        bias_scale=x.bias_scale,
        heads=heads,
        repeats=heads // kv_heads,
        queries=queries,
        keys=keys,
        **tables,
    )


def operand(tensor: Tensor) -> Operand:
    """Its last axis contiguous: a copy where it is not."""
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        tensor = tensor.contiguous()
    return Operand(tensor, tensor.stride()[:3])


def _dense(tensor: Tensor | None) -> Dense | None:
    return None if tensor is None else Dense(tensor, tensor.stride())


def _table(tensor: Tensor) -> Table:
    """Axes that broadcast stay as they are."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        small = tensor[:1] if tensor.stride(0) == 0 else tensor
        small = small[:, :1] if tensor.stride(1) == 0 else small
        tensor = small.contiguous().expand(tensor.shape)
    return Table(tensor, tensor.stride()[:2], tensor.shape[-1])


def _sink(x: Arguments) -> Sink | None:
    if x.sink is None:
        return None
    mass = None if x.sink_log_mass is None else x.sink_log_mass.exp().float().contiguous()
    return Sink(x.sink.float().contiguous(), mass)


def _dropout(x: Arguments) -> Dropout | None:
    if x.seed is None or x.dropout <= 0:
        return None
    limit = min(round(x.dropout * 2**32), 2**32 - 1)  # at 1 the factor drops the rest
    factor = 1 / (1 - x.dropout) if x.dropout < 1 else 0.0
    return Dropout(x.seed, limit, factor, x.first, x.queries)


def _limits(x: Arguments) -> Table:
    """(batch or 1, head or 1, four numbers of each query), flat but for the first two axes."""
    limits = row_limits(x).to(torch.int32).contiguous()
    batch, heads = limits.shape[:2]
    strides = (limits.stride(0) if batch > 1 else 0, limits.stride(1) if heads > 1 else 0)
    return Table(limits, strides, x.query.shape[2])


def row_limits(x: Arguments) -> Tensor:
    """(batch or 1, head or 1, 4, query): the first key that a query sees, the first one that it
    does not, what added to a key is its place in a table by relative position, and the first key
    of the query's sequence."""
    row = torch.arange(x.query.shape[2], device=x.query.device)
    query, start, stop = row, torch.zeros_like(row), torch.full_like(row, x.key.shape[2])
    if x.query_start is not None and x.key_start is not None:
        sequence = torch.searchsorted(x.query_start[1:].contiguous(), row, right=True)
        sequence = sequence.clamp(max=x.query_start.shape[0] - 2)
        query = row - x.query_start[sequence]
        start = x.key_start[sequence].clamp(0, x.key.shape[2])
        stop = x.key_start[sequence + 1].clamp(0, x.key.shape[2])
    place = x.longest_query - 1 - query - start
    lowest, highest = max(x.lowest, -FAR), min(x.highest, FAR)
    first = torch.maximum(start, start + query + lowest)
    last = torch.minimum(stop, start + query + highest + 1)
    if x.start is not None:
        first = torch.maximum(first, start + _narrowed(x.start))
    if x.stop is not None:
        last = torch.minimum(last, start + _narrowed(x.stop))
    first = torch.minimum(first, stop)
    last = torch.maximum(last, first)
    return torch.stack(torch.broadcast_tensors(_wide(first), _wide(last), place, start), 2)


def _narrowed(tensor: Tensor) -> Tensor:
    """(batch or 1, head or 1, query): axes that broadcast have length one."""
    for axis in (0, 1):
        if tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.expand(1, 1, -1) if tensor.ndim == 1 else tensor
