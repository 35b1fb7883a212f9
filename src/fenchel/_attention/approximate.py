"""Softmax that skips what provably changes the output by no more than an error that you allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fenchel._attention.cache import KeyValueCache
from fenchel._attention.cache_read import CacheRead
from fenchel._numerics import compute_dtype
from fenchel.scores import default_scale

if TYPE_CHECKING:
    from fenchel.regularizers.shannon import Shannon


def approximate_softmax(
    query: Tensor, cache: KeyValueCache, regularizer: Shannon, scale: float | None, error: float
) -> Tensor:
    """Within `error` (Euclidean, per query) of the exact output; `cache.read.error` says how near.

    Let S be the keys that are skipped and m the weight that they have in all. The output without
    them differs by m |mean over S - mean over the others| <= m * diameter of the values. With
    bounds u on the scores of S and l on all scores, m <= sum_S exp u / sum exp l. A key is skipped
    where its share of that, times the number of keys, times the diameter, is below the error.
    """
    dtype, count, table = compute_dtype(query.dtype), len(cache), cache._table
    table.refresh()
    factor = default_scale(query, scale) / float(regularizer.temperature)
    scaled = (query.to(dtype) * factor).contiguous()
    bounds = cache.pool.bounds(scaled.float(), table.numbers, table.counts, count)
    diameter = _diameters(cache, query.shape[1])  # (batch, head)
    if bounds is None:
        upper = torch.full((*query.shape[:3], count), torch.inf)
        log_total = torch.zeros(query.shape[:3], dtype=torch.float64)
    else:
        upper = bounds[0].double()
        log_total = (upper - bounds[1].double()).nan_to_num(-torch.inf).logsumexp(-1)
    allowed = torch.log(error / diameter / count).unsqueeze(-1)
    kept = ~(upper <= (log_total + allowed).unsqueeze(-1))
    _hide_absent(kept, cache)
    share = (upper - log_total.unsqueeze(-1)).exp().masked_fill(kept, 0.0).sum(-1)
    output = _attend_kept(scaled, cache, kept)
    cache._counts_read = _reading(query, cache, kept, share * diameter.unsqueeze(-1), bounds)
    return output.to(query.dtype)


def _hide_absent(kept: Tensor, cache: KeyValueCache) -> None:
    for b, length in enumerate(cache.lengths):
        kept[b, ..., length:] = False


def _diameters(cache: KeyValueCache, heads: int) -> Tensor:
    """Of the values of each head, at most: twice the longest. float64 (batch, head), above 0."""
    known, longest = cache._value_radius
    if known != cache._table.changes:
        parts = []
        for b, length in enumerate(cache.lengths):  # (kv_head, page, token, d_value)
            norms = cache.pool.value[:, cache._table.pages[b]].double().norm(dim=-1).flatten(1)
            parts.append(norms[:, :length].amax(-1))
        longest = torch.stack(parts)
        cache._value_radius = (cache._table.changes, longest)
    return (2 * longest).clamp(min=1e-30).repeat_interleave(heads // cache.kv_heads, 1)


def _attend_kept(query: Tensor, cache: KeyValueCache, kept: Tensor) -> Tensor:
    """Exact softmax over the kept keys, head by head: only their keys and values are read."""
    batch, heads, queries, _ = query.shape
    repeats = heads // cache.kv_heads
    output = query.new_empty((batch, heads, queries, cache.d_value))
    key, value = cache.pool.key, cache.pool.value
    for b in range(batch):
        pages = cache._table.numbers[b]
        for h in range(heads):
            for i in range(queries):
                place = kept[b, h, i].nonzero().squeeze(-1)
                page, row = pages[place // key.shape[2]], place % key.shape[2]
                scores = key[h // repeats, page, row].to(query.dtype) @ query[b, h, i]
                weights = scores.softmax(-1)
                output[b, h, i] = weights @ value[h // repeats, page, row].to(query.dtype)
    return output


def _reading(
    query: Tensor, cache: KeyValueCache, kept: Tensor, error: Tensor, bounds: object
) -> CacheRead:
    lengths = torch.tensor(cache.lengths).view(-1, 1, 1)
    scored, size = kept.sum(-1), cache.dtype.itemsize
    shadow = 0 if bounds is None else int(lengths.sum()) * cache.kv_heads * (cache.d + 4)
    width = (cache.d + cache.d_value) * size
    of_all = int(lengths.sum()) * cache.kv_heads * width
    total = shadow + int(scored.sum()) * width
    return CacheRead(lengths.expand(query.shape[:3]), scored, scored, total, of_all, error)
