"""Attention of the last tokens of a cache: exact, reading only what can matter."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._attention.approximate import approximate_softmax
from fenchel._attention.cache import KeyValueCache, refuse_gradient
from fenchel._attention.call import AttentionCall, Options, observer, prepare
from fenchel._attention.dense import FEW, as_tsallis
from fenchel._attention.front import attention, paths_of
from fenchel._attention.plans import Described, describe_lengths, recall, remember
from fenchel._attention.proof import DecodeProof
from fenchel._attention.sparse import GPU_PATH, NATIVE_PATH, CallNumbers, arguments, for_gpu
from fenchel._attention.step import DecodingStep
from fenchel._kernels.attention_call import Saved, problem
from fenchel._kernels.attention_plan import Extent, Lengths
from fenchel._kernels.choice import GPU
from fenchel._kernels.gpu.device import load
from fenchel._kernels.gpu.folding import against_folding
from fenchel._kernels.library import run, view
from fenchel._kernels.route import choose
from fenchel._numerics import check_tensor, transformed
from fenchel.priors.contract import Prior, factors
from fenchel.priors.kinds import Causal, Documents
from fenchel.regularizers.contract import Regularizer, resolve_regularizer
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

_ENTMAX = Tsallis(1.5)
SHORT = 768  # keys that are scored whole in any case: kFewKeys of native/page.h


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
    error: float | None = ...,
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
    error: float | None = ...,
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
    error: float | None = None,
    proof: bool = False,
) -> Tensor | DecodeProof:
    """The attention of the last tokens of a cache: on the CPU bit for bit that of `attention`.

    >>> cache.append(key, value)                                  # first the token itself
    >>> fl.decode(query, cache, fl.Tsallis(1.5))                  # then it asks
    >>> print(cache.read)                                         # what that read

    Query i is the token at position length - queries + i of its sequence, and sees the keys up to
    that position. One pass over the shadow of the keys bounds every score from above. Keys whose
    bound lies below the threshold get no weight whatever their score is, and are not read. The
    others are scored as `attention` scores them. Softmax gives every key a weight, and reads all.
    On a GPU the same is true up to rounding; those kernels were never run on a device.

    query: (batch, head, query, d), in the dtype of the cache; head is a multiple of the cache's
        kv_heads. No gradient is computed: one that would be expected is an error.
    base, attn_mask: as of `attention`; priors are placed at the positions of the queries.
    error: for `Shannon` alone: keys may be skipped that provably change the output by no more than
        this (Euclidean distance, per query). `cache.read.error` is what it is at most.
    proof: return a `DecodeProof` in place of the output: what was skipped, and why that is right.
    """
    plain = base is None and attn_mask is None and error is None and not proof
    step = getattr(cache, "_step", None) if plain else None
    if step is not None:
        repeated: Tensor | None = step.repeat(query, cache, regularizer, scale, softcap)
        if repeated is not None:
            return repeated
    call = _Decoding(query, cache, resolve_regularizer(regularizer))
    if error is not None:
        return call.run_approximately(error, scale, base, attn_mask, softcap, proof)
    options = call.place(Options(base, attn_mask, False, scale, 0.0, True, softcap))
    with cache._lock:
        output, candidates, bounds = call.run(options, proof)
    if not proof:
        return output
    return DecodeProof(output, bounds[..., 0], bounds[..., 1], candidates, call.question(options))


def attend_cached(
    query: Tensor, cache: KeyValueCache, regularizer: Regularizer | Module, options: Options
) -> Tensor:
    """The same where the caller has placed the priors, as models do."""
    step, plain = cache._step, options.base is None and options.attn_mask is None
    if step is not None and plain and not options.is_causal:
        output = step.repeat(query, cache, regularizer, options.scale, options.softcap)
        if output is not None:
            return output
    call = _Decoding(query, cache, resolve_regularizer(regularizer), causal=False)
    with cache._lock:
        return call.run(options, False)[0]


class _Decoding:
    """One call: who asks, what is remembered, and how weights are found."""

    def __init__(
        self, query: Tensor, cache: KeyValueCache, regularizer: Regularizer, causal: bool = True
    ) -> None:
        if not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache must be a KeyValueCache, got {type(cache).__name__}")
        _check_query(query, cache)
        refuse_gradient(query, "query")
        query = query.resolve_neg()  # native code reads memory
        self.query = query.detach() if query.requires_grad else query
        self.cache, self.regularizer = cache, regularizer
        self.queries, self.keys = query.shape[2], len(cache)
        self.offset = self.keys - self.queries
        self.is_even = cache.batch == 1 or min(cache.lengths) == self.keys
        self.is_causal = causal and self.queries > 1  # the last token sees everything in any case

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
        if proof and not self.is_even:
            raise ValueError(
                f"a proof is about sequences of one length, got {self.cache.lengths}; prove them "
                "one by one, by cache.select([i])"
            )
        found = self._on_gpu(options, proof)
        found = self._native(options, proof) if found is None else found
        if found is not None:
            return found
        if proof:
            raise ValueError(
                "a proof is of what was skipped, and nothing skips here: it needs Tsallis with "
                "alpha > 1 (on a GPU at most 2), a cache with a shadow by the kernels that run "
                "here, and float32, bfloat16 or float16"
            )
        output = self._attend_all(options)
        self._note_all()
        return output, None, None

    def run_approximately(self, error: float, scale: float | None, *others: object) -> Tensor:
        """others: what this has no room for."""
        if not isinstance(self.regularizer, Shannon) or isinstance(
            self.regularizer.temperature, Tensor
        ):
            raise ValueError(
                "error needs fl.Shannon() with one temperature; Tsallis is exact without it: leave "
                f"error out (got {self.regularizer})"
            )
        if not (isinstance(error, float | int) and 0 < error < float("inf")):
            raise ValueError(f"error must be a positive number, got {error!r}")
        if any(other not in (None, False) for other in others) or self.queries > 1:
            raise ValueError(
                "error works with one query per sequence, and without base, attn_mask, softcap and "
                "proof; drop those, or drop error"
            )
        with self.cache._lock, torch.no_grad():
            return approximate_softmax(self.query, self.cache, self.regularizer, scale, error)

    # ---- kernels on a GPU

    def _on_gpu(self, options: Options, proof: bool) -> tuple[Tensor, Any, Any] | None:
        """Where the cache has their shadow, and nothing speaks against them."""
        regularizer, cache = self.regularizer, self.cache
        if not isinstance(regularizer, Tsallis) or cache.pool.layout != GPU:
            return None
        if observer() is not None or (not self.is_even and _holds_documents(options)):
            return None
        call = self._call(options)
        path, _ = choose(paths_of(call, regularizer))
        if path.name != GPU_PATH:
            return None
        x = for_gpu(arguments(CallNumbers(self._with_causality(call)), regularizer), regularizer)
        if against_folding(x, save=False) is not None:
            return None
        table = cache._table
        table.refresh()
        decoded = load("cached:decode")(x, cache.pool, table.numbers, table.lengths, proof)
        cache._counts_read = decoded.counts
        return decoded.output, decoded.candidates, decoded.bounds

    def _with_causality(self, call: AttentionCall) -> AttentionCall:
        return replace(call, causal=True, first=self.offset) if self.is_causal else call

    # ---- native kernels

    def _native(self, options: Options, proof: bool) -> tuple[Tensor, Any, Any] | None:
        regularizer, query, cache = self.regularizer, self.query, self.cache
        if not isinstance(regularizer, Tsallis | Shannon):
            return None
        if not self.is_even and _holds_documents(options):
            return None
        if isinstance(regularizer, Shannon) and self.queries > FEW:  # as `attention` does
            return None
        if not query.is_cpu or observer() is not None or transformed():
            return None
        described = describe_lengths(self._lengths(), query.dtype, regularizer, options)
        plan = None if described is None else recall(described.kind)
        call: AttentionCall | None = None
        if plan is None:
            call = self._call(options)
            path, _ = choose(paths_of(call, regularizer))
            if path.name != NATIVE_PATH:
                return None
            if described is not None:
                plan = remember(described.kind, call, regularizer)
        struct = _Struct(self, proof)
        output = query.new_empty((*query.shape[:3], cache.d_value))
        if plan is not None and described is not None:
            operands, extent = cache.pool.operands, self._extent(described)
            plan.attend_pages(extent, query, *operands, output, struct.address)
            if self.queries == 1 and options.base is None and options.attn_mask is None:
                question = regularizer, options.scale, options.softcap
                cache._step = DecodingStep(plan, extent, query, cache, question)
        else:
            assert call is not None
            self._run_arguments(call, output, struct)
        struct.note()
        return output, struct.candidates, struct.bounds

    def _lengths(self) -> Lengths:
        cache, heads = self.cache, self.query.shape[1]
        tokens = (self.queries, self.keys)
        return cache.batch, heads, cache.kv_heads, *tokens, cache.d, cache.d_value

    def _call(self, options: Options) -> AttentionCall:
        """With nothing in place of keys and values: only their shapes count."""
        cache, tokens = self.cache, (self.cache.batch, self.cache.kv_heads, self.keys)
        key, value = (self.query.new_zeros(d).expand(*tokens, d) for d in (cache.d, cache.d_value))
        return prepare(self.query, key, value, options)

    def _extent(self, described: Described) -> Extent:
        extent = described.extent
        if not self.is_causal:
            return extent
        return extent._replace(highest=min(extent.highest, self.offset))

    def _run_arguments(self, call: AttentionCall, output: Tensor, struct: _Struct) -> None:
        """A call whose kind has no plan."""
        call = self._with_causality(call)
        assert isinstance(self.regularizer, Tsallis | Shannon)
        x = arguments(CallNumbers(call), as_tsallis(self.regularizer))
        nothing = output.new_empty(0)
        p, _kept = problem(x, Saved(nothing, nothing, nothing, nothing))
        operands = self.cache.pool.operands  # held here: another thread may let the pool grow
        p.key, p.value = map(view, operands)
        p.output, p.cache = view(output), struct.address
        run("attention", p)

    # ---- everything else

    def _attend_all(self, options: Options) -> Tensor:
        if self.is_even:
            key, value, options = self.cache.key, self.cache.value, self._causal(options)
            with torch.no_grad():
                return attention(self.query, key, value, self.regularizer, **options._asdict())
        raise ValueError(
            f"sequences have different lengths {self.cache.lengths}, which decode takes with "
            "Tsallis alone (1 < alpha <= 2 on a GPU), in the kernels that the cache was made with, "
            "and without Documents; decode them one by one, by cache.select([i])"
        )

    def _causal(self, options: Options) -> Options:
        """With a mask that hides the tokens after each query."""
        if not self.is_causal:
            return options
        past = Causal(self.offset)
        if not isinstance(options.base, Tensor):
            return options._replace(base=past if options.base is None else options.base * past)
        mask = torch.ones(self.queries, self.keys, dtype=torch.bool, device=self.query.device)
        return options._replace(base=options.base * mask.tril(self.offset))

    def _note_all(self) -> None:
        self.cache.note_whole(self.query.shape[:3])


class _Struct:
    """What native code reads about the cache, and writes about the reading."""

    def __init__(self, call: _Decoding, proof: bool) -> None:
        cache, rows = call.cache, call.query.shape[:3]
        self._cache, self.candidates, self.bounds = cache, None, None
        self._counts = call.query.new_empty((*rows, 5), dtype=torch.int64)
        c = cache._table.struct()
        c.read, c.candidate, c.bound = self._counts.data_ptr(), None, None
        if proof:
            self.candidates = torch.zeros((*rows, call.keys), dtype=torch.bool)
            self.bounds = torch.empty((*rows, 2), dtype=torch.float64)
            c.candidate, c.bound = self.candidates.data_ptr(), self.bounds.data_ptr()
        self.address = ctypes.addressof(c)

    def note(self) -> None:
        self._cache._counts_read = self._counts


def _holds_documents(options: Options) -> bool:
    """Something is said about queries by their place in the longest sequence."""
    priors = (term for term in (options.base, options.attn_mask) if isinstance(term, Prior))
    return any(isinstance(x, Documents) for prior in priors for x in factors(prior))


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
            f"{query.device}; convert the query"
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
