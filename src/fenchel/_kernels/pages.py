"""Pages of a cache: keys, values, and the shadow of the keys that decoding reads first.

A page holds PAGE tokens of all heads. Several caches may share a pool, and several sequences a
page. Native code writes the shadow (`native/shadow.h`), or kernels in Triton do, in a layout of
their own (`gpu/shadow.py`); a pool keeps to one of them, and without either there is none.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.choice import GPU, NATIVE
from fenchel._kernels.gpu import stored
from fenchel._kernels.gpu.device import against_gpu
from fenchel._kernels.library import (
    AppendProblem,
    BoundsProblem,
    View,
    addressed,
    code,
    loaded,
    run,
    view,
)
from fenchel._kernels.route import WIDEST_HEAD, against_library

PAGE = 512  # tokens: kChunk of native/problem.h
_SMALL = 256  # keys that one thread stores sooner than two


class PagePool:
    """Memory for pages. A page that nobody uses is given out again.

    key, value: (kv_head, page, token, component), so that pages in a row are tokens in a row.
    shadow: bytes (kv_head, page, byte); empty where no kernels are there for it. layout: whose
    kernels write and read it, "native" or "gpu", decided when the pool is made.
    """

    def __init__(
        self,
        kv_heads: int,
        d: int,
        d_value: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.kv_heads, self.d, self.d_value = kv_heads, d, d_value
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.tables: weakref.WeakSet[Any] = weakref.WeakSet()  # that have pages here
        self._users: list[int] = []  # of each page; an interrupt may leave too many, never too few
        self._free: dict[int, None] = {}  # pages without a user, the next one last
        self._views: tuple[Tensor, tuple[Any, Any, Any]] | None = None  # made when first asked for
        self.layout = self._choose_layout()
        self.lock = threading.RLock()  # for caches that share this pool in several threads
        self.key, self.value, self.shadow = self._allocate(0)
        self.operands = _operands(self.key, self.value)

    def _allocate(self, pages: int) -> tuple[Tensor, Tensor, Tensor]:
        with torch.inference_mode(False):  # usable in and outside of it, and with a version
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            key = like.new_empty((self.kv_heads, pages, PAGE, self.d))
            value = like.new_empty((self.kv_heads, pages, PAGE, self.d_value))
            shadow = like.new_empty((self.kv_heads, pages, self._record()), dtype=torch.uint8)
        return key, value, shadow

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_views": None, "tables": None, "lock": None, "operands": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, tables=weakref.WeakSet(), lock=threading.RLock())
        # only tables that were copied too have pages here: they enter by themselves
        self._users, self._free = [0] * len(self), _without_user([0] * len(self))
        self.operands = _operands(self.key, self.value)  # pickled, they would be other memory

    def _choose_layout(self) -> str | None:
        """None: no shadow."""
        if self.dtype == torch.float64:
            return None
        widest = max(self.d, self.d_value)
        if widest <= WIDEST_HEAD and against_gpu(torch.empty(0, device=self.device)) is None:
            return GPU
        return NATIVE if self.device.type == "cpu" and loaded() is not None else None

    def _record(self) -> int:
        """Bytes of the shadow of one page of one head."""
        native = loaded()
        if self.layout == GPU:
            return stored.record_bytes(self.d, PAGE)
        return native.shadow_bytes(self.d) if native is not None and self.layout else 0

    def __len__(self) -> int:
        return self.key.shape[1]

    def is_shared(self, page: int) -> bool:
        """More than one sequence reads it."""
        return self._users[page] > 1

    def take(self, after: int | None) -> int:
        """A page for one user, the one that follows `after` where it is free."""
        page = -1 if after is None else after + 1
        if not (0 <= page < len(self) and self._users[page] == 0):
            if not self._free:
                self._recount()
            if not self._free:
                self.grow(len(self) + max(1, len(self) // 2))
            page = next(reversed(self._free))
        self._free.pop(page, None)  # first: an interrupt may lose a page, but give none out twice
        self._users[page] = 1
        return page

    def _recount(self) -> None:
        """Who uses which page. What was interrupted may have left pages that no table has."""
        users = [0] * len(self)
        for table in self.tables:
            for page in chain.from_iterable(table.pages):
                users[page] += 1
        vars(self).update(_users=users, _free=_without_user(users))

    def is_free(self, page: int) -> bool:
        return page < len(self) and self._users[page] == 0

    def join(self, pages: list[int]) -> None:
        """One more user of each."""
        for page in pages:
            self._free.pop(page, None)
            self._users[page] += 1

    def leave(self, pages: list[int]) -> None:
        """One user less of each."""
        with self.lock:
            for page in pages:
                self._users[page] -= 1
                if self._users[page] == 0:
                    self._free[page] = None

    def grow(self, pages: int) -> None:
        """To so many pages; those there are keep their numbers."""
        before, storage = (self.key, self.value, self.shadow), self._allocate(pages)
        count = len(self)
        for new, old in zip(storage, before, strict=True):
            new[:, :count] = old
        users = self._users + [0] * (pages - count)
        free = {**dict.fromkeys(range(pages - 1, count - 1, -1)), **self._free}
        vars(self).update(_state(storage, users, free))

    def lay_out(self, table: Any, room: int) -> None:
        """All pages of a table anew: those of each sequence in a row, with room for so many in all.
        Only where no other table has pages here."""
        count = room * len(table.pages)
        before, storage = (self.key, self.value, self.shadow), self._allocate(count)
        users, laid_out = [0] * count, []
        for number, pages in enumerate(table.pages):
            start = number * room
            row = list(range(start, start + len(pages)))
            for new, old in zip(storage, before, strict=True):
                new[:, start : start + len(pages)] = old[:, pages]
            users[start : start + len(pages)] = [1] * len(pages)
            laid_out.append(row)
        state = _state(storage, users, _without_user(users))
        anew = {"pages": laid_out, "_is_stale": True}
        # one step of Python, which no interrupt divides
        list(map(dict.update, (vars(self), vars(table)), (state, anew)))

    def copy_page(self, page: int, to: int) -> None:
        for storage in (self.key, self.value, self.shadow):
            storage[:, to] = storage[:, page]

    def write(
        self, key: Tensor, value: Tensor, pages: Tensor, lengths: Tensor, table: list[list[int]]
    ) -> None:
        """Store new tokens (batch, kv_head, token, component) behind `lengths` others.

        pages: (batch, chunk), as table; sequence b has its tokens i in page table[b][i // PAGE].
        """
        if self.is_native(key, value):
            run("append", self._problem(key, value, pages, lengths))
            return
        if self.layout == GPU and against_gpu(key) is None:
            operands = key.resolve_neg(), value.resolve_neg()  # kernels read memory
            stored.append(self, *operands, pages, lengths, PAGE)
            return
        if self.layout is not None:  # bytes of another time would be read as bounds
            self.layout = None
            self.shadow = self.shadow.new_empty((self.kv_heads, len(self), 0))
        for b, length in enumerate(lengths.tolist()):
            place = torch.arange(length, length + key.shape[2])
            page = torch.tensor(table[b])[place // PAGE].to(self.device)
            row = (place % PAGE).to(self.device)
            self.key[:, page, row] = key[b].detach()
            self.value[:, page, row] = value[b].detach()

    def is_native(self, key: Tensor, value: Tensor) -> bool:
        plain = type(key) is type(value) is Tensor and not key.is_neg() and not value.is_neg()
        plain = plain and self.layout != GPU
        has_code = self.shadow.shape[-1] > 0 or self.dtype is torch.float64
        return plain and has_code and key.is_cpu and against_library() is None

    def bounds(
        self, query: Tensor, pages: Tensor, lengths: Tensor, keys: int
    ) -> tuple[Tensor, Tensor] | None:
        """Of all scores <query, key>: from above, and how far below that they may be at most.

        query: float32 (batch, head, query, d), times the scale. Returns (batch, head, query, key)
        twice; -inf and 0 beyond a sequence's end. None where there is no shadow.
        """
        if not self.has_native_shadow or against_library() is not None:
            return None
        shape = (*query.shape[:3], keys)
        upper, width = query.new_full(shape, -torch.inf), query.new_zeros(shape)
        p: Any = BoundsProblem()
        p.batch, p.heads, p.queries, p.dim = query.shape
        shadow = self.shadow  # held here: another thread may let the pool grow
        p.kv_heads, p.keys, p.query, p.shadow = self.kv_heads, keys, view(query), _records(shadow)
        p.pages, p.lengths = pages.data_ptr(), lengths.data_ptr()
        p.chunks, p.threads = pages.shape[1], torch.get_num_threads()
        p.upper, p.width = upper.data_ptr(), width.data_ptr()
        run("bounds", p)
        return upper, width

    @property
    def has_native_shadow(self) -> bool:
        return self.layout == NATIVE and self.shadow.shape[-1] > 0

    def _problem(self, key: Tensor, value: Tensor, pages: Tensor, lengths: Tensor) -> Any:
        p: Any = AppendProblem()
        p.batch, p.kv_heads, p.tokens, p.dim = key.shape
        p.value_dim = value.shape[3]
        p.key, p.value = view(key), view(value)
        p.stored_key, p.stored_value, p.shadow = self.views()
        p.pages, p.lengths = pages.data_ptr(), lengths.data_ptr()
        small = key.shape[0] * key.shape[1] * key.shape[2] <= _SMALL
        p.chunks, p.threads = pages.shape[1], 1 if small else torch.get_num_threads()
        return p

    def views(self) -> tuple[Any, Any, Any]:
        """(page, head, token, component) of keys, values and shadow, as native code reads them."""
        if self._views is None or self._views[0] is not self.shadow:
            key, value = map(view, self.operands)
            shadow = _records(self.shadow) if self.has_native_shadow else View()
            self._views = (self.shadow, (key, value, shadow))
        return self._views[1]


_KEY: int = AppendProblem.key.offset
_TWO_VIEWS = struct.Struct("6q6q")  # of the new key and value, which stand side by side


class AppendStep:
    """One more token for each sequence, on pages that they have: the struct of such an append, with
    another key and value."""

    def __init__(self, pool: PagePool, key: Tensor, value: Tensor, *numbers: Tensor) -> None:
        self._struct = pool._problem(key, value, *numbers)
        self._numbers = numbers  # which the struct points to
        self._append, self._address = addressed("append"), ctypes.addressof(self._struct)
        self._shapes, self._dtype = (key.shape, value.shape), key.dtype
        self._code = code(key.dtype)
        self.shadow = pool.shadow

    def fits(self, key: Tensor, value: Tensor) -> bool:
        return (
            type(key) is Tensor
            and type(value) is Tensor
            and key.dtype is value.dtype is self._dtype
            and (key.shape, value.shape) == self._shapes
            and key.is_cpu
            and value.is_cpu
            and not (key.requires_grad or value.requires_grad)
            and not (key.is_neg() or value.is_neg())
            and against_library() is None
        )

    def run(self, key: Tensor, value: Tensor) -> None:
        views = (
            *(key.data_ptr(), self._code, *key.stride()),
            *(value.data_ptr(), self._code, *value.stride()),
        )
        _TWO_VIEWS.pack_into(self._struct, _KEY, *views)
        self._append(self._address)


def _records(storage: Tensor) -> Any:
    shadow: Any = View()
    if storage.shape[-1]:
        shadow.data = storage.data_ptr()
        shadow.stride_0, shadow.stride_1 = storage.stride(1), storage.stride(0)
    return shadow


def _operands(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(page, head, token, component), as native code reads them."""
    return key.transpose(0, 1), value.transpose(0, 1)


def _without_user(users: list[int]) -> dict[int, None]:
    return {page: None for page in range(len(users) - 1, -1, -1) if not users[page]}


def _state(
    storage: tuple[Tensor, Tensor, Tensor], users: list[int], free: dict[int, None]
) -> dict[str, Any]:
    """What changes in a pool that gets other memory."""
    key, value, shadow = storage
    new = {"key": key, "value": value, "shadow": shadow, "operands": _operands(key, value)}
    return {**new, "_users": users, "_free": free}
