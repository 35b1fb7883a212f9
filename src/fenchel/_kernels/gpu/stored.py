"""The cache's pages as kernels read them, and the launches that write them at `append`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
