"""A cache's pages as kernels read them, and the launches that write them at `append`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.gpu.call import Operand, operand
from fenchel._kernels.gpu.device import load, run
from fenchel._kernels.gpu.shapes import padded

if TYPE_CHECKING:
    from fenchel._kernels.pages import PagePool

_BLOCK = 64  # keys of a program
_ALIGNED = 64  # bytes at which parts of a page begin


class Pages(NamedTuple):
    """Which pages hold the tokens of each sequence: int32 (sequence, chunk)."""

    numbers: Tensor
    chunks: int


class Part(NamedTuple):
    """Of the shadow: a view (head, page, ...), the rest contiguous."""

    data: Tensor
    strides: tuple[int, ...]  # of head and page


class Shadow(NamedTuple):
    """See `shadow.py`. width: bytes of a key."""

    centre: Part
    norm: Part
    words: Part
    bytes: Part
    width: int


class Append(NamedTuple):
    """New tokens (batch, head, token, component), behind `lengths` others."""

    new_key: Operand
    new_value: Operand
    key: Operand  # (page, head, token, component), and so are values
    value: Operand
    pages: Pages
    lengths: Tensor  # int32 (sequence,)
    tokens: int


def record_bytes(d: int, page: int) -> int:
    """Of the shadow of one page of one head. page: its tokens."""
    return sum(_sizes(d, page))


def _sizes(d: int, page: int) -> tuple[int, int, int, int]:
    """Bytes of the centre, its norm, words and bytes; each a multiple of what it is aligned to."""
    width = -(-d // 16) * 16
    return 4 * width, _ALIGNED, 4 * page, page * width


def read_shadow(storage: Tensor, d: int, page: int) -> Shadow:
    """storage: bytes (head, page, byte)."""
    dtypes = (torch.float32, torch.float32, torch.int32, torch.int8)
    parts: list[Part] = []
    for piece, dtype in zip(storage.split(_sizes(d, page), -1), dtypes, strict=True):
        data = piece.view(dtype)
        parts.append(Part(data, data.stride()[:2]))
    centre, norm, words, whole = parts
    return Shadow(centre, norm, words, whole, -(-d // 16) * 16)


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Small whole numbers to the device, which the host does not wait for."""
    return numbers.to(torch.int32).to(device, non_blocking=True)


def read_pages(numbers: Tensor, device: torch.device) -> Pages:
    """numbers: on the host (sequence, chunk)."""
    return Pages(upload(numbers.contiguous(), device), numbers.shape[1])


def append(
    pool: PagePool, key: Tensor, value: Tensor, numbers: Tensor, lengths: Tensor, page: int
) -> None:
    """Store new tokens, and their shadow where the pool has one."""
    tokens, device = key.shape[2], key.device
    key_pages, value_pages = (Operand(x, x.stride()[:3]) for x in pool.operands)
    x = Append(
        new_key=operand(key.detach()),
        new_value=operand(value.detach()),
        key=key_pages,
        value=value_pages,
        pages=read_pages(numbers, device),
        lengths=upload(lengths, device),
        tokens=tokens,
    )
    heads = (key.shape[0], key.shape[1])
    widest = max(padded(pool.d), padded(pool.d_value))
    warps = 4 if widest <= 64 else 8  # so that a block fits the registers
    query: dict[str, Any] = {"D": pool.d, "WIDTH": padded(pool.d), "BN": _BLOCK}
    query["num_warps"] = warps
    values = {"DV": pool.d_value, "VALUE_WIDTH": padded(pool.d_value)}
    run(load("shadow:store"), (*heads, -(-tokens // _BLOCK)), x, **query, **values)
    if pool.shadow.shape[-1]:
        shadow = read_shadow(pool.shadow, pool.d, page)
        touched = (tokens + page - 2) // page + 1
        run(load("shadow:centre"), (*heads, touched), x, shadow, **query)
        blocks = touched * (page // _BLOCK)
        run(load("shadow:quantise"), (*heads, blocks), x, shadow, **query)
