"""What the heads of a model work with on one sentence, and how far their outputs can move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel.bounds import Bound, query_lipschitz
from fenchel.lens.capture.calls import Call, capture_attentions
from fenchel.lens.families import Kind, find_attentions
from fenchel.lens.inputs import Batch
from fenchel.regularizers import Shannon


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """Of one layer and one sentence: queries (H, Q, f), keys and values (H, n, f), and the tokens
    that came in (n, d); float64. Scores are <q, k> / temperature, up to what q does not change."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    tokens: Tensor
    temperature: float


def capture_head_inputs(
    model: Any, inputs: Mapping[str, Tensor], attention: Kind = "encoder"
) -> list[HeadInputs]:
    """What each layer's heads work with, for one sentence without padding."""
    attentions = find_attentions(model, attention)
    batch = Batch.of(model, inputs, attention)
    if len(batch.real) != 1 or not bool(batch.real.all()):
        raise ValueError("inputs must be one sentence without padding; encode it alone")
    return [
        _inputs(call) for call in capture_attentions(model, attentions, lambda: batch.run(model))
    ]


def _inputs(call: Call) -> HeadInputs:
    assert call.tokens is not None  # `capture_attentions` records them
    query, key, value, tokens = (
        x[0].double() for x in (call.query, call.key, call.value, call.tokens.keys)
    )
    return HeadInputs(query, key, value, tokens, 1 / call.scaling)


def head_bound(layer: HeadInputs, head: int) -> Bound:
    """How far the output of one head can move with its query."""
    return query_lipschitz(layer.keys[head], layer.values[head], Shannon(layer.temperature))


def largest_local_constant(
    queries: Tensor, keys: Tensor, values: Tensor, temperature: float
) -> float:
    """The largest operator norm of Cov(v, k) / temperature over the queries."""
    weights = (queries @ keys.mT / temperature).softmax(-1)  # (Q, n)
    centred = keys - (weights @ keys).unsqueeze(-2)  # (Q, n, f)
    jacobians = (values * weights.unsqueeze(-1)).mT @ centred / temperature
    return float(torch.linalg.matrix_norm(jacobians, 2).max())
