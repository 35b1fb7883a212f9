"""The path that every regulariser can take: blocks of queries against all keys, through `solve`.

A block of scores is made, solved and forgotten; the backward pass makes it again. Memory is
therefore that of one block, however long the sequence. All of it is plain torch operations, so
that derivatives of any order, `vmap`, `jvp` and `compile` work; it is the reference that the fast
paths are tested against, and what runs where they cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fenchel._attention.call import AttentionCall
from fenchel._kernels.dropout import keep_mask
from fenchel._kernels.route import chosen_kernels, finite, use
from fenchel._numerics import compute_dtype, full_precision, is_symbolic, transformed, where
from fenchel._solution import Solution
from fenchel._solve import solve
from fenchel._unchanged import Unchanged
from fenchel.priors.contract import Prior
from fenchel.priors.measure import expand_to
from fenchel.regularizers.contract import Regularizer

R = TypeVar("R", bound=Regularizer)

TILES = "tiles of torch operations"  # the name of this path
TILE = 2**22  # scores held at once; 16 MB in float32


def tiled(call: AttentionCall, regularizer: Regularizer) -> Tensor:
    """(batch, head, query, d_value), tile by tile."""
    return by_tiles(call, regularizer, attend)


def by_tiles(
    call: AttentionCall, regularizer: R, compute: Callable[[AttentionCall, R], Tensor]
) -> Tensor:
    """`compute` on every tile, each forgotten until the backward pass needs it."""
    tiles = list(split(call, regularizer))
    if len(tiles) == 1:
        return compute(*tiles[0])
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return torch.cat([compute(*tile) for tile in tiles], 2)
    return torch.cat([_recompute_later(compute, *tile) for tile in tiles], 2)


def _recompute_later(
    compute: Callable[[AttentionCall, R], Tensor], call: AttentionCall, regularizer: R
) -> Tensor:
    """`compute`, now and once more in the backward pass, from the same numbers or not at all."""
    unchanged, kernels = Unchanged(call=call, regularizer=regularizer), chosen_kernels()

    def run() -> Tensor:
        unchanged.check()
        with use(kernels) if kernels is not None else nullcontext():
            return compute(call, regularizer)

    output: Tensor = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
    return output


def split(call: AttentionCall, regularizer: R) -> Iterator[tuple[AttentionCall, R]]:
    """Blocks of queries whose scores fit `TILE`, with the regulariser of their rows."""
    batch, heads, queries, keys = call.scores_shape
    if any(map(is_symbolic, (batch, heads, queries, keys))):  # one graph for all of them
        yield call, regularizer
        return
    rows = max(16, TILE // max(1, batch * heads * keys))
    if rows >= queries:
        yield call, regularizer
        return
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        yield call.tile(start, stop), regularizer.tile(start, stop, queries)


def attend(call: AttentionCall, regularizer: Regularizer) -> Tensor:
    """Scores, weights, expectation: the whole of attention in three lines."""
    weights = weights_of_keys(solve_tile(call, regularizer), call)
    weights = drop(weights.reshape(call.scores_shape), call)
    values = _per_head(call.value, call).to(weights.dtype)
    return expectation(weights, values).to(call.query.dtype)


def attend_densely(
    call: AttentionCall, regularizer: Regularizer, dropout: float
) -> tuple[Tensor, Tensor]:
    """The same with the weights, (batch, head, query, key): both in the dtype of the query."""
    weights = weights_of_keys(solve_tile(call, regularizer), call).reshape(call.scores_shape)
    weights = torch.nn.functional.dropout(weights, dropout)
    output = expectation(weights, _per_head(call.value, call).to(weights.dtype))
    return output.to(call.query.dtype), weights.to(call.query.dtype)


def expectation(weights: Tensor, values: Tensor) -> Tensor:
    """weights @ values, where a value that carries no weight does not count, NaN or not."""
    with full_precision(weights):
        if finite(values):
            return weights @ values
        strange = ~values.isfinite()
        touched = (weights > 0).to(weights.dtype) @ strange.to(weights.dtype)
        usual = weights @ where(~strange, values, 0.0)
        return where(touched == 0, usual, torch.nan)


def solve_tile(call: AttentionCall, regularizer: Regularizer) -> Solution:
    """The solution for this block of queries; rows in the caller's own axes, a sink as last key."""
    base = call.base
    if isinstance(base, Tensor):
        base = call.restore(base)
    rows = call.restore(scores(call))
    if any(prior.sink is not None for prior in call.priors):
        rows, base = _with_null_key(call, rows, base)
    return solve(rows, regularizer, base=base)


def weights_of_keys(solution: Solution, call: AttentionCall) -> Tensor:
    """Without the weight of a sink."""
    return solution.weights[..., : call.key.shape[2]]


def _with_null_key(
    call: AttentionCall, rows: Tensor, base: Tensor | Prior | None
) -> tuple[Tensor, Tensor | Prior]:
    """Scores and measure with one key more: its logits are a score, or a log mass."""
    logits = [prior.sink for prior in call.priors if prior.sink is not None]
    if len(logits) > 1:
        raise ValueError("attention has one Sink, as base or as attn_mask")
    column = logits[0].to(rows.dtype)[..., None, None].expand(*rows.shape[:-1], 1)
    as_mass = isinstance(base, Prior) and base.sink is not None
    rows = torch.cat([rows, torch.zeros_like(column) if as_mass else column], -1)
    log_mass = column if as_mass else torch.zeros_like(column)
    if base is None:
        return rows, torch.ones_like(rows, dtype=torch.bool)
    if isinstance(base, Prior):
        others = log_mass_of_tile(base, call)
        return rows, StoredLogMass(torch.cat([others.expand(*rows.shape[:-1], -1), log_mass], -1))
    return rows, torch.cat([base, torch.ones_like(log_mass, dtype=base.dtype)], -1)


@dataclass(frozen=True, eq=False)
class StoredLogMass(Prior):
    """A log mass that is stored whole, (..., query, key), and the logits of a null key."""

    tensor: Tensor
    logits: Tensor | None = None
    hides_only: bool = False

    @property
    def is_mask(self) -> bool:
        return self.hides_only

    @property
    def sink(self) -> Tensor | None:
        return self.logits

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.tensor[..., rows, :][..., columns]


def log_mass_of_tile(prior: Prior, call: AttentionCall) -> Tensor:
    """Of the tile, in the caller's axes as far as the prior has them."""
    device, shape = call.query.device, call.scores_shape
    rows, columns = (torch.arange(n, device=device) for n in shape[2:])
    log_mass = prior.log_mass(rows, columns).to(compute_dtype(call.query.dtype))
    return expand_to(log_mass, call.caller_shape, f"{type(prior).__name__}.log_mass")


def scores(call: AttentionCall) -> Tensor:
    """(batch, head, query, key), hidden keys at -inf, in the precision of the computation."""
    dtype = compute_dtype(call.query.dtype)
    query, key = call.query.to(dtype) * call.scale, _per_head(call.key, call).to(dtype)
    with full_precision(query):
        product = _product(query, key)
    if call.softcap:
        product = call.softcap * (product / call.softcap).tanh()
    if call.modify is not None:
        product = call.modify(product, call.first)
    if call.bias is not None:
        bias = _bias(call).to(dtype)
        product = where(bias != -torch.inf, product + bias, -torch.inf)  # whatever the key holds
    hidden = call.hidden()
    return product if hidden is None else where(~hidden, product, -torch.inf)


def _bias(call: AttentionCall) -> Tensor:
    if isinstance(call.bias, Prior):
        return log_mass_of_tile(call.bias, call).reshape(call.scores_shape)
    assert call.bias is not None
    return call.bias


def _product(query: Tensor, key: Tensor) -> Tensor:
    """query @ key^T, where NaN of a key stays in its own column, also in derivatives."""
    if finite(key):
        return query @ key.mT
    whole = key.isfinite().all(-1, keepdim=True)
    return where(whole.mT, query @ where(whole, key, 0.0).mT, torch.nan)


def drop(weights: Tensor, call: AttentionCall) -> Tensor:
    """Dropout on the weights: kept ones grow by 1 / (1 - p)."""
    if call.seed is None:
        return weights
    mask = keep_mask(call.seed, call.scores_shape, call.dropout, call.first, call.queries)
    factor = 1 / (1 - call.dropout) if call.dropout < 1 else 0.0
    return where(mask, weights * factor, 0.0)


def _per_head(tensor: Tensor, call: AttentionCall) -> Tensor:
    """Key or value heads repeated for the query heads that read them."""
    repeats = call.query.shape[1] // max(1, tensor.shape[1])
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)
