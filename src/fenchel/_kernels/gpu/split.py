"""The launches of decoding: the keys of a row are split over programs (`decode.py`).

    scan, scan_shadow   scores of a split, or bounds of them from the shadow of a cache
    bound_lanes         a lower bound of each row's threshold, from the best keys of all splits
    collect             the keys of a split that may lie above it
    score_whole, rescore   their scores, where only bounds were there
    search              the threshold, and the weights
    gather, join        the values of a split, and the sum over splits

Nothing here looks at a value on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.attention_call import Arguments
from fenchel._kernels.gpu import decode, decode_search, shadow
from fenchel._kernels.gpu.call import Operand, family, operand
from fenchel._kernels.gpu.device import registers, run
from fenchel._kernels.gpu.folding import fold
from fenchel._kernels.gpu.shapes import shapes
from fenchel._kernels.gpu.stored import Pages, Shadow, read_pages, read_shadow, upload
from fenchel._kernels.pages import PAGE, PagePool

_LEAST_INTEGERS = 32  # components of a product of bytes on tensor cores
_ROWS = 16  # of a tile
_ENTRIES = 16  # of a list, in a program that scores them
_REGISTERS = 255  # of a thread, in kernels that else give some up for one more program


class Found(NamedTuple):
    """What is known of the rows, see `decode.py`."""

    upper: Tensor
    lane_score: Tensor
    lane_mass: Tensor | None
    bounds: Tensor
    key: Tensor
    score: Tensor
    weight: Tensor
    number: Tensor
    whole: Tensor
    whole_weight: Tensor
    broken: Tensor
    support: Tensor
    share: Tensor


class Cached(NamedTuple):
    """Operands (page, head, token, component), and where the tokens of sequences stand."""

    key: Operand
    value: Operand
    pages: Pages
    shadow: Shadow | None
    behind: Tensor | None  # see `fold`


class Split:
    """One call: its sizes, its scratch memory, and its launches."""

    def __init__(self, x: Arguments, cached: Cached | None = None) -> None:
        self.cached, kind = cached, family(x)
        self.call = fold(x, kind, None if cached is None else cached.behind)
        if cached is not None:
            self.call = self.call._replace(key=cached.key, value=cached.value)
        sizes = shapes(x)
        self.settings, call = sizes.settings, self.call
        self.units = x.query.shape[0] * call.heads * -(-call.queries // _ROWS)
        self.length = _split_length(self.settings, self.units, call.keys)
        self.splits = -(-call.keys // self.length)
        self.capacity = max(4, self.length // 8)
        most = 64 if self.settings.multiplies_bytes else 16  # without tensor cores, less fits
        self.block = min(self.settings.keys, most, self.length)
        self.query = {"D": x.query.shape[3], "WIDTH": sizes.width}
        self.value = {"DV": x.value.shape[3], "VALUE_WIDTH": sizes.value_width}
        self.rows, self.kind = {"BM": _ROWS}, {"FAMILY": kind}
        self.entries = {"CAPACITY": self.capacity}
        self.cut = {"SPLIT": self.length}
        self.keys = {"BN": self.block, **self.cut}
        self.options = {"num_warps": self.settings.warps[0], "num_stages": self.settings.stages}
        self.exact = cached is None or cached.shadow is None
        self.found = self._make_room(x.query.device)

    @property
    def pages(self) -> Pages | None:
        return None if self.cached is None else self.cached.pages

    def _make_room(self, device: torch.device) -> Found:
        rows, splits = self.units * _ROWS, self.splits

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        lists = (rows, splits, self.capacity)
        upper, whole = new(rows, splits * self.length), new(rows, splits * self.length)
        return Found(
            upper=upper,
            lane_score=new(rows, splits, self.block),
            lane_mass=None if self.call.has_mass is None else new(rows, splits, self.block),
            bounds=new(rows, 3),
            key=new(*lists, dtype=torch.int32),
            score=new(*lists),
            weight=new(*lists),
            number=new(rows, splits, dtype=torch.int32),
            whole=upper if self.exact else whole,
            whole_weight=new(rows, splits * self.length),
            broken=new(rows, dtype=torch.int32),
            support=new(rows, splits, dtype=torch.int32),
            share=new(rows, splits, self.value["VALUE_WIDTH"]),
        )

    def by_row(self, found: Tensor) -> Tensor:
        """(batch, kv_head, row, ...) of what is kept for every row of a tile."""
        heads, queries = self.call.heads, self.call.queries
        rows = -(-queries // _ROWS) * _ROWS
        return found.view(-1, heads, rows, *found.shape[1:])[:, :, :queries]

    def run(self, output: Tensor, counts: Tensor | None = None) -> None:
        """output: (batch, head, query, component), contiguous; counts likewise, five columns."""
        self.find()
        self.weigh()
        call = self.call
        shape = (-1, call.heads, call.queries)
        to = operand(output.view(*shape, output.shape[3]))
        self.average(to, None if counts is None else counts.view(*shape, 5))

    def find(self) -> None:
        """Candidates and their scores."""
        grid, size = (self.units, self.splits), self.settings
        call, pages, found = self.call, self.pages, self.found
        heavy = {"num_warps": size.warps[1], "num_stages": size.stages, **registers(_REGISTERS)}
        if self.exact:
            run(
                decode.scan, grid, call, pages, found, **self.query, **self.rows, **self.keys,
                **self.kind, **heavy,
            )  # fmt: skip
        else:
            assert self.cached is not None
            width = max(_LEAST_INTEGERS, self.query["WIDTH"])
            run(
                shadow.scan_shadow, grid, call, pages, self.cached.shadow, found,
                D=self.query["D"], WIDTH=width, BYTES=size.multiplies_bytes, **self.rows,
                **self.keys, **self.kind, **heavy,
            )  # fmt: skip
        lanes = self.splits * self.block
        run(
            decode.bound_lanes, (self.units, _ROWS), call, found, lanes, LB=size.lanes,
            STEPS=size.steps[0], **self.rows, **self.kind,
        )  # fmt: skip
        run(
            decode.collect, grid, call, found, EXACT=self.exact, **self.rows, **self.keys,
            **self.entries,
        )  # fmt: skip
        if not self.exact:
            self.score()

    def score(self) -> None:
        """Candidates that are known by their bounds."""
        call, pages, found = self.call, self.pages, self.found
        run(
            decode.score_whole, (self.units, self.splits), call, pages, found, **self.query,
            **self.rows, **self.keys, **self.entries, **self.options,
        )  # fmt: skip
        parts = -(-self.splits * self.capacity // _ENTRIES)
        run(
            decode.rescore, (self.units, _ROWS, parts), call, pages, found, self.splits,
            EB=_ENTRIES, **self.query, **self.rows, **self.entries,
        )  # fmt: skip

    def weigh(self) -> None:
        size = self.settings
        run(
            decode_search.search, (self.units, _ROWS), self.call, self.found, self.splits,
            EB=size.lanes, STEPS=size.steps[1], **self.rows, **self.cut, **self.entries,
            **self.kind,
        )  # fmt: skip

    def average(self, output: Operand, counts: Tensor | None) -> None:
        call, found = self.call, self.found
        run(
            decode.gather, (self.units, self.splits), call, self.pages, found, **self.value,
            **self.rows, **self.keys, **self.entries, **self.options,
        )  # fmt: skip
        run(
            decode.join, (self.units, _ROWS), call, found, output, counts, self.splits, SB=16,
            EXACT=self.exact, **self.value, **self.rows, **self.cut, **self.entries,
        )  # fmt: skip


def _split_length(settings: Any, units: int, keys: int) -> int:
    """As long as programs fill a device; at most a page."""
    length = PAGE
    while length > settings.run and units * -(-keys // length) < settings.programs:
        length //= 2
    return length


def read_cache(pool: PagePool, numbers: Tensor, lengths: list[int]) -> Cached:
    """The tokens of some sequences. numbers: of their pages, on the host."""
    device, longest = pool.device, max(lengths)
    key, value = (Operand(stored, stored.stride()[:3]) for stored in pool.operands)
    behind = torch.tensor([longest - length for length in lengths])
    return Cached(
        key=key,
        value=value,
        pages=read_pages(numbers, device),
        shadow=read_shadow(pool.shadow, pool.d, PAGE) if pool.shadow.shape[-1] else None,
        behind=None if min(lengths) == longest else upload(behind, device),
    )


def forward(x: Arguments, output: Tensor) -> None:
    Split(x).run(output)
