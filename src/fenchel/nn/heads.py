"""One axis of features as heads, and back."""

from __future__ import annotations

from torch import Tensor


def split_heads(x: Tensor, count: int) -> Tensor:
    """(batch, token, head * size) -> (batch, head, token, size)"""
    heads: Tensor = x.unflatten(-1, (count, x.shape[-1] // count))
    return heads.transpose(1, 2)


def join_heads(heads: Tensor) -> Tensor:
    """(batch, head, token, size) -> (batch, token, head * size)"""
    return heads.transpose(1, 2).flatten(2)
