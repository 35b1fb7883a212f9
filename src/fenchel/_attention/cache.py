"""Keys and values of past tokens, for decoding: `KeyValueCache`."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._attention.cache_read import CacheRead, counts_of_all, read_counts
from fenchel._attention.page_table import PageTable
from fenchel._kernels.pages import PAGE, PagePool
from fenchel._numerics import check_tensor, check_whole
from fenchel.regularizers.contract import Regularizer

if TYPE_CHECKING:
    from fenchel._attention.eviction import QueryBall, QueryBox
    from fenchel._attention.step import DecodingStep

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Lock:
    """One thread at a time; a second one does not wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what an interrupt leaves locked opens for its own thread

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this cache is in use by another thread; give each thread its own, by select()"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[_Lock], tuple[()]]:
        return _Lock, ()  # a copy starts open


class KeyValueCache:
    """Keys and values of past tokens, with what exact sparse decoding needs beside them.

    >>> cache = fl.KeyValueCache(batch=1, kv_heads=8, d=64)
    >>> cache.append(key, value)                                  # (batch, kv_head, token, d)
    >>> fl.decode(query, cache, fl.Tsallis(1.5))                  # the last tokens ask

    Tokens stand in pages of 512, and no token is copied when another comes; memory grows by halves.
    Beside each key stands its shadow: one byte per component, and a bound on what that leaves out.

    d_value: components of a value; None: as many as of a key.
    device: of the pages. On a CUDA device the shadow belongs to the GPU kernels; what `fl.explain`
        says of that path holds for it.
    capacity: most tokens of a sequence, taken at once; None: as many as come.
    pool: of another cache, to share its memory. Pages are shared by `select`, and copied when one
        of the sequences writes to them.

    One thread at a time: using a cache from two threads at once raises an error.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        d: int,
        d_value: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        d_value = d if d_value is None else d_value
        sizes = {"batch": batch, "kv_heads": kv_heads, "d": d, "d_value": d_value}
        for name, size in sizes.items():
            check_whole(size, name, 1)
        if capacity is not None:
            check_whole(capacity, "capacity", 1)
        if dtype not in _DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
        if pool is None:
            pool = PagePool(kv_heads, d, d_value, dtype=dtype, device=device)
        _check_pool(pool, kv_heads, d, d_value, dtype)
        self.pool, self.capacity = pool, capacity
        self._table = PageTable(pool, batch, capacity)
        # (batch, head, query, 5), as native code writes it
        self._counts_read: Tensor | CacheRead | tuple[tuple[int, ...], torch.Size] | None = None
        self._value_radius = (-1, torch.zeros(0))
        self._step: DecodingStep | None = None  # the last call of `decode`, if it can be repeated
        self.asked: object = None  # what led to it, in the words of who asked; for adapters
        self._lock = _Lock()

    # ---- what it holds

    @property
    def batch(self) -> int:
        """How many sequences."""
        return len(self._table.lengths)

    @property
    def kv_heads(self) -> int:
        return self.pool.kv_heads

    @property
    def d(self) -> int:
        return self.pool.d

    @property
    def d_value(self) -> int:
        return self.pool.d_value

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self._table.lengths)

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._table.lengths)

    def __bool__(self) -> bool:
        """A cache is there, also when it is empty."""
        return True

    def __repr__(self) -> str:
        return (
            f"KeyValueCache(batch={self.batch}, kv_heads={self.kv_heads}, d={self.d}, "
            f"d_value={self.d_value}, dtype={self.dtype}, lengths={self.lengths})"
        )

    @property
    def key(self) -> Tensor:
        """(batch, kv_head, token, d): a view where the pages stand in a row, else a copy.
        To be read only: what is written into it does not reach the shadow."""
        return self._written_out(self.pool.key)

    @property
    def value(self) -> Tensor:
        """(batch, kv_head, token, d_value), likewise."""
        return self._written_out(self.pool.value)

    @property
    def nbytes(self) -> dict[str, int]:
        """Of the pages in use: keys and values, and the shadow."""
        pages = len({page for pages in self._table.pages for page in pages})
        of_token = (self.d + self.d_value) * self.dtype.itemsize
        return {
            "keys and values": pages * self.kv_heads * PAGE * of_token,
            "shadow": pages * self.kv_heads * self.pool.shadow.shape[-1],
        }

    def note_whole(self, rows: torch.Size) -> None:
        """Queries (batch, head, query) have read every key and value, not by `decode`."""
        self._counts_read = (self.lengths, rows)

    @property
    def was_read(self) -> bool:
        """`decode` was called."""
        return self._counts_read is not None

    @property
    def read(self) -> CacheRead:
        """What the last `decode` read."""
        counts = self._counts_read
        if counts is None:
            raise RuntimeError("nothing was decoded from this cache yet; call fl.decode first")
        if isinstance(counts, CacheRead):
            return counts
        if isinstance(counts, tuple):
            counts = counts_of_all(*counts)
        return read_counts(counts, self.kv_heads, (self.d, self.d_value), self.dtype)

    # ---- how it changes

    def append(self, key: Tensor, value: Tensor, tokens: Sequence[int] | None = None) -> None:
        """New tokens at the end of each sequence.

        key: (batch, kv_head, token, d); value: (batch, kv_head, token, d_value).
        tokens: how many of them each sequence gets, the first ones; None: all.
        """
        if tokens is None:
            with self._lock:
                if self._table.write_next(key, value, self.capacity):
                    return
        self._check_new(key, value)
        with self._lock:
            if tokens is None:
                self._check_room([length + key.shape[2] for length in self.lengths])
                if key.shape[2]:
                    self._table.write(key, value, range(self.batch))
                return
            self._check_tokens(tokens, key.shape[2])
            self._append_ragged(key, value, tokens)

    def crop(self, length: int | Sequence[int]) -> None:
        """Keep the first tokens of each sequence: so many, or all where there are fewer."""
        lengths = list(length) if isinstance(length, Sequence) else [length] * self.batch
        if len(lengths) != self.batch:
            raise ValueError(f"length must be one number or {self.batch}, got {len(lengths)}")
        for kept in lengths:
            check_whole(kept, "length", 0)
        with self._lock:
            self._table.crop(lengths)

    def select(self, sequences: Sequence[int] | Tensor) -> KeyValueCache:
        """A cache of these sequences, by number, left out or repeated as they are named.

        Nothing is copied: pages are shared until one of the caches appends to them.
        """
        numbers = self._numbers(sequences)
        sizes = (len(numbers), self.kv_heads, self.d, self.d_value)
        with self._lock:
            other = KeyValueCache(*sizes, dtype=self.dtype, capacity=self.capacity, pool=self.pool)
            other._table.share(self._table, numbers)
            return other

    def reorder(self, sequences: Sequence[int] | Tensor) -> None:
        """Sequence i becomes the former sequence sequences[i], as beam search needs it."""
        numbers = self._numbers(sequences)
        if numbers == list(range(self.batch)):
            return
        with self._lock:
            self._table.share(self._table, numbers)

    def compact(self) -> None:
        """The pages of each sequence in a row again, as `key` and `value` need them for a view.
        Nothing happens where they are, or where the pool has other users."""
        table = self._table
        if table.is_in_rows or not table.is_alone or not all(table.lengths):
            return
        with self._lock:
            table.compact()

    def evictable(
        self,
        region: QueryBall | QueryBox,
        regularizer: Regularizer | Module,
        scale: float | None = None,
    ) -> list[Tensor]:
        """Keys that no query of the region can ever attend to: bool (kv_head, token) per sequence.

        >>> region = fl.QueryBall(mean_query, radius)             # what you declare of the future
        >>> [mask] = cache.evictable(region, fl.Tsallis(1.5))     # True: may go, without loss

        Tokens that come later change nothing about that. It is a proof, and often an empty one: a
        ball around zero, as rotary positions need it, proves nothing for any key, because with a
        query it holds the opposite one.
        """
        from fenchel._attention.eviction import evictable

        return [
            evictable(self.select([b]).key[0], region, regularizer, scale)
            for b in range(self.batch)
        ]

    def keep(self, tokens: Sequence[Tensor]) -> None:
        """Drop every other token. tokens: bool (token,) per sequence, True: stays.

        Positions of the tokens that stay move up, so that priors by position mean others than
        before. Keys that carry their position in them, as rotary ones do, are not concerned.
        """
        from fenchel._attention.eviction import check_masks

        check_masks(tokens, self.lengths)
        sizes = (self.batch, self.kv_heads, self.d, self.d_value)
        with self._lock:
            # Elsewhere first, so that an interrupt leaves all tokens or those that stay.
            rest = KeyValueCache(*sizes, dtype=self.dtype, pool=self.pool)
            for b, mask in enumerate(tokens):
                one = self.select([b])
                rest._append_to(b, one.key[:, :, mask], one.value[:, :, mask])
                del one
            self._table.share(rest._table, list(range(self.batch)))
            del rest
            self.compact()

    def close(self) -> None:
        """Give the pages back to the pool; the cache is empty then."""
        self.crop(0)

    # ---- on disk

    def save(self, path: str | Path) -> None:
        """Into a safetensors file: keys and values, with checksums. `load` makes the shadow
        again."""
        from fenchel._attention.cache_files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> KeyValueCache:
        """What `save` wrote. A file in which a bit has changed is refused."""
        from fenchel._attention.cache_files import load

        return load(path, device)

    # ---- inside

    def _append_ragged(self, key: Tensor, value: Tensor, tokens: Sequence[int]) -> None:
        """To all sequences or none."""
        before = list(self.lengths)
        try:
            for b, count in enumerate(tokens):
                part = slice(b, b + 1)
                if count:
                    new = key[part, :, :count], value[part, :, :count]
                    self._table.write(*new, range(b, b + 1))
        except BaseException:
            self._table.crop(before)
            raise

    def _append_to(self, b: int, key: Tensor, value: Tensor) -> None:
        """To one sequence: (1, kv_head, token, component)."""
        self._check_new(key.expand(self.batch, -1, -1, -1), value.expand(self.batch, -1, -1, -1))
        with self._lock:
            if key.shape[2]:
                self._table.write(key, value, range(b, b + 1))

    def _numbers(self, sequences: Sequence[int] | Tensor) -> list[int]:
        given = sequences.tolist() if isinstance(sequences, Tensor) else sequences
        try:
            numbers = [_index(b) for b in given]
        except TypeError:
            raise TypeError(
                f"sequences must be a list of whole numbers, got {given!r}; for a mask, pass "
                "mask.nonzero().flatten()"
            ) from None
        if not numbers or not all(0 <= b < self.batch for b in numbers):
            raise ValueError(f"sequences must be numbers from 0 to {self.batch - 1}, got {numbers}")
        return numbers

    def _check_new(self, key: Tensor, value: Tensor) -> None:
        fit = self._fits(key, self.d) and self._fits(value, self.d_value)
        refuse_gradient(key, "key")
        refuse_gradient(value, "value")
        if fit and key.shape[2] == value.shape[2]:
            return
        for name, tensor, width in (("key", key, self.d), ("value", value, self.d_value)):
            check_tensor(tensor, name)
            expected = (self.batch, self.kv_heads, width)
            if tensor.ndim != 4 or (*tensor.shape[:2], tensor.shape[3]) != expected:
                raise ValueError(
                    f"{name} must have shape ({self.batch}, {self.kv_heads}, tokens, {width}), got "
                    f"{tuple(tensor.shape)}"
                )
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise ValueError(
                    f"the cache holds {self.dtype} on {self.device}, {name} is {tensor.dtype} on "
                    f"{tensor.device}; convert it, or make a cache of that dtype"
                )
        if key.shape[2] != value.shape[2]:
            raise ValueError(
                f"key has {key.shape[2]} tokens and value {value.shape[2]}; they must be as many"
            )

    def _fits(self, tensor: Tensor, width: int) -> bool:
        """Without looking closer."""
        pool = self.pool
        if type(tensor) is not Tensor or tensor.ndim != 4 or tensor.dtype is not pool.dtype:
            return False
        batch, heads, _, components = tensor.shape
        shape = batch == self.batch and heads == pool.kv_heads and components == width
        return shape and tensor.device == pool.device

    def _check_tokens(self, tokens: Sequence[int], given: int) -> None:
        if len(tokens) != self.batch:
            raise ValueError(
                f"tokens must have one number per sequence, got {len(tokens)} for {self.batch}"
            )
        for count in tokens:
            check_whole(count, "tokens", 0)
            if count > given:
                raise ValueError(f"tokens says {count}, but {given} are given")
        self._check_room([n + more for n, more in zip(self.lengths, tokens, strict=True)])

    def _check_room(self, lengths: list[int]) -> None:
        if self.capacity is not None and max(lengths) > self.capacity:
            raise ValueError(
                f"the cache has a capacity of {self.capacity} tokens, and a sequence would have "
                f"{max(lengths)}; make it larger, or crop it first"
            )

    def _written_out(self, storage: Tensor) -> Tensor:
        if not self._table.is_even:
            raise ValueError(
                f"sequences have different lengths, {self.lengths}; take one: cache.select([0]).key"
            )
        return self._table.written_out(storage)


def _index(number: object) -> int:
    """A whole number of any library. True and False are none."""
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)  # type: ignore[arg-type]


def refuse_gradient(tensor: Tensor, name: str) -> None:
    """A cache keeps numbers: a gradient that is expected to go through it would be lost."""
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, and none goes through a cache; decode under "
            "torch.no_grad(), or train with fl.attention"
        )


def _check_pool(pool: PagePool, kv_heads: int, d: int, d_value: int, dtype: torch.dtype) -> None:
    expected = (pool.kv_heads, pool.d, pool.d_value, pool.dtype)
    if (kv_heads, d, d_value, dtype) != expected:
        raise ValueError(
            f"the pool holds (kv_heads, d, d_value, dtype) = {expected}, the cache would need "
            f"{(kv_heads, d, d_value, dtype)}"
        )
