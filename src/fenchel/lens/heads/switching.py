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
from fenchel.lens.heads.tallies import OutputTally, add, stack, transform
from fenchel.regularizers import Regularizer, Tsallis

Batches = Callable[[], Iterator[PreparedBatch]]


@dataclass(frozen=True, eq=False)
class Output:
    """embedding: the mean over tokens that count of the last states, (B, width), float64.
    logits: (B, Q, words) of a language model, else None; real: (B, Q)."""

    embedding: Tensor
    logits: Tensor | None
    real: Tensor

    def move_to(self, other: Output) -> Tensor:
        """|e' - e| / |e| of every text. (B)"""
        apart: Tensor = (other.embedding - self.embedding).norm(dim=-1)
        size: Tensor = self.embedding.norm(dim=-1)
        return apart / size.clamp_min(1e-300)

    def cosine(self, other: Output) -> Tensor:
        cosine: Tensor = torch.cosine_similarity(
            self.embedding, other.embedding, dim=-1, eps=1e-300
        )
        return cosine

    def divergence(self, other: Output) -> Tensor:
        """KL(these predictions | the other's), summed over the tokens of every text. (B)"""
        if self.logits is None or other.logits is None:
            raise ValueError("only a language model has predictions")
        divergences = []
        for text, real in enumerate(self.real):  # one text at a time: vocabularies are large
            p, q = (x[text, real].double().log_softmax(-1) for x in (self.logits, other.logits))
            divergences.append((p.exp() * (p - q)).sum().clamp_min(0))
        return torch.stack(divergences)


def run(model: Any, prepared: PreparedBatch, instead: Choice | None = None) -> Output:
    """The model on these inputs; `instead` as in `watch`."""
    with watch(model, _ignore, instead=instead):
        outputs = model(**prepared.arguments, output_hidden_states=True)
    states = embedding(last_states(outputs).double(), prepared)
    return Output(states, logits_of(outputs), prepared.last.real)


def _ignore(_: object) -> None:
    """A call that nobody counts."""


def switch_head(kind: Kind, layer: int, head: int, heads: int, alpha: float) -> Choice:
    """Softmax everywhere but in one head."""
    alphas = torch.ones(heads, 1)
    alphas[head] = alpha
    omega = Tsallis(alphas)
    return lambda k, n: omega if (k, n) == (kind, layer) else None


def switch_all(regularizer: Regularizer) -> Choice:
    return lambda kind, layer: regularizer


@dataclass(frozen=True)
class SwitchedHeads:
    """Heads of one attention, which has `count` of them."""

    kind: Kind
    layer: int
    heads: Sequence[int]
    count: int


def count_head_switches(
    model: Any, batches: Batches, switched: SwitchedHeads, alpha: float
) -> OutputTally:
    """Every head of one attention switched alone. (H)"""
    place = (switched.kind, switched.layer)
    rows: list[OutputTally | None] = [None] * len(switched.heads)
    for prepared in batches():
        before = run(model, prepared)
        for number, head in enumerate(switched.heads):
            choice = switch_head(*place, head, switched.count, alpha)
            rows[number] = add(rows[number], _compare(before, run(model, prepared, choice)))
    return stack([row for row in rows if row is not None])


def count_whole_switch(model: Any, batches: Batches, alpha: float) -> OutputTally:
    """All heads switched at once. (1)"""
    total: OutputTally | None = None
    for prepared in batches():
        after = run(model, prepared, switch_all(Tsallis(alpha)))
        total = add(total, _compare(run(model, prepared), after))
    assert total is not None  # a probe holds at least one text
    return transform(total, lambda x: x[None])


def _compare(before: Output, after: Output) -> OutputTally:
    """Sums over texts, without an axis."""
    tokens = kl = None
    if before.logits is not None:
        tokens, kl = before.real.double().sum(), before.divergence(after).sum()
    return OutputTally(
        texts=torch.tensor(float(len(before.real)), dtype=torch.float64),
        cosine=before.cosine(after).sum(),
        apart=(after.embedding - before.embedding).square().sum(),
        size=before.embedding.square().sum(),
        tokens=tokens,
        kl=kl,
    )
