"""Where the gradient of a loss pulls attention: which keys a step down would look at more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel.lens.capture.calls import Call, watch
from fenchel.lens.capture.embeddings import watch_embeddings
from fenchel.lens.families import Kind
from fenchel.lens.heads.datasets import PreparedBatch, Tokens, make_dataset
from fenchel.lens.heads.outputs import embedding, last_states, logits_of
from fenchel.lens.heads.tallies import AdvantageTally

Loss = Callable[[Any, PreparedBatch], Tensor]


@dataclass(frozen=True, eq=False)
class Advantage:
    """Of one attention: scores (B, H, Q, n), minus the derivative of the loss in each score.

    -dLoss/ds_j = p_j (E_p l - l_j) with l_j = <dLoss/dy, v_j>: positive where a step down the
    gradient would attend more.
    """

    call: Call
    scores: Tensor

    def select(self, heads: Sequence[int]) -> Advantage:
        return Advantage(self.call.select(heads), self.scores[:, list(heads)])


@dataclass(frozen=True, eq=False, repr=False)
class Advantages:
    """attribution: minus gradient x input of the tokens that come in, and of those that an
    encoder-decoder writes, (B, n), NaN for a token without one."""

    prepared: PreparedBatch
    by_call: list[Advantage]
    attribution: tuple[Tensor | None, Tensor | None]

    def __repr__(self) -> str:
        return f"Advantages({len(self.prepared.first.real)} texts: {self._places()})"

    def of(self, kind: Kind, layer: int) -> Tensor:
        """-dLoss/dscore, (B, H, Q, n)."""
        for one in self.by_call:
            if (one.call.kind, one.call.layer) == (kind, layer):
                return one.scores
        raise KeyError(f"no {kind} layer {layer}; there are: {self._places()}")

    def _places(self) -> str:
        return ", ".join(f"{one.call.kind} {one.call.layer}" for one in self.by_call)

    def attribution_of(self, kind: Kind) -> Tensor | None:
        """Of the tokens that are asked."""
        written = kind == "decoder" and self.prepared.second is not None
        return self.attribution[1 if written else 0]


def advantage(
    model: Any, tokenizer: Any, texts: Sequence[Any], loss: Loss | None = None
) -> Advantages:
    """Which keys the gradient of a loss would attend more, in every head.

    >>> pull = lens.advantage(model, tokenizer, ["A man is playing a guitar."])
    >>> pull.of("encoder", 2)[0, 7].sum(0)            # layer 2, head 7: by token
    >>> towards = lambda outputs, prepared: -outputs.last_hidden_state[:, 0].sum()
    >>> lens.advantage(model, tokenizer, texts, towards)          # any direction of the output

    tokenizer, texts: as in `audit`; all texts at once. loss: of what the model returns and of what
    it was given, one number. None: a language model's surprise, else minus the length of the
    embedding.
    """
    dataset = make_dataset(tokenizer, texts)
    return advantages(model, dataset.prepare(model, range(len(dataset))), loss)


def advantages(model: Any, prepared: PreparedBatch, loss: Loss | None = None) -> Advantages:
    """The same of inputs that are ready."""
    if torch.is_inference_mode_enabled():
        raise ValueError("advantages need derivatives; leave torch.inference_mode")
    chosen = default_loss(model) if loss is None else loss
    calls: list[Call] = []
    with watch_embeddings(model, prepared.arguments) as entered:
        with watch(model, calls.append, derivatives=True):
            value = chosen(model(**prepared.arguments, output_hidden_states=True), prepared)
        _check_loss(value)
        variables = [*(call.output for call in calls), *entered.values()]
        slopes = torch.autograd.grad(value, variables, allow_unused=True)
    by_call = [_advantage(call, slope) for call, slope in zip(calls, slopes, strict=False)]
    by_side = dict(zip(entered, slopes[len(calls) :], strict=True))

    def attribute(side: str, tokens: Tokens | None) -> Tensor | None:
        if side not in by_side or tokens is None:
            return None
        return _attribution(entered[side], by_side[side], tokens)

    sides = (attribute("input", prepared.first), attribute("output", prepared.second))
    return Advantages(prepared, by_call, sides)


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"loss(outputs, prepared) must return one number, got {shape}")


def _attribution(vectors: Tensor, slope: Tensor | None, tokens: Tokens) -> Tensor:
    """Minus gradient x input; special tokens that come before the vectors have none. (B, n)"""
    product = torch.zeros_like(vectors) if slope is None else -(slope * vectors)
    values = product.detach().double().flatten(2).sum(-1)
    before = tokens.real.shape[1] - values.shape[1]
    return torch.nn.functional.pad(values, (before, 0), value=torch.nan)


def _advantage(call: Call, slope: Tensor | None) -> Advantage:
    with torch.no_grad():
        p = call.weights()
        if slope is None:  # the loss does not depend on it
            return Advantage(call, torch.zeros_like(p))
        _, values = call.repeat_groups()
        direction = slope.double().transpose(1, 2)  # (B, H, Q, e)
        losses = direction @ values.mT  # (B, H, Q, n)
        mean = (p * losses).sum(-1, keepdim=True)
        return Advantage(call, p * (mean - losses))


def default_loss(model: Any) -> Loss:
    """Summed over texts. Of a model that writes: the mean surprise of the next token. Else minus
    the length of the embedding, the mean of the last states: its gradient is their direction."""
    return _next_token if model.can_generate() else _length


def _next_token(outputs: Any, prepared: PreparedBatch) -> Tensor:
    logits = logits_of(outputs)
    if logits is None:
        raise ValueError(f"{type(outputs).__name__} holds no logits of every token; give a loss")
    return _surprise(logits, prepared)


def _length(outputs: Any, prepared: PreparedBatch) -> Tensor:
    lengths: Tensor = embedding(last_states(outputs), prepared).norm(dim=-1)
    return -lengths.sum()


def _surprise(logits: Tensor, prepared: PreparedBatch) -> Tensor:
    decoder = prepared.second is not None
    ids = prepared.arguments["decoder_input_ids" if decoder else "input_ids"]
    real = prepared.last.real
    follows, counts = ids[:, 1:], (real[:, 1:] & real[:, :-1]).to(logits.dtype)
    surprise = -logits[:, :-1].log_softmax(-1).gather(-1, follows.unsqueeze(-1)).squeeze(-1)
    means: Tensor = (surprise * counts).sum(1) / counts.sum(1).clamp_min(1)
    return means.sum()


def count_advantage(
    advantage: Advantage, prepared: PreparedBatch, attribution: Tensor | None
) -> AdvantageTally:
    """attribution: minus gradient x input of the tokens that are asked, (B, n)."""
    asking, asked = prepared.sides(advantage.call.kind)
    gains = where(asking.real[:, None, :, None], advantage.scores, 0.0)  # (B, H, Q, n)
    size = gains.abs().sum(2)  # (B, H, n)
    texts = agreement = None
    if attribution is not None:
        texts, agreement = _count_agreement(gains.sum(2), attribution, asked)
    return AdvantageTally(
        queries=asking.real.sum().double().expand(advantage.call.heads).clone(),
        size=size.sum((0, 2)),
        special=(size * asked.special[:, None]).sum((0, 2)),
        texts=texts,
        agreement=agreement,
    )


def _count_agreement(gains: Tensor, attribution: Tensor, asked: Tokens) -> tuple[Tensor, Tensor]:
    """How many texts can be ranked, and the sum of their rank correlations. gains (B, H, n)"""
    ranked = asked.real & attribution.isfinite()
    correlations = torch.stack(
        [
            rank_correlation(gains[text][:, tokens], attribution[text, tokens])
            for text, tokens in enumerate(ranked)
        ]
    )  # (B, H), NaN where nothing can be ranked
    finite = correlations.isfinite()
    return finite.double().sum(0), where(finite, correlations, 0.0).sum(0)


def rank_correlation(rows: Tensor, other: Tensor) -> Tensor:
    """Spearman's, of every row (H, n) with `other` (n); NaN for rows that are constant."""
    a, b = _ranks(rows), _ranks(other)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    sizes = a.norm(dim=-1) * b.norm(dim=-1)
    return where(sizes > 0, (a * b).sum(-1) / where(sizes > 0, sizes, 1.0), torch.nan)


def _ranks(x: Tensor) -> Tensor:
    """Ties share their mean rank. (..., n)"""
    below = (x.unsqueeze(-1) > x.unsqueeze(-2)).double().sum(-1)
    equal = (x.unsqueeze(-1) == x.unsqueeze(-2)).double().sum(-1)
    return below + (equal - 1) / 2
