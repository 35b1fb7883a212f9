"""Which pages of a pool hold the tokens of which sequence of a cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.library import CacheProblem
from fenchel._kernels.pages import PAGE, AppendStep, PagePool


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
        self.changes = 0  # of tokens, for what is remembered about them
        self._struct: tuple[Any, Tensor] | None = None
        self._append: AppendStep | None = None  # the last token's, if it can be repeated
        with pool.lock:
            pool.tables.add(self)
            if capacity is not None and self.is_alone:
                pool.lay_out(self, _count(capacity))
        self.renew()

    def __getstate__(self) -> dict[str, Any]:
        views = {"_struct": None, "_append": None, "_count_words": None, "_is_stale": True}
        return {**vars(self), **views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with self.pool.lock:
            self.pool.tables.add(self)
            for pages in self.pages:
                self.pool.join(pages)

    def __del__(self) -> None:
        # A garbage collector takes a table from its pool before this is called, and others may have
        # laid out their pages since: what it had is then found free by the pool itself.
        if hasattr(self, "pages") and self in self.pool.tables:
            with self.pool.lock:
                before, self.pages = self.pages, []
                for pages in before:
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
        """New tokens (sequence, kv_head, token, component) at the end of these sequences.

        Where that is interrupted, or memory is short, the sequences are what they were.
        """
        count, first, last = key.shape[2], sequences.start, sequences.stop
        with self.pool.lock:
            try:
                self._make_room(sequences, count)
            except BaseException:
                self.crop(self.lengths)  # pages without tokens
                raise
            self.refresh()
            numbers, counts = self.numbers, self.counts
            if last - first < len(self.lengths):
                numbers, counts = numbers[first:last], counts[first:last]
            self.pool.write(key, value, numbers, counts, self.pages[first:last])
            if count == 1 and counts is self.counts and self.pool.is_native(key, value):
                self._append = AppendStep(self.pool, key, value, numbers, counts)
            self._lengthen(
                [n + count if first <= b < last else n for b, n in enumerate(self.lengths)]
            )

    def write_next(self, key: Tensor, value: Tensor, most: int | None) -> bool:
        """One more token for each sequence, where no page has to be added or copied; False where
        one has. most: tokens of a sequence."""
        step, pool, lengths = self._append, self.pool, self.lengths
        if step is None or not step.fits(key, value):
            return False
        with pool.lock:
            if self._is_stale or step.shadow is not pool.shadow:
                return False
            for pages, length in zip(self.pages, lengths, strict=True):
                if length % PAGE == 0 or length == most or pool.is_shared(pages[length // PAGE]):
                    return False
            step.run(key, value)
            self._lengthen([length + 1 for length in lengths])
        return True

    def _lengthen(self, lengths: list[int]) -> None:
        """After tokens were written."""
        self._is_stale = True
        self.changes += 1
        self.lengths = lengths
        for b, length in enumerate(lengths):
            self._count_words[b] = length
        self._is_stale = False

    def crop(self, lengths: list[int]) -> None:
        """Keep the first tokens of each sequence."""
        lengths = [min(pair) for pair in zip(lengths, self.lengths, strict=True)]
        with self.pool.lock:
            kept = [pages[: _count(n)] for pages, n in zip(self.pages, lengths, strict=True)]
            gone = [pages[_count(n) :] for pages, n in zip(self.pages, lengths, strict=True)]
            self._become(kept, lengths)
            for row in gone:
                self.pool.leave(row)
        self.renew()

    def share(self, other: PageTable, sequences: list[int]) -> None:
        """Become these sequences of a table in the same pool, which may be this one."""
        before, pages = self.pages, [list(other.pages[b]) for b in sequences]
        with self.pool.lock:
            for row in pages:
                self.pool.join(row)
            self._become(pages, [other.lengths[b] for b in sequences])
            for row in before:
                self.pool.leave(row)
        self.renew()

    def _become(self, pages: list[list[int]], lengths: list[int]) -> None:
        state = {"pages": pages, "lengths": lengths, "_is_stale": True, "changes": self.changes + 1}
        vars(self).update(state)  # one step, which no interrupt divides

    def compact(self) -> None:
        """Pages in rows again, where the table is alone."""
        with self.pool.lock:
            if self.is_alone:
                self._lay_out(max(map(len, self.pages)))
        self.renew()

    def refresh(self) -> None:
        """After a change that was interrupted."""
        if self._is_stale:
            self.renew()

    def renew(self) -> None:
        """What native code reads, after a change of pages."""
        chunks = max(1, *map(len, self.pages))
        rows = [pages + [0] * (chunks - len(pages)) for pages in self.pages]
        with torch.inference_mode(False):  # counts are added to, in or outside of it
            self.numbers = torch.tensor(rows, dtype=torch.int64)  # (sequence, chunk)
            self.counts = torch.tensor(self.lengths, dtype=torch.int64)
        words: Any = self.counts.numpy()
        self._count_words = memoryview(words)  # the same memory, sooner written
        self._step = self._step_between_sequences()
        self._struct, self._append, self._is_stale = None, None, False

    def _make_room(self, sequences: range, count: int) -> None:
        """Pages for so many new tokens, none of them shared."""
        for b in sequences:
            # one page as a rule; more after an append that was interrupted
            for which in range(self.lengths[b] // PAGE, len(self.pages[b])):
                if self.pool.is_shared(self.pages[b][which]):
                    self._is_stale = True
                    self._copy_page(self.pages[b], which)
            needed = _count(self.lengths[b] + count)
            if needed > len(self.pages[b]):
                self._is_stale = True
                self._add_pages(b, needed)

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
        """All pages anew, in rows of so many, or as many as the longest sequence has."""
        if self._capacity is not None:
            room = _count(self._capacity)
        self.pool.lay_out(self, max(room, *map(len, self.pages)))

    def _copy_page(self, pages: list[int], which: int) -> None:
        """A page of its own in place of one that others read."""
        before, page = pages[which], self.pool.take(None)
        self.pool.copy_page(before, page)
        pages[which] = page
        self.pool.leave([before])

    # ---- reading

    def struct(self) -> Any:
        """What native code reads about pages and lengths; made again when they change."""
        self.refresh()
        shadow = self.pool.shadow
        if self._struct is None or self._struct[1] is not shadow:
            c: Any = CacheProblem()
            c.pages, c.lengths = self.numbers.data_ptr(), self.counts.data_ptr()
            c.chunks, c.shadow = self.numbers.shape[1], self.pool.views()[2]
            self._struct = (c, shadow)
        return self._struct[0]

    def written_out(self, storage: Tensor) -> Tensor:
        """(sequence, kv_head, token, component) of equally long sequences."""
        self.refresh()
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
