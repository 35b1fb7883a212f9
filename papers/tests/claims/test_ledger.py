"""Every entry has a claim; each says its verdict, and none of them with a broken library."""

import ast
import json
import math
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from papers import claims
from papers.claims import Evidence, Verdict
from papers.claims.ledger import Claim, Record
from papers.claims.listed import FAMILIES, find
from tests import needs

MUTATED = (
    "deciphering",
    "deciphering_transport",
    "theory",
    "onesided",
    "thesis",
    "thesis_integrals",
)
MODULES = [import_module(f"papers.tests.claims.mutations.{name}") for name in MUTATED]
MUTATIONS = {id: each for module in MODULES for id, each in module.MUTATIONS.items()}
WITHOUT = {id: why for module in MODULES for id, why in module.WITHOUT.items()}
LEDGER = claims.ledger()


@pytest.mark.smoke
def test_every_entry_has_a_claim():
    assert [entry.id for entry in claims.listed()] == list(LEDGER)


def test_every_claim_has_a_mutation_or_a_reason():
    assert MUTATIONS.keys() | WITHOUT.keys() == LEDGER.keys()
    assert not MUTATIONS.keys() & WITHOUT.keys()
    told = {id for id in WITHOUT if LEDGER[id].verdict in (Verdict.CONFIRMED, Verdict.CORRECTED)}
    assert not told, "a verdict of confirmation must be able to fail"


def test_every_family_is_mutated():
    for name in FAMILIES:
        bodies = {each.body for each in LEDGER.values() if each.body.__module__.endswith(name)}
        assert any(LEDGER[id].body in bodies for id in MUTATIONS), name


def quickest():
    """One entry of each family, by the seconds of the stored ledger."""
    stored = json.loads((needs.ROOT / "papers/results/ledger.json").read_text(encoding="utf-8"))
    seconds = {entry["id"]: entry["seconds"] for entry in stored if entry["checks"]}
    return {
        min(
            (id for id, each in LEDGER.items() if each.body.__module__.endswith(name)),
            key=lambda id: seconds.get(id, math.inf),
        )
        for name in FAMILIES
    }


SMOKE = quickest()


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.smoke] * (id in SMOKE)) for id in LEDGER]
)
def test_the_evidence_bears_the_verdict_out(id):
    record = claims.run(LEDGER[id])
    failed = [check for check in record.checks if not check.bears_out]
    assert record.verdict is LEDGER[id].verdict, failed


@pytest.mark.parametrize(
    ("id", "mutation"), [(id, each) for id, several in MUTATIONS.items() for each in several]
)
def test_a_broken_library_is_noticed(id, mutation, monkeypatch):
    mutation.apply(monkeypatch)
    assert noticed(claims.run(LEDGER[id]))


def noticed(record: Record) -> bool:
    """By a check that fails: a claim that was not computed may have checks that cannot."""
    computed = not any("not computed" in note for note in record.notes)
    failed = not all(check.bears_out for check in record.checks)
    return computed and failed and record.verdict is Verdict.CONTRADICTED


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 200])
@pytest.mark.parametrize("id", LEDGER)
def test_other_seeds_and_longer_searches(id, seed):
    record = claims.run(LEDGER[id], seed=seed, slow=True)
    assert record.verdict is LEDGER[id].verdict, record.checks


# ---- against the shared list


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """Of each entry of CLAIMS.md its id and what stands after R:"""
    path = needs.shared("CLAIMS.md", covers="the ledger against the written list of claims")
    lines = re.findall(r"^- \*\*([^*]+)\*\*(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.split(r"[ ,]", name)[0]: rest.split("R: ", 1)[1] for name, rest in lines}


def test_the_list_is_the_shared_one(written):
    assert list(written) == [entry.id for entry in claims.listed()]


# Entries whose expected verdict is several, or none of the five words.
SETTLED = {
    "D-Fig3": Verdict.CORRECTED,  # a trend that holds in the end, and a range that does not
    "D-P1lim": Verdict.CORRECTED,  # its assumption is broken by both of its own costs
    "M-R15": Verdict.CORRECTED,
    "M-R27": Verdict.CORRECTED,
    "F-E3.8": Verdict.CORRECTED,  # the gradient holds, the convexity only for alpha <= 2
    "F-S3.2txt": Verdict.CORRECTED,
    "F-S6.2": Verdict.CORRECTED,
}
WORDS = {
    "CONFIRMED": Verdict.CONFIRMED,
    "CWC": Verdict.CORRECTED,
    "REFUTED": Verdict.REFUTED,
    "NC": Verdict.NOT_CHECKABLE,
    "DEF": Verdict.DEFINITION,
}


def test_verdicts_are_the_expected_ones(written):
    for id, text in written.items():
        word = re.match(r"[A-Z]+", text)
        expected = SETTLED[id] if id in SETTLED else WORDS[word.group()]
        assert LEDGER[id].verdict is expected, id


def test_no_two_entries_share_a_name():
    every = [name.casefold() for entry in claims.listed() for name in entry.names()]
    assert len(every) == len(set(every))


# ---- what a verdict needs


def said(verdict, body):
    return claims.run(Claim("D-E1", "", verdict, body))


def test_nothing_is_confirmed_without_a_check():
    for verdict in (Verdict.CONFIRMED, Verdict.CORRECTED, Verdict.REFUTED, Verdict.NOT_CHECKABLE):
        with pytest.raises(ValueError, match="without"):
            said(verdict, lambda evidence: None)


def test_a_refutation_needs_a_computation_that_fails_as_printed():
    def body(evidence: Evidence) -> None:
        evidence.counterexample = "one"
        evidence.printed_below("x", 2.0, 1.0)

    assert said(Verdict.REFUTED, body).verdict is Verdict.REFUTED

    def tame(evidence: Evidence) -> None:
        evidence.counterexample = "one"
        evidence.printed_below("x", 0.5, 1.0)

    assert said(Verdict.REFUTED, tame).verdict is Verdict.CONTRADICTED


@pytest.mark.parametrize("method", ["below", "printed_below"])
def test_nan_proves_nothing(method):
    def body(evidence: Evidence) -> None:
        evidence.counterexample = "one"
        evidence.printed_below("true", 2.0, 1.0)
        getattr(evidence, method)("x", float("nan"), 1.0)

    assert said(Verdict.REFUTED, body).verdict is Verdict.CONTRADICTED


@pytest.mark.parametrize(("method", "figure"), [("above", math.inf), ("below", -math.inf)])
def test_infinity_proves_nothing_unless_it_is_the_point(method, figure):
    def verdict(figure, **options):
        def body(evidence: Evidence) -> None:
            getattr(evidence, method)("x", figure, 0.0, **options)

        return said(Verdict.CONFIRMED, body).verdict

    assert verdict(figure) is Verdict.CONTRADICTED
    assert verdict(figure, infinite=True) is Verdict.CONFIRMED
    assert verdict(math.nan, infinite=True) is Verdict.CONTRADICTED
    assert verdict(-figure, infinite=True) is Verdict.CONTRADICTED


def test_infinity_does_not_refute():
    def body(evidence: Evidence) -> None:
        evidence.counterexample = "one"
        evidence.printed_below("x", math.inf, 1.0)

    assert said(Verdict.REFUTED, body).verdict is Verdict.CONTRADICTED


def test_a_claim_that_fails_is_contradicted_and_says_why():
    def body(evidence: Evidence) -> None:
        evidence.below("fine", 0.0)
        raise RuntimeError("no such thing")

    record = said(Verdict.CONFIRMED, body)
    assert record.verdict is Verdict.CONTRADICTED
    assert "no such thing" in record.notes[0]
    assert not noticed(record)


def test_a_mutation_is_noticed_by_a_check_alone():
    def body(figure):
        return lambda evidence: evidence.below("x", figure, 1.0)

    assert noticed(said(Verdict.CONFIRMED, body(2.0)))
    assert noticed(said(Verdict.CONFIRMED, body(math.nan)))
    assert not noticed(said(Verdict.CONFIRMED, body(0.5)))


def test_figures_of_several_keep_nan_and_refuse_none():
    def body(figures):
        return lambda evidence: evidence.below("x", figures, 1.0)

    assert said(Verdict.CONFIRMED, body([0.5, torch.tensor([0.1, 0.75])])).checks[0].figure == 0.75
    assert said(Verdict.CONFIRMED, body([0.5, math.nan])).verdict is Verdict.CONTRADICTED
    assert said(Verdict.CONFIRMED, body([math.nan, 0.5])).verdict is Verdict.CONTRADICTED
    assert "no figures" in said(Verdict.CONFIRMED, body([])).notes[0]


def test_no_claim_reduces_figures_by_what_loses_nan():
    """Python's max([0.1, nan]) is 0.1: a check takes the figures themselves."""
    for path in sorted((Path(claims.__file__).parent).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("max", "min"):
                assert len(node.args) > 1, f"{path.name}:{node.lineno}: use evidence.largest"


def test_entries_are_found_by_any_of_their_names():
    assert find("d-e6").id == find("D-E5").id == "D-E5/E6"
    assert find("F-A1").id == "F-E3.17/3.18"
    assert find("D-E28").id == "D-E27/28"
    assert find(" F-E3.4 ").id == "F-E3.3/3.4"
    assert find("D-E24").id == "D-E23..26"
    assert find("F-A.20").id == "F-A.18..21"
    assert find("F-E4.9").id == "F-E4.7..4.10"
    assert find("F-A.38").id == "F-A.35..A.41"
    assert find("M-L33").id == "M-L32/33/34"
    with pytest.raises(KeyError, match="D-Tab1, D-Tab2"):
        find("D-Tab")


def test_the_readme_counts_them():
    words = {9: "nine", 5: "five"}
    text = " ".join((needs.ROOT / "README.md").read_text(encoding="utf-8").split())
    held = {verdict: sum(c.verdict is verdict for c in LEDGER.values()) for verdict in Verdict}
    assert f"computes the {len(LEDGER)} theorems" in text
    assert (
        f"{held[Verdict.CONFIRMED]} are confirmed, {held[Verdict.CORRECTED]} confirmed with" in text
    )
    assert f"{held[Verdict.REFUTED]} refuted with a counterexample" in text
    assert f"{words[held[Verdict.NOT_CHECKABLE]]} cannot be checked" in text
    assert f"{words[held[Verdict.DEFINITION]]} are definitions" in text
