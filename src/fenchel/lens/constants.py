"""What the heads of a model work with on one sentence, and how far their outputs can move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel.bounds import Bound, query_lipschitz
from fenchel.lens.inputs import Batch
from fenchel.lens.problems import evaluating
from fenchel.lens.recognise import Attention, Kind, attentions
from fenchel.regularizers import Shannon


@dataclass(frozen=True, eq=False)
class Seen:
    """Of one layer and one sentence: queries (H, Q, f), keys and values (H, n, f), and the tokens
    that came in (n, d); float64. Scores are <q, k> / temperature, up to what q does not change."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    tokens: Tensor
    temperature: float


def seen(model: Any, inputs: Mapping[str, Tensor], attention: Kind = "encoder") -> Iterator[Seen]:
    """What each layer's heads work with, for one sentence without padding."""
    found = attentions(model, attention)
    batch = Batch.of(model, inputs, attention)
    if len(batch.real) != 1 or not bool(batch.real.all()):
        raise ValueError("inputs must be one sentence without padding; encode it alone")
    kept: list[dict[str, Tensor]] = [{} for _ in found]
    with evaluating(model), ExitStack() as hooks, torch.no_grad():
        for one, to in zip(found, kept, strict=True):
            for name in ("query", "key", "value"):
                hook = getattr(one, name).register_forward_hook(_keep(to, name))
                hooks.callback(hook.remove)
        batch.run(model)
    for one, to in zip(found, kept, strict=True):
        query, key, value = (_by_head(one, to[name]) for name in ("query", "key", "value"))
        yield Seen(query, key, value, to["tokens"][0].double(), 1 / one.scaling)


def head_certificate(layer: Seen, head: int) -> Bound:
    """Of one head's query -> output."""
    return query_lipschitz(layer.keys[head], layer.values[head], Shannon(layer.temperature))


def max_local(queries: Tensor, keys: Tensor, values: Tensor, temperature: float) -> float:
    """The largest operator norm of Cov(v, k) / temperature over the queries."""
    weights = (queries @ keys.mT / temperature).softmax(-1)  # (Q, n)
    about = keys - (weights @ keys).unsqueeze(-2)  # (Q, n, f)
    jacobians = (values * weights.unsqueeze(-1)).mT @ about / temperature
    return float(torch.linalg.matrix_norm(jacobians, 2).max())


def _keep(to: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(_: Any, args: Any, output: Tensor) -> None:
        to[name] = output
        if name == "key":
            to["tokens"] = args[0]

    return hook


def _by_head(one: Attention, x: Tensor) -> Tensor:
    """(1, n, H f) -> (H, n, f)"""
    by_head: Tensor = x[0].double().unflatten(-1, (one.heads, one.head_size))
    return by_head.transpose(0, 1)
