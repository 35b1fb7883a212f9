"""Decoding from a cache: its pages, its shadow, and on demand what was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.attention_call import Arguments
from fenchel._kernels.gpu.split import Split, read_cache

if TYPE_CHECKING:
    from fenchel._kernels.pages import PagePool

COUNTS = 5  # numbers of each row, as in `cache_read.py`


class Decoded(NamedTuple):
    """Of queries (batch, head, query). candidates, bounds: for a proof, see `DecodeProof`."""

    output: Tensor
    counts: Tensor
    candidates: Tensor | None
    bounds: Tensor | None


def decode(
    x: Arguments, pool: PagePool, numbers: Tensor, lengths: list[int], proof: bool
) -> Decoded:
    """x: a call whose keys and values are the cache's, and only their shapes count.
    numbers: of the pages of each sequence, on the host."""
    rows = x.query.shape[:3]
    output = x.query.new_empty((*rows, pool.d_value))
    counts = torch.empty((*rows, COUNTS), dtype=torch.int64, device=pool.device)
    split = Split(x, read_cache(pool, numbers, lengths))
    split.run(output, counts)
    candidates, bounds = _skipped(split, rows) if proof else (None, None)
    return Decoded(output, counts, candidates, bounds)


def _skipped(split: Split, rows: torch.Size) -> tuple[Tensor, Tensor]:
    """(which keys were scored, the cut and the largest bound of what was skipped) of each row.

    A bound may exceed the cut by the rounding of their difference. The larger of the two is then
    the cut: that is far within the margin by which `lower_bound` stays below the threshold.
    """
    call, found = split.call, split.found
    upper = split.by_row(found.upper)[..., : call.keys]
    centre, _, low = split.by_row(found.bounds).unbind(-1)
    crowded = split.by_row(found.number) > split.capacity
    whole = crowded.repeat_interleave(split.length, -1)[..., : call.keys]
    first, last = call.limits.data[:, :, :2].unsqueeze(-1).unbind(2)
    key = torch.arange(call.keys, device=upper.device)
    seen = (key >= first) & (key < last) & (upper != -torch.inf)
    below = upper - centre.unsqueeze(-1) <= low.unsqueeze(-1)
    candidates = seen & (whole | ~below)
    bounds = upper.double().masked_fill(~(seen & ~candidates), -torch.inf)
    skipped = bounds.amax(-1)
    cut = torch.maximum(centre.double() + low.double(), skipped)
    cut = cut.masked_fill(skipped == -torch.inf, -torch.inf)
    both = torch.stack([cut, skipped], -1)
    return candidates.view(*rows, call.keys), both.view(*rows, 2)
