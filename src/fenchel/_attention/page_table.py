"""Which pages of a pool hold the tokens of which sequence of a cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.library import CacheProblem
from fenchel._kernels.pages import PAGE, PagePool


class PageTable:
    """Pages and lengths of some sequences.

    A table that is alone in its pool keeps the pages of each sequence in a row, so that their
    tokens can be seen as one tensor. Sequences that share pages copy one before they write to it.
    """

    def __init__(self, pool: PagePool, sequences: int, capacity: int | None) -> None:
        self.pool = pool
        self.pages: list[list[int]] = [[] for _ in range(sequences)]
        self.lengths = [0] * sequences
        self._capacity = capacity
        pool.tables.add(self)
        if capacity is not None and self.is_alone:
            self.pages = pool.lay_out(self.pages, _count(capacity))
        self.renew()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_struct": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.pool.tables.add(self)

    def __del__(self) -> None:
        for pages in getattr(self, "pages", ()):
            self.pool.leave(pages)

    @property
    def is_alone(self) -> bool:
        """No other table has pages in the pool."""
        return len(self.pool.tables) == 1

    @property
    def is_even(self) -> bool:
        """All sequences have the same length."""
        return len(set(self.lengths)) == 1

    @property
    def is_in_rows(self) -> bool:
        """Tokens can be seen as one tensor."""
        return self._step is not None

    # ---- changes

    def write(self, key: Tensor, value: Tensor, sequences: range) -> None:
        """New tokens (sequence, kv_head, token, component) at the end of these sequences."""
        count = key.shape[2]
        self._make_room(sequences, count)
        first, last = sequences.start, sequences.stop
        numbers, counts = self.numbers, self.counts
        if last - first < len(self.lengths):
            numbers, counts = numbers[first:last], counts[first:last]
        self.pool.write(key, value, numbers, counts, self.pages[first:last])
        for b in sequences:
            self.lengths[b] += count
        counts.add_(count)

    def crop(self, b: int, length: int) -> None:
        """Keep the first tokens of a sequence; `renew` after the last."""
        self.lengths[b] = min(length, self.lengths[b])
        kept = _count(self.lengths[b])
        self.pool.leave(self.pages[b][kept:])
        del self.pages[b][kept:]

    def share(self, other: PageTable, sequences: list[int]) -> None:
        """Become these sequences of a table in the same pool, which may be this one."""
        pages = [list(other.pages[b]) for b in sequences]
        for row in pages:
            self.pool.join(row)
        for row in self.pages:
            self.pool.leave(row)
        self.pages, self.lengths = pages, [other.lengths[b] for b in sequences]
        self.renew()

    def compact(self) -> None:
        """Pages in rows again."""
        self._lay_out(max(map(len, self.pages)))
        self.renew()

    def renew(self) -> None:
        """What native code reads, after a change of pages."""
        chunks = max(1, *map(len, self.pages))
        rows = [pages + [0] * (chunks - len(pages)) for pages in self.pages]
        self.numbers = torch.tensor(rows, dtype=torch.int64)  # (sequence, chunk)
        self.counts = torch.tensor(self.lengths, dtype=torch.int64)
        self._step = self._step_between_sequences()
        self._struct: tuple[Any, Tensor] | None = None

    def _make_room(self, sequences: range, count: int) -> None:
        """Pages for so many new tokens, none of them shared."""
        changed = False
        for b in sequences:
            if self.lengths[b] % PAGE and self.pool.is_shared(self.pages[b][-1]):
                self._copy_last(self.pages[b])
                changed = True
            needed = _count(self.lengths[b] + count)
            if needed > len(self.pages[b]):
                self._add_pages(b, needed)
                changed = True
        if changed:
            self.renew()

    def _add_pages(self, b: int, needed: int) -> None:
        row = len(self.pool) // len(self.pages)  # of each sequence, where the table is alone
        before = self.pages[b][-1] if self.pages[b] else b * row - 1
        if self.is_alone and not self.pool.is_free(before + 1):
            self._lay_out(needed + needed // 2)
            row = len(self.pool) // len(self.pages)
        pages = self.pages[b]
        while len(pages) < needed:
            pages.append(self.pool.take(pages[-1] if pages else b * row - 1))

    def _lay_out(self, room: int) -> None:
        """All pages anew, in rows of so many."""
        if self._capacity is not None:
            room = max(_count(self._capacity), *map(len, self.pages))
        self.pages = self.pool.lay_out(self.pages, room)

    def _copy_last(self, pages: list[int]) -> None:
        """A page of its own in place of one that others read."""
        page = self.pool.take(None)
        self.pool.copy_page(pages[-1], page)
        self.pool.leave(pages[-1:])
        pages[-1] = page

    # ---- reading

    def struct(self) -> Any:
        """What native code reads about pages and lengths; made again when they change."""
        shadow = self.pool.shadow
        if self._struct is None or self._struct[1] is not shadow:
            c: Any = CacheProblem()
            c.pages, c.lengths = self.numbers.data_ptr(), self.counts.data_ptr()
            c.chunks, c.shadow = self.numbers.shape[1], self.pool.views()[2]
            self._struct = (c, shadow)
        return self._struct[0]

    def written_out(self, storage: Tensor) -> Tensor:
        """(sequence, kv_head, token, component) of equally long sequences."""
        heads, _, _, width = storage.shape
        sequences, length = len(self.lengths), self.lengths[0]
        if length == 0:
            return storage.new_empty((sequences, heads, 0, width))
        if self._step is None:
            # (head, sequence, chunk, token, component)
            chunks = storage[:, self.numbers.to(storage.device)]
            return chunks.transpose(0, 1).reshape(sequences, heads, -1, width)[:, :, :length]
        head, page, token, _ = storage.stride()
        strides = (self._step * page, head, token, 1)
        return storage.as_strided(
            (sequences, heads, length, width), strides, self.pages[0][0] * page
        )

    def _step_between_sequences(self) -> int | None:
        """Pages from the start of one sequence to that of the next, if all pages stand in rows."""
        if not all(self.pages):
            return None
        first = [pages[0] for pages in self.pages]
        step = first[1] - first[0] if len(first) > 1 else 1
        rows = all(pages == list(range(pages[0], pages[0] + len(pages))) for pages in self.pages)
        even = all(b - a == step for a, b in pairwise(first))
        return step if rows and even and step > 0 else None


def _count(tokens: int) -> int:
    """Pages for so many tokens."""
    return -(-tokens // PAGE)
