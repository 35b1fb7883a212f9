"""What is said about the study of negations is read from its file."""

import json

import pytest

from papers import claims

CLAIM = claims.ledger()["M-NEG"]


def document(last, share):
    layers = [{"ratio": {"mean": mean}} for mean in (0.9, 1.2, last)]
    nearer = {"words": {"share": share, "n": 40}}
    together = {"layers": layers, "negation_nearer_than_same_relation": nearer}
    return json.dumps({"model": "A", "sources": {"together": together}})


def note(folder):
    return claims.run(CLAIM, results=folder).notes[0]


@pytest.fixture
def folder(tmp_path):
    """Of experiments, beside which the studies lie."""
    experiments = tmp_path / "experiments"
    experiments.mkdir()
    return experiments


@pytest.mark.parametrize(("last", "share"), [(1.5, 1.0), (3.25, 0.75)])
def test_figures_are_those_of_the_file(folder, last, share):
    (folder.parent / "study_negation.json").write_text(document(last, share), encoding="utf-8")
    said = note(folder)
    assert f"{last:.2f} times as far" in said
    assert "at the input 0.90 times" in said
    assert f"in {100 * share:g} % of 40 pairs" in said


def test_no_file(folder):
    assert "not at hand" in note(folder)
    assert "not at hand" in note(None)
    assert not any(digit in note(None) for digit in "0123456789")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"sources": {"together": 1}}'])
def test_a_file_that_cannot_be_read(folder, text):
    (folder.parent / "study_negation.json").write_text(text, encoding="utf-8")
    assert "cannot be read" in note(folder)
