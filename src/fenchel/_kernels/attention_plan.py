"""A call of fused attention that was described before: its lengths and addresses are filled in.

What the native code reads is a few dozen words. Those that hold for every call of a kind are packed
once; the others are packed around them at each call, which takes a microsecond.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._kernels import attention_call
from fenchel._kernels.attention import key_parts, sum_parts
from fenchel._kernels.attention_call import Arguments, Saved, check_arguments, problem
from fenchel._kernels.library import (
    BLOCK,
    AttentionGradient,
    AttentionProblem,
    addressed,
    code,
    packed,
)
from fenchel._kernels.operands import MOST_KEYS, check
from fenchel._numerics import compute_dtype


class Extent(NamedTuple):
    """Lengths of one call, as the native struct begins, and which keys query i sees:
    i + lowest .. i + highest."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    lowest: int
    highest: int

    @property
    def output(self) -> tuple[int, int, int, int]:
        """Its shape."""
        return self.batch, self.heads, self.queries, self.value_dim

    @property
    def saved(self) -> tuple[int, int, int]:
        """Rows, keys that a block of them may save, and keys that all blocks may."""
        heads, queries = self.batch * self.heads, self.queries
        capacity = BLOCK * min(attention_call.ROOM, self.keys + 1)
        return heads * queries, capacity, heads * -(-queries // BLOCK) * capacity


Lengths = tuple[int, int, int, int, int, int, int]


def lengths_of(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Lengths | None:
    """Of operands with four axes, where they fit as they are and none is empty; None otherwise."""
    batch, heads, queries, dim = query.shape
    kv_batch, kv_heads, keys, key_dim = key.shape
    value_dim = value.shape[3]
    lengths = batch, heads, kv_heads, queries, keys, dim, value_dim
    if 0 in lengths or keys > MOST_KEYS or kv_batch != batch or key_dim != dim:
        return None
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        return None
    return lengths if value.shape == (batch, kv_heads, keys, value_dim) else None


_STRUCT: Any = AttentionProblem
_FIRST = slice(_STRUCT.mask.offset, _STRUCT.lowest.offset)  # what is packed once
_SECOND = slice(_STRUCT.start.offset, _STRUCT.queries_in_all.offset)
_PROBLEM = struct.Struct(
    f"9q 6q6q6q {_FIRST.stop - _FIRST.start}s 2q {_SECOND.stop - _SECOND.start}s 2q 6q 5q q"
)
_FILLED_IN = (  # at each call, in the order of `_PROBLEM`
    *("batch", "heads", "kv_heads", "queries", "keys", "dim", "value_dim"),
    *("query_start", "key_start", "query", "key", "value", "lowest", "highest"),
    *("queries_in_all", "threads", "output"),
    *("offset", "count", "capacity", "saved_key", "saved_distance", "cache"),
)
_GRADIENT = struct.Struct("6q q 3q 9q")
_NOTHING = (0,) * 6  # a view of nothing
_NOT_SAVED = (0,) * 5


def _check_layout() -> None:
    """The order above is that of native/problem.h."""
    once = (*range(_FIRST.start, _FIRST.stop), *range(_SECOND.start, _SECOND.stop))
    names = [name for name, _ in _STRUCT._fields_ if getattr(_STRUCT, name).offset not in once]
    sizes = (ctypes.sizeof(AttentionProblem), ctypes.sizeof(AttentionGradient))
    if tuple(names) != _FILLED_IN or sizes != (_PROBLEM.size, _GRADIENT.size):
        raise AssertionError(f"native/problem.h has other fields than are packed here: {names}")


_check_layout()


class Plan:
    """All calls of one kind: of any lengths, unless the kernel reads tables by position."""

    def __init__(self, x: Arguments) -> None:
        check_arguments(x)
        nothing = x.query.new_empty(0)
        p, self._tables = problem(x, Saved(nothing, nothing, nothing, nothing))
        # One alpha for all rows: with these strides it is read for any number of them.
        p.eps.stride_0 = p.eps.stride_1 = p.eps.stride_2 = 0
        self._first, self._second = bytes(p)[_FIRST], bytes(p)[_SECOND]
        self._dtype, self._compute = x.query.dtype, compute_dtype(x.query.dtype)
        self._code, self._distance_words = code(self._dtype), self._compute.itemsize // 4
        self._lowest, self._highest = x.lowest, x.highest
        self._attend = packed("attention", 1)
        self._differentiate = packed("attention_gradient", 2)
        self._arguments = x._replace(
            query=nothing, key=nothing, value=nothing, eps=x.eps[:1, :1, :1]
        )

    @property
    def nbytes(self) -> int:
        """Of the tables by position."""
        return sum(table.untyped_storage().nbytes() for table in self._tables)

    def attend(self, extent: Extent, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output alone."""
        output = _output(query, extent)
        self._attend(self._pack(extent, query, key, value, self._view(output), _NOT_SAVED))
        return output

    def attend_pages(
        self, extent: Extent, query: Tensor, key: Tensor, value: Tensor, output: Tensor, cache: int
    ) -> None:
        """Into `output`, from keys and values (page, head, token, component) of a cache, whose
        CacheProblem is at this address."""
        self._attend(self._pack(extent, query, key, value, self._view(output), _NOT_SAVED, cache))

    def stand(
        self, extent: Extent, query: Tensor, key: Tensor, value: Tensor, output: Tensor, cache: int
    ) -> StandingCall:
        """The same call, to be made again and again."""
        words = self._pack(extent, query, key, value, self._view(output), _NOT_SAVED, cache)
        return StandingCall(words, query.dtype)

    def attend_saving(
        self, extent: Extent, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The output, and what the derivative needs, in one piece of memory."""
        output = _output(query, extent)
        saved = query.new_empty(self._saved_words(extent), dtype=torch.int32)
        places = self._places(saved, extent)
        self._attend(self._pack(extent, query, key, value, self._view(output), places))
        return output, saved

    def differentiate(
        self,
        extent: Extent,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        saved: Tensor,
    ) -> tuple[Tensor, ...]:
        """In query, key and value, by the kernel."""
        parts, dtype = key_parts(extent.heads, extent.kv_heads, extent.queries), self._compute
        of_query = query.new_empty(query.shape, dtype=dtype)
        of_key = query.new_empty((parts, *key.shape), dtype=dtype)
        of_value = query.new_empty((parts, *value.shape), dtype=dtype)
        addresses = of_query.data_ptr(), of_key.data_ptr(), of_value.data_ptr()
        p = self._pack(extent, query, key, value, _NOTHING, self._places(saved, extent))
        g = _GRADIENT.pack(*self._view(gradient), parts, *addresses, *(0,) * 9)
        self._differentiate(p, g)
        gradients = of_query, sum_parts(of_key), sum_parts(of_value)
        return gradients if dtype is self._dtype else tuple(g.to(self._dtype) for g in gradients)

    def fits(
        self,
        extent: Extent,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        saved: Tensor,
    ) -> bool:
        """These are of a call of this extent: a hook may have changed what was saved."""
        return (
            query.dtype is key.dtype is value.dtype is gradient.dtype is self._dtype
            and lengths_of(query, key, value, enable_gqa=True) == extent[:7]
            and gradient.shape == extent.output
            and saved.shape == (self._saved_words(extent),)
            and saved.dtype is torch.int32
            and saved.is_contiguous()
        )

    def arguments(
        self, extent: Extent, query: Tensor, key: Tensor, value: Tensor, saved: Tensor
    ) -> tuple[Arguments, Saved]:
        """The same call as the operators take it."""
        rows = extent.output[:3]
        x = self._arguments._replace(
            query=query,
            key=key,
            value=value,
            eps=self._arguments.eps.expand(rows),
            lowest=max(self._lowest, extent.lowest),
            highest=min(self._highest, extent.highest),
            queries=extent.queries,
            longest_query=extent.queries,
            longest_key=extent.keys,
        )
        check(saved, "saved", (self._saved_words(extent),), (torch.int32,))
        count, _, pool = extent.saved
        sizes = (4 * count, self._distance_words * pool, pool, count)
        offset, distance, keys, support_size = saved.contiguous().split(sizes)
        offset = offset.view(torch.float64).view(*rows, 2)
        return x, Saved(offset, support_size.view(rows), keys, distance.view(self._compute))

    def _pack(
        self,
        extent: Extent,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: tuple[int, ...],
        places: tuple[int, ...],
        cache: int = 0,
    ) -> bytes:
        """The native struct. cache: address of a CacheProblem."""
        *lengths, lowest, highest = extent
        dtype = self._code
        return _PROBLEM.pack(
            *lengths,
            *(0, 0),  # no packed sequences
            *(query.data_ptr(), dtype, *query.stride()),
            *(key.data_ptr(), dtype, *key.stride()),
            *(value.data_ptr(), dtype, *value.stride()),
            self._first,
            max(self._lowest, lowest),
            min(self._highest, highest),
            self._second,
            extent.queries,
            torch.get_num_threads(),
            *output,
            *places,
            cache,
        )

    def _view(self, tensor: Tensor) -> tuple[int, ...]:
        return tensor.data_ptr(), self._code, *tensor.stride()

    def _saved_words(self, extent: Extent) -> int:
        """Of 32 bits: two doubles and a count per row, a distance and a key per entry of a pool."""
        rows, _, pool = extent.saved
        return 5 * rows + (self._distance_words + 1) * pool

    def _places(self, saved: Tensor, extent: Extent) -> tuple[int, ...]:
        """Where offsets and counts are saved, how many keys of a block, where they and their
        distances."""
        rows, capacity, pool = extent.saved
        offset = saved.data_ptr()
        distance = offset + 16 * rows
        key = distance + 4 * self._distance_words * pool
        return offset, key + 4 * pool, capacity, key, distance


_KEYS, _QUERY, _THREADS = (getattr(_STRUCT, name).offset for name in ("keys", "query", "threads"))
_WORD, _VIEW = struct.Struct("q"), struct.Struct("6q")
_THREADS_AND_OUTPUT = struct.Struct("q q")  # neighbours, by `_FILLED_IN`


class StandingCall:
    """One query from pages that stay where they are: what differs from the last call is written
    into its struct."""

    def __init__(self, packed_struct: bytes, dtype: torch.dtype) -> None:
        self._code = code(dtype)
        self._struct = ctypes.create_string_buffer(packed_struct, len(packed_struct))
        self._attend = addressed("attention")
        self._address = ctypes.addressof(self._struct)

    def attend(self, keys: int, query: Tensor, output: Tensor) -> None:
        struct = self._struct
        _WORD.pack_into(struct, _KEYS, keys)
        _VIEW.pack_into(struct, _QUERY, query.data_ptr(), self._code, *query.stride())
        _THREADS_AND_OUTPUT.pack_into(struct, _THREADS, torch.get_num_threads(), output.data_ptr())
        self._attend(self._address)


def _output(query: Tensor, extent: Extent) -> Tensor:
    if extent.value_dim == extent.dim:  # twice as fast
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    return query.new_empty(extent.output)
