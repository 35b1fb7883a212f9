"""Sizes of one call on the GPU: blocks, chunks, and what a forward pass keeps. No triton here:
shapes are asked for while a graph is traced, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from fenchel._kernels.gpu.configurations import Configuration, architecture, configuration

if TYPE_CHECKING:
    from fenchel._kernels.attention_call import Arguments

CLOSED = (0.5, 1.0)  # alpha - 1 of the families with closed forms
_LEAST_WIDTH = 16  # of a product on tensor cores


class Chunk(NamedTuple):
    """Units start .. stop - 1, and what they cover; heads are counted over all batches."""

    start: int
    stop: int
    head: int
    heads: int
    group: int  # the key head of the first one
    groups: int
    first_row: int  # of rows of all heads
    last_row: int


class Shapes(NamedTuple):
    """width, value_width: columns padded to powers of two."""

    settings: Configuration
    width: int
    value_width: int
    row_blocks: int
    key_blocks: int
    units: int
    words: int  # of bits for the key blocks of a unit

    def chunks(self, x: Arguments, more: int = 0) -> Iterator[Chunk]:
        """more: bytes of scratch that a pair of query and key takes beyond the usual."""
        size, rows, n = self.settings, self.settings.rows, x.query.shape[2]
        entry = 16 * size.capacity + 16 + 4 * self.key_blocks + more * x.key.shape[2]
        at_once = max(1, size.chunk // (rows * entry))
        repeats = x.query.shape[1] // x.key.shape[1]
        for start in range(0, self.units, at_once):
            stop = min(start + at_once, self.units)
            head, last = start // self.row_blocks, (stop - 1) // self.row_blocks
            group = head // repeats
            yield Chunk(
                start=start,
                stop=stop,
                head=head,
                heads=last - head + 1,
                group=group,
                groups=last // repeats - group + 1,
                first_row=head * n + start % self.row_blocks * rows,
                last_row=last * n + min(n, ((stop - 1) % self.row_blocks + 1) * rows),
            )

    def parts(self, groups: int) -> int:
        """Programs that share a block of keys, so that few keys still fill a device."""
        programs = max(1, self.key_blocks * groups)
        return max(1, min(8, self.row_blocks, -(-self.settings.programs // programs)))


def shapes(x: Arguments) -> Shapes:
    """Of one call; lengths may stand for many while a graph is traced."""
    batch, heads, queries, dim = x.query.shape
    width, value_width = padded(dim), padded(x.value.shape[3])
    settings = configuration(
        architecture(x.query.device), x.query.dtype, max(width, value_width), _is_rich(x)
    )
    row_blocks = -(-queries // settings.rows)
    key_blocks = -(-x.key.shape[2] // settings.keys)
    return Shapes(
        settings=settings,
        width=width,
        value_width=value_width,
        row_blocks=row_blocks,
        key_blocks=key_blocks,
        units=batch * heads * row_blocks,
        words=-(-key_blocks // 32),
    )


def _is_rich(x: Arguments) -> bool:
    """Needs more registers for a tile than a closed form of a product does."""
    pairs = (x.mask, x.bias, x.mass, x.seed)
    tables = (x.relative, x.relative_log_mass, x.of_key, x.of_key_log_mass)
    more = any(tensor is not None for tensor in (*pairs, *tables))
    return more or x.softcap > 0 or x.uniform_eps not in CLOSED


def kept(x: Arguments) -> tuple[int, int]:
    """Lengths of `saved_key` and `saved_distance`: a bit for every tile, and the mean of a row's
    values by slope in float32. Tiles are few: of n queries and keys, n^2 / 2^17 words."""
    batch, heads, queries, _ = x.query.shape
    sizes = shapes(x)
    return sizes.units * sizes.words, batch * heads * queries * x.value.shape[3]


def padded(dim: int) -> int:
    """Columns of a tile that holds so many components."""
    return max(_LEAST_WIDTH, 1 << (dim - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """Of products of float32: exact unless the user has allowed less."""
    if dtype != torch.float32:
        return "ieee"
    allowed = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed or torch.backends.cuda.matmul.allow_tf32 else "ieee"
