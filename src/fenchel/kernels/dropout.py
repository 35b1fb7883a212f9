"""Which weights survive dropout: a hash of (seed, row, key), the same in every path, so that a
backward pass or a tile can make it again without storing it."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def keep_mask(seed: Tensor, shape: torch.Size, dropout: float, first: int, queries: int) -> Tensor:
    """bool (batch, head, query, key) for the queries first .. of `queries` in all.

    The native code repeats this arithmetic on 32-bit words (`Dropout` in `native/operands.h`).
    """
    batch, heads, rows, keys = shape
    device = seed.device
    outer = torch.arange(batch * heads, device=device).reshape(batch, heads, 1, 1)
    inner = torch.arange(first, first + rows, device=device).reshape(rows, 1)
    key = torch.arange(keys, device=device)
    row_word = _mix((outer * queries + inner) * 0x9E3779B1 + seed)
    word = _mix(row_word ^ (key * 0x85EBCA77 & _MASK))
    return word >= round(dropout * 2**32)


def _mix(word: Tensor) -> Tensor:
    """A 32-bit finaliser (Wellons, 2018) in 64-bit arithmetic."""
    word = word & _MASK
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _MASK
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _MASK
    return word ^ (word >> 16)
