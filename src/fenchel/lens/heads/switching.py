"""The whole model with the attention of one head, or of all, replaced: how far its output moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel.lens.capture.calls import Choice, watch
from fenchel.lens.families import Kind
from fenchel.lens.heads.datasets import PreparedBatch
from fenchel.lens.heads.outputs import embedding, last_states, logits_of
from fenchel.lens.heads.tallies import Tallies
from fenchel.regularizers import Regularizer, Tsallis


@dataclass(frozen=True, eq=False)
class Output:
    """embedding: the mean over tokens that count of the last states, (B, width), float64.
    logits: (B, Q, words) of a language model, else None; real: (B, Q)."""

    embedding: Tensor
    logits: Tensor | None
    real: Tensor

    def moved(self, other: Output) -> Tensor:
        """|e' - e| / |e| of every text. (B)"""
        apart: Tensor = (other.embedding - self.embedding).norm(dim=-1)
        size: Tensor = self.embedding.norm(dim=-1)
        return apart / size.clamp_min(1e-300)

    def cosine(self, other: Output) -> Tensor:
        found: Tensor = torch.cosine_similarity(self.embedding, other.embedding, dim=-1, eps=1e-300)
        return found

    def divergence(self, other: Output) -> Tensor:
        """KL(own predictions | the other's), summed over the tokens of every text. (B)"""
        if self.logits is None or other.logits is None:
            raise ValueError("only a language model has predictions")
        found = []
        for text, real in enumerate(self.real):  # one text at a time: vocabularies are large
            own, its = (x[text, real].double().log_softmax(-1) for x in (self.logits, other.logits))
            found.append((own.exp() * (own - its)).sum().clamp_min(0))
        return torch.stack(found)


def run(model: Any, prepared: PreparedBatch, instead: Choice | None = None) -> Output:
    """The model on these inputs; `instead` as in `watch`."""
    with watch(model, _nothing, instead=instead):
        outputs = model(**prepared.arguments, output_hidden_states=True)
    states = embedding(last_states(outputs).double(), prepared)
    return Output(states, logits_of(outputs), prepared.last.real)


def _nothing(_: object) -> None:
    """A call that nobody counts."""


def one_head(kind: Kind, layer: int, head: int, heads: int, alpha: float) -> Choice:
    """Softmax everywhere but in one head."""
    alphas = torch.ones(heads, 1)
    alphas[head] = alpha
    omega = Tsallis(alphas)
    return lambda k, n: omega if (k, n) == (kind, layer) else None


def everywhere(regularizer: Regularizer) -> Choice:
    return lambda kind, layer: regularizer


def head_tallies(
    model: Any,
    batches: Callable[[], Iterator[PreparedBatch]],
    place: tuple[Kind, int],
    chosen: tuple[Sequence[int], int],
    alpha: float,
) -> Tallies:
    """Every head of one attention switched alone: model_* by head.

    chosen: (those that are switched, of how many).
    """
    heads, count = chosen
    rows: list[Tallies] = [{} for _ in heads]
    for prepared in batches():
        before = run(model, prepared)
        for number, head in enumerate(heads):
            after = run(model, prepared, one_head(*place, head, count, alpha))
            rows[number] = _plus(rows[number], _compared(before, after, alpha))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def whole_tallies(
    model: Any, batches: Callable[[], Iterator[PreparedBatch]], alpha: float
) -> Tallies:
    """All heads switched at once; one number each, with an axis of one."""
    total: Tallies = {}
    for prepared in batches():
        after = run(model, prepared, everywhere(Tsallis(alpha)))
        total = _plus(total, _compared(run(model, prepared), after, alpha))
    return {name: value[None] for name, value in total.items()}


def _compared(before: Output, after: Output, alpha: float) -> Tallies:
    apart = (after.embedding - before.embedding).square().sum()
    made = {
        f"model_cosine_{alpha:g}": before.cosine(after).sum(),
        f"model_apart_{alpha:g}": apart,
        f"model_size_{alpha:g}": before.embedding.square().sum(),
        f"model_texts_{alpha:g}": torch.tensor(float(len(before.real)), dtype=torch.float64),
    }
    if before.logits is not None:
        made[f"model_kl_{alpha:g}"] = before.divergence(after).sum()
        made[f"model_tokens_{alpha:g}"] = before.real.double().sum()
    return made


def _plus(total: Tallies, more: Tallies) -> Tallies:
    return {name: total.get(name, 0.0) + value for name, value in more.items()}
