"""What is counted of a few texts at a time: over all texts, or over the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status
from fenchel.bounds import attack, query_lipschitz
from fenchel.lens.deviations import MEASURES as DEVIATIONS
from fenchel.lens.estimation import deviation
from fenchel.lens.heads.capture import Call, Choice, watch
from fenchel.lens.heads.geometry import fisher_tallies, local_tallies
from fenchel.lens.heads.material import Material, Prepared
from fenchel.lens.heads.projection import Projections
from fenchel.lens.heads.pull import advantage_tallies, advantages
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
from fenchel.lens.heads.wanted import Wanted
from fenchel.lens.recognise import FAMILIES, Kind
from fenchel.regularizers import Shannon


def batches(model: Any, material: Material, places: Sequence[int]) -> Iterator[Prepared]:
    for group in material.groups(model, places):
        yield material.prepared(model, group)


def chunk_tallies(
    model: Any,
    material: Material,
    places: Sequence[int],
    wanted: Wanted,
    projections: Projections,
) -> Tallies:
    """The measures of all texts, by "kind/layer/name"."""
    total: Tallies = {"inputs/0/cut": _one(material.cut(model, places))}
    for prepared in batches(model, material, places):
        total = added(total, _batch_tallies(model, prepared, wanted, projections))
        total = added(total, {"inputs/0/tokens": _one(int(prepared.first.real.sum()))})
    return total


def _one(number: int) -> Tensor:
    return torch.tensor([float(number)], dtype=torch.float64)


def over_calls(
    model: Any,
    prepared: Prepared,
    make: Callable[[Call], Tallies],
    instead: Choice | None = None,
) -> Tallies:
    """What `make` counts of each attention call, added up by "kind/layer/name"."""
    total: Tallies = {}

    def count(call: Call) -> None:
        made = {f"{call.kind}/{call.layer}/{name}": value for name, value in make(call).items()}
        total.update(added(total, made))

    with watch(model, count, instead=instead):
        model(**prepared.given)
    return total


def _batch_tallies(
    model: Any, prepared: Prepared, wanted: Wanted, projections: Projections
) -> Tallies:
    known = str(getattr(model.config, "model_type", "")) in FAMILIES
    kinds: dict[Kind, None] = {}

    def make(call: Call) -> Tallies:
        kinds[call.kind] = None
        if not wanted.takes(call.layer):
            return {}
        return _call_tallies(call, prepared, wanted, projections)

    total = over_calls(model, prepared, make)
    if known and "deviation" in wanted.measures:
        for kind in kinds:
            total = added(total, _token_deviation_tallies(model, prepared, kind, wanted))
    return total


def _counted(call: Call, prepared: Prepared, wanted: Wanted) -> Counted:
    return Counted(call, *prepared.sides(call.kind), wanted.chosen(call.heads))


def _call_tallies(
    call: Call, prepared: Prepared, wanted: Wanted, projections: Projections
) -> Tallies:
    counted = _counted(call, prepared, wanted)
    made: Tallies = {"queries": counted.counts.double().sum((0, 2))}
    if "weights" in wanted.measures:
        made |= weight_tallies(counted)
    if "what_if" in wanted.measures:
        projection = projections.get((call.kind, call.layer))
        made |= what_if_tallies(counted, wanted.alphas, projection)
    if "certificate" in wanted.measures:
        made |= certificate_tallies(counted)
    if "deviation" in wanted.measures:
        made |= preference_tallies(counted) | head_deviation_tallies(counted)
    return made


def _token_deviation_tallies(model: Any, prepared: Prepared, kind: Kind, wanted: Wanted) -> Tallies:
    """Of the estimation problem in the space of the tokens, where the family is known."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    more = () if kind == "encoder" else ("decoder_input_ids", "decoder_attention_mask")
    inputs = {name: prepared.given[name] for name in (*names, *more) if name in prepared.given}
    with torch.no_grad():
        found = deviation(model, inputs, attention=kind)
    made: Tallies = {}
    for layer in filter(wanted.takes, range(found.layers)):
        here = f"{kind}/{layer}/token_deviation"
        heads = wanted.chosen(found.heads)
        solved = _by_head(found.codes[layer])[heads] == int(Status.OK)
        made[f"{here}_count"] = solved.double().sum(1)
        for name in DEVIATIONS:
            values = _by_head(getattr(found, name)[layer])[heads]
            made[f"{here}_{name}"] = where(solved & values.isfinite(), values, 0.0).sum(1)
    return made


def _by_head(x: Tensor) -> Tensor:
    """(B, H, Q) -> (H, B Q)"""
    return x.transpose(0, 1).flatten(1)


def probe_tallies(model: Any, material: Material, places: Sequence[int], wanted: Wanted) -> Tallies:
    """Fisher information, local constants and advantages of the texts at these places."""
    total: Tallies = {}
    for prepared in batches(model, material, places):
        if wanted.probes("geometry", "local"):
            total = added(total, _geometry(model, prepared, wanted))
        if wanted.probes("advantage"):
            total = added(total, _advantages(model, prepared, wanted))
    return total


def _geometry(model: Any, prepared: Prepared, wanted: Wanted) -> Tallies:
    def make(call: Call) -> Tallies:
        if not wanted.takes(call.layer):
            return {}
        counted = _counted(call, prepared, wanted)
        made = fisher_tallies(counted) if wanted.probes("geometry") else {}
        return made | (local_tallies(counted) if wanted.probes("local") else {})

    return over_calls(model, prepared, make)


def _advantages(model: Any, prepared: Prepared, wanted: Wanted) -> Tallies:
    pulls = advantages(model, prepared)
    total: Tallies = {}
    for one in pulls.found:
        kind, layer = one.call.kind, one.call.layer
        if wanted.takes(layer):
            chosen = one.only(wanted.chosen(one.call.heads))
            made = advantage_tallies(chosen, prepared, pulls.attributed(kind))
            placed = {f"{kind}/{layer}/{name}": value for name, value in made.items()}
            total = added(total, placed)
    return total


def attack_tallies(model: Any, material: Material, place: int, wanted: Wanted) -> Tallies:
    """Every certificate of query -> output attacked, with the keys and values of one text.

    attacked and certified: observed and certified constant, whose quotient is the tightness.
    """
    prepared = next(batches(model, material, [place]))

    def make(call: Call) -> Tallies:
        if not wanted.takes(call.layer):
            return {}
        keys, values = call.only(wanted.chosen(call.heads)).repeated()
        real = prepared.sides(call.kind)[1].real[0]
        pairs = [
            _attacked(k[real], v[real], call.scaling, wanted)
            for k, v in zip(keys[0], values[0], strict=True)
        ]
        certified, attacked = torch.tensor(pairs, dtype=torch.float64).T
        return {"certified": certified, "attacked": attacked}

    return over_calls(model, prepared, make)


def _attacked(keys: Tensor, values: Tensor, scaling: float, wanted: Wanted) -> tuple[float, float]:
    certificate = query_lipschitz(keys, values, Shannon(1 / scaling))
    return certificate.value, attack(certificate, wanted.trials).observed
