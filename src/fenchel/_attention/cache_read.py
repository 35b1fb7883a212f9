"""What a call of `decode` has read of its cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheRead:
    """What the last `decode` read, per sequence, head and query: (batch, head, query).

    seen: visible keys. scored: keys whose exact score was computed. support: keys whose value was
    read. bytes: of keys, values and shadow. bytes_of_all: of every visible key and value.
    error: for `decode(..., error=...)`, how far the output may be from the exact one, certified.

    Query heads that share a key head read its shadow once, and so the keys of a page that is scored
    whole; what they pick by themselves counts for each of them.
    """

    seen: Tensor
    scored: Tensor
    support: Tensor
    bytes: int
    bytes_of_all: int
    error: Tensor | None = None

    def __str__(self) -> str:
        share = self.bytes / max(1, self.bytes_of_all)
        return (
            f"{self.scored.double().mean():.1f} keys scored and {self.support.double().mean():.1f} "
            f"values read per query; {self.bytes:,} bytes, {share:.3f} of all keys and values"
        )


def counts_of_all(lengths: tuple[int, ...], rows: torch.Size) -> Tensor:
    """Where queries (batch, head, query) have read every key and value."""
    whole = torch.tensor(lengths).view(-1, 1, 1).expand(rows)
    nothing = torch.zeros_like(whole)
    return torch.stack([whole, nothing, whole, nothing, whole], -1)


def read_counts(
    counts: Tensor, kv_heads: int, widths: tuple[int, int], dtype: torch.dtype
) -> CacheRead:
    """From what native code counts: (batch, head, query, 5), as in `CacheProblem`.

    widths: components of a key and of a value.
    """
    # A copy: the next call writes its counts to the same place.
    seen, bounded, whole, picked, support = counts.clone().unbind(-1)
    heads = (kv_heads, seen.shape[1] // kv_heads)

    def once(count: Tensor) -> Tensor:
        """For all rows that share a key head."""
        largest: Tensor = count.unflatten(1, heads).amax((2, 3))
        return largest.sum()

    (d, d_value), size, visible = widths, dtype.itemsize, once(seen)
    values = torch.minimum(support.sum(), visible)
    exact = (once(whole) + picked.sum()) * d + values * d_value
    total = once(bounded) * (d + 4) + exact * size
    of_all = visible * (d + d_value) * size
    scored = torch.minimum(whole + picked, seen)  # some are read again with their whole page
    return CacheRead(seen, scored, support, int(total), int(of_all))
