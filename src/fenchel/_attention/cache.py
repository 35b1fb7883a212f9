"""Keys and values of past tokens, for decoding: `KeyValueCache`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fenchel._kernels.library import CacheProblem
from fenchel._kernels.pages import PAGE, PagePool
from fenchel._numerics import check_tensor, check_whole
from fenchel.regularizers.tsallis import Tsallis

if TYPE_CHECKING:
    from fenchel._attention.eviction import QueryBall, QueryBox

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class CacheRead:
    """What the last `decode` read, per sequence, head and query: (batch, head, query).

    seen: visible keys. scored: keys whose exact score was computed. support: keys whose value was
    read. bytes: of keys, values and shadow. bytes_of_all: of every visible key and value. error: for
    `decode(..., error=...)`, how far the output may be from the exact one, certified.

    Query heads that share a key head read its shadow once, and so the keys of a page that is scored
    whole; what they pick by themselves counts for each of them.
    """

    seen: Tensor
    scored: Tensor
    support: Tensor
    bytes: int
    bytes_of_all: int
    error: Tensor | None = None

    def __str__(self) -> str:
        share = self.bytes / max(1, self.bytes_of_all)
        return (
            f"{self.scored.double().mean():.1f} keys scored and {self.support.double().mean():.1f} "
            f"values read per query; {self.bytes:,} bytes, {share:.3f} of all keys and values"
        )


class _Lock:
    """One thread at a time; a second one does not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this cache is in use by another thread; give each thread its own, by select()"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class KeyValueCache:
    """Keys and values of past tokens, with what exact sparse decoding needs beside them.

    >>> cache = fl.KeyValueCache(batch=1, kv_heads=8, d=64)
    >>> cache.append(key, value)                                  # (batch, kv_head, token, d)
    >>> fl.decode(query, cache, fl.Tsallis(1.5))                  # the last tokens ask

    Tokens stand in pages of 512, and no token is copied when another comes; memory grows by halves.
    Beside each key stands its shadow: one byte per component, and a bound on what that leaves out.

    d_value: components of a value; None: as many as of a key.
    capacity: most tokens of a sequence, taken at once; None: as many as come.
    pool: of another cache, to share its memory. Pages are shared by `select`, and copied when one of
        the sequences writes to them.

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
        pool.caches.add(self)
        self._table: list[list[int]] = [[] for _ in range(batch)]
        self._lengths = [0] * batch
        # (batch, head, query, 5), as native code writes it
        self._counts_read: Tensor | CacheRead | None = None
        self._value_radius = (0, torch.zeros(0))
        self._lock = _Lock()
        self._renew()
        if capacity is not None and self._alone:
            self._table = pool.lay_out(self._table, -(-capacity // PAGE))
            self._renew()

    # ---- what it holds

    @property
    def batch(self) -> int:
        """How many sequences."""
        return len(self._lengths)

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
        return tuple(self._lengths)

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._lengths)

    def __repr__(self) -> str:
        return (
            f"KeyValueCache(batch={self.batch}, kv_heads={self.kv_heads}, d={self.d}, "
            f"d_value={self.d_value}, dtype={self.dtype}, lengths={self.lengths})"
        )

    @property
    def key(self) -> Tensor:
        """(batch, kv_head, token, d): a view where the pages stand in a row, else a copy."""
        return self._written_out(self.pool.key)

    @property
    def value(self) -> Tensor:
        """(batch, kv_head, token, d_value), likewise."""
        return self._written_out(self.pool.value)

    @property
    def nbytes(self) -> dict[str, int]:
        """Of the pages in use: keys and values, and the shadow."""
        pages = len({page for pages in self._table for page in pages})
        pool, per_page = self.pool, self.kv_heads * PAGE
        stored = pages * per_page * (self.d + self.d_value) * self.dtype.itemsize
        return {
            "keys and values": stored,
            "shadow": pages * self.kv_heads * int(pool.shadow.shape[-1]),
        }

    @property
    def was_read(self) -> bool:
        """`decode` was called."""
        return self._counts_read is not None

    @property
    def read(self) -> CacheRead:
        """What the last `decode` read."""
        if self._counts_read is None:
            raise RuntimeError("nothing was decoded from this cache yet; call fl.decode first")
        if isinstance(self._counts_read, CacheRead):
            return self._counts_read
        seen, bounded, whole, picked, support = self._counts_read.unbind(-1)
        heads = (self.kv_heads, seen.shape[1] // self.kv_heads)

        def once(count: Tensor) -> Tensor:
            """For all rows that share a key head."""
            return count.unflatten(1, heads).amax((2, 3)).sum()

        size, width = self.dtype.itemsize, self.d + self.d_value
        values = torch.minimum(support.sum(), once(seen))
        exact = (once(whole) + picked.sum()) * self.d + values * self.d_value
        total = once(bounded) * (self.d + 4) + exact * size
        return CacheRead(seen, whole + picked, support, int(total), int(once(seen) * width * size))

    # ---- how it changes

    def append(self, key: Tensor, value: Tensor, tokens: Sequence[int] | None = None) -> None:
        """New tokens at the end of each sequence.

        key: (batch, kv_head, token, d); value: (batch, kv_head, token, d_value).
        tokens: how many of them each sequence gets, the first ones; None: all.
        """
        self._check_new(key, value)
        with self._alone_in_here():
            if tokens is None:
                return self._append(key, value, range(self.batch))
            if len(tokens) != self.batch:
                raise ValueError(
                    f"tokens must have one number per sequence, got {len(tokens)} for {self.batch}"
                )
            for count in tokens:
                check_whole(count, "tokens", 0)
                if count > key.shape[2]:
                    raise ValueError(f"tokens says {count}, but {key.shape[2]} are given")
            self._check_room([n + more for n, more in zip(self._lengths, tokens, strict=True)])
            for b, count in enumerate(tokens):
                self._append(
                    key[b : b + 1, :, :count], value[b : b + 1, :, :count], range(b, b + 1)
                )
            return None

    def _append_to(self, b: int, key: Tensor, value: Tensor) -> None:
        """To one sequence: (1, kv_head, token, component)."""
        self._check_new(key.expand(self.batch, -1, -1, -1), value.expand(self.batch, -1, -1, -1))
        with self._alone_in_here():
            self._append(key, value, range(b, b + 1))

    def crop(self, length: int | Sequence[int]) -> None:
        """Keep the first tokens of each sequence: so many, or all where there are fewer."""
        lengths = [length] * self.batch if isinstance(length, int) else list(length)
        if len(lengths) != self.batch:
            raise ValueError(f"length must be one number or {self.batch}, got {len(lengths)}")
        with self._alone_in_here():
            for b, kept in enumerate(lengths):
                check_whole(kept, "length", 0)
                self._lengths[b] = min(kept, self._lengths[b])
                pages = -(-self._lengths[b] // PAGE)
                self.pool.leave(self._table[b][pages:])
                del self._table[b][pages:]
            self._renew()

    def select(self, sequences: Sequence[int] | Tensor) -> KeyValueCache:
        """A cache of these sequences, by number, left out or repeated as they are named.

        Nothing is copied: pages are shared until one of the caches appends to them.
        """
        numbers = self._numbers(sequences)
        with self._alone_in_here():
            other = KeyValueCache(
                len(numbers), self.kv_heads, self.d, self.d_value, dtype=self.dtype,
                capacity=self.capacity, pool=self.pool,
            )  # fmt: skip
            other._table = [list(self._table[b]) for b in numbers]
            other._lengths = [self._lengths[b] for b in numbers]
            for pages in other._table:
                self.pool.join(pages)
            other._renew()
            return other

    def reorder(self, sequences: Sequence[int] | Tensor) -> None:
        """Sequence i becomes the former sequence sequences[i], as beam search needs it."""
        numbers = self._numbers(sequences)
        if numbers == list(range(self.batch)):
            return
        with self._alone_in_here():
            table = [list(self._table[b]) for b in numbers]
            for pages in table:
                self.pool.join(pages)
            for pages in self._table:
                self.pool.leave(pages)
            self._table, self._lengths = table, [self._lengths[b] for b in numbers]
            self._renew()

    def compact(self) -> None:
        """The pages of each sequence in a row again, as `key` and `value` need them for a view.
        Nothing happens where they are, or where the pool has other users."""
        if self._step is not None or not self._alone or not any(self._lengths):
            return
        with self._alone_in_here():
            self._lay_out(max(len(pages) for pages in self._table))
            self._renew()

    def evictable(
        self, region: QueryBall | QueryBox, regularizer: Tsallis, scale: float | None = None
    ) -> list[Tensor]:
        """Keys that no query of the region can ever attend to: bool (kv_head, token) per sequence.

        >>> region = fl.QueryBall(mean_query, radius)             # what you declare of the future
        >>> [mask] = cache.evictable(region, fl.Tsallis(1.5))     # True: may go, without loss

        Tokens that come later change nothing about that. It is a proof, and often an empty one: a
        ball around zero, as rotary positions need it, proves nothing for any key, because with a
        query it holds the opposite one.
        """
        from fenchel._attention.eviction import evictable

        heads = region.centre.shape[0] if region.centre.ndim > 1 else self.kv_heads
        if heads % self.kv_heads:
            raise ValueError(
                f"the region has {heads} heads, which must be a multiple of {self.kv_heads}"
            )
        found = []
        for b in range(self.batch):
            key = self.select([b]).key[0]
            found.append(evictable(key, region, regularizer, heads, scale))
        return found

    def keep(self, tokens: Sequence[Tensor]) -> None:
        """Drop every other token. tokens: bool (token,) per sequence, True: stays.

        Positions of the tokens that stay move up, so that priors by position mean others than
        before. Keys that carry their position in them, as rotary ones do, are not concerned.
        """
        if len(tokens) != self.batch:
            raise ValueError(f"keep needs one mask per sequence, got {len(tokens)}")
        parts = []
        for b, (mask, length) in enumerate(zip(tokens, self._lengths, strict=True)):
            if mask.dtype != torch.bool or mask.shape != (length,):
                raise ValueError(
                    f"the mask of sequence {b} must be bool of shape ({length},), got "
                    f"{mask.dtype} of shape {tuple(mask.shape)}"
                )
            one = self.select([b])
            parts.append((one.key[:, :, mask], one.value[:, :, mask]))
        self.crop(0)
        for b, (key, value) in enumerate(parts):
            self._append_to(b, key, value)

    def close(self) -> None:
        """Give the pages back to the pool; the cache is empty then."""
        self.crop(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_struct": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=_Lock())
        self.pool.caches.add(self)
        self._renew()

    def __del__(self) -> None:
        pool = getattr(self, "pool", None)
        for pages in getattr(self, "_table", ()) if pool is not None else ():
            pool.leave(pages)

    # ---- on disk

    def save(self, path: str | Path) -> None:
        """Into a safetensors file: keys and values; the shadow is made again by `load`."""
        from fenchel._attention.cache_files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> KeyValueCache:
        """What `save` wrote."""
        from fenchel._attention.cache_files import load

        return load(path, device)

    # ---- inside

    @property
    def _alone(self) -> bool:
        """No other cache has pages in the pool."""
        return len(self.pool.caches) == 1

    def _numbers(self, sequences: Sequence[int] | Tensor) -> list[int]:
        numbers = [int(b) for b in sequences]
        if not numbers or not all(0 <= b < self.batch for b in numbers):
            raise ValueError(f"sequences must be numbers from 0 to {self.batch - 1}, got {numbers}")
        return numbers

    def _alone_in_here(self) -> _Lock:
        """For a `with`."""
        return self._lock

    def _check_new(self, key: Tensor, value: Tensor) -> None:
        if self._fits(key, self.d) and self._fits(value, self.d_value):
            if key.shape[2] == value.shape[2]:
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
        pool = self.pool
        if type(tensor) is not Tensor or tensor.ndim != 4 or tensor.dtype is not pool.dtype:
            return False
        batch, heads, _, components = tensor.shape
        shape = batch == len(self._lengths) and heads == pool.kv_heads and components == width
        return shape and tensor.device == pool.device

    def _check_room(self, lengths: list[int]) -> None:
        if self.capacity is not None and max(lengths) > self.capacity:
            raise ValueError(
                f"the cache has a capacity of {self.capacity} tokens, and a sequence would have "
                f"{max(lengths)}; make it larger, or crop it first"
            )

    def _append(self, key: Tensor, value: Tensor, sequences: range) -> None:
        count = key.shape[2]
        if count == 0:
            return
        self._check_room([self._lengths[b] + count for b in sequences])
        self._make_room(sequences, count)
        first, last = sequences.start, sequences.stop
        pages, counts = self._pages, self._counts
        if last - first < self.batch:
            pages, counts = pages[first:last], counts[first:last]
        self.pool.write(key, value, pages, counts, self._table[first:last])
        for b in sequences:
            self._lengths[b] += count
        counts.add_(count)

    def _make_room(self, sequences: range, count: int) -> None:
        """Pages for so many new tokens, none of them shared."""
        changed = False
        for b in sequences:
            pages, length = self._table[b], self._lengths[b]
            if length % PAGE and self.pool.is_shared(pages[-1]):
                self._copy_last(pages)
                changed = True
            needed = -(-(length + count) // PAGE)
            if needed <= len(pages):
                continue
            changed = True
            follows = pages[-1] + 1 if pages else len(self.pool)
            if self._alone and not self.pool.is_free(follows):
                self._lay_out(max(needed, -(-3 * needed // 2)))
                pages = self._table[b]
            while len(pages) < needed:
                pages.append(self.pool.take(pages[-1] if pages else self._start(b)))
        if changed:
            self._renew()

    def _start(self, b: int) -> int | None:
        """The page before the first of sequence b, where sequences have room of their own."""
        return b * (len(self.pool) // self.batch) - 1 if self._alone else None

    def _lay_out(self, room: int) -> None:
        """Everything anew in rows of so many pages."""
        if self.capacity is not None:
            room = max(-(-self.capacity // PAGE), *(len(pages) for pages in self._table))
        self._table = self.pool.lay_out(self._table, room)

    def _copy_last(self, pages: list[int]) -> None:
        """A page of its own in place of one that others read."""
        page = self.pool.take(None)
        self.pool.copy_page(pages[-1], page)
        self.pool.leave(pages[-1:])
        pages[-1] = page

    def _renew(self) -> None:
        """Table and lengths as native code reads them."""
        chunks = max(1, *(len(pages) for pages in self._table))
        rows = [pages + [0] * (chunks - len(pages)) for pages in self._table]
        self._pages = torch.tensor(rows, dtype=torch.int64)
        self._counts = torch.tensor(self._lengths, dtype=torch.int64)
        self._step = self._step_between_sequences()
        self._struct: Any = None

    def _native_struct(self) -> Any:
        """What native code reads about pages and lengths; made again when they change."""
        if self._struct is None or self._struct_pool is not self.pool.shadow:
            c: Any = CacheProblem()
            c.pages, c.lengths = self._pages.data_ptr(), self._counts.data_ptr()
            c.chunks, c.shadow = self._pages.shape[1], self.pool.views()[2]
            self._struct, self._struct_pool = c, self.pool.shadow
        return self._struct

    def _step_between_sequences(self) -> int | None:
        """Pages from the start of one sequence to that of the next, if all pages stand in rows."""
        if not all(self._table):
            return None
        first = [pages[0] for pages in self._table]
        step = first[1] - first[0] if len(first) > 1 else 1
        rows = all(p == list(range(p[0], p[0] + len(p))) for p in self._table)
        even = all(b - a == step for a, b in zip(first, first[1:], strict=False))
        return step if rows and even and step > 0 else None

    def _written_out(self, storage: Tensor) -> Tensor:
        length = self._lengths[0]
        if any(n != length for n in self._lengths):
            raise ValueError(
                f"sequences have different lengths, {self.lengths}; take one by cache.select([0])"
            )
        heads, _, _, width = storage.shape
        if length == 0:
            return storage.new_empty((self.batch, heads, 0, width))
        if self._step is None:
            chunks = storage[:, self._pages.to(storage.device)]  # (head, batch, chunk, token, d)
            return chunks.transpose(0, 1).reshape(self.batch, heads, -1, width)[:, :, :length]
        token, page, head = storage.stride(2), storage.stride(1), storage.stride(0)
        shape, strides = (self.batch, heads, length, width), (self._step * page, head, token, 1)
        return storage.as_strided(shape, strides, self._table[0][0] * page)


def _check_pool(pool: PagePool, kv_heads: int, d: int, d_value: int, dtype: torch.dtype) -> None:
    expected = (pool.kv_heads, pool.d, pool.d_value, pool.dtype)
    if (kv_heads, d, d_value, dtype) != expected:
        raise ValueError(
            f"the pool holds (kv_heads, d, d_value, dtype) = {expected}, the cache would need "
            f"{(kv_heads, d, d_value, dtype)}"
        )
