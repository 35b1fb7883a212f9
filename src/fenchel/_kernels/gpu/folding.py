"""A call whose query heads that share a key head are rows of one head, as decoding reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._kernels.attention_call import Arguments
from fenchel._kernels.choice import Reason
from fenchel._kernels.gpu.call import Call, Dense, Sink, Table, operand, read_call
from fenchel._kernels.gpu.configurations import Configuration

MOST_ROWS = 64  # that read the same keys; more of them fill a device without splitting keys


def against_folding(x: Arguments, save: bool) -> Reason:
    """Why the keys of a row are not split over programs: the one place that decides it, by shapes
    and strides alone."""
    rows = x.query.shape[2] * (x.query.shape[1] // x.key.shape[1])
    if rows > MOST_ROWS:
        return f"{rows} rows share each key head, more than {MOST_ROWS}: they fill a device"
    if save:
        return "a derivative is asked for, which needs what the other kernels keep"
    if x.seed is not None and x.dropout > 0:
        return "dropout counts rows by query head"
    if x.query_start is not None:
        return "sequences are packed"
    if any(_differs(x, table) for table in (x.of_key, x.of_key_log_mass)):
        return "a bias or mass by key differs between heads that share a key head"
    return None


def against_split(x: Arguments, save: bool, settings: Configuration) -> Reason:
    """The same for keys that stand in one tensor, where few keys are read by one program anyway."""
    if x.key.shape[2] <= settings.run:
        return f"{x.key.shape[2]} keys are few for several programs"
    return against_folding(x, save)


def _differs(x: Arguments, table: Tensor | None) -> bool:
    """Between query heads of a group."""
    return table is not None and _repeats(x) > 1 and table.stride(1) != 0


def _repeats(x: Arguments) -> int:
    return x.query.shape[1] // x.key.shape[1]


def fold(x: Arguments, kind: int, behind: Tensor | None = None) -> Call:
    """Row r of a group is query r % queries of its query head r // queries.

    behind: int32 (batch,), how many keys fewer than the longest a sequence has. Its queries stand
    so many positions earlier.
    """
    call = read_call(x, kind)
    shifts = any(_differs(x, table) for table in (x.relative, x.relative_log_mass))
    query = _rows(x, x.query)
    return call._replace(
        query=operand(query),
        limits=_limits(x, call.limits, behind, shifts),
        mask=_dense(x, call.mask),
        bias=_dense(x, call.bias),
        mass=_dense(x, call.mass),
        log_mass=_dense(x, call.log_mass),
        relative=_by_position(x, call.relative, shifts),
        relative_log_mass=_by_position(x, call.relative_log_mass, shifts),
        of_key=_by_key(x, call.of_key),
        of_key_log_mass=_by_key(x, call.of_key_log_mass),
        sink=_sink(x, call.sink),
        heads=x.key.shape[1],
        repeats=1,
        queries=query.shape[2],
    )


def _rows(x: Arguments, tensor: Tensor) -> Tensor:
    """(batch, head, query, ...) as (batch, kv_head, row, ...)."""
    batch, heads, queries = x.query.shape[:3]
    kv_heads = x.key.shape[1]
    return tensor.reshape(batch, kv_heads, heads // kv_heads * queries, *tensor.shape[3:])


def _dense(x: Arguments, dense: Dense | None) -> Dense | None:
    """A view with one query; with more, a copy of a few rows where they are not in order."""
    if dense is None:
        return None
    rows = _rows(x, dense.data)
    return Dense(rows, rows.stride())


def _limits(x: Arguments, limits: Table, behind: Tensor | None, shifts: bool) -> Table:
    numbers, repeats = limits.data, _repeats(x)  # (batch or 1, head or 1, 4, query)
    if behind is not None:
        numbers = _behind(numbers, behind)
    batch, heads, _, queries = numbers.shape
    numbers = numbers.expand(batch, heads if heads > 1 else repeats, 4, queries)
    numbers = numbers.reshape(batch, -1, repeats, 4, queries).movedim(2, 3)
    if shifts:
        positions = x.longest_query + x.longest_key - 1
        numbers = numbers.clone()
        place = torch.arange(repeats, dtype=numbers.dtype, device=numbers.device) * positions
        numbers[:, :, 2] += place.unsqueeze(-1)
    numbers = numbers.reshape(batch, -1, 4, repeats * queries).contiguous()
    strides = [0 if n == 1 else numbers.stride(axis) for axis, n in enumerate(numbers.shape[:2])]
    return Table(numbers, tuple(strides), limits.size)


def _behind(limits: Tensor, behind: Tensor) -> Tensor:
    """Keys are counted from the sequence's own first one, positions from the longest one's."""
    first, last, place, start = limits.unbind(2)
    shift = behind.view(-1, 1, 1)
    first, last = (first - shift).clamp(min=0), (last - shift).clamp(min=0)
    return torch.stack(torch.broadcast_tensors(first, last, place + shift, start), 2)


def _by_position(x: Arguments, table: Table | None, shifts: bool) -> Table | None:
    """One table for each key head: that of all its query heads, or theirs end to end."""
    if table is None:
        return None
    data, repeats = table.data, _repeats(x)
    if not shifts:
        data = data[:, ::repeats]
        return Table(data, data.stride()[:2], table.size)
    small = data[:1] if data.stride(0) == 0 else data
    small = small.reshape(small.shape[0], -1, repeats * table.size)
    return Table(
        small, (0 if len(small) == 1 else small.stride(0), small.stride(1)), small.shape[2]
    )


def _by_key(x: Arguments, table: Table | None) -> Table | None:
    if table is None:
        return None
    data = table.data[:, :: _repeats(x)]
    return Table(data, data.stride()[:2], table.size)


def _sink(x: Arguments, sink: Sink | None) -> Sink | None:
    """Of every row."""
    if sink is None:
        return None

    def spread(tensor: Tensor) -> Tensor:
        return tensor.reshape(*x.query.shape[:2], 1).expand(x.query.shape[:3]).contiguous()

    return Sink(spread(sink.score), None if sink.mass is None else spread(sink.mass))
