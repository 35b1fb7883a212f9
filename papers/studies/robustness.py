"""Attention on sub-sampled neighbourhoods: how far a head's outputs move when keys are left out.

Keys are drawn, the same for all queries, and attention over those that stay is computed exactly.
The truth is W1(m(Y), m(Y')), Y and Y' the outputs over all n queries before and after. Three more
numbers stand above it:

    W1(m(Y), m(Y'))  <=  1/n sum_i |y'_i - y_i|  <=  1/n sum_i move_bound_i.

The first step is the coupling that leaves every query with itself: a plan, if not the cheapest. The
second is `perturbation.move_bound`, the most that ANY choice of as many keys can move y_i; it may
choose other keys for every query, and an unlucky choice, where a draw is an average one.

Proposition 25 of Vuckovic, Baratin and Tachet des Combes (2020), corrected, bounds the
same |y'_i - y_i|, in the l1 norm, by K (Ly D + top) / eps W1(keys, kept keys): on the ball that
holds queries and keys, or on these tokens alone, the smallest set that it can be used on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fenchel.bounds.contraction import Setting
from fenchel.bounds.domain import Ball
from fenchel.bounds.perturbation import move_bound
from fenchel.lens.families import family_of, find_attentions
from fenchel.lens.head_bounds import HeadInputs, capture_head_inputs
from fenchel.lens.tokenizing import encode
from fenchel.measures import Dot, Empirical, wasserstein1
from papers.checks import check_whole
from papers.studies.documents import quantiles, rounded
from papers.studies.hidden import apart, spread

SHARES = (0.9, 0.75, 0.5, 0.25)
ROUNDING = 1e-9  # of the bound
_ROOM = 2**23  # numbers of one tensor: 64 MB
_FIGURES = ("truth", "truth_max", "coupled", "bound", "hull", "ball", "tokens")
_WORDS = (
    "truth: exact W1 (l2) between a head's outputs over all queries, with all keys and with those "
    "that stay; mean over the draws",
    "bound: for every query the worst choice of as many keys, averaged over the queries; above W1 "
    "since leaving each query with itself is one coupling",
    "a draw is an average choice, the bound the worst one, chosen anew for every query: part of "
    "the ratio no bound for all choices can avoid; ratio_to_largest_draw shows how much",
    "where bound_to_hull is 1 the bound says only that outputs stay averages of the values",
    "[CLS] and [SEP] are keys like others and may be left out",
    "`layer` counts from 0",
)


@dataclass(frozen=True, eq=False)
class Robustness:
    """Each (share, sentence, head), but `spread` (sentence, head).

    truth, truth_max: W1, mean and largest over the draws. coupled: mean move of a query.
    bound: certified. hull: how far an average of the values can be, whatever happens to the keys.
    ball, tokens: log10 of Proposition 25 corrected, on either set.
    spread: mean distance of a head's values to their mean, the unit of `relative` figures.
    exceeded: draws that moved further than their bound; it must be 0.
    """

    truth: Tensor = field(repr=False)
    truth_max: Tensor = field(repr=False)
    coupled: Tensor = field(repr=False)
    bound: Tensor = field(repr=False)
    hull: Tensor = field(repr=False)
    ball: Tensor = field(repr=False)
    tokens: Tensor = field(repr=False)
    spread: Tensor = field(repr=False)
    exceeded: int
    shares: tuple[float, ...]
    layer: int
    draws: int
    queries: int

    def as_json(self) -> dict[str, Any]:
        """Over sentences and heads: medians, and where 90 % of them lie."""
        return {
            "study": "robustness",
            "layer": self.layer,
            "sentences": self.spread.shape[0],
            "heads": self.spread.shape[1],
            "queries": self.queries,
            "draws": self.draws,
            "exceeded": self.exceeded,
            "value_spread": quantiles(self.spread),
            "shares": [self._share(k) for k in range(len(self.shares))],
            "words": list(_WORDS),
        }

    def _share(self, k: int) -> dict[str, Any]:
        truth, most, bound = self.truth[k], self.truth_max[k], self.bound[k]
        ratio, tightest = _over(bound, truth), _over(bound, most)
        lowest = tightest[~tightest.isnan()]
        return {
            "kept": self.shares[k],
            "truth": quantiles(truth),
            "truth_max": quantiles(most),
            "coupled": quantiles(self.coupled[k]),
            "bound": quantiles(bound),
            "truth_relative": quantiles(_over(truth, self.spread)),
            "truth_max_relative": quantiles(_over(most, self.spread)),
            "bound_relative": quantiles(_over(bound, self.spread)),
            "bound_to_hull": quantiles(_over(bound, self.hull[k])),
            "ratio": quantiles(ratio),
            "ratio_to_largest_draw": {
                **quantiles(tightest),
                "least": rounded(float(lowest.min())) if lowest.numel() else None,
            },
            "log10_proposition_25": {
                "on_the_ball": quantiles(self.ball[k]),
                "on_these_tokens": quantiles(self.tokens[k]),
            },
        }


def robustness(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    layer: int = 2,
    draws: int = 20,
    seed: int = 0,
    advance: Callable[[float], object] | None = None,
) -> Robustness:
    """Of all heads of one layer.

    >>> model, tokenizer = lens.load("build/models/minilm")
    >>> found = robustness(model, tokenizer, ["A man is playing a guitar."], draws=5)
    >>> found.exceeded, found.truth.shape
    (0, torch.Size([4, 1, 12]))

    model: BERT and its kin; T5 adds a position bias to its scores, and is refused.
    layer: from 0. draws: choices of keys for each sentence and share.
    advance: called with the share of the work that was done since the last call.
    """
    check_whole(draws, "draws", 1)
    _check_layer(model, layer)
    generator = torch.Generator().manual_seed(seed)
    rows, spreads, queries = [], [], 0
    for text in texts:
        heads = capture_head_inputs(model, encode(tokenizer, [text], model=model))[layer]
        always = hull(heads), log_on_ball(heads), log_here(heads)  # whatever the share
        by_share = [_measured(heads, share, draws, generator, always) for share in SHARES]
        rows.append(torch.stack(by_share, 1))  # (figure, share, head)
        spreads.append(spread(heads.values))
        queries += heads.queries.shape[1]
        if advance is not None:
            advance(1 / len(texts))
    *figures, over = torch.stack(rows, 2)  # (figure, share, sentence, head)
    counts = {"exceeded": int(over.sum()), "layer": layer, "draws": draws, "queries": queries}
    named: dict[str, Any] = {**dict(zip(_FIGURES, figures, strict=True)), **counts}
    return Robustness(**named, spread=torch.stack(spreads), shares=SHARES)


def _measured(
    heads: HeadInputs,
    share: float,
    draws: int,
    generator: torch.Generator,
    always: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """(figure, head), in the order of `_FIGURES`, and how many draws exceed the bound."""
    n = heads.keys.shape[1]
    m = max(1, math.floor(share * n))
    kept = torch.stack([torch.randperm(n, generator=generator)[:m] for _ in range(draws)])
    truth, coupled = moves(heads, kept)  # (draws, head)
    bound = certified(heads, n - m)
    between = wasserstein1(Empirical(heads.keys), Empirical(heads.keys[:, kept[0]]))  # l1
    farthest, *known = always
    logs = [(log + between.log()) / math.log(10) for log in known]
    over = (truth > bound * (1 + ROUNDING)).sum(0)
    return torch.stack(
        [truth.mean(0), truth.amax(0), coupled.mean(0), bound, farthest, *logs, over]
    )


# ---- what happens


def moves(heads: HeadInputs, kept: Tensor) -> tuple[Tensor, Tensor]:
    """W1 between the outputs, and the mean move of a query, for keys kept (draws, m).

    Each (draws, head).
    """
    scores = heads.queries @ heads.keys.mT / heads.temperature  # (H, Q, n)
    before = scores.softmax(-1) @ heads.values
    truth, coupled = [], []
    for some in kept:  # one draw at a time: with all, memory is draws * H * Q * n
        after = scores[:, :, some].softmax(-1) @ heads.values[:, some]
        truth.append(apart(after, before))
        coupled.append((after - before).norm(dim=-1).mean(-1))
    return torch.stack(truth), torch.stack(coupled)


# ---- what is certified


def certified(heads: HeadInputs, gone: int) -> Tensor:
    """The mean over queries of the most that any `gone` keys can move an output. (head)"""
    weights = (heads.queries @ heads.keys.mT / heads.temperature).softmax(-1)
    values = heads.values.unsqueeze(-3)
    parts = [move_bound(part, values, gone) for part in _blocks(weights, values[0].numel())]
    return torch.cat(parts, -1).mean(-1)


def hull(heads: HeadInputs) -> Tensor:
    """The mean over queries of the distance to the farthest value: an output is an average of
    values before and after, so no bound need be larger. (head)"""
    weights = (heads.queries @ heads.keys.mT / heads.temperature).softmax(-1)
    return torch.cdist(weights @ heads.values, heads.values).amax(-1).mean(-1)


def log_on_ball(heads: HeadInputs) -> Tensor:
    """log of K (Ly D + top) / eps on the ball that holds a head's queries and keys. (head)"""
    longest = torch.cat([heads.queries, heads.keys], 1).norm(dim=-1).amax(-1)
    steep = _lookup_slope(heads).log()
    dim = heads.keys.shape[-1]
    logs = []
    for radius in longest.tolist():
        setting = Setting(Dot(heads.temperature), Ball(radius), dim)
        g = setting.potential_bounds()
        slope = g.log_key_slope + math.log(setting.diameter)
        top = max(slope, g.log_most)
        whole = top + math.log(math.exp(slope - top) + math.exp(g.log_most - top))
        logs.append(whole - g.log_least)
    return steep + steep.new_tensor(logs)


def log_here(heads: HeadInputs) -> Tensor:
    """The same on the set of a head's own keys, for the query with the largest. (head)

    The proof asks for no more than a set that holds both neighbourhoods.
    """
    scores = heads.queries @ heads.keys.mT / heads.temperature
    potential = (scores - scores.amax(-1, keepdim=True)).exp()  # (H, Q, n), its top is one
    away = _l1(heads.keys)
    parts = []
    for part in _blocks(potential, away[0].numel()):
        slopes = (part.unsqueeze(-1) - part.unsqueeze(-2)).abs()  # (H, q, n, n)
        parts.append(_slope(slopes, away.unsqueeze(1)).flatten(-2).amax(-1))
    steepest = torch.cat(parts, -1)
    wide = away.flatten(-2).amax(-1, keepdim=True)
    constant = (steepest * wide + 1).log() - (scores.amin(-1) - scores.amax(-1))
    return _lookup_slope(heads).log() + constant.amax(-1)


def _blocks(rows: Tensor, each: int) -> tuple[Tensor, ...]:
    """Rows (H, Q, n) cut along the queries, for work of `each` numbers for a head and query."""
    blocks: tuple[Tensor, ...] = rows.split(max(1, _ROOM // (len(rows) * each)), 1)
    return blocks


def _lookup_slope(heads: HeadInputs) -> Tensor:
    """Lipschitz constant of key -> value on the head's own tokens, in the l1 norm. (head)"""
    return _slope(_l1(heads.values), _l1(heads.keys)).flatten(-2).amax(-1)


def _l1(x: Tensor) -> Tensor:
    away: Tensor = torch.cdist(x, x, 1.0)
    return away


def _slope(moved: Tensor, away: Tensor) -> Tensor:
    """moved / away, infinite where equal keys do not go with equal values."""
    apart = away > 0
    return torch.where(
        apart, moved / torch.where(apart, away, 1.0), torch.where(moved > 0, math.inf, 0.0)
    )


def _over(value: Tensor, unit: Tensor) -> Tensor:
    return torch.where(unit > 0, value / torch.where(unit > 0, unit, 1.0), math.nan)


def _check_layer(model: Any, layer: int) -> None:
    check_whole(layer, "layer", 0)
    if family_of(model).pair:
        raise ValueError(
            f"{type(model).__name__} adds a position bias to its scores, which this study leaves "
            "out; use a BERT, RoBERTa or one of their kin"
        )
    count = len(find_attentions(model, "encoder"))
    if layer >= count:
        raise ValueError(f"layer must be below the {count} layers there are, from 0, got {layer}")
