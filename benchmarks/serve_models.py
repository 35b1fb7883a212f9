"""Time per generated token of whole models, with each attention and cache, over the context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import product
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import extras
from benchmarks.attention_rounds import Rounds, Thunk, interleave
from benchmarks.serve_attention import Entry, compare, dtype_name
from benchmarks.serve_library import (
    ROOM,
    Pretrained,
    Sizes,
    library,
    parameters,
    random_llama,
    replaced,
)

DYNAMIC, STATIC, OURS = "DynamicCache", "StaticCache", "hf.Cache"
SOFTMAX, ENTMAX = "fenchel:softmax", "fenchel:entmax15"
METHODS = (("sdpa", DYNAMIC), ("sdpa", STATIC), (SOFTMAX, OURS), (ENTMAX, OURS))
_PROFILED = 3  # steps whose parts are timed


class ModelDtype(StrEnum):
    """As the command line names it."""

    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.value]


@dataclass(frozen=True)
class Tokens:
    """What is measured. deviations: of the scores of the random model."""

    contexts: tuple[int, ...] = (512, 2048, 4096, 7680)  # of the pretrained model
    random_contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    deviations: tuple[float, ...] = (1.0, 4.0)
    sizes: Sizes = field(default_factory=Sizes)
    dtype: torch.dtype = torch.float32
    rounds: Rounds = field(default_factory=lambda: Rounds(5, 11, 30.0))


class Start(NamedTuple):
    """One model with a context in front of it: tokens to read, or a cache filled at random.

    ids: (1, context and ROOM). past: key and value of every layer, (1, kv_head, context, d).
    """

    name: str
    scores: str
    model: Any
    context: int
    ids: Tensor
    past: tuple[Tensor, Tensor] | None = None


class Case(NamedTuple):
    name: str
    context: int
    make: Callable[[], Start]

    def measure(self, rounds: Rounds, advance: Callable[[float], object]) -> list[Entry]:
        start = self.make()
        caches: dict[str, Any] = {}
        decoders = [Decoder(start, *method, caches) for method in METHODS]
        samples = interleave([decoder.start for decoder in decoders], rounds, advance)
        rows = compare([f"{attention}, {cache}" for attention, cache in METHODS], samples)
        dtype = start.model.dtype
        named = {"model": start.name, "scores": start.scores, "dtype": dtype_name(dtype)}
        entries = []
        for decoder, row in zip(decoders, rows, strict=True):
            row |= {"tokens_per_second": 1 / row["seconds"] if row["seconds"] else None}
            row |= decoder.parts() if not row["error"] else NOTHING
            row["difference"] = difference(decoder, decoders[0])
            row["error"] = row["error"] or disagreement(row["difference"], dtype)
            entries.append({**named, "context": start.context, **row})
        return entries


def pretrained_cases(tokens: Tokens, pretrained: Pretrained) -> Iterator[Case]:
    for context in tokens.contexts:
        if context + ROOM <= pretrained.room:
            ids = pretrained.ids[:, : context + ROOM]
            start = Start(pretrained.name, "real", pretrained.model, context, ids)
            yield Case(start.name, context, partial(Start, *start))


def random_cases(tokens: Tokens) -> Iterator[Case]:
    """One model for all, made with the first."""
    models: list[Any] = []

    def make(context: int, deviation: float) -> Start:
        if not models:
            positions = max(tokens.random_contexts) + ROOM
            models.append(random_llama(tokens.sizes, positions, tokens.dtype))
        return _random_start(models[0], context, deviation)

    for context, deviation in product(tokens.random_contexts, tokens.deviations):
        yield Case("random Llama", context, partial(make, context, deviation))


def _random_start(model: Any, context: int, deviation: float) -> Start:
    config = model.config
    g = torch.Generator().manual_seed(0)
    d = config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, context, d)
    # A query is a random projection of a normalised state, which has this deviation.
    of_query = config.initializer_range * config.hidden_size**0.5
    key = (deviation / of_query) * torch.randn(shape, generator=g)
    past = key.to(model.dtype), torch.randn(shape, generator=g).to(model.dtype)
    ids = torch.randint(config.vocab_size, (1, context + ROOM), generator=g)
    name = f"random Llama, {parameters(model) / 1e6:,.0f} million parameters"
    return Start(name, f"deviation {deviation:g}", model, context, ids, past)


class Decoder:
    """One model with one attention and one cache, a token at a time."""

    def __init__(self, start: Start, attention: str, kind: str, caches: dict[str, Any]) -> None:
        """caches: of the decoders before, filled at random; those of one kind share theirs."""
        self._start, self.attention, self._kind, self._caches = start, attention, kind, caches
        self.cache: Any = None
        self.logits: Tensor | None = None  # of the first step
        self.prefill: float | None = None  # seconds
        self._steps = 0

    def start(self) -> Thunk:
        """With the context in its cache."""
        start = self._start
        start.model.set_attn_implementation(self.attention)
        if start.past is None:
            self.cache = make_cache(self._kind, start.model, start.context)
            began = time.perf_counter()
            self._read(start.ids[:, : start.context])
            self.prefill = time.perf_counter() - began
        else:
            if self._kind not in self._caches:
                cache = self._caches[self._kind] = make_cache(
                    self._kind, start.model, start.context
                )
                fill(cache, start.model, start.past)
            self.cache = self._caches[self._kind]
        return self.step

    def step(self) -> None:
        place = self._start.context + self._steps % ROOM
        logits = self._read(self._start.ids[:, place : place + 1])
        self.logits = logits if self.logits is None else self.logits
        self._steps += 1

    def _read(self, ids: Tensor) -> Tensor:
        model = self._start.model
        model.config._attn_implementation = self.attention  # as set_attn_implementation, at no cost
        with torch.no_grad():
            output = model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits
        return logits

    def parts(self) -> Entry:
        """Time within the attention function and within the cache, in steps of their own."""
        steps = [self._profile() for _ in range(_PROFILED)]
        whole, attention, cache = (median(step[i] for step in steps) for i in range(3))
        return {
            "attention_seconds": attention,
            "attention_share": median(step[1] / step[0] for step in steps),
            "cache_seconds": cache,
            "cache_share": median(step[2] / step[0] for step in steps),
            "profiled_seconds": whole,
            "prefill_seconds": self.prefill,
            **self._reads(),
        }

    def _profile(self) -> tuple[float, float, float]:
        attention, update = Stopwatch(), Stopwatch()
        self.cache.update = update.around(self.cache.update)
        try:
            with replaced(self.attention, attention.around):
                began = time.perf_counter()
                self.step()
                return time.perf_counter() - began, attention.seconds, update.seconds
        finally:
            del self.cache.update

    def _reads(self) -> Entry:
        """Means of the layers in the last step."""
        reads = self.cache.read if self._kind == OURS else ()
        if not reads:
            return dict.fromkeys(_READS)
        return {
            "scored": mean(float(read.scored.double().mean()) for read in reads),
            "support": mean(float(read.support.double().mean()) for read in reads),
            "bytes": sum(read.bytes for read in reads),
            "bytes_of_all": sum(read.bytes_of_all for read in reads),
        }


_PARTS = ("attention_seconds", "attention_share", "cache_seconds", "cache_share")
_READS = ("scored", "support", "bytes", "bytes_of_all")
NOTHING: Entry = dict.fromkeys((*_PARTS, "profiled_seconds", "prefill_seconds", *_READS))


class Stopwatch:
    """Seconds within a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def make_cache(kind: str, model: Any, context: int) -> Any:
    transformers = library()
    if kind == OURS:
        return extras.load("fenchel.hf").Cache(model)
    if kind == DYNAMIC:
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=context + ROOM)


def fill(cache: Any, model: Any, past: tuple[Tensor, Tensor]) -> None:
    """The same keys and values in every layer, in memory of their own."""
    with torch.no_grad():
        for layer in range(model.config.num_hidden_layers):
            cache.update(*past, layer)


# ---- does softmax give the same everywhere


def difference(decoder: Decoder, reference: Decoder) -> float | None:
    """Of the first logits, relative to the largest; None for another map than softmax."""
    if decoder.attention == ENTMAX or decoder.logits is None or reference.logits is None:
        return None
    expected = reference.logits.double()
    return float((decoder.logits.double() - expected).abs().max() / expected.abs().max())


def disagreement(apart: float | None, dtype: torch.dtype) -> str:
    """Empty where `apart` is rounding, as it grows through the layers of a model."""
    limit = torch.finfo(dtype).eps ** 0.5
    if apart is None or apart <= limit:
        return ""
    return f"logits differ from those of sdpa by {apart:.1e} of the largest, more than {limit:.1e}"
