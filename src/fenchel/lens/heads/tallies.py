"""What an audit has counted: sums over queries, so that texts can be added in any chunks.

Every tally is a tensor in float64 whose first axis is the head. Each record holds the number of
queries, texts or problems that its sums are over; a mean is a sum over that number.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

_LARGEST = {"by": torch.maximum}  # of a field that is a maximum and not a sum
_BETWEEN = ":"  # of the parts of an array's name; "/" stands within the name of a place
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class WeightTally:
    """Over queries. Histograms (H, bins); agreement (H, H): cosines of the weights of two heads."""

    queries: Tensor
    entropy: Tensor
    entropy_share: Tensor
    entropy_share_histogram: Tensor
    effective_support: Tensor
    top_weight_histogram: Tensor
    mass_first: Tensor
    mass_special: Tensor
    mass_separator: Tensor
    agreement: Tensor


@dataclass(frozen=True, eq=False)
class OffsetTally:
    """Where queries and keys are the same tokens: distance; mass by key - query (H, offsets)."""

    queries: Tensor
    distance: Tensor
    mass: Tensor


@dataclass(frozen=True, eq=False)
class SwitchTally:
    """The heads at one alpha. change: |y' - y| / |y|; square: |y' - y|^2; links kept, as a number
    (support_size) and as a share. layer_square, layer_all: the square of the move of the layer's
    output, this head switched alone or with all others; None where its projection is not known."""

    change: Tensor
    square: Tensor
    support_size: Tensor
    kept: Tensor
    layer_square: Tensor | None = None
    layer_all: Tensor | None = None


@dataclass(frozen=True, eq=False)
class WhatIfTally:
    """square, layer_square: |y|^2 of the heads and of the layer's output. by_alpha: "1.5" -> …"""

    queries: Tensor
    square: Tensor
    by_alpha: dict[str, SwitchTally]
    layer_square: Tensor | None = None


@dataclass(frozen=True, eq=False)
class BoundTally:
    """The bound of |Δoutput| / |Δquery|, text by text."""

    texts: Tensor
    bound: Tensor
    largest: Tensor = field(metadata=_LARGEST)


@dataclass(frozen=True, eq=False)
class DeviationTally:
    """Over the problems that were solved; see `fenchel.lens.Deviations`."""

    count: Tensor
    multiplier: Tensor
    mean: Tensor
    mean_shift: Tensor
    parameter: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PreferenceTally:
    """Of u ~ exp(bias). effective_support: exp of its entropy. by_offset: the bias over pairs at
    key - query, and how many pairs there were."""

    queries: Tensor
    effective_support: Tensor
    by_offset: Tensor
    pairs: Tensor


@dataclass(frozen=True, eq=False)
class FisherTally:
    """The Fisher information of the weights: the trace in the scores; in the query (H, f, f)."""

    queries: Tensor
    scores: Tensor
    query: Tensor


@dataclass(frozen=True, eq=False)
class LocalTally:
    """The exact |Δoutput| / |Δquery| at the texts' queries. share: of the largest of a text, over
    the bound of the text."""

    queries: Tensor
    texts: Tensor
    constant: Tensor
    share: Tensor
    largest: Tensor = field(metadata=_LARGEST)


@dataclass(frozen=True, eq=False)
class AdvantageTally:
    """size: sum_j |dLoss/ds_j|; special: the part of it at special tokens. agreement: the rank
    correlation with minus gradient x input, text by text; None for a model without embeddings."""

    queries: Tensor
    size: Tensor
    special: Tensor
    texts: Tensor | None = None
    agreement: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AttackTally:
    """The bound of one text, and the largest constant that an attack on it observed."""

    certified: Tensor
    attacked: Tensor


@dataclass(frozen=True, eq=False)
class OutputTally:
    """The model's output before and after a switch: cosine of the embeddings, the square of their
    difference and of their length. tokens, kl: of a language model's predictions."""

    texts: Tensor
    cosine: Tensor
    apart: Tensor
    size: Tensor
    tokens: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RecipeTally:
    """The share of links that the recipe keeps, and its alpha."""

    queries: Tensor
    kept: Tensor
    alpha: Tensor = field(metadata=_LARGEST)


@dataclass(frozen=True, eq=False)
class AttentionTally:
    """Of one attention; None: not asked for, or not to be had."""

    weights: WeightTally | None = None
    offsets: OffsetTally | None = None
    what_if: WhatIfTally | None = None
    bounds: BoundTally | None = None
    token_deviation: DeviationTally | None = None
    head_deviation: DeviationTally | None = None
    preference: PreferenceTally | None = None
    fisher: FisherTally | None = None
    local: LocalTally | None = None
    advantage: AdvantageTally | None = None
    attack: AttackTally | None = None
    recipe: RecipeTally | None = None
    model: dict[str, OutputTally] = field(default_factory=dict)  # by alpha, each head alone


@dataclass(frozen=True, eq=False)
class InputTally:
    """tokens of all texts; cut: how many texts were too long. (1)"""

    tokens: Tensor
    cut: Tensor


@dataclass(frozen=True, eq=False)
class MoveTally:
    """How far texts moved: squares and the largest. (1)"""

    texts: Tensor
    square: Tensor
    largest: Tensor = field(metadata=_LARGEST)


@dataclass(frozen=True, eq=False)
class Tallies:
    """attentions by "kind/layer". everywhere: all heads switched, by alpha. recipe: how far it
    moves the texts of the probe ("probe") and others ("unseen")."""

    attentions: dict[str, AttentionTally] = field(default_factory=dict)
    inputs: InputTally | None = None
    everywhere: dict[str, OutputTally] = field(default_factory=dict)
    recipe: dict[str, MoveTally] = field(default_factory=dict)


# ---- what all records can do


def add(first: T, second: T) -> T:
    """The sum of two records, field by field; the maximum of fields that are maxima."""
    total: T = _add(first, second, torch.add)
    return total


def _add(first: Any, second: Any, by: Callable[[Tensor, Tensor], Tensor]) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, Tensor):
        return by(first, second)
    if isinstance(first, dict):
        return {key: _add(first.get(key), second.get(key), by) for key in {**first, **second}}
    return type(first)(
        **{
            one.name: _add(
                getattr(first, one.name), getattr(second, one.name), one.metadata.get("by", by)
            )
            for one in dataclasses.fields(first)
        }
    )


def transform(record: T, change: Callable[[Tensor], Tensor]) -> T:
    """Every tensor of the record changed."""
    values = {name: change(x) for name, x in to_arrays(record).items()}
    return from_arrays(type(record), values)


def stack(records: list[T]) -> T:
    """Along a new first axis."""
    rows = [to_arrays(record) for record in records]
    values = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return from_arrays(type(records[0]), values)


def to_arrays(record: Any) -> dict[str, Tensor]:
    """Every tensor by its place in the record, such as "inputs:tokens"."""
    if isinstance(record, Tensor):
        return {"": record}
    if record is None:
        return {}
    names = record if isinstance(record, dict) else [one.name for one in dataclasses.fields(record)]
    parts = record if isinstance(record, dict) else vars(record)
    return {
        f"{name}{_BETWEEN}{inner}" if inner else name: x
        for name in names
        for inner, x in to_arrays(parts[name]).items()
    }


def from_arrays(kind: type[T], arrays: Mapping[str, Tensor]) -> T:
    """The record whose arrays these are."""
    record: T = _build(kind, arrays)
    return record


def _build(kind: Any, arrays: Mapping[str, Tensor]) -> Any:
    if kind is Tensor:
        return arrays[""]
    if get_origin(kind) in (Union, types.UnionType):
        (some,) = (one for one in get_args(kind) if one is not types.NoneType)
        return _build(some, arrays) if arrays else None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, x in arrays.items():
        first, _, inner = name.partition(_BETWEEN)
        parts.setdefault(first, {})[inner] = x
    if get_origin(kind) is dict:
        return {key: _build(get_args(kind)[1], part) for key, part in parts.items()}
    hints = get_type_hints(kind)
    unknown = sorted(parts.keys() - hints.keys())
    if unknown:
        raise KeyError(f"{kind.__name__} has no {unknown[0]}; was it written by another version?")
    return kind(**{name: _build(hint, parts.get(name, {})) for name, hint in hints.items()})
