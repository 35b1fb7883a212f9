"""The launches of a call, chunk by chunk. Nothing here looks at a value on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.attention_call import TRAINED, Arguments, Saved, forward_outputs
from fenchel._kernels.gpu import bound, gradient, lists, scores, split, tiles
from fenchel._kernels.gpu.call import GENERAL, Operand, family, operand, read_call
from fenchel._kernels.gpu.device import run
from fenchel._kernels.gpu.folding import against_split
from fenchel._kernels.gpu.shapes import Chunk, precision, shapes


class Kept(NamedTuple):
    """What the forward kernels keep of each row, and the backward ones read."""

    offset: Tensor
    support_size: Tensor
    mean: Tensor  # float32 (batch, head, query, value_dim)


class RowOutputs(NamedTuple):
    """Derivatives that `rows` writes. score, mass: (rows, keys) from `first` on."""

    query: Tensor
    eps: Tensor | None
    sink: Tensor | None
    sink_mass: Tensor | None
    score: Tensor | None
    mass: Tensor | None
    first: int


class ColumnOutputs(NamedTuple):
    """Shares that `columns` writes."""

    key: Tensor
    value: Tensor
    of_key: Tensor | None
    of_key_mass: Tensor | None


def forward(x: Arguments, save: bool) -> tuple[Tensor, ...]:
    """The operator `fenchel::tsallis_attention`."""
    outputs = forward_outputs(x, save)
    if against_split(x, save, shapes(x).settings) is None:
        split.forward(x, outputs[0])
        return outputs
    output, offset, support_size, tile_bits, mean = outputs
    kept = Kept(offset, support_size, mean) if save else None
    work = _Work(x, family(x))
    odd = work.odd_blocks()
    for chunk in work.sizes.chunks(x):
        work.bound_rows(chunk, tile_bits if save else None)
        work.pack_lists(chunk)
        work.attend(chunk, odd, operand(output), kept)
    return outputs


class _Work:
    """Scratch memory of the chunks of one call, and the launches that fill it."""

    def __init__(self, x: Arguments, kind: int) -> None:
        self.x, self.call, self.sizes = x, read_call(x, kind), shapes(x)
        sizes = self.sizes
        size = sizes.settings
        self.options = {"num_warps": size.warps[0], "num_stages": size.stages}
        self.heavy = {"num_warps": size.warps[1], "num_stages": size.stages}
        self.light, self.lists = {"num_warps": 4}, {"num_warps": 1}
        if size.registers is not None:
            for options in (self.options, self.heavy, self.light, self.lists):
                options["maxnreg"] = size.registers
        finer = 1 if kind == family(x) else 2  # a derivative in alpha computes more per pair
        self.split = tuple(finer * pieces for pieces in size.split)
        self.rows = {"BM": size.rows}
        self.keys = {"BN": size.keys}
        self.query = {"D": x.query.shape[3], "WIDTH": sizes.width}
        self.value = {"DV": x.value.shape[3], "VALUE_WIDTH": sizes.value_width}
        self.kind = {"FAMILY": kind}
        self.precision = {"PRECISION": precision(x.query.dtype)}

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.query.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.x.query.device)

    def make_room(self, units: int) -> None:
        """For a chunk: bounds, active tiles and candidates of its rows."""
        size = self.sizes.settings
        self.make_lists(units)
        self.bounds = self.new(units, 3, size.rows)
        entries = (units, size.rows, size.capacity)
        self.key = self.new(*entries, dtype=torch.int32)
        self.distance = self.new(*entries)
        self.mass = self.new(*entries) if self.call.has_mass is not None else None
        self.number = self.new(units, size.rows, dtype=torch.int32)
        self.crowded = self.new(units, dtype=torch.int32)

    def make_lists(self, units: int) -> None:
        """For the active tiles alone."""
        self.active = self.new(units, self.sizes.key_blocks, dtype=torch.int32)
        self.count = self.new(units, dtype=torch.int32)

    def bound_rows(self, chunk: Chunk, tile_bits: Tensor | None) -> None:
        units, size = chunk.stop - chunk.start, self.sizes.settings
        self.make_room(units)
        tops = self.new(units, self.sizes.key_blocks, size.rows)
        constants = {**self.query, **self.rows, **self.keys, **self.kind, **self.precision}
        run(
            bound.bound, (units,), self.call, self.bounds, tops, chunk.start,
            STEPS=size.steps[0], **constants, **self.options,
        )  # fmt: skip
        run(
            bound.listing, (units,), self.call, self.bounds, tops, self.active, self.count,
            tile_bits, chunk.start, **self.rows, **self.keys,
        )  # fmt: skip

    def pack_lists(self, chunk: Chunk) -> None:
        constants = {**self.query, **self.rows, **self.keys, **self.precision}
        run(
            lists.pack, (chunk.stop - chunk.start,), self.call, self.bounds, self.active,
            self.count, self.key, self.distance, self.mass, self.number, self.crowded,
            chunk.start, CAPACITY=self.sizes.settings.capacity, **constants, **self.heavy,
        )  # fmt: skip

    @property
    def candidates(self) -> tuple[Tensor | None, ...]:
        return self.key, self.distance, self.mass, self.number, self.crowded

    def attend(self, chunk: Chunk, odd: Tensor, output: Operand, kept: Kept | None) -> None:
        units, size = chunk.stop - chunk.start, self.sizes.settings
        constants = {**self.value, **self.rows, **self.kind}
        run(
            lists.attend, (units, size.rows // size.few), self.call, self.bounds,
            *self.candidates, output, kept, chunk.start, R=size.few, CAPACITY=size.capacity,
            STEPS=size.steps[1], **constants, **self.lists,
        )  # fmt: skip
        run(
            tiles.attend_tiles, (units,), self.call, self.bounds, self.active, self.count,
            self.crowded, odd, output, kept, chunk.start, STEPS=size.steps[2], SPLIT=self.split[0],
            **self.query, **self.keys, **self.precision, **constants, **self.heavy,
        )  # fmt: skip

    def recall(self, chunk: Chunk, tile_bits: Tensor) -> None:
        """The active tiles of a chunk's rows, as the forward pass found them."""
        units = chunk.stop - chunk.start
        self.make_lists(units)
        run(
            bound.unfold, (units,), self.call, tile_bits, self.active, self.count, chunk.start,
            **self.keys,
        )  # fmt: skip

    def odd_blocks(self) -> Tensor:
        """Blocks of keys where something is not finite."""
        groups = self.x.key.shape[0] * self.x.key.shape[1]
        flags = self.new(groups, self.sizes.key_blocks, dtype=torch.int32)
        grid = (self.sizes.key_blocks, groups)
        constants = {**self.query, **self.value, **self.keys}
        run(scores.odd_blocks, grid, self.call, flags, **constants, **self.light)
        return flags


def backward(
    gradient_of_output: Tensor, x: Arguments, saved: Saved, output_mask: list[bool]
) -> tuple[Tensor, ...]:
    """The operator `fenchel::tsallis_attention_backward`."""
    wanted = dict(zip(TRAINED, output_mask, strict=True))
    kept = Kept(saved.offset.contiguous(), saved.support_size, saved.saved_distance.contiguous())
    kind = GENERAL if wanted["eps"] else family(x)
    return _Backward(x, kept, saved.saved_key.contiguous(), kind, wanted).run(gradient_of_output)


class _Backward:
    """Derivatives that grow chunk by chunk."""

    def __init__(
        self, x: Arguments, kept: Kept, tile_bits: Tensor, kind: int, wanted: dict[str, bool]
    ) -> None:
        self.x, self.kept, self.tile_bits, self.wanted = x, kept, tile_bits, wanted
        self.work = work = _Work(x, kind)
        batch, heads, queries, dim = x.query.shape
        kv_heads, keys = x.key.shape[1:3]
        rows, groups = (batch, heads, queries), batch * kv_heads
        positions = x.longest_query + x.longest_key - 1
        shapes_of: dict[str, tuple[int, ...]] = {
            "eps": rows, "sink": rows, "sink_log_mass": rows,
            "bias": (*rows, keys), "mass": (*rows, keys),
            "relative": (batch * heads, positions), "of_key": (batch * heads, keys),
        }  # fmt: skip
        self.of: dict[str, Tensor | None] = {}
        for name in TRAINED:
            shape = shapes_of.get(name) or shapes_of[name.removesuffix("_log_mass")]
            whole = torch.float64 if len(shape) == 3 else torch.float32
            device = x.query.device
            self.of[name] = torch.zeros(shape, dtype=whole, device=device) if wanted[name] else None
        self.query = work.new(*x.query.shape)
        self.key = work.zeros(groups, keys, dim)
        self.value = work.zeros(groups, keys, x.value.shape[3])

    def run(self, gradient_of_output: Tensor) -> tuple[Tensor, ...]:
        mean = self.kept.mean.view(*self.x.query.shape[:3], -1)
        delta = (gradient_of_output.float() * mean).sum(-1).contiguous()
        incoming = operand(gradient_of_output.to(self.x.query.dtype))
        dense = sum(4 for name in ("relative", "relative_log_mass") if self.wanted[name])
        self.odd_keys, self.odd_rows = self.work.odd_blocks(), self.odd_units(incoming)
        for chunk in self.work.sizes.chunks(self.x, dense):
            self.work.recall(chunk, self.tile_bits)
            self.differentiate_rows(chunk, delta, incoming)
            self.differentiate_columns(chunk, delta, incoming)
        return self.finish()

    def odd_units(self, incoming: Operand) -> Tensor:
        """Units where something is not finite."""
        work = self.work
        flags = work.new(work.sizes.units, dtype=torch.int32)
        run(
            gradient.odd_units, (work.sizes.units,), work.call, self.kept, incoming, flags,
            **work.query, **work.value, **work.rows, **work.light,
        )  # fmt: skip
        return flags

    def differentiate_rows(self, chunk: Chunk, delta: Tensor, incoming: Operand) -> None:
        work, call = self.work, self.work.call
        outputs = self.row_outputs(chunk)
        units = chunk.stop - chunk.start
        constants = {**work.query, **work.value, **work.rows, **work.kind}
        run(
            gradient.rows, (units,), call, work.active, work.count, self.odd_keys, self.kept,
            delta, incoming, outputs, chunk.start, SPLIT=work.split[0], **constants, **work.keys,
            **work.precision, **work.heavy,
        )  # fmt: skip
        self.sum_diagonals(chunk, "relative", outputs.score, outputs.first)
        self.sum_diagonals(chunk, "relative_log_mass", outputs.mass, outputs.first)

    def row_outputs(self, chunk: Chunk) -> RowOutputs:
        """The derivative of a bias has all pairs; what is summed along positions is scratch."""
        first = 0 if self.wanted["bias"] or self.wanted["mass"] else chunk.first_row
        rows, keys = chunk.last_row - first, self.x.key.shape[2]

        def dense(whole: str, by_position: str) -> Tensor | None:
            if self.of[whole] is not None:
                return self.of[whole]
            return self.work.zeros(rows, keys) if self.wanted[by_position] else None

        return RowOutputs(
            query=self.query,
            eps=self.of["eps"],
            sink=self.of["sink"],
            sink_mass=self.of["sink_log_mass"],
            score=dense("bias", "relative"),
            mass=dense("mass", "relative_log_mass"),
            first=first,
        )

    def sum_diagonals(self, chunk: Chunk, name: str, pairs: Tensor | None, first: int) -> None:
        total = self.of[name]
        if total is None or pairs is None:
            return
        positions, block = total.shape[1], 128
        part = self.work.new(chunk.heads, positions)
        grid = (-(-positions // block), chunk.heads)
        run(
            gradient.diagonals, grid, self.work.call, pairs, part, first, chunk.first_row,
            chunk.last_row, chunk.head, positions, BP=block,
        )  # fmt: skip
        total[chunk.head : chunk.head + chunk.heads] += part

    def differentiate_columns(self, chunk: Chunk, delta: Tensor, incoming: Operand) -> None:
        work, sizes, keys = self.work, self.work.sizes, self.x.key.shape[2]
        room = min(sizes.row_blocks, chunk.stop - chunk.start)
        listed = work.new(chunk.heads, sizes.key_blocks, room, dtype=torch.int32)
        count = work.new(chunk.heads, sizes.key_blocks, dtype=torch.int32)
        run(
            gradient.column_listing, (sizes.words, chunk.heads), work.call, self.tile_bits,
            listed, count, chunk.start, chunk.stop, chunk.head, room, **work.rows, **work.keys,
        )  # fmt: skip
        parts = sizes.parts(chunk.groups)
        wanted = (self.wanted["of_key"], self.wanted["of_key_log_mass"])
        of_key, of_mass = (work.new(parts, chunk.heads, keys) if w else None for w in wanted)
        shares = ColumnOutputs(
            work.new(parts, chunk.groups, keys, self.x.query.shape[3]),
            work.new(parts, chunk.groups, keys, self.x.value.shape[3]),
            of_key,
            of_mass,
        )
        run(
            gradient.columns, (sizes.key_blocks, parts, chunk.groups), work.call, listed, count,
            self.odd_rows, self.kept, delta, incoming, shares, chunk.heads, chunk.head,
            chunk.group, room, PARTS=parts, SPLIT=work.split[1], **work.query, **work.value,
            **work.rows, **work.keys, **work.kind, **work.precision, **work.heavy,
        )  # fmt: skip
        groups = slice(chunk.group, chunk.group + chunk.groups)
        heads = slice(chunk.head, chunk.head + chunk.heads)
        for total, part, place in (
            (self.key, shares.key, groups),
            (self.value, shares.value, groups),
            (self.of["of_key"], of_key, heads),
            (self.of["of_key_log_mass"], of_mass, heads),
        ):
            if total is not None and part is not None:
                total[place] += part.sum(0)

    def finish(self) -> tuple[Tensor, ...]:
        """In the shapes and precisions of the operands."""
        x = self.x
        results = []
        for name in TRAINED:
            total = self.of[name]
            if total is None:
                kind = torch.float64 if name in ("eps", "sink", "sink_log_mass") else torch.float32
                total = self.work.new(0, dtype=kind)
            elif name.startswith("sink"):
                total = total.sum(-1)
            elif total.ndim == 2:
                total = total.view(*x.query.shape[:2], -1)
            results.append(total)
        return (
            self.query.to(x.query.dtype),
            self.key.view(x.key.shape).to(x.key.dtype),
            self.value.view(x.value.shape).to(x.value.dtype),
            *results,
        )
