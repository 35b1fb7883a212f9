"""The masks of `torch.nn.MultiheadAttention`, in the form that `fenchel.attention` takes.

Here, and nowhere else in the library, a bool mask says True where a key may *not* be seen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel._numerics import check_tensor, where


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, like: Tensor, extra: int
) -> Tensor | None:
    """One mask for all: bool with True = attend, or float if either of the two is float.

    The masks broadcast to (batch, head, query, key) without the `extra` keys that the module
    itself appends; those are always seen.
    """
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return pad(~hidden, (0, extra), value=True)
    biases = [_as_bias(mask, like) for mask in masks]
    return pad(biases[0] if len(biases) == 1 else biases[0] + biases[1], (0, extra))


def lay_out_attn_mask(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """(query, key) or (batch * head, query, key) -> broadcasts to `shape` = (batch, head, ...)."""
    if mask is None:
        return None
    _check_mask(mask, "attn_mask")
    batch, heads, queries, keys = shape
    if mask.shape == (queries, keys):
        return mask.reshape(1, 1, queries, keys)
    if mask.shape == (batch * heads, queries, keys):
        return mask.reshape(batch, heads, queries, keys)  # (batch * head, ...) -> (batch, head, ..)
    raise ValueError(
        f"attn_mask must have shape (query, key) = {(queries, keys)} or (batch * head, query, key) "
        f"= {(batch * heads, queries, keys)}, got {tuple(mask.shape)}"
    )


def lay_out_padding(mask: Tensor | None, shape: torch.Size, batched: bool) -> Tensor | None:
    """(batch, key), or (key,) for an unbatched call -> (batch, 1, 1, key)."""
    if mask is None:
        return None
    _check_mask(mask, "key_padding_mask")
    batch, _, _, keys = shape
    expected = (batch, keys) if batched else (keys,)
    if mask.shape != expected:
        axes = "(batch, key)" if batched else "(key,)"
        raise ValueError(
            f"key_padding_mask must have shape {axes} = {expected}, got {tuple(mask.shape)}"
        )
    return mask.reshape(batch, 1, 1, keys)


def _check_mask(mask: Tensor, name: str) -> None:
    check_tensor(mask, name)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name} must be bool (True = not allowed) or float (added to the scores), got "
            f"{mask.dtype}; pass {name}.bool()"
        )


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    """What is added to the scores: -inf where a bool mask hides a key."""
    if mask.dtype != torch.bool:
        return mask
    return where(~mask, torch.zeros_like(mask, dtype=like.dtype), -torch.inf)
