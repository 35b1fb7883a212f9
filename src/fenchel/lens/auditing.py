"""The audit: every head of a model over many texts, in chunks, with memory that does not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.lens.capture import Call, watch
from fenchel.lens.estimation import deviation
from fenchel.lens.recognise import FAMILIES, Kind
from fenchel.lens.store import Store
from fenchel.lens.table import Audit
from fenchel.lens.tallies import (
    Counted,
    Tallies,
    Tokens,
    added,
    certificate_tallies,
    head_deviation_tallies,
    weight_tallies,
    what_if_tallies,
)
from fenchel.lens.text import encode

MEASURES = ("weights", "deviation", "what_if", "certificate")
ALPHAS = (1.5, 2.0)
_ENTRIES = 2**23  # numbers of the weights of one layer that are held at once


@dataclass(frozen=True)
class Wanted:
    """measures: of `MEASURES`. alphas: of the what-if. generated: tokens that an encoder-decoder
    writes itself where no target is given."""

    measures: tuple[str, ...] = MEASURES
    alphas: tuple[float, ...] = ALPHAS
    generated: int = 32

    def __post_init__(self) -> None:
        unknown = [name for name in self.measures if name not in MEASURES]
        if unknown or not self.measures:
            shown = ", ".join(unknown) or "none"
            raise ValueError(f"measures must be of {', '.join(MEASURES)}; got {shown}")


def chunk_tallies(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    wanted: Wanted,
    targets: Sequence[str] | None = None,
) -> Tallies:
    """All that is counted of these texts, by "kind/layer/name"."""
    total: Tallies = {}
    for places, inputs in _batches(model, tokenizer, texts):
        asked = None if targets is None else [targets[place] for place in places]
        total = added(total, _batch_tallies(model, tokenizer, inputs, wanted, asked))
    return total


def _batches(
    model: Any, tokenizer: Any, texts: Sequence[str]
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """The texts in their order, so many at a time that one layer's weights fit."""
    heads = _heads(model)
    longest = encode(tokenizer, texts)["input_ids"].shape[1]
    some = max(1, _ENTRIES // (heads * longest**2))
    for start in range(0, len(texts), some):
        places = list(range(start, min(start + some, len(texts))))
        yield places, encode(tokenizer, [texts[place] for place in places])


def _heads(model: Any) -> int:
    config = model.config
    for name in ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return 16  # only how much is done at once depends on it


def _batch_tallies(
    model: Any,
    tokenizer: Any,
    inputs: dict[str, Tensor],
    wanted: Wanted,
    targets: Sequence[str] | None,
) -> Tallies:
    first = _tokens(tokenizer, inputs["input_ids"], inputs["attention_mask"])
    given, second = dict(inputs), first
    if getattr(model.config, "is_encoder_decoder", False):
        more = _decoder_inputs(model, tokenizer, inputs, wanted, targets)
        given |= more
        second = _tokens(tokenizer, more["decoder_input_ids"], more["decoder_attention_mask"])
    known = str(getattr(model.config, "model_type", "")) in FAMILIES
    total: Tallies = {}

    def count(call: Call) -> None:
        nonlocal total
        asking = first if call.kind == "encoder" or second is first else second
        asked = first if call.kind != "decoder" else asking
        made = _call_tallies(Counted(call, asking, asked), wanted, known)
        prefix = f"{call.kind}/{call.layer}"
        total = added(total, {f"{prefix}/{name}": value for name, value in made.items()})

    with watch(model, count) as met:
        model(**given)
    if known and "deviation" in wanted.measures:
        for kind in dict.fromkeys(kind for kind, _ in met.values()):
            total = added(total, _deviation_tallies(model, given, kind))
    return total


def _call_tallies(counted: Counted, wanted: Wanted, known: bool) -> Tallies:
    made: Tallies = {"queries": counted.counts.double().sum((0, 2))}
    if "weights" in wanted.measures:
        made |= weight_tallies(counted)
    if "what_if" in wanted.measures:
        made |= what_if_tallies(counted, wanted.alphas)
    if "certificate" in wanted.measures:
        made |= certificate_tallies(counted)
    if "deviation" in wanted.measures and not known:
        made |= head_deviation_tallies(counted)
    return made


def _deviation_tallies(model: Any, given: Mapping[str, Tensor], kind: Kind) -> Tallies:
    """Of the estimation problem in the space of the tokens, where the family is known."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    more = () if kind == "encoder" else ("decoder_input_ids", "decoder_attention_mask")
    inputs = {name: given[name] for name in (*names, *more) if name in given}
    with torch.no_grad():
        found = deviation(model, inputs, attention=kind)
    made: Tallies = {}
    for layer in range(found.layers):
        for name in ("multiplier", "mean", "mean_shift"):
            values = getattr(found, name)[layer].transpose(0, 1).flatten(1)  # (H, B Q)
            solved = values.isfinite()
            made[f"{kind}/{layer}/deviation_{name}"] = torch.where(solved, values, 0.0).sum(1)
        made[f"{kind}/{layer}/deviation_count"] = solved.double().sum(1)
    return made


def _tokens(tokenizer: Any, ids: Tensor, mask: Tensor) -> Tokens:
    special = torch.isin(ids, torch.tensor(sorted(tokenizer.all_special_ids), device=ids.device))
    real = mask.bool()
    return Tokens(real, special & real)


def _decoder_inputs(
    model: Any,
    tokenizer: Any,
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    targets: Sequence[str] | None,
) -> dict[str, Tensor]:
    """The target, moved on by one; or what the model writes itself, greedily."""
    if targets is None:
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=wanted.generated, do_sample=False)
        labels, start = made[:, 1:], made[:, :1]
        real = (labels != tokenizer.pad_token_id).long()
    else:
        encoded = encode(tokenizer, targets)
        labels, real = encoded["input_ids"], encoded["attention_mask"]
        start = torch.full_like(labels[:, :1], _start(model, tokenizer))
    # a query counts if what follows it does
    return {
        "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1),
        "decoder_attention_mask": real,
    }


def _start(model: Any, tokenizer: Any) -> int:
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "decoder_start_token_id", None)
        if found is not None:
            return int(found)
    return int(tokenizer.pad_token_id)


def audit(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    wanted: Wanted | None = None,
    targets: Sequence[str] | None = None,
    chunk: int = 16,
    store: Store | None = None,
    advance: Callable[[int], object] | None = None,
) -> Audit:
    """Every head of the model over the texts, chunk by chunk.

    >>> model, tokenizer = lens.load("build/models/minilm")
    >>> lens.audit(model, tokenizer, sentences).rows()[0]

    chunk: texts of a chunk, the unit of work: the result depends on it (by rounding) and on nothing
        else. store: where chunks are kept, opened; those that are there already are not run again.
    advance: called with the number of texts after each chunk.
    """
    check_whole(chunk, "chunk", 1)
    if not texts:
        raise ValueError("texts must not be empty")
    if targets is not None and len(targets) != len(texts):
        raise ValueError(f"one target a text is needed, got {len(targets)} for {len(texts)}")
    wanted = Wanted() if wanted is None else wanted
    total: Tallies = {}
    for number, start in enumerate(range(0, len(texts), chunk)):
        part = slice(start, start + chunk)
        made = None if store is None else store.load(number)
        if made is None:
            own = None if targets is None else targets[part]
            made = chunk_tallies(model, tokenizer, texts[part], wanted, own)
            if store is not None:
                store.save(number, made)
        total = added(total, made)
        if advance is not None:
            advance(len(texts[part]))
    return Audit(total)
