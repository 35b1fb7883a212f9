"""Sentences with their negations, and the controls that belong to each.

Read from a folder `negation/` with

    lama/*.jsonl      one JSON object a line: relation, subject, object, sentence, negation; the
                      object goes where [MASK] stands (Kassner and Schuetze 2020)
    neg-nli/*.tsv     index, Text, Hypothesis, gold_label in groups of three: negated text, negated
                      hypothesis, both (Hossain and others 2020)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

VARIABLE = "FENCHEL_DATA"
NEUTRAL = ("indeed", "also", "really")
HEDGES = ("possibly", "allegedly", "formerly")  # take the claim back without a negation
_TRIES = 1000
_MISSING = (
    "give --data FOLDER, the folder `negation` that holds lama/*.jsonl, or set the environment "
    f"variable {VARIABLE} to the folder that holds negation/"
)


@dataclass(frozen=True)
class Fact:
    """sentence and negation with the object in its place; subject "" if unknown."""

    source: str
    relation: str
    subject: str
    sentence: str
    negation: str

    @property
    def place(self) -> int | None:
        """Of the "not", where the negation is the sentence with that one word more."""
        plain, negated = self.sentence.split(), self.negation.split()
        for i, word in enumerate(negated):
            if word == "not" and negated[:i] + negated[i + 1 :] == plain:
                return i
        return None

    def with_word(self, word: str) -> str | None:
        """The sentence with `word` at the place of the "not", or None where it has none."""
        if self.place is None:
            return None
        words = self.sentence.split()
        return " ".join([*words[: self.place], word, *words[self.place :]])


@dataclass(frozen=True)
class Case:
    """A fact with the sentences it is compared with, by condition.

    negation; not, never and the words of `NEUTRAL` and `HEDGES`, where a "not" was put in,
    at its place;
    same_relation, other_relation: another sentence, where there is one.
    """

    fact: Fact
    others: dict[str, str] = field(repr=False)


def negation_folder(given: Path | None = None) -> Path:
    """The folder that is given, or `negation` in the folder that FENCHEL_DATA names."""
    if given is None:
        named = os.environ.get(VARIABLE, "")
        if not named:
            raise FileNotFoundError(f"no negation data: {_MISSING}")
        given = Path(named) / "negation"
    inside = given / "negation"  # the folder of all data is as good
    folder = inside if inside.is_dir() else given
    if not list(folder.glob("lama/*.jsonl")):
        raise FileNotFoundError(f"{folder} holds no lama/*.jsonl: {_MISSING}")
    return folder


def read_facts(folder: Path) -> list[Fact]:
    """All facts, each once, but those whose negation is the sentence itself (relation P159)."""
    facts = [fact for path in sorted(folder.glob("lama/*.jsonl")) for fact in _lama(path)]
    facts += [fact for path in sorted(folder.glob("neg-nli/*.tsv")) for fact in _inference(path)]
    kept = dict.fromkeys(fact for fact in facts if fact.sentence != fact.negation)
    if not kept:
        raise ValueError(f"{folder} holds no sentence with a negation that differs from it")
    return list(kept)


def _lama(path: Path) -> Iterator[Fact]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                texts = [entry[name] for name in ("sentence", "negation")]
                filled = [" ".join(x.replace("[MASK]", entry["object"]).split()) for x in texts]
                subject = str(entry["subject"] or "")
                yield Fact(path.stem, str(entry["relation"]), subject, *filled)
            except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as problem:
                raise ValueError(
                    f"{path}, line {number}: a JSON object with sentence, negation, object, "
                    f"subject and relation is needed ({problem!r})"
                ) from None


def _inference(path: Path) -> Iterator[Fact]:
    """A text beside its negated text, and a hypothesis beside its own."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    if any(len(row) != 4 for row in rows):
        raise ValueError(f"{path}: four columns are needed, index, Text, Hypothesis, gold_label")
    for first, second, third in zip(rows[::3], rows[1::3], rows[2::3], strict=False):
        negated, plain = first[1], second[1]
        if third[1] == negated != plain:
            yield _sentence(path, plain, negated)
        negated, plain = second[2], first[2]
        if third[2] == negated != plain:
            yield _sentence(path, plain, negated)


def _sentence(path: Path, plain: str, negated: str) -> Fact:
    return Fact(path.stem, path.stem, "", " ".join(plain.split()), " ".join(negated.split()))


# ---- what they are compared with


def drawn_cases(facts: Sequence[Fact], pairs: int, seed: int = 0) -> list[Case]:
    """At most `pairs` of each source, drawn at random, with their controls."""
    chance = np.random.default_rng(seed)
    cases = []
    for source in dict.fromkeys(fact.source for fact in facts):
        of_source = [fact for fact in facts if fact.source == source]
        chosen = sorted(chance.permutation(len(of_source))[:pairs].tolist())
        cases += [_case(of_source[i], facts, chance) for i in chosen]
    return cases


def _case(fact: Fact, facts: Sequence[Fact], chance: np.random.Generator) -> Case:
    others = {"negation": fact.negation}
    for word in ("not", "never", *HEDGES, *NEUTRAL):
        put = fact.with_word(word)
        if put is not None:
            others[word] = put
    group = (fact.source, fact.relation)
    same = [other for other in facts if (other.source, other.relation) == group]
    for name, among, wanted in (("same_relation", same, True), ("other_relation", facts, False)):
        other = _another(fact, among, wanted, chance)
        if other is not None:
            others[name] = other.sentence
    return Case(fact, others)


def _another(
    fact: Fact, among: Sequence[Fact], same: bool, chance: np.random.Generator
) -> Fact | None:
    """One with another subject and another sentence, of the same relation or of another."""
    for _ in range(_TRIES):
        other = among[int(chance.integers(len(among)))]
        alike = (other.source, other.relation) == (fact.source, fact.relation)
        known = other.subject == fact.subject != ""
        if alike == same and not known and other.sentence != fact.sentence:
            return other
    return None
