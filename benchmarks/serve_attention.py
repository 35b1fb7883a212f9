"""Attention of one query to cached keys: `fl.decode` and `fl.attention` beside torch's SDPA.

The keys are the same in every round, so that a processor's cache may hold them; the queries change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fenchel as fl
from benchmarks.attention_rounds import Rounds, Samples, Thunk, interleave

Entry = dict[str, Any]

SDPA, DECODE, ATTENTION = "SDPA", "fl.decode", "fl.attention"
_OMEGA = fl.Tsallis(1.5)


@dataclass(frozen=True)
class Calls:
    """What is measured. shapes: heads of the query, heads of the keys, components of each."""

    shapes: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (9, 3, 64))
    keys: tuple[int, ...] = (64, 256, 512, 2048, 8192, 32768)
    deviations: tuple[float, ...] = (1.0, 4.0)  # of the scores
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    queries: int = 8  # asked in turn
    rounds: Rounds = field(default_factory=lambda: Rounds(5, 15, 4.0))


class Operands(NamedTuple):
    """query: (query, head, d); key, value: (1, kv_head, key, d), contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor


class Case(NamedTuple):
    """scores: where they come from. make: the operands, when it is their turn."""

    scores: str
    dtype: torch.dtype
    make: Callable[[], Operands]

    def measure(self, rounds: Rounds, advance: Callable[[float], object]) -> list[Entry]:
        operands = Operands(*(x.to(self.dtype).contiguous() for x in self.make()))
        cache = _filled(operands)
        named = self._named(operands)
        makers = [
            partial(_thunk, attend, operands) for attend in _methods(operands, cache).values()
        ]
        with torch.no_grad():
            samples = interleave(makers, rounds, advance)
            reads = inspect(operands, cache)
        rows = compare((SDPA, DECODE, ATTENTION), samples)
        rows[1] |= reads | {"error": rows[1]["error"] or reads["error"]}
        return [named | row for row in rows]

    def _named(self, operands: Operands) -> Entry:
        _, heads, width = operands.query.shape
        _, kv_heads, keys, _ = operands.key.shape
        shape = {"heads": heads, "kv_heads": kv_heads, "width": width, "keys": keys}
        return {**shape, "scores": self.scores, "dtype": dtype_name(self.dtype)}


def random_cases(calls: Calls) -> Iterator[Case]:
    for dtype, shape, n in product(calls.dtypes, calls.shapes, calls.keys):
        for deviation in calls.deviations:
            make = partial(_random, shape, n, deviation, calls.queries)
            yield Case(f"deviation {deviation:g}", dtype, make)


def model_cases(calls: Calls, layers: dict[int, Operands]) -> Iterator[Case]:
    """Queries and keys that a model computed: the last queries before each number of keys.

    layers: query (token, head, d) and key, value (1, kv_head, token, d) of a whole text.
    """
    for dtype, n in product(calls.dtypes, calls.keys):
        for number, (query, key, value) in layers.items():
            if n <= key.shape[2]:
                shown = Operands(
                    query[max(0, n - calls.queries) : n], key[:, :, :n], value[:, :, :n]
                )
                yield Case(f"real, layer {number}", dtype, partial(Operands, *shown))


def _random(shape: tuple[int, int, int], n: int, deviation: float, queries: int) -> Operands:
    heads, kv_heads, d = shape
    g = torch.Generator().manual_seed(0)
    spread = deviation**0.5
    query = spread * torch.randn(queries, heads, d, generator=g)
    key = spread * torch.randn(1, kv_heads, n, d, generator=g)
    return Operands(query, key, torch.randn(1, kv_heads, n, d, generator=g))


def _filled(operands: Operands) -> fl.KeyValueCache:
    _, kv_heads, _, d = operands.key.shape
    cache = fl.KeyValueCache(1, kv_heads, d, dtype=operands.key.dtype)
    cache.append(operands.key, operands.value)
    return cache


def _methods(operands: Operands, cache: fl.KeyValueCache) -> dict[str, Callable[[Tensor], Tensor]]:
    _, key, value = operands
    return {
        SDPA: lambda q: sdpa(q, key, value, enable_gqa=True),
        DECODE: lambda q: fl.decode(q, cache, _OMEGA),
        ATTENTION: lambda q: fl.attention(q, key, value, _OMEGA, enable_gqa=True),
    }


def _asked(operands: Operands) -> list[Tensor]:
    """Each query alone: (1, head, 1, d)."""
    return [query[None, :, None] for query in operands.query]


def _thunk(attend: Callable[[Tensor], Tensor], operands: Operands) -> Thunk:
    queries = cycle(_asked(operands))
    return lambda: attend(next(queries))


def inspect(operands: Operands, cache: fl.KeyValueCache) -> Entry:
    """What `fl.decode` read, means of all queries, and whether `fl.attention` gives the same."""
    methods, reads, wrong = _methods(operands, cache), [], ""
    for query in _asked(operands):
        output = methods[DECODE](query)
        reads.append(cache.read)
        wrong = wrong or mismatch(output, methods[ATTENTION](query))
    return {
        "scored": mean(float(read.scored.double().mean()) for read in reads),
        "support": mean(float(read.support.double().mean()) for read in reads),
        "bytes": mean(read.bytes for read in reads),
        "bytes_of_all": mean(read.bytes_of_all for read in reads),
        "error": wrong,
    }


def mismatch(output: Tensor, reference: Tensor) -> str:
    """Empty where both have the same bits."""
    if torch.equal(output, reference):
        return ""
    apart = float((output.double() - reference.double()).abs().max())
    return f"{DECODE} differs from {ATTENTION} by {apart:.1e}"


def compare(names: Sequence[str], samples: Sequence[Samples]) -> list[Entry]:
    """Times of each, and ratios to the first, round by round."""
    rows = []
    for name, taken in zip(names, samples, strict=True):
        pairs = zip(taken.seconds, samples[0].seconds, strict=False)
        ratios = sorted(time / other for time, other in pairs)
        rows.append(
            {
                "method": name,
                "seconds": median(taken.seconds) if taken.seconds else None,
                "ratio": median(ratios) if ratios else None,
                "least": ratios[0] if ratios else None,
                "most": ratios[-1] if ratios else None,
                "rounds": len(taken.seconds),
                "error": taken.error,
            }
        )
    return rows


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
