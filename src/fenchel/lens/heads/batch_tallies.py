"""What is counted of a few texts at a time: over all texts, or over the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status
from fenchel.bounds import attack, query_lipschitz
from fenchel.lens.capture.calls import Call, Choice, watch
from fenchel.lens.capture.output_projections import Projections
from fenchel.lens.deviations import MEASURES as DEVIATIONS
from fenchel.lens.deviations import deviation
from fenchel.lens.families import FAMILIES, Kind
from fenchel.lens.heads.advantages import advantage_tallies, advantages
from fenchel.lens.heads.datasets import Dataset, PreparedBatch
from fenchel.lens.heads.geometry import fisher_tallies, local_tallies
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.heads.tallies import (
    Counted,
    Tallies,
    added,
    certificate_tallies,
    head_deviation_tallies,
    preference_tallies,
    weight_tallies,
    what_if_tallies,
)
from fenchel.regularizers import Shannon


def batches(model: Any, dataset: Dataset, places: Sequence[int]) -> Iterator[PreparedBatch]:
    for group in dataset.groups(model, places):
        yield dataset.prepare(model, group)


def chunk_tallies(
    model: Any,
    dataset: Dataset,
    places: Sequence[int],
    settings: AuditSettings,
    projections: Projections,
) -> Tallies:
    """The measures of all texts, by "kind/layer/name"."""
    total: Tallies = {"inputs/0/cut": _one(dataset.cut(model, places))}
    for prepared in batches(model, dataset, places):
        total = added(total, _batch_tallies(model, prepared, settings, projections))
        total = added(total, {"inputs/0/tokens": _one(int(prepared.first.real.sum()))})
    return total


def _one(number: int) -> Tensor:
    return torch.tensor([float(number)], dtype=torch.float64)


def over_calls(
    model: Any,
    prepared: PreparedBatch,
    make: Callable[[Call], Tallies],
    instead: Choice | None = None,
) -> Tallies:
    """What `make` counts of each attention call, added up by "kind/layer/name"."""
    total: Tallies = {}

    def count(call: Call) -> None:
        made = {f"{call.kind}/{call.layer}/{name}": value for name, value in make(call).items()}
        total.update(added(total, made))

    with watch(model, count, instead=instead):
        model(**prepared.arguments)
    return total


def _batch_tallies(
    model: Any, prepared: PreparedBatch, settings: AuditSettings, projections: Projections
) -> Tallies:
    known = str(getattr(model.config, "model_type", "")) in FAMILIES
    kinds: dict[Kind, None] = {}

    def make(call: Call) -> Tallies:
        kinds[call.kind] = None
        if not settings.includes_layer(call.layer):
            return {}
        return _call_tallies(call, prepared, settings, projections)

    total = over_calls(model, prepared, make)
    if known and "deviation" in settings.measures:
        for kind in kinds:
            total = added(total, _token_deviation_tallies(model, prepared, kind, settings))
    return total


def _counted(call: Call, prepared: PreparedBatch, settings: AuditSettings) -> Counted:
    return Counted(call, *prepared.sides(call.kind), settings.choose_heads(call.heads))


def _call_tallies(
    call: Call, prepared: PreparedBatch, settings: AuditSettings, projections: Projections
) -> Tallies:
    counted = _counted(call, prepared, settings)
    made: Tallies = {"queries": counted.counts.double().sum((0, 2))}
    if "weights" in settings.measures:
        made |= weight_tallies(counted)
    if "what_if" in settings.measures:
        projection = projections.get((call.kind, call.layer))
        made |= what_if_tallies(counted, settings.alphas, projection)
    if "certificate" in settings.measures:
        made |= certificate_tallies(counted)
    if "deviation" in settings.measures:
        made |= preference_tallies(counted) | head_deviation_tallies(counted)
    return made


def _token_deviation_tallies(
    model: Any, prepared: PreparedBatch, kind: Kind, settings: AuditSettings
) -> Tallies:
    """Of the estimation problem in the space of the tokens, where the family is known."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    more = () if kind == "encoder" else ("decoder_input_ids", "decoder_attention_mask")
    inputs = {
        name: prepared.arguments[name] for name in (*names, *more) if name in prepared.arguments
    }
    with torch.no_grad():
        found = deviation(model, inputs, attention=kind)
    made: Tallies = {}
    for layer in filter(settings.includes_layer, range(found.layers)):
        here = f"{kind}/{layer}/token_deviation"
        heads = settings.choose_heads(found.heads)
        solved = _by_head(found.codes[layer])[heads] == int(Status.OK)
        made[f"{here}_count"] = solved.double().sum(1)
        for name in DEVIATIONS:
            values = _by_head(getattr(found, name)[layer])[heads]
            made[f"{here}_{name}"] = where(solved & values.isfinite(), values, 0.0).sum(1)
    return made


def _by_head(x: Tensor) -> Tensor:
    """(B, H, Q) -> (H, B Q)"""
    return x.transpose(0, 1).flatten(1)


def probe_tallies(
    model: Any, dataset: Dataset, places: Sequence[int], settings: AuditSettings
) -> Tallies:
    """Fisher information, local constants and advantages of the texts at these places."""
    total: Tallies = {}
    for prepared in batches(model, dataset, places):
        if settings.asks_for("geometry", "local"):
            total = added(total, _geometry(model, prepared, settings))
        if settings.asks_for("advantage"):
            total = added(total, _advantages(model, prepared, settings))
    return total


def _geometry(model: Any, prepared: PreparedBatch, settings: AuditSettings) -> Tallies:
    def make(call: Call) -> Tallies:
        if not settings.includes_layer(call.layer):
            return {}
        counted = _counted(call, prepared, settings)
        made = fisher_tallies(counted) if settings.asks_for("geometry") else {}
        return made | (local_tallies(counted) if settings.asks_for("local") else {})

    return over_calls(model, prepared, make)


def _advantages(model: Any, prepared: PreparedBatch, settings: AuditSettings) -> Tallies:
    pulls = advantages(model, prepared)
    total: Tallies = {}
    for one in pulls.found:
        kind, layer = one.call.kind, one.call.layer
        if settings.includes_layer(layer):
            chosen = one.select(settings.choose_heads(one.call.heads))
            made = advantage_tallies(chosen, prepared, pulls.attributed(kind))
            placed = {f"{kind}/{layer}/{name}": value for name, value in made.items()}
            total = added(total, placed)
    return total


def attack_tallies(model: Any, dataset: Dataset, place: int, settings: AuditSettings) -> Tallies:
    """Every certificate of query -> output attacked, with the keys and values of one text.

    attacked and certified: observed and certified constant, whose quotient is the tightness.
    """
    prepared = next(batches(model, dataset, [place]))

    def make(call: Call) -> Tallies:
        if not settings.includes_layer(call.layer):
            return {}
        keys, values = call.select(settings.choose_heads(call.heads)).repeat_groups()
        real = prepared.sides(call.kind)[1].real[0]
        pairs = [
            _attacked(k[real], v[real], call.scaling, settings)
            for k, v in zip(keys[0], values[0], strict=True)
        ]
        certified, attacked = torch.tensor(pairs, dtype=torch.float64).T
        return {"certified": certified, "attacked": attacked}

    return over_calls(model, prepared, make)


def _attacked(
    keys: Tensor, values: Tensor, scaling: float, settings: AuditSettings
) -> tuple[float, float]:
    certificate = query_lipschitz(keys, values, Shannon(1 / scaling))
    return certificate.value, attack(certificate, settings.trials).observed
