"""Decoding one token at a time: one attention call, and whole models, over the length of the past.

Times are ratios to torch's attention (SDPA), or to SDPA with transformers' DynamicCache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, serve_attention, serve_library, serve_models, tables
from benchmarks.attention_rounds import Advance, Neighbours, Rounds, part
from benchmarks.serve_attention import ATTENTION, DECODE, SDPA, Calls, Entry
from benchmarks.serve_library import ROOM, Pretrained, Sizes
from benchmarks.serve_models import Tokens
from benchmarks.tables import Listing

_WEIGHT = 8  # a context of a model takes about as long as so many attention calls
_NOTES = (
    "One attention call: keys and values are the same in every round, and may stay in the cache of "
    "the processor where they fit.",
    "Whole models: one step reads all weights and every layer's keys in between, so that little "
    "stays there.",
    "attention_share and cache_share: time within the registered attention function and within the "
    "cache's update, as shares of steps that were timed for this alone.",
    "prefill_seconds: of one prefill, not repeated and not in turn.",
    "scored: scores computed per query and head; a key that is scored a second time counts twice.",
    "StaticCache: transformers passes SDPA a mask and repeats the keys for all query heads.",
    "The random model: all layers hold the same random keys and values, nothing was read before; "
    "fenchel:softmax and fenchel:entmax15 share one hf.Cache.",
)


@dataclass(frozen=True)
class Sweep:
    """What is measured. layers: of the pretrained model, for attention calls with real scores."""

    calls: Calls = field(default_factory=Calls)
    tokens: Tokens = field(default_factory=Tokens)
    layers: int = 4
    threads: int | None = None  # None: as many as torch has
    pretrained: Pretrained | None = None

    @property
    def longest(self) -> int:
        """Tokens of a text, of which all contexts can be made."""
        return max(*self.calls.keys, *(context + ROOM for context in self.tokens.contexts))

    def up_to(self, largest: int) -> Sweep:
        """Without longer pasts."""
        calls, tokens = self.calls, self.tokens
        sizes = calls.keys, tokens.contexts, tokens.random_contexts
        keys, contexts, random_contexts = (tuple(n for n in x if n <= largest) for x in sizes)
        if not (keys and contexts and random_contexts):
            least = max(map(min, sizes))
            raise ValueError(
                f"the shortest past is {least} tokens long, so largest cannot be {largest}"
            )
        calls = replace(calls, keys=keys)
        tokens = replace(tokens, contexts=contexts, random_contexts=random_contexts)
        return replace(self, calls=calls, tokens=tokens)


FULL = Sweep()
QUICK = Sweep(
    Calls(((9, 3, 64),), (256, 1024), rounds=Rounds(2, 3, 0.5)),
    Tokens((256,), (256, 1024), (1.0,), Sizes(256, 512, 2, 8, 2, 1000), rounds=Rounds(2, 3, 2.0)),
    layers=1,
)


def chosen(
    sweep: Sweep,
    dtype: torch.dtype,
    largest: int | None,
    folder: Path | None,
    texts: Path | None,
) -> Sweep:
    """As the command line asks for it. dtype: of whole models. folder, texts: both or neither."""
    serve_library.library()  # or an error before the work
    sweep = replace(sweep, tokens=replace(sweep.tokens, dtype=dtype))
    if largest is not None:
        sweep = sweep.up_to(largest)
    if folder is None or texts is None:
        return sweep
    return with_model(sweep, folder, texts.read_text(encoding="utf-8"))


def with_model(sweep: Sweep, folder: Path, text: str) -> Sweep:
    """Also the model in this folder, reading this text."""
    pretrained = serve_library.load(folder, text, sweep.longest, sweep.tokens.dtype)
    if pretrained.room < min(sweep.tokens.contexts) + ROOM:
        raise ValueError(
            f"the shortest context with {ROOM} tokens after it is "
            f"{min(sweep.tokens.contexts) + ROOM} tokens; text and positions of {folder.name} "
            f"allow {pretrained.room}"
        )
    return replace(sweep, pretrained=pretrained)


def left_out(sweep: Sweep) -> list[str]:
    """What will not be measured, and the way to measure it."""
    if sweep.pretrained is None:
        return [
            "Left out: real scores, and time per token of a pretrained model. To measure them, add "
            "--model FOLDER (a Llama-like decoder of Hugging Face) and --texts FILE (a long text)."
        ]
    room, name = sweep.pretrained.room, sweep.pretrained.name
    calls = [n for n in sweep.calls.keys if n > room]
    contexts = [n for n in sweep.tokens.contexts if n + ROOM > room]
    told = (("real scores with", calls), ("contexts of", contexts))
    return [
        f"Left out: {what} {' and '.join(f'{n:,}' for n in sizes)} tokens; the text and the "
        f"positions of {name} allow {room:,}."
        for what, sizes in told
        if sizes
    ]


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    threads: int
    calls: tuple[Entry, ...]
    tokens: tuple[Entry, ...]
    others: float | None = None  # share of the processors that other processes had

    def as_json(self) -> Entry:
        tokens = self.sweep.tokens
        return {
            "bench": "serve",
            "baseline": SDPA,
            "settings": {
                "threads": self.threads,
                "batch": 1,
                "queries": self.sweep.calls.queries,
                "regularizer": "Tsallis(1.5)",
                "model_dtype": serve_attention.dtype_name(tokens.dtype),
                "random_model": vars(tokens.sizes),
            },
            "notes": list(_NOTES),
            "left_out": left_out(self.sweep),
            "kernels": machine.kernels(),
            "transformers": str(serve_library.library().__version__),
            **machine.circumstances(self.others),
            "results": list(self.calls),
            "tokens": list(self.tokens),
        }


def run(sweep: Sweep, advance: Advance = lambda what, share: None) -> Report:
    """Measure all of it. advance: (what is measured, share of the whole that was just done)."""
    before = torch.get_num_threads()
    threads = sweep.threads or before
    torch.set_num_threads(threads)
    try:
        neighbours = Neighbours()
        advance("real scores", 0.0)
        calls, models = _call_cases(sweep), _model_cases(sweep)
        one = 1 / (len(calls) + _WEIGHT * len(models))
        call_entries, model_entries = [], []
        for call in calls:
            done = part(advance, f"one query, {call.scores}", one)
            call_entries += call.measure(sweep.calls.rounds, done)
        for case in models:
            done = part(advance, f"{case.name}, {case.context:,}", _WEIGHT * one)
            model_entries += case.measure(sweep.tokens.rounds, done)
        others = neighbours.share()
    finally:
        torch.set_num_threads(before)
    return Report(sweep, threads, tuple(call_entries), tuple(model_entries), others)


def _call_cases(sweep: Sweep) -> list[serve_attention.Case]:
    cases = list(serve_attention.random_cases(sweep.calls))
    if sweep.pretrained is not None:
        tokens = max((n for n in sweep.calls.keys if n <= sweep.pretrained.room), default=0)
        recorded = serve_library.record(sweep.pretrained, sweep.layers, tokens) if tokens else {}
        cases += serve_attention.model_cases(sweep.calls, recorded)
    return cases


def _model_cases(sweep: Sweep) -> list[serve_models.Case]:
    cases: list[serve_models.Case] = []
    if sweep.pretrained is not None:
        cases += serve_models.pretrained_cases(sweep.tokens, sweep.pretrained)
    return [*cases, *serve_models.random_cases(sweep.tokens)]


# ---- tables


def listings(document: Entry) -> list[Listing]:
    """From the JSON of a run: attention calls of each dtype and shape, then each model."""
    calls = dict.fromkeys((e["dtype"], _shape(e)) for e in document["results"])
    models = dict.fromkeys((e["model"], e["scores"]) for e in document["tokens"])
    return [
        *(_call_listing(document, *group) for group in calls),
        *(_model_listing(document, *group) for group in models),
    ]


def _shape(entry: Entry) -> str:
    return f"{entry['heads']}/{entry['kv_heads']} heads of {entry['width']}"


def _call_listing(document: Entry, dtype: str, shape: str) -> Listing:
    header = (
        "scores", "keys", "SDPA", DECODE, "ratio", f"{ATTENTION}, ratio", "scored", "support",
        "bytes",
    )  # fmt: skip
    same = [e for e in document["results"] if (e["dtype"], _shape(e)) == (dtype, shape)]
    rows = []
    for i in range(0, len(same), 3):  # of one case
        plain, decode, attention = same[i : i + 3]
        rows.append(
            (
                plain["scores"],
                f"{plain['keys']:,}",
                plain["error"] or tables.seconds(plain["seconds"]),
                tables.seconds(decode["seconds"]),
                _ratio(decode),
                _ratio(attention),
                *_reads(decode),
            )
        )
    title = (
        f"Entmax-1.5 of one query, {shape}, {dtype}: time, ratio to SDPA, keys scored and "
        f"supported per query, bytes read of all ({document['settings']['threads']} thread(s))"
    )
    return Listing(title, header, rows)


def _model_listing(document: Entry, model: str, scores: str) -> Listing:
    same = [e for e in document["tokens"] if (e["model"], e["scores"]) == (model, scores)]
    rows = [_model_row(e) for e in same]
    settings = document["settings"]
    kind = "real scores" if scores == "real" else f"scores of {scores}"
    title = (
        f"{model}, {settings['model_dtype']}, {kind}: tokens per second, time relative to "
        f"sdpa with DynamicCache, shares in attention and cache, bytes read of all "
        f"({settings['threads']} thread(s))"
    )
    header = ("context", "with", "prefill", "per token", "tokens/s", "ratio", "attention", "cache")
    return Listing(title, (*header, "bytes"), rows)


def _model_row(e: Entry) -> tuple[str, ...]:
    speed = e["tokens_per_second"]
    return (
        f"{e['context']:,}",
        e["method"].removesuffix(", hf.Cache"),  # the only one for these
        tables.seconds(e["prefill_seconds"]),
        tables.seconds(e["seconds"]),
        "–" if speed is None else f"{speed:.3g}",
        _ratio(e),
        _share(e["attention_share"]),
        _share(e["cache_share"]),
        _reads(e)[-1],
    )


def _ratio(entry: Entry) -> str:
    """Or why it is not to be trusted."""
    if entry["error"] or entry["ratio"] is None:
        return entry["error"] or "–"
    return f"{entry['ratio']:.2f}"


def _reads(entry: Entry) -> tuple[str, str, str]:
    """Keys scored, keys supported, and the share of all bytes."""
    if entry.get("scored") is None:
        return "–", "–", "–"
    share = entry["bytes"] / entry["bytes_of_all"]
    return f"{entry['scored']:.0f}", f"{entry['support']:.0f}", _share(share)


def _share(value: Any) -> str:
    return "–" if value is None else f"{value:.0%}"
