"""What both studies' networks are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fenchel.nn as fnn

_LOW = -(2**63)  # of random_: all 64 bits


def check_dropout(share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {share}")


class Dropout(nn.Module):
    """torch's dropout at two fifths of its cost on a CPU: 16 random bits an entry, four entries a
    draw, where torch draws for each; the share is met to 2^-17."""

    def __init__(self, share: float) -> None:
        super().__init__()
        check_dropout(share)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return x
        count = x.numel()
        drawn = torch.empty((count + 3) // 4, dtype=torch.int64, device=x.device)
        bits = drawn.random_(_LOW, None).view(torch.int16)[:count].view(x.shape)
        lost = min(round(self.share * 2**16), 2**16 - 1)  # one more is no int16
        kept = (bits >= -(2**15) + lost).to(x.dtype)
        return x * kept.mul_(2**16 / (2**16 - lost))  # by what is kept, not by what was asked for

    def extra_repr(self) -> str:
        return f"{self.share:g}"


class FeedForward(nn.Sequential):
    """Two linear layers, a bend and dropout between them."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        first, second = nn.Linear(width, inner), nn.Linear(inner, width)
        super().__init__(first, nn.GELU(), Dropout(dropout), second)


class Attending(nn.Module):
    """x + softmax attention of norm x to tokens, in several heads; tokens None: to itself."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.heads = fnn.MultiheadAttention(width, heads, batch_first=True)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, tokens: Tensor | None, ignored: Tensor | None) -> Tensor:
        """ignored: bool (batch, token), True where there is nothing."""
        seen = self.norm(x)
        keys = seen if tokens is None else tokens
        context = self.heads(seen, keys, keys, key_padding_mask=ignored, need_weights=False)[0]
        output: Tensor = x + self.dropout(context)
        return output
