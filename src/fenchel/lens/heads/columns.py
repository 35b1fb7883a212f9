"""The numbers of a head, each with its name, its meaning, and how it follows from the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel.lens.heads.tallies import REACH, Tallies

Value = Callable[[Tallies], Tensor]


@dataclass(frozen=True)
class Column:
    """name: in tables. of: the texts it is counted over, all or the probe. needs: tallies without
    which it is not there. scale: how a map is coloured."""

    name: str
    title: str
    unit: str
    group: str
    explain: str
    value: Value
    needs: tuple[str, ...]
    scale: str = "linear"
    of: str = "texts"


def columns(alphas: tuple[float, ...]) -> Iterator[Column]:
    """In the order of presentation."""
    yield from _WEIGHTS
    yield from _ESTIMATION
    for alpha in alphas:
        yield from _what_if(f"{alpha:g}")
    yield from _GEOMETRY
    yield from _STABILITY
    yield from _RECIPE


def over(name: str, count: str = "queries") -> Value:
    """A mean: a sum over how many; NaN over none."""
    return lambda here: here[name] / here[count]


def at_offset(offset: int) -> Value:
    return lambda here: here["mass_by_offset"][:, REACH + offset] / here["queries"]


def root_of(change: str, size: str) -> Value:
    """sqrt(sum of squares / sum of squares)"""
    return lambda here: (here[change] / here[size].clamp_min(1e-300)).sqrt()


def _with_others(here: Tallies) -> Tensor:
    """The mean cosine with the other heads of the layer; NaN for a head that has none."""
    cosines = here["agreement"] / here["queries"].clamp_min(1)[:, None]
    heads = len(cosines)
    if heads == 1:
        return torch.full_like(cosines[0], torch.nan)
    return (cosines.sum(1) - cosines.diagonal()) / (heads - 1)


def spectrum(here: Tallies) -> Tensor:
    """Eigenvalues of the mean Fisher information in the query, falling. (H, f)"""
    mean = here["fisher"] / here["fisher_queries"].clamp_min(1)[:, None, None]
    values: Tensor = torch.linalg.eigvalsh((mean + mean.mT) / 2)
    return values.flip(-1).clamp_min(0)


def _effective_rank(here: Tallies) -> Tensor:
    shares = spectrum(here)
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-300)
    return (-torch.xlogy(shares, shares).sum(-1)).exp()


_Made = tuple[str, str, str, str, Value, tuple[str, ...], str]


def _column(
    name: str,
    title: str,
    unit: str,
    explain: str,
    value: Value,
    *needs: str,
    scale: str = "linear",
) -> _Made:
    return name, title, unit, explain, value, needs or (name,), scale


def _group(group: str, of: str, *made: _Made) -> tuple[Column, ...]:
    return tuple(
        Column(name, title, unit, group, explain, value, needs, scale, of)
        for name, title, unit, explain, value, needs, scale in made
    )


_WEIGHTS = _group(
    "weights",
    "texts",
    _column(
        "entropy", "entropy", "nats",
        "Mean over queries of −Σ p log p: 0 looks at one token only.", over("entropy"),
    ),
    _column(
        "entropy_share", "entropy, of the most possible", "",
        "Entropy over that of even weights: 1 looks at all tokens alike.", over("entropy_share"),
    ),
    _column(
        "effective_support", "effective support", "tokens",
        "Mean of exp(entropy): as many tokens, evenly looked at, would be as spread.",
        over("effective_support"),
    ),
    _column(
        "mass_first", "weight on the first token", "",
        "Share of the weight on the first token of the text, such as [CLS] or <s>.",
        over("mass_first"),
    ),
    _column(
        "mass_separator", "weight on separators", "",
        "Share on special tokens other than the first, such as [SEP] or </s>.",
        over("mass_separator"),
    ),
    _column(
        "mass_special", "weight on special tokens", "",
        "Share on all tokens that the tokenizer calls special.", over("mass_special"),
    ),
    _column(
        "mass_self", "weight on itself", "",
        "Share that a token gives to itself.", at_offset(0), "mass_by_offset",
    ),
    _column(
        "mass_previous", "weight on the previous token", "",
        "Share that a token gives to the one before it.", at_offset(-1), "mass_by_offset",
    ),
    _column(
        "mass_next", "weight on the next token", "",
        "Share that a token gives to the one after it.", at_offset(1), "mass_by_offset",
    ),
    _column(
        "distance", "distance", "tokens",
        "Mean distance between a token and what it looks at.", over("distance"),
    ),
    _column(
        "agreement", "agreement with other heads", "",
        "Mean cosine of its weights with those of the other measured heads of its layer.",
        _with_others,
    ),
)  # fmt: skip


def _deviation(space: str, problem: str) -> tuple[_Made, ...]:
    """Of the estimation problem in one space, "token" or "head"; the two are not comparable."""

    def column(name: str, title: str, explain: str) -> _Made:
        tally, count = f"{space}_deviation_{name}", f"{space}_deviation_count"
        return _column(
            tally, f"{title}, {space} space", "", explain, over(tally, count), count, scale="log"
        )

    return (
        column(
            "multiplier", "off the exact multiplier",
            f"|λ − λ*| / |λ*|: attention is the first-order solution of an estimation problem, "
            f"here {problem}; so far is its multiplier from the exact one.",
        ),
        column(
            "mean", "off the exact mean",
            f"|h − h*| / |h*|: the same of the estimated mean, {problem}; this is what the head "
            "looks up.",
        ),
        column(
            "mean_shift", "off the exact shift",
            f"|h − h*| over what attention does to the mean of the preference, {problem}.",
        ),
    )  # fmt: skip


_ESTIMATION = _group(
    "estimation",
    "texts",
    *_deviation("token", "with the tokens that come in as templates (BERT, RoBERTa and T5)"),
    _column(
        "token_deviation_parameter", "small parameter, token space", "",
        "|Cov z| / |z| of the templates: the deviation of the multiplier to leading order. Where "
        "it is small, so is that deviation.",
        over("token_deviation_parameter", "token_deviation_count"), "token_deviation_count",
        scale="log",
    ),
    *_deviation("head", "with the head's own keys as templates (any model)"),
    _column(
        "preference_support", "support of the preference", "tokens",
        "Effective support of the preference that the position bias alone implies.",
        over("preference_support"),
    ),
)  # fmt: skip

_GEOMETRY = _group(
    "geometry",
    "probe",
    _column(
        "fisher_scores", "Fisher information, scores", "",
        "1 − Σ p²: how easily the weights follow the scores; 0 is frozen.",
        over("fisher_scores", "fisher_queries"),
    ),
    _column(
        "fisher_trace", "Fisher information, query", "",
        "Trace of scaling² Cov(k) under the weights: how easily they follow the query.",
        lambda here: spectrum(here).sum(-1), "fisher", scale="log",
    ),
    _column(
        "fisher_largest", "largest Fisher eigenvalue", "",
        "The same along the one direction of the query that changes the weights most.",
        lambda here: spectrum(here)[:, 0], "fisher", scale="log",
    ),
    _column(
        "fisher_rank", "Fisher rank", "directions",
        "Effective number of directions of the query that matter (exp of the spectrum's entropy).",
        _effective_rank, "fisher",
    ),
    _column(
        "advantage", "pull of the gradient", "",
        "Mean over queries of Σ |∂loss/∂score|: how much a step down the gradient would change "
        "whom the head looks at.",
        over("advantage", "advantage_queries"), scale="log",
    ),
    _column(
        "advantage_special", "pull at special tokens", "",
        "The part of that pull at special tokens.",
        lambda here: here["advantage_special"] / here["advantage"].clamp_min(1e-300),
    ),
    _column(
        "advantage_agreement", "agreement with gradient × input", "",
        "Rank correlation over tokens of what each would gain with −gradient × input.",
        over("advantage_agreement", "advantage_texts"),
    ),
)  # fmt: skip

_STABILITY = (
    *_group(
        "stability",
        "texts",
        _column(
            "bound", "certified constant", "",
            "Mean over texts of the certified bound of |Δoutput| / |Δquery|, for all queries.",
            over("bound", "texts"), scale="log",
        ),
        _column(
            "largest_bound", "largest certified constant", "",
            "The largest of these bounds over the texts.",
            lambda here: here["largest_bound"], scale="log",
        ),
    ),
    *_group(
        "stability",
        "probe",
        _column(
            "local", "local constant", "",
            "Mean over the texts' own queries of the exact |Δoutput| / |Δquery| there.",
            over("local", "local_queries"), scale="log",
        ),
        _column(
            "largest_local", "largest local constant", "",
            "The largest of these.", lambda here: here["largest_local"], scale="log",
        ),
        _column(
            "local_share", "local, of the certified", "",
            "Mean over texts of the largest local constant over the text's certificate.",
            over("local_share", "local_texts"),
        ),
        _column(
            "attacked", "attacked constant", "",
            "The largest |Δoutput| / |Δquery| that an attack on the certificate of one text found.",
            lambda here: here["attacked"], scale="log",
        ),
        _column(
            "tightness", "certified / attacked", "",
            "The certificate of one text over the strongest attack on it: 1 is tight.",
            lambda here: here["certified"] / here["attacked"].clamp_min(1e-300), "attacked",
        ),
    ),
)  # fmt: skip

_RECIPE = _group(
    "recipe",
    "probe",
    _column(
        "recipe_alpha", "alpha of the recipe", "",
        "The entmax that saves most links within the tolerance; 1 is softmax.",
        lambda here: here["largest_recipe_alpha"], "largest_recipe_alpha",
    ),
    _column(
        "recipe_kept", "links kept by the recipe", "",
        "Share of the links that keep a weight.", over("recipe_kept", "recipe_queries"),
    ),
)  # fmt: skip


def _what_if(alpha: str) -> tuple[Column, ...]:
    named = {"1.5": "entmax-1.5", "2": "sparsemax"}.get(alpha, f"entmax-{alpha}")
    texts = _group(
        "what-if",
        "texts",
        _column(
            f"kept_{alpha}", f"{named}: links kept", "",
            f"Share of the links that keep a weight under {named}.", over(f"kept_{alpha}"),
        ),
        _column(
            f"support_{alpha}", f"{named}: support", "tokens",
            f"Tokens that a query looks at under {named}.", over(f"support_{alpha}"),
        ),
        _column(
            f"change_{alpha}", f"{named}: head changes by", "",
            "Mean over queries of |Δy| / |y| of the head's own output.", over(f"change_{alpha}"),
        ),
        _column(
            f"moved_{alpha}", f"{named}: head moves by", "",
            "The same in root mean square, which long outputs dominate.",
            root_of(f"square_{alpha}", "square"), f"square_{alpha}",
        ),
        _column(
            f"layer_moved_{alpha}", f"{named}: layer moves by", "",
            "|Δ| / |·| of the layer's attention output, this head switched alone.",
            root_of(f"layer_square_{alpha}", "layer_square"), f"layer_square_{alpha}",
        ),
        _column(
            f"layer_all_{alpha}", f"{named}: layer, all heads", "",
            "The same with every measured head of the layer switched.",
            root_of(f"layer_all_{alpha}", "layer_square"), f"layer_all_{alpha}",
        ),
    )  # fmt: skip
    probe = _group(
        "what-if",
        "probe",
        _column(
            f"model_moved_{alpha}", f"{named}: model moves by", "",
            "|Δ| / |·| of the model's embedding (mean of the last states), this head switched.",
            root_of(f"model_apart_{alpha}", f"model_size_{alpha}"), f"model_apart_{alpha}",
            scale="log",
        ),
        _column(
            f"model_cosine_{alpha}", f"{named}: cosine of the model's output", "",
            "Mean cosine of the embeddings before and after.",
            over(f"model_cosine_{alpha}", f"model_texts_{alpha}"),
        ),
        _column(
            f"model_kl_{alpha}", f"{named}: KL of predictions", "nats",
            "Mean KL divergence of the next-token predictions, before from after.",
            over(f"model_kl_{alpha}", f"model_tokens_{alpha}"), scale="log",
        ),
    )  # fmt: skip
    return texts + probe
