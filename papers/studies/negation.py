"""Does negation move a sentence further than a word that changes nothing?

W1 (l2) between the tokens of a sentence and those of

    negation         its negation, as the data has it
    not              the same, where it is the sentence with one word more
    never            that word in the place of the "not": another negation
    hedged           possibly, allegedly, formerly in its place, the mean of the three: another
                     meaning, and no negation
    neutral          indeed, also, really in its place, the mean of the three: the same length, the
                     same meaning or nearly so
    same_relation    a sentence of the same relation about another subject
    other_relation   a sentence of another relation

layer by layer. [CLS] and [SEP] are left out of "words" and are part of "all".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from papers.studies.documents import interval, ratio_interval, rounded
from papers.studies.facts import HEDGES, NEUTRAL, Case
from papers.studies.hidden import Cloud, apart, clouds

CONDITIONS = ("negation", "not", "never", "hedged", "neutral", "same_relation", "other_relation")
_MEASURED = ("negation", "not", "never", *HEDGES, *NEUTRAL, "same_relation", "other_relation")
_CHUNK = 16  # cases whose hidden states are held at once
_WORDS = (
    "intervals: 95 % by Student's t over pairs; pairs of one relation share a template, so "
    "`over_relations`, where each relation counts once, is the wider and the safer one",
    "it shows how far contextual embeddings move; not that the model understands negation, nor "
    "that anything downstream uses the move",
    "at layer 0 there is no context, only words and positions: what the ratio is there it owes to "
    "the words' own embeddings, and only its change from there on is the doing of the layers",
    "compare hedged before speaking of negation: it tells how far any word goes that changes what "
    "is claimed",
    "neutral words are adverbs at the place of the not: the same length, not quite the same "
    "meaning (also adds a presupposition), and not always good English; the data holds no "
    "paraphrases by people",
)


@dataclass(frozen=True, eq=False)
class Negation:
    """Each (case, layers + 1), by condition, NaN where a case lacks it; cosine (case).

    words, everything: W1 without and with [CLS] and [SEP]. cosine: distance of the mean-pooled
    embeddings at the last layer, for which [CLS] and [SEP] are pooled too. longer: cases in which
    a neutral or hedged sentence has not as many tokens as the one with "not".
    """

    cases: Sequence[Case] = field(repr=False)
    words: dict[str, Tensor] = field(repr=False)
    everything: dict[str, Tensor] = field(repr=False)
    cosine: dict[str, Tensor] = field(repr=False)
    longer: int

    def as_json(self) -> dict[str, Any]:
        """Together, and source by source."""
        sources = [case.fact.source for case in self.cases]
        parts = {"together": torch.ones(len(sources), dtype=torch.bool)}
        for source in dict.fromkeys(sources):
            parts[source] = torch.tensor([other == source for other in sources])
        return {
            "study": "negation",
            "pairs": len(sources),
            "unequal_lengths": self.longer,
            "neutral_words": {word: self._word(word) for word in NEUTRAL},
            "sources": {name: self._part(which) for name, which in parts.items()},
            "with_cls_and_sep": self._everything(),
            "words": list(_WORDS),
        }

    def _part(self, which: Tensor) -> dict[str, Any]:
        """which (case): bool"""
        last = self.words["negation"].shape[1] - 1
        relations = [
            c.fact.relation + c.fact.source for c, w in zip(self.cases, which, strict=True) if w
        ]
        layers = []
        for layer in range(last + 1):
            distances = {name: x[which, layer] for name, x in self.words.items()}
            layers.append(
                {
                    "layer": layer,
                    "words": {name: interval(distances[name]) for name in CONDITIONS},
                    "ratio": _ratios(distances, "not", relations),
                    "ratio_never": ratio_interval(distances["never"] / distances["neutral"]),
                    "ratio_hedged": ratio_interval(distances["hedged"] / distances["neutral"]),
                }
            )
        cosine = {name: x[which] for name, x in self.cosine.items()}
        return {
            "pairs": int(which.sum()),
            "layers": layers,
            "cosine": {name: interval(cosine[name]) for name in CONDITIONS},
            "cosine_ratio": _ratios(cosine, "not", relations),
            "cosine_ratio_hedged": ratio_interval(cosine["hedged"] / cosine["neutral"]),
            "negation_nearer_than_same_relation": {
                "words": _share(
                    self.words["negation"][which, -1], self.words["same_relation"][which, -1]
                ),
                "cosine": _share(cosine["negation"], cosine["same_relation"]),
            },
        }

    def _everything(self) -> list[dict[str, Any]]:
        """All sources, [CLS] and [SEP] among the tokens."""
        entries = []
        for layer in range(self.everything["negation"].shape[1]):
            distances = {name: x[:, layer] for name, x in self.everything.items()}
            means = {name: interval(distances[name]) for name in CONDITIONS}
            ratio = ratio_interval(distances["not"] / distances["neutral"])
            entries.append({"layer": layer, "all": means, "ratio": ratio})
        return entries

    def _word(self, word: str) -> dict[str, Any]:
        """One neutral word by itself, at the last layer."""
        first, last = (self.words["not"] / self.words[word]).T[[0, -1]]
        return {
            "ratio_layer_0": ratio_interval(first),
            "ratio_last_layer": ratio_interval(last),
            "cosine_ratio": ratio_interval(self.cosine["not"] / self.cosine[word]),
        }


def negation(
    model: Any,
    tokenizer: Any,
    cases: Sequence[Case],
    *,
    advance: Callable[[float], object] | None = None,
) -> Negation:
    """Distances of every case, under every condition it has.

    >>> cases = drawn_cases(read_facts(Path("data/negation")), 300)
    >>> found = negation(*lens.load("build/models/minilm"), cases)
    >>> found.words["not"][:, -1]                   # last layer, one number a case
    """
    if not cases:
        raise ValueError("there is no sentence with a negation to compare it with")
    rows, longer = [], 0
    for start in range(0, len(cases), _CHUNK):
        some = cases[start : start + _CHUNK]
        texts = dict.fromkeys(text for case in some for text in _texts(case))
        known = dict(zip(texts, clouds(model, tokenizer, list(texts)), strict=True))
        for case in some:
            rows.append([_compared(case, name, known) for name in _MEASURED])
            longer += _unequal(case, known)
        if advance is not None:
            advance(len(some) / len(cases))
    table = torch.stack([torch.stack(row) for row in rows])  # (case, condition, figure)
    depth = (table.shape[-1] - 1) // 2
    parts = table.split([depth, depth, 1], -1)
    words, everything, cosine = (_by_condition(part) for part in parts)
    pooled = {name: value.squeeze(-1) for name, value in cosine.items()}
    return Negation(cases, words, everything, pooled, longer)


def _texts(case: Case) -> Iterable[str]:
    return (case.fact.sentence, *case.others.values())


def _compared(case: Case, name: str, known: dict[str, Cloud]) -> Tensor:
    """W1 of words, W1 of all, cosine distance: (2 (layers + 1) + 1), NaN without that condition."""
    one = known[case.fact.sentence]
    if name not in case.others:
        return torch.full((2 * len(one.tokens) + 1,), torch.nan, dtype=torch.float64)
    other = known[case.others[name]]
    cosine = 1 - torch.cosine_similarity(one.embedding, other.embedding, dim=0)
    return torch.cat(
        [apart(one.inner, other.inner), apart(one.tokens, other.tokens), cosine.unsqueeze(0)]
    )


def _by_condition(table: Tensor) -> dict[str, Tensor]:
    """table (case, condition, ...)"""
    by_name = dict(zip(_MEASURED, table.unbind(1), strict=True))
    for name, words in (("neutral", NEUTRAL), ("hedged", HEDGES)):
        by_name[name] = torch.stack([by_name[word] for word in words]).mean(0)
    return by_name


def _unequal(case: Case, known: dict[str, Cloud]) -> bool:
    lengths = {
        known[case.others[name]].tokens.shape[1]
        for name in ("not", *NEUTRAL, *HEDGES)
        if name in case.others
    }
    return len(lengths) > 1


# ---- summaries


def _ratios(values: dict[str, Tensor], name: str, relations: Sequence[str]) -> dict[str, Any]:
    """Paired, to the neutral words: over pairs, and over relations (geometric means of each)."""
    logs = (values[name] / values["neutral"]).log()
    groups = [
        logs[torch.tensor([other == relation for other in relations])].nanmean()
        for relation in dict.fromkeys(relations)
    ]
    return {
        **ratio_interval(logs.exp()),
        "over_relations": ratio_interval(torch.stack(groups).exp()),
    }


def _share(smaller: Tensor, larger: Tensor) -> dict[str, Any]:
    """How often the one is below the other, of the pairs that have both."""
    both = ~(smaller.isnan() | larger.isnan())
    n = int(both.sum())
    share = float((smaller < larger)[both].double().mean()) if n else None
    return {"share": rounded(share), "n": n}
