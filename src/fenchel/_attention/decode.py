"""Attention of the last tokens of a cache: exact, reading only what can matter."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._attention.cache import CacheRead, KeyValueCache
from fenchel._attention.call import AttentionCall, Options, observer, prepare
from fenchel._attention.front import attention, paths_of
from fenchel._attention.plans import Described, describe, recall, remember
from fenchel._attention.proof import DecodeProof
from fenchel._attention.sparse import NATIVE_PATH, CallNumbers, arguments
from fenchel._kernels.attention_call import Saved, problem
from fenchel._kernels.attention_plan import Extent
from fenchel._kernels.library import CacheProblem, run, view
from fenchel._kernels.route import choose
from fenchel._numerics import check_tensor, transformed
from fenchel.priors.contract import Prior
from fenchel.priors.kinds import Causal, Documents
from fenchel.regularizers.contract import Regularizer, resolve_regularizer
from fenchel.regularizers.tsallis import Tsallis

_ENTMAX = Tsallis(1.5)


@overload
def decode(
    query: Tensor,
    cache: KeyValueCache,
    regularizer: Regularizer | Module = ...,
    *,
    base: Tensor | Prior | None = ...,
    attn_mask: Tensor | Prior | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    proof: Literal[False] = ...,
) -> Tensor: ...


@overload
def decode(
    query: Tensor,
    cache: KeyValueCache,
    regularizer: Regularizer | Module = ...,
    *,
    base: Tensor | Prior | None = ...,
    attn_mask: Tensor | Prior | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    proof: Literal[True],
) -> DecodeProof: ...


def decode(
    query: Tensor,
    cache: KeyValueCache,
    regularizer: Regularizer | Module = _ENTMAX,
    *,
    base: Tensor | Prior | None = None,
    attn_mask: Tensor | Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    proof: bool = False,
) -> Tensor | DecodeProof:
    """The attention of the last tokens of a cache, bit for bit that of `attention`.

    >>> cache.append(key, value)                                  # first the token itself
    >>> fl.decode(query, cache, fl.Tsallis(1.5))                  # then it asks
    >>> print(cache.read)                                         # what that read

    Query i is the token at position length - queries + i of its sequence, and sees the keys up to
    that position. One pass over the shadow of the keys bounds every score from above. Keys whose
    bound lies below the threshold get no weight whatever their score is, and are not read. The
    others are scored as `attention` scores them. Softmax gives every key a weight, and reads all.

    query: (batch, head, query, d), in the dtype of the cache; head is a multiple of the cache's
        kv_heads. No gradient is computed.
    base, attn_mask: as of `attention`; priors are placed at the positions of the queries.
    proof: return a `DecodeProof` in place of the output: what was skipped, and why that is right.
    """
    call = _Decoding(query, cache, resolve_regularizer(regularizer))
    options = call.place(Options(base, attn_mask, False, scale, 0.0, True, softcap))
    with cache._alone_in_here(), torch.no_grad():
        output, candidates, bounds = call.run(options, proof)
    if not proof:
        return output
    return DecodeProof(output, bounds[..., 0], bounds[..., 1], candidates, call.question(options))


def attend_cached(
    query: Tensor, cache: KeyValueCache, regularizer: Regularizer | Module, options: Options
) -> Tensor:
    """The same where the caller has placed the priors, as models do."""
    call = _Decoding(query, cache, resolve_regularizer(regularizer))
    with cache._alone_in_here(), torch.no_grad():
        return call.run(options, False)[0]


class _Decoding:
    """One call: who asks, what is remembered, and how weights are found."""

    def __init__(self, query: Tensor, cache: KeyValueCache, regularizer: Regularizer) -> None:
        if not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache must be a KeyValueCache, got {type(cache).__name__}")
        _check_query(query, cache)
        self.query, self.cache, self.regularizer = query.detach(), cache, regularizer
        self.queries, self.keys = query.shape[2], len(cache)
        self.offset = self.keys - self.queries
        self.is_even = min(cache.lengths) == self.keys

    def place(self, options: Options) -> Options:
        """With priors where the queries are."""
        return options._replace(
            base=self._placed(options.base, "base"),
            attn_mask=self._placed(options.attn_mask, "attn_mask"),
        )

    def _placed(self, term: Tensor | Prior | None, name: str) -> Tensor | Prior | None:
        if not isinstance(term, Prior):
            if term is not None and not self.is_even:
                raise ValueError(
                    f"{name} is a tensor, and sequences have different lengths "
                    f"{self.cache.lengths}; decode them one by one, by cache.select([i])"
                )
            return term
        if term.offset is not None:
            raise ValueError(
                f"{name} fixes an offset of {term.offset}; leave it out, decode places the queries"
            )
        return term.shifted(self.offset) if self.offset else term

    def question(self, options: Options) -> Any:
        """What a proof is about: query, regulariser and options, causality among them."""
        return self.query, self.regularizer, self._causal(options)

    def run(self, options: Options, proof: bool) -> tuple[Tensor, Any, Any]:
        """The output, and for a proof the candidates and the bounds."""
        native = self._native(options, proof)
        if native is not None:
            return native
        if proof:
            raise ValueError(
                "a proof is of what was skipped, and nothing skips here: it needs Tsallis with "
                "alpha > 1, the native kernels, and float32, bfloat16 or float16"
            )
        output = self._attend_all(options)
        self._note_all()
        return output, None, None

    # ---- native kernels

    def _native(self, options: Options, proof: bool) -> tuple[Tensor, Any, Any] | None:
        if not isinstance(self.regularizer, Tsallis) or observer() is not None or transformed():
            return None
        if not self.is_even and self._has_tables_by_query(options):
            return None
        query, cache = self.query, self.cache
        nothing = query.new_zeros(())
        key = nothing.expand(cache.batch, cache.kv_heads, self.keys, cache.d)
        value = nothing.expand(cache.batch, cache.kv_heads, self.keys, cache.d_value)
        described = describe((query, key, value), self.regularizer, options)
        plan = None if described is None else recall(described.kind)
        call: AttentionCall | None = None
        if plan is None:
            call = prepare(query, key, value, options)
            path, _ = choose(paths_of(call, self.regularizer))
            if path.name != NATIVE_PATH:
                return None
            if described is not None:
                plan = remember(described.kind, call, self.regularizer)
        struct = _Struct(self, proof)
        output = query.new_empty((*query.shape[:3], cache.d_value))
        if plan is not None and described is not None:
            pool = cache.pool
            operands = query, pool.key.transpose(0, 1), pool.value.transpose(0, 1)
            plan.attend_pages(self._extent(described), *operands, output, struct.address)
        else:
            assert call is not None
            self._run_arguments(call, output, struct)
        struct.note()
        return output, struct.candidates, struct.bounds

    def _extent(self, described: Described) -> Extent:
        extent = described.extent
        return extent._replace(highest=min(extent.highest, self.offset))

    def _run_arguments(self, call: AttentionCall, output: Tensor, struct: _Struct) -> None:
        """A call whose kind has no plan."""
        call = replace(call, causal=True, first=self.offset)
        assert isinstance(self.regularizer, Tsallis)
        x = arguments(CallNumbers(call), self.regularizer)
        nothing = output.new_empty(0)
        p, _kept = problem(x, Saved(nothing, nothing, nothing, nothing))
        p.key, p.value, _ = self.cache.pool.views()
        p.output, p.cache = view(output), struct.address
        run("attention", p)

    def _has_tables_by_query(self, options: Options) -> bool:
        """Something is said about queries by their place in the longest sequence."""
        return any(_holds_documents(term) for term in (options.base, options.attn_mask))

    # ---- everything else

    def _attend_all(self, options: Options) -> Tensor:
        if self.is_even:
            key, value = self.cache.key, self.cache.value
            return attention(self.query, key, value, self.regularizer, **self._causal(options)._asdict())
        raise ValueError(
            f"sequences have different lengths {self.cache.lengths}, which decode takes with "
            "Tsallis on the native kernels, and without Documents; decode them one by one, by "
            "cache.select([i])"
        )

    def _causal(self, options: Options) -> Options:
        """With a mask that hides the tokens after each query."""
        if self.queries == 1:
            return options
        past = Causal(self.offset)
        for name in ("base", "attn_mask"):
            term = getattr(options, name)
            if term is None:
                return options._replace(**{name: past})
            if isinstance(term, Prior):
                return options._replace(**{name: _both(term, past)})
        mask = torch.ones(self.queries, self.keys, dtype=torch.bool, device=self.query.device)
        return options._replace(base=options.base * mask.tril(self.offset))

    def _note_all(self) -> None:
        shape = self.query.shape[:3]
        lengths = torch.tensor(self.cache.lengths).view(-1, 1, 1).expand(shape)
        nothing = torch.zeros_like(lengths)
        counts = torch.stack([lengths, nothing, lengths, lengths], -1)
        self.cache._read = lambda: _reading(self.cache, counts)


class _Struct:
    """What native code reads about the cache, and writes about the reading."""

    def __init__(self, call: _Decoding, proof: bool) -> None:
        cache, rows = call.cache, call.query.shape[:3]
        self._cache, self.candidates, self.bounds = cache, None, None
        self._counts = torch.empty((*rows, 4), dtype=torch.int64)
        c: Any = CacheProblem()
        c.pages, c.lengths = cache._pages.data_ptr(), cache._counts.data_ptr()
        c.chunks, c.read = cache._pages.shape[1], self._counts.data_ptr()
        c.shadow = cache.pool.views()[2]
        if proof:
            self.candidates = torch.zeros((*rows, call.keys), dtype=torch.bool)
            self.bounds = torch.empty((*rows, 2), dtype=torch.float64)
            c.candidate, c.bound = self.candidates.data_ptr(), self.bounds.data_ptr()
        self._struct = c
        self.address = ctypes.addressof(c)

    def note(self) -> None:
        cache, counts = self._cache, self._counts
        cache._read = lambda: _reading(cache, counts)


def _reading(cache: KeyValueCache, counts: Tensor) -> CacheRead:
    seen, bounded, scored, support = counts.unbind(-1)
    heads = counts.shape[1] // cache.kv_heads
    size = cache.dtype.itemsize
    of_shadow = bounded.unflatten(1, (cache.kv_heads, heads)).amax((2, 3)).sum() * (cache.d + 4)
    exact = (scored * cache.d + support * cache.d_value).sum() * size
    visible = seen.unflatten(1, (cache.kv_heads, heads)).amax((2, 3)).sum()
    of_all = visible * (cache.d + cache.d_value) * size
    return CacheRead(scored, support, int(of_shadow + exact), int(of_all))


def _both(prior: Prior, past: Causal) -> Prior:
    return prior * (past if prior.offset is not None or not past.offset else Causal(past.offset))


def _holds_documents(term: object) -> bool:
    from fenchel.priors.contract import factors

    return isinstance(term, Prior) and any(isinstance(x, Documents) for x in factors(term))


def _check_query(query: Tensor, cache: KeyValueCache) -> None:
    check_tensor(query, "query")
    if query.ndim != 4 or query.shape[0] != cache.batch or query.shape[3] != cache.d:
        raise ValueError(
            f"query must have shape ({cache.batch}, heads, queries, {cache.d}), got "
            f"{tuple(query.shape)}"
        )
    if query.dtype != cache.dtype or query.device != cache.device:
        raise ValueError(
            f"the cache holds {cache.dtype} on {cache.device}, query is {query.dtype} on "
            f"{query.device}; convert it"
        )
    heads, queries = query.shape[1:3]
    if heads == 0 or heads % cache.kv_heads:
        raise ValueError(
            f"the query has {heads} heads, which must be a multiple of the cache's {cache.kv_heads}"
        )
    if queries == 0 or queries > min(cache.lengths):
        raise ValueError(
            f"the queries are the last tokens of the cache; got {queries} of them, and the cache "
            f"has {min(cache.lengths)} tokens. Append keys and values first"
        )
