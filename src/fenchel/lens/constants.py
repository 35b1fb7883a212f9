"""How far the output of every head of a model can move with its query: certified, attacked, and as
it is at the queries of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.bounds import (
    Bound,
    Head,
    attack,
    local_lipschitz,
    query_lipschitz,
    self_attention_lipschitz,
)
from fenchel.bounds.query import distances
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


@dataclass(frozen=True, eq=False)
class Stability:
    """Constants of query -> output in the l2 norm, each (layer, head).

    bound: certified, for all queries. attacked: the largest that was observed. diameters: the
    coarser bound diam(K) diam(V) / (4 temperature). local: the largest at the text's own queries.
    paper: log10 of the constant of Corollary 24 as printed, on the smallest set it allows.
    """

    bound: Tensor
    attacked: Tensor
    diameters: Tensor
    local: Tensor
    paper: Tensor
    tokens: int
    trials: int

    @property
    def tightness(self) -> Tensor:
        """certified / observed (layer, head): at least one, at most so far from the truth."""
        nothing = (self.bound == 0) & (self.attacked == 0)  # all values alike
        return torch.where(nothing, 1.0, self.bound / self.attacked)

    def as_json(self) -> dict[str, Any]:
        names = ("bound", "attacked", "diameters", "local", "paper")
        tables = {name: _rounded(getattr(self, name)) for name in names}
        tightness = self.tightness.flatten()
        summary = {
            "tightness_median": float(tightness.median()),
            "tightness_worst": float(tightness.max()),
            "local_share_median": float((self.local / self.bound).median()),
            "paper_log10_median": float(self.paper.median()),
        }
        return {"tokens": self.tokens, "trials": self.trials, "summary": summary, **tables}


def stability(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    attention: Kind = "encoder",
    budget: int = 2_000,
    advance: Callable[[float], object] | None = None,
) -> Stability:
    """Certificate and attack of every head, with the keys and values of one sentence.

    >>> model, tokenizer = lens.load("build/models/minilm")
    >>> found = lens.stability(model, lens.encode(tokenizer, [text]))
    >>> found.bound[2, 5], found.tightness.max()

    inputs: of one sentence. Position biases and masks do not matter to the bound. budget: trials of
    the attack on each head. advance: called with the share of the work done since the last call.
    """
    check_whole(budget, "budget", 1)
    layers = list(seen(model, inputs, attention))
    if layers[0].keys.shape[1] < 2:
        raise ValueError("inputs must have at least two tokens: with one, no output can move")
    rows: list[list[tuple[float, ...]]] = []
    for layer in layers:
        rows.append([])
        for head in range(len(layer.keys)):
            rows[-1].append(_measured(layer, head, budget))
            if advance is not None:
                advance(1 / len(layers) / len(layer.keys))
    bound, attacked, wide, local, paper = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    tokens = layers[0].keys.shape[1]
    return Stability(bound, attacked, wide, local, paper, tokens, budget)


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


def self_attention_certificate(one: Attention, layer: Seen) -> Bound:
    """Of all heads together, tokens -> outputs side by side, on the ball of the text's tokens."""
    if one.kind != "encoder" or one.family.pair:
        raise ValueError("only self-attention without a position bias can be certified as a whole")
    heads = [Head(*_matrices(one, number)) for number in range(one.heads)]
    radius = float(layer.tokens.norm(dim=-1).max())
    return self_attention_lipschitz(heads, len(layer.tokens), radius)


def _matrices(one: Attention, head: int) -> tuple[Any, ...]:
    parts = (one.query, one.key, one.value)
    weights = [one.per_head(part.weight.detach().double())[head] for part in parts]
    biases = [
        None if part.bias is None else one.per_head(part.bias.detach().double())[head]
        for part in (one.query, one.value)
    ]
    return (*weights, 1 / one.scaling, *biases)


def _measured(layer: Seen, head: int, budget: int) -> tuple[float, ...]:
    certificate = head_certificate(layer, head)
    found = attack(certificate, budget)
    keys, values, queries = layer.keys[head], layer.values[head], layer.queries[head]
    wide = distances(keys).max() * distances(values).max() / (4 * layer.temperature)
    local = max_local(queries, keys, values, layer.temperature)
    paper = printed_log10(queries, keys, values, layer.temperature)
    return certificate.value, found.observed, float(wide), local, paper


def max_local(queries: Tensor, keys: Tensor, values: Tensor, temperature: float) -> float:
    """The largest operator norm of Cov(v, k) / temperature over the queries."""
    weights = (queries @ keys.mT / temperature).softmax(-1)  # (Q, n)
    about = keys - (weights @ keys).unsqueeze(-2)  # (Q, n, f)
    jacobians = (values * weights.unsqueeze(-1)).mT @ about / temperature
    return float(torch.linalg.matrix_norm(jacobians, 2).max())


def printed_log10(queries: Tensor, keys: Tensor, values: Tensor, temperature: float) -> float:
    """log10 of d^(3/2) |l|_Lip 2 Lx diam / eps, the set being no more than these queries and keys.

    Lx, the slope of exp(<x, k> / temperature) in x for the l1 distance, is taken from its gradient.
    -inf where keys or values are all alike.
    """
    scores = queries @ keys.mT / temperature
    both = torch.cat([queries, keys])
    apart = torch.cdist(keys, keys, 1.0)
    steep = torch.cdist(values, values, 1.0)[apart > 0] / apart[apart > 0]
    factors = [float(keys.abs().max()) / temperature, float(torch.cdist(both, both, 1.0).max())]
    factors += [2 * keys.shape[1] ** 1.5, float(steep.max()) if steep.numel() else 0.0]
    if min(factors) <= 0:
        return -math.inf
    natural = sum(map(math.log, factors)) + float(scores.max() - scores.min())
    return natural / math.log(10)


def local_of(certificate: Bound, tokens: Tensor) -> float:
    """The operator norm of the certified map's Jacobian at these tokens."""
    function = certificate.trials.map.function  # type: ignore[attr-defined]
    return local_lipschitz(lambda x: function(x.unsqueeze(0))[0], tokens, tolerance=1e-8).value


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


def _rounded(table: Tensor) -> list[list[float | None]]:
    """To six digits; None for what JSON has no number for."""
    return [
        [float(f"{x:.6g}") if math.isfinite(x) else None for x in row] for row in table.tolist()
    ]
