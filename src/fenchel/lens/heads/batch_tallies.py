"""What is counted of a few texts at a time: over all texts, or over the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status
from fenchel.bounds import attack, query_lipschitz
from fenchel.lens.capture.calls import Call, Choice, watch
from fenchel.lens.capture.output_projections import Projections
from fenchel.lens.deviations import deviation
from fenchel.lens.families import FAMILIES, Kind, place_name
from fenchel.lens.heads.advantages import advantages, count_advantage
from fenchel.lens.heads.counting import (
    CountedCall,
    count_bounds,
    count_head_deviation,
    count_offsets,
    count_preference,
    count_weights,
    count_what_if,
)
from fenchel.lens.heads.datasets import Dataset, PreparedBatch
from fenchel.lens.heads.geometry import count_fisher, count_local
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.heads.tallies import (
    AttackTally,
    AttentionTally,
    DeviationTally,
    InputTally,
    Tallies,
    add,
)
from fenchel.regularizers import Shannon

T = TypeVar("T")


def batches(model: Any, dataset: Dataset, places: Sequence[int]) -> Iterator[PreparedBatch]:
    for group in dataset.groups(model, places):
        yield dataset.prepare(model, group)


def count_calls(
    model: Any,
    prepared: PreparedBatch,
    count: Callable[[Call], T | None],
    instead: Choice | None = None,
) -> dict[str, T]:
    """What `count` makes of each attention call, by "kind/layer". None: not counted."""
    records: dict[str, T] = {}

    def on_call(call: Call) -> None:
        record = count(call)
        if record is not None:
            records[place_name(call.kind, call.layer)] = record

    with watch(model, on_call, instead=instead):
        model(**prepared.arguments)
    return records


def count_chunk(
    model: Any,
    dataset: Dataset,
    places: Sequence[int],
    settings: AuditSettings,
    projections: Projections,
) -> Tallies:
    """The measures of all texts."""
    total = Tallies(inputs=InputTally(tokens=_one(0), cut=_one(dataset.cut(model, places))))
    for prepared in batches(model, dataset, places):
        total = add(total, Tallies(_count_batch(model, prepared, settings, projections)))
        tokens = _one(int(prepared.first.real.sum()))
        total = add(total, Tallies(inputs=InputTally(tokens, cut=_one(0))))
    return total


def _one(number: int) -> Tensor:
    return torch.tensor([float(number)], dtype=torch.float64)


def _count_batch(
    model: Any, prepared: PreparedBatch, settings: AuditSettings, projections: Projections
) -> dict[str, AttentionTally]:
    kinds: dict[Kind, None] = {}

    def count(call: Call) -> AttentionTally | None:
        kinds[call.kind] = None
        if not settings.includes_layer(call.layer):
            return None
        return _count_call(call, prepared, settings, projections)

    total = count_calls(model, prepared, count)
    if settings.asks_for("deviation") and str(getattr(model.config, "model_type", "")) in FAMILIES:
        for kind in kinds:
            total = add(total, _count_token_deviations(model, prepared, kind, settings))
    return total


def _select(call: Call, prepared: PreparedBatch, settings: AuditSettings) -> CountedCall:
    return CountedCall(call, *prepared.sides(call.kind), settings.choose_heads(call.heads))


def _count_call(
    call: Call, prepared: PreparedBatch, settings: AuditSettings, projections: Projections
) -> AttentionTally:
    counted = _select(call, prepared, settings)
    projection = projections.get((call.kind, call.layer))
    asked = settings.asks_for
    return AttentionTally(
        weights=count_weights(counted) if asked("weights") else None,
        offsets=count_offsets(counted) if asked("weights") else None,
        what_if=count_what_if(counted, settings.alphas, projection) if asked("what_if") else None,
        bounds=count_bounds(counted) if asked("certificate") else None,
        preference=count_preference(counted) if asked("deviation") else None,
        head_deviation=count_head_deviation(counted) if asked("deviation") else None,
    )


def _count_token_deviations(
    model: Any, prepared: PreparedBatch, kind: Kind, settings: AuditSettings
) -> dict[str, AttentionTally]:
    """Of the estimation problem in the space of the tokens, where the family is known."""
    names = ["input_ids", "attention_mask", "token_type_ids"]
    names += [] if kind == "encoder" else ["decoder_input_ids", "decoder_attention_mask"]
    inputs = {name: x for name, x in prepared.arguments.items() if name in names}
    with torch.no_grad():
        deviations = deviation(model, inputs, attention=kind)
    heads = settings.choose_heads(deviations.heads)
    tallies = {}
    for layer in filter(settings.includes_layer, range(deviations.layers)):
        solved = _by_head(deviations.codes[layer])[heads] == int(Status.OK)

        def total(values: Tensor, layer: int = layer, solved: Tensor = solved) -> Tensor:
            chosen = _by_head(values[layer])[heads]
            return where(solved & chosen.isfinite(), chosen, 0.0).sum(1)

        tally = DeviationTally(
            count=solved.double().sum(1),
            multiplier=total(deviations.multiplier),
            mean=total(deviations.mean),
            mean_shift=total(deviations.mean_shift),
            parameter=total(deviations.parameter),
        )
        tallies[place_name(kind, layer)] = AttentionTally(token_deviation=tally)
    return tallies


def _by_head(x: Tensor) -> Tensor:
    """(B, H, Q) -> (H, B Q)"""
    return x.transpose(0, 1).flatten(1)


def count_probe(
    model: Any, dataset: Dataset, places: Sequence[int], settings: AuditSettings
) -> Tallies:
    """Fisher information, local constants and advantages of the texts at these places."""
    total = Tallies()
    for prepared in batches(model, dataset, places):
        if settings.asks_for("geometry", "local"):
            total = add(total, Tallies(_count_geometry(model, prepared, settings)))
        if settings.asks_for("advantage"):
            total = add(total, Tallies(_count_advantages(model, prepared, settings)))
    return total


def _count_geometry(
    model: Any, prepared: PreparedBatch, settings: AuditSettings
) -> dict[str, AttentionTally]:
    def count(call: Call) -> AttentionTally | None:
        if not settings.includes_layer(call.layer):
            return None
        counted = _select(call, prepared, settings)
        return AttentionTally(
            fisher=count_fisher(counted) if settings.asks_for("geometry") else None,
            local=count_local(counted) if settings.asks_for("local") else None,
        )

    return count_calls(model, prepared, count)


def _count_advantages(
    model: Any, prepared: PreparedBatch, settings: AuditSettings
) -> dict[str, AttentionTally]:
    pulls = advantages(model, prepared)
    tallies = {}
    for advantage in pulls.by_call:
        kind, layer = advantage.call.kind, advantage.call.layer
        if settings.includes_layer(layer):
            chosen = advantage.select(settings.choose_heads(advantage.call.heads))
            tally = count_advantage(chosen, prepared, pulls.attribution_of(kind))
            tallies[place_name(kind, layer)] = AttentionTally(advantage=tally)
    return tallies


def count_attack(model: Any, dataset: Dataset, place: int, settings: AuditSettings) -> Tallies:
    """Every bound of query -> output attacked, with the keys and values of one text."""
    prepared = next(batches(model, dataset, [place]))

    def count(call: Call) -> AttentionTally | None:
        if not settings.includes_layer(call.layer):
            return None
        keys, values = call.select(settings.choose_heads(call.heads)).repeat_groups()
        real = prepared.sides(call.kind)[1].real[0]
        pairs = [
            _attack(k[real], v[real], call.scaling, settings.trials)
            for k, v in zip(keys[0], values[0], strict=True)
        ]
        certified, attacked = torch.tensor(pairs, dtype=torch.float64).T
        return AttentionTally(attack=AttackTally(certified, attacked))

    return Tallies(count_calls(model, prepared, count))


def _attack(keys: Tensor, values: Tensor, scaling: float, trials: int) -> tuple[float, float]:
    """The bound, and the largest constant that the attack observed."""
    bound = query_lipschitz(keys, values, Shannon(1 / scaling))
    return bound.value, attack(bound, trials).observed
