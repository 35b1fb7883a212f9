"""The numbers of a head, each with its name, its meaning, and how it follows from the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fenchel.lens.heads.counting import REACH
from fenchel.lens.heads.tallies import (
    AdvantageTally,
    AttackTally,
    AttentionTally,
    BoundTally,
    DeviationTally,
    FisherTally,
    LocalTally,
    OffsetTally,
    OutputTally,
    PreferenceTally,
    RecipeTally,
    WeightTally,
    WhatIfTally,
)

_TINY = 1e-300
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """name: in tables. of: the texts it is counted over, all or the probe. scale: how a map is
    coloured. value: (H), or None where the attention has no such number."""

    name: str
    title: str
    unit: str
    group: str
    explain: str
    value: Callable[[AttentionTally], Tensor | None]
    scale: str = "linear"
    of: str = "texts"


@dataclass(frozen=True)
class _Source(Generic[T]):
    """Columns that come from one record of the tallies."""

    group: str
    of: str
    record: Callable[[AttentionTally], T | None]

    def column(
        self,
        name: str,
        title: str,
        unit: str,
        explain: str,
        value: Callable[[T], Tensor | None],
        scale: str = "linear",
    ) -> Column:
        def read(tally: AttentionTally) -> Tensor | None:
            record = self.record(tally)
            return None if record is None else value(record)

        return Column(name, title, unit, self.group, explain, read, scale, self.of)


def columns(alphas: tuple[float, ...]) -> Iterator[Column]:
    """In the order of presentation."""
    yield from _WEIGHTS
    yield from _ESTIMATION
    for alpha in alphas:
        yield from _what_if(f"{alpha:g}")
    yield from _GEOMETRY
    yield from _STABILITY
    yield from _RECIPE


def relative_root(change: Tensor, size: Tensor) -> Tensor:
    """sqrt(sum of squares / sum of squares)"""
    return (change / size.clamp_min(_TINY)).sqrt()


def _layer_root(change: Tensor | None, size: Tensor | None) -> Tensor | None:
    return None if change is None or size is None else relative_root(change, size)


def _quotient(total: Tensor | None, count: Tensor | None) -> Tensor | None:
    return None if total is None or count is None else total / count


def _mass_at(offset: int) -> Callable[[OffsetTally], Tensor]:
    return lambda tally: tally.mass[:, REACH + offset] / tally.queries


def mean_agreement(tally: WeightTally) -> Tensor:
    """The mean cosine of the weights of two heads. (H, H)"""
    return tally.agreement / tally.queries.clamp_min(1)[:, None]


def _agreement_with_others(tally: WeightTally) -> Tensor:
    """NaN for a head that is alone in its layer."""
    cosines = mean_agreement(tally)
    heads = len(cosines)
    if heads == 1:
        return torch.full_like(cosines[0], torch.nan)
    return (cosines.sum(1) - cosines.diagonal()) / (heads - 1)


def spectrum(tally: FisherTally) -> Tensor:
    """Eigenvalues of the mean Fisher information in the query, falling. (H, f)"""
    mean = tally.query / tally.queries.clamp_min(1)[:, None, None]
    values: Tensor = torch.linalg.eigvalsh((mean + mean.mT) / 2)
    return values.flip(-1).clamp_min(0)


def _effective_rank(tally: FisherTally) -> Tensor:
    shares = spectrum(tally)
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(_TINY)
    return (-torch.xlogy(shares, shares).sum(-1)).exp()


_weights = _Source[WeightTally]("weights", "texts", lambda tally: tally.weights)
_offsets = _Source[OffsetTally]("weights", "texts", lambda tally: tally.offsets)
_WEIGHTS = (
    _weights.column(
        "entropy", "entropy", "nats",
        "Mean over queries of −Σ p log p: 0 looks at one token only.",
        lambda tally: tally.entropy / tally.queries,
    ),
    _weights.column(
        "entropy_share", "entropy, of the most possible", "",
        "Entropy over that of even weights: 1 looks at all tokens alike.",
        lambda tally: tally.entropy_share / tally.queries,
    ),
    _weights.column(
        "effective_support", "effective support", "tokens",
        "Mean of exp(entropy): as many tokens, evenly looked at, would be as spread.",
        lambda tally: tally.effective_support / tally.queries,
    ),
    _weights.column(
        "mass_first", "weight on the first token", "",
        "Share of the weight on the first token of the text, such as [CLS] or <s>.",
        lambda tally: tally.mass_first / tally.queries,
    ),
    _weights.column(
        "mass_separator", "weight on separators", "",
        "Share on special tokens other than the first, such as [SEP] or </s>.",
        lambda tally: tally.mass_separator / tally.queries,
    ),
    _weights.column(
        "mass_special", "weight on special tokens", "",
        "Share on all tokens that the tokenizer calls special.",
        lambda tally: tally.mass_special / tally.queries,
    ),
    _offsets.column(
        "mass_self", "weight on itself", "",
        "Share that a token gives to itself.", _mass_at(0),
    ),
    _offsets.column(
        "mass_previous", "weight on the previous token", "",
        "Share that a token gives to the one before it.", _mass_at(-1),
    ),
    _offsets.column(
        "mass_next", "weight on the next token", "",
        "Share that a token gives to the one after it.", _mass_at(1),
    ),
    _offsets.column(
        "distance", "distance", "tokens",
        "Mean distance between a token and what it looks at.",
        lambda tally: tally.distance / tally.queries,
    ),
    _weights.column(
        "agreement", "agreement with other heads", "",
        "Mean cosine of its weights with those of the other measured heads of its layer.",
        _agreement_with_others,
    ),
)  # fmt: skip


def _deviation(source: _Source[DeviationTally], space: str, problem: str) -> tuple[Column, ...]:
    """Of the estimation problem in one space, "token" or "head"; the two are not comparable."""
    return (
        source.column(
            f"{space}_deviation_multiplier", f"off the exact multiplier, {space} space", "",
            f"|λ − λ*| / |λ*|: attention is the first-order solution of an estimation problem, "
            f"here {problem}; so far is its multiplier from the exact one.",
            lambda tally: tally.multiplier / tally.count, "log",
        ),
        source.column(
            f"{space}_deviation_mean", f"off the exact mean, {space} space", "",
            f"|h − h*| / |h*|: the same of the estimated mean, {problem}; this is what the head "
            "looks up.",
            lambda tally: tally.mean / tally.count, "log",
        ),
        source.column(
            f"{space}_deviation_mean_shift", f"off the exact shift, {space} space", "",
            f"|h − h*| over what attention does to the mean of the preference, {problem}.",
            lambda tally: tally.mean_shift / tally.count, "log",
        ),
    )  # fmt: skip


_tokens = _Source[DeviationTally]("estimation", "texts", lambda tally: tally.token_deviation)
_heads = _Source[DeviationTally]("estimation", "texts", lambda tally: tally.head_deviation)
_preference = _Source[PreferenceTally]("estimation", "texts", lambda tally: tally.preference)
_ESTIMATION = (
    *_deviation(
        _tokens, "token", "with the tokens that come in as templates (BERT, RoBERTa and T5)"
    ),
    _tokens.column(
        "token_deviation_parameter", "small parameter, token space", "",
        "|Cov z| / |z| of the templates: the deviation of the multiplier to leading order. Where "
        "it is small, so is that deviation.",
        lambda tally: _quotient(tally.parameter, tally.count), "log",
    ),
    *_deviation(_heads, "head", "with the head's own keys as templates (any model)"),
    _preference.column(
        "preference_support", "support of the preference", "tokens",
        "Effective support of the preference that the position bias alone implies.",
        lambda tally: tally.effective_support / tally.queries,
    ),
)  # fmt: skip

_fisher = _Source[FisherTally]("geometry", "probe", lambda tally: tally.fisher)
_advantage = _Source[AdvantageTally]("geometry", "probe", lambda tally: tally.advantage)
_GEOMETRY = (
    _fisher.column(
        "fisher_scores", "Fisher information, scores", "",
        "1 − Σ p²: how easily the weights follow the scores; 0 is frozen.",
        lambda tally: tally.scores / tally.queries,
    ),
    _fisher.column(
        "fisher_trace", "Fisher information, query", "",
        "Trace of scaling² Cov(k) under the weights: how easily they follow the query.",
        lambda tally: spectrum(tally).sum(-1), "log",
    ),
    _fisher.column(
        "fisher_largest", "largest Fisher eigenvalue", "",
        "The same along the one direction of the query that changes the weights most.",
        lambda tally: spectrum(tally)[:, 0], "log",
    ),
    _fisher.column(
        "fisher_rank", "Fisher rank", "directions",
        "Effective number of directions of the query that matter (exp of the spectrum's entropy).",
        _effective_rank,
    ),
    _advantage.column(
        "advantage", "pull of the gradient", "",
        "Mean over queries of Σ |∂loss/∂score|: how much a step down the gradient would change "
        "whom the head looks at.",
        lambda tally: tally.size / tally.queries, "log",
    ),
    _advantage.column(
        "advantage_special", "pull at special tokens", "",
        "The part of that pull at special tokens.",
        lambda tally: tally.special / tally.size.clamp_min(_TINY),
    ),
    _advantage.column(
        "advantage_agreement", "agreement with gradient × input", "",
        "Rank correlation over tokens of what each would gain with −gradient × input.",
        lambda tally: _quotient(tally.agreement, tally.texts),
    ),
)  # fmt: skip

_bounds = _Source[BoundTally]("stability", "texts", lambda tally: tally.bounds)
_local = _Source[LocalTally]("stability", "probe", lambda tally: tally.local)
_attack = _Source[AttackTally]("stability", "probe", lambda tally: tally.attack)
_STABILITY = (
    _bounds.column(
        "bound", "certified constant", "",
        "Mean over texts of the certified bound of |Δoutput| / |Δquery|, for all queries.",
        lambda tally: tally.bound / tally.texts, "log",
    ),
    _bounds.column(
        "largest_bound", "largest certified constant", "",
        "The largest of these bounds over the texts.", lambda tally: tally.largest, "log",
    ),
    _local.column(
        "local", "local constant", "",
        "Mean over the texts' own queries of the exact |Δoutput| / |Δquery| there.",
        lambda tally: tally.constant / tally.queries, "log",
    ),
    _local.column(
        "largest_local", "largest local constant", "",
        "The largest of these.", lambda tally: tally.largest, "log",
    ),
    _local.column(
        "local_share", "local, of the certified", "",
        "Mean over texts of the largest local constant over the text's certificate.",
        lambda tally: tally.share / tally.texts,
    ),
    _attack.column(
        "attacked", "attacked constant", "",
        "The largest |Δoutput| / |Δquery| that an attack on the certificate of one text found.",
        lambda tally: tally.attacked, "log",
    ),
    _attack.column(
        "tightness", "certified / attacked", "",
        "The certificate of one text over the strongest attack on it: 1 is tight.",
        lambda tally: tally.certified / tally.attacked.clamp_min(_TINY),
    ),
)  # fmt: skip

_recipe = _Source[RecipeTally]("recipe", "probe", lambda tally: tally.recipe)
_RECIPE = (
    _recipe.column(
        "recipe_alpha", "alpha of the recipe", "",
        "The entmax that saves most links within the tolerance; 1 is softmax.",
        lambda tally: tally.alpha,
    ),
    _recipe.column(
        "recipe_kept", "links kept by the recipe", "",
        "Share of the links that keep a weight.", lambda tally: tally.kept / tally.queries,
    ),
)  # fmt: skip


def _what_if(alpha: str) -> tuple[Column, ...]:
    named = {"1.5": "entmax-1.5", "2": "sparsemax"}.get(alpha, f"entmax-{alpha}")
    head = _Source[WhatIfTally]("what-if", "texts", lambda tally: tally.what_if)
    model = _Source[OutputTally]("what-if", "probe", lambda tally: tally.model.get(alpha))
    return (
        head.column(
            f"kept_{alpha}", f"{named}: links kept", "",
            f"Share of the links that keep a weight under {named}.",
            lambda tally: tally.by_alpha[alpha].kept / tally.queries,
        ),
        head.column(
            f"support_size_{alpha}", f"{named}: support size", "tokens",
            f"Tokens that a query looks at under {named}.",
            lambda tally: tally.by_alpha[alpha].support_size / tally.queries,
        ),
        head.column(
            f"change_{alpha}", f"{named}: head changes by", "",
            "Mean over queries of |Δy| / |y| of the head's own output.",
            lambda tally: tally.by_alpha[alpha].change / tally.queries,
        ),
        head.column(
            f"moved_{alpha}", f"{named}: head moves by", "",
            "The same in root mean square, which long outputs dominate.",
            lambda tally: relative_root(tally.by_alpha[alpha].square, tally.square),
        ),
        head.column(
            f"layer_moved_{alpha}", f"{named}: layer moves by", "",
            "|Δ| / |·| of the layer's attention output, this head switched alone.",
            lambda tally: _layer_root(tally.by_alpha[alpha].layer_square, tally.layer_square),
        ),
        head.column(
            f"layer_all_{alpha}", f"{named}: layer, all heads", "",
            "The same with every measured head of the layer switched.",
            lambda tally: _layer_root(tally.by_alpha[alpha].layer_all, tally.layer_square),
        ),
        model.column(
            f"model_moved_{alpha}", f"{named}: model moves by", "",
            "|Δ| / |·| of the model's embedding (mean of the last states), this head switched.",
            lambda tally: relative_root(tally.apart, tally.size), "log",
        ),
        model.column(
            f"model_cosine_{alpha}", f"{named}: cosine of the model's output", "",
            "Mean cosine of the embeddings before and after.",
            lambda tally: tally.cosine / tally.texts,
        ),
        model.column(
            f"model_kl_{alpha}", f"{named}: KL of predictions", "nats",
            "Mean KL divergence of the next-token predictions, before from after.",
            lambda tally: _quotient(tally.kl, tally.tokens), "log",
        ),
    )  # fmt: skip
