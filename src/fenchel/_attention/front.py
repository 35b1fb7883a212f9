"""The front door: `scaled_dot_product_attention` with any regulariser and base measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._attention.call import AttentionCall, Options, observer, prepare
from fenchel._attention.dense import softmax_paths
from fenchel._attention.plans import Described, describe, recall, remember, run
from fenchel._attention.sparse import NATIVE_PATH, sparse_paths
from fenchel._attention.tiled import TILES, attend_densely, tiled
from fenchel._kernels.route import Path, Route, choose
from fenchel._numerics import check_local
from fenchel.priors.contract import Prior
from fenchel.regularizers.contract import Regularizer, resolve_regularizer
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

_SHANNON = Shannon()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    regularizer: Regularizer | Module = _SHANNON,
    *,
    base: Tensor | Prior | None = None,
    attn_mask: Tensor | Prior | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """sum_j p_j value_j for each query, p = argmax_p <scores, p> - Omega(p), scores = scale <q, k>.

    >>> q, k, v = torch.randn(3, 2, 8, 1024, 64)                  # (batch, head, token, component)
    >>> fl.attention(q, k, v, fl.Tsallis(1.5), is_causal=True)    # exact, sparse

    Arguments are those of `torch.nn.functional.scaled_dot_product_attention`, which computes
    `Shannon()`. Memory grows with the number of tokens, not with its square.

    query: (..., head, query, d); key: (..., head, key, d); value: (..., head, key, d_value); or
        jagged nested tensors (batch, head, tokens, d).
    regularizer: or a module whose `forward()` returns one, such as `nn.LearnedTsallis`.
    base: how much room each key has: a tensor that broadcasts to the scores (..., query, key), or
        a prior; see `solve`.
    attn_mask: broadcasts to the scores; bool: True = attend; float: added to the scores; or a
        prior, whose logarithm is added.
    is_causal: query i sees keys 0 .. i; together with a mask both apply.
    dropout_p: the share of weights set to zero, as in torch also outside of training.
    enable_gqa: key and value have fewer heads, each read by several query heads in a row.
    softcap: scores become softcap * tanh(scores / softcap), before any bias (Gemma 2).

    A query that sees no key gets zeros; one with a NaN or +inf score gets NaN, and so does one that
    sees fewer keys than `Budget(k)` asks for: under a causal mask the first queries. There give one
    budget per query: `Budget(torch.arange(1.0, queries + 1).clamp(max=k))`.
    """
    options = Options(base, attn_mask, is_causal, scale, dropout_p, enable_gqa, softcap)
    if getattr(query, "is_nested", False):
        from fenchel._attention.packed import attend_jagged

        return attend_jagged(query, key, value, regularizer, options)
    described = describe((query, key, value), regularizer, options)
    plan = None if described is None else recall(described.kind)
    if described is not None and plan is not None:
        return run(plan, described.extent, query, key, value)
    return _attend(query, key, value, regularizer, options, described)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    regularizer: Regularizer | Module,
    options: Options,
    described: Described | None,
) -> Tensor:
    """described: calls whose plan is remembered."""
    regularizer = resolve_regularizer(regularizer)
    call = prepare(query, key, value, options)
    path, _ = choose(paths_of(call, regularizer))
    if described is not None and path.name == NATIVE_PATH:
        assert isinstance(regularizer, Tsallis | Shannon)
        plan = remember(described.kind, call, regularizer)
        return run(plan, described.extent, query, key, value)  # checkpoints count what is saved
    watch = observer()
    return call.restore(path.run() if watch is None else watch(call, regularizer, path.run))


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    regularizer: Regularizer | Module,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """The output of `attention`, and the weights (..., query, key) that gave it, for modules that
    return both. Dropout draws what torch's does."""
    regularizer = resolve_regularizer(regularizer)
    call = prepare(query, key, value, options._replace(dropout_p=0.0))
    output, weights = attend_densely(call, regularizer, options.dropout_p)
    watch = observer()
    if watch is not None:
        watch(call, regularizer, lambda: output)
    return call.restore(output), call.restore(weights)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    regularizer: Regularizer | Module = _SHANNON,
    *,
    base: Tensor | Prior | None = None,
    attn_mask: Tensor | Prior | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Route:
    """Which implementation `attention` runs for these arguments, and why no faster one.

    >>> print(fl.explain(q, k, v, fl.Tsallis(1.5)))
    runs on: native kernels
    not on GPU kernels (proved in the interpreter, ...): GPU kernels run on CPU tensors only inside ...
    """
    regularizer = resolve_regularizer(regularizer)
    options = Options(base, attn_mask, is_causal, scale, dropout_p, enable_gqa, softcap)
    with torch.random.fork_rng(devices=[]):  # asking draws no random number
        call = prepare(query, key, value, options)
    return choose(paths_of(call, regularizer))[1]


# The paths of each kind of regulariser; all others go through the tiles.
_PATHS: dict[type[Regularizer], Callable[[AttentionCall, Any], list[Path]]] = {
    Shannon: softmax_paths,
    Tsallis: sparse_paths,
}


def paths_of(call: AttentionCall, regularizer: Regularizer) -> list[Path]:
    """The implementations that may run this call, the fastest first."""
    if regularizer.maximizer is not Shannon:  # which torch's own attention computes
        for name in ("query", "key", "value"):
            check_local(getattr(call, name), name)
    if regularizer.maximizer in _PATHS:
        return _PATHS[regularizer.maximizer](call, regularizer)
    return [
        Path(NATIVE_PATH, lambda: _ONLY_TSALLIS, _never),
        Path(TILES, lambda: None, lambda: tiled(call, regularizer)),
    ]


_ONLY_TSALLIS = "the fused kernels compute Tsallis regularisers only"


def _never() -> Tensor:
    raise AssertionError(_ONLY_TSALLIS)
