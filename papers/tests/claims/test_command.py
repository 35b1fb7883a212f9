"""`python -m papers claims`: what it prints and writes, and its exit code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from fenchel import measures
from papers import claims
from papers.__main__ import app
from papers.claims import Evidence, Verdict
from papers.claims.ledger import Claim
from tests import needs


def _right(evidence: Evidence) -> None:
    evidence.below("distance", 1e-17)
    evidence.note("A remark.")


def _false(evidence: Evidence) -> None:
    evidence.printed_below("ratio", 3.0, 1.0)
    evidence.above("ratio, corrected", 3.0, 2.0)
    evidence.counterexample = "x = [3]"
    evidence.correction = "ratio ≤ 4"


def _broken(evidence: Evidence) -> None:
    evidence.below("distance", 0.5)


BOOK = {
    "D-E1": Claim("D-E1", "a mean", Verdict.CONFIRMED, _right),
    "L-5": Claim("L-5", "a <gradient>", Verdict.REFUTED, _false),
}
SPOILT = BOOK | {"L-6": Claim("L-6", "a Hessian", Verdict.CONFIRMED, _broken)}


@pytest.fixture
def book(monkeypatch):
    monkeypatch.setattr(claims, "ledger", lambda: BOOK)


def call(*words):
    return CliRunner().invoke(app, ["claims", *words])


@pytest.mark.smoke
@pytest.mark.usefixtures("book")
def test_table_counterexample_and_count():
    result = call()
    assert result.exit_code == 0, result.output
    assert "x = [3]" in result.output
    assert "1 CONFIRMED, 1 REFUTED" in result.output


@pytest.mark.usefixtures("book")
def test_json_alone_on_standard_output():
    entries = json.loads(call("--json", "-").stdout)
    assert [(each["id"], each["verdict"]) for each in entries] == [
        ("D-E1", "CONFIRMED"),
        ("L-5", "REFUTED"),
    ]
    assert entries[0]["figure"] == 1e-17
    assert all(each["seconds"] >= 0 for each in entries)


@pytest.mark.usefixtures("book")
def test_papers_and_ids_are_chosen():
    assert [each["id"] for each in json.loads(call("--paper", "l", "--json", "-").stdout)] == [
        "L-5"
    ]
    assert [each["id"] for each in json.loads(call("--id", "d-e1", "--json", "-").stdout)] == [
        "D-E1"
    ]
    both = json.loads(call("--id", "D-E1", "--paper", "L", "--json", "-").stdout)
    assert [each["id"] for each in both] == ["D-E1", "L-5"]


@pytest.mark.usefixtures("book")
def test_unknown_names_are_told():
    assert "there is D:" in " ".join(call("--paper", "X").output.split())
    wrong = call("--id", "D-Tab9")
    assert wrong.exit_code == 2
    assert "no entry 'D-Tab9'" in wrong.output


def test_a_contradiction_is_an_exit_code(monkeypatch):
    monkeypatch.setattr(claims, "ledger", lambda: SPOILT)
    result = call()
    assert result.exit_code == 1
    assert "✗ distance: 0.5" in result.output


@pytest.mark.smoke
@pytest.mark.usefixtures("book")
def test_files(tmp_path):
    page, document = tmp_path / "ledger.html", tmp_path / "ledger.json"
    result = call("--html", str(page), "--json", str(document))
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert "x = [3]" in text
    assert "a &lt;gradient&gt;" in text
    assert len(json.loads(document.read_text(encoding="utf-8"))) == 2
    assert call("--html", str(tmp_path / "none" / "x.html")).exit_code == 2


@pytest.mark.usefixtures("book")
def test_list_computes_nothing():
    assert call("--list").output.split()[:3] == ["D-E1", "a", "mean"]


def test_a_missing_extra_is_told_and_the_others_computed(monkeypatch):
    def needs(evidence: Evidence) -> None:
        raise ModuleNotFoundError("No module named 'ot'", name="ot")

    entry = Claim("M-W1", "", Verdict.CONFIRMED, needs)
    monkeypatch.setattr(claims, "ledger", lambda: BOOK | {"M-W1": entry})
    result = call()
    assert result.exit_code == 1
    assert "for want of POT: M-W1" in result.output
    assert "1 CONFIRMED, 1 REFUTED" in result.output
    alone = call("--id", "M-W1")
    assert "none computed; 0 s" in alone.output


def test_a_package_without_a_name_is_told_in_its_own_words(monkeypatch):
    def needs(evidence: Evidence) -> None:
        raise ImportError("equal weights need something")

    entry = Claim("M-W1", "", Verdict.CONFIRMED, needs)
    monkeypatch.setattr(claims, "ledger", lambda: BOOK | {"M-W1": entry})
    assert "for want of equal weights need something: M-W1" in call().output


def test_distances_name_the_packages_that_they_lack(monkeypatch):
    one, as_many, more = (measures.Empirical(torch.randn(n, 2)) for n in (3, 3, 4))
    for package, pair in {"scipy": (one, as_many), "ot": (one, more)}.items():
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.optimize", None)
        with pytest.raises(ImportError) as missing:
            measures.wasserstein1(*pair)
        assert missing.value.name == package


@pytest.mark.usefixtures("book")
def test_outputs_are_checked_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "run", None)
    same = str(tmp_path / "x")
    for words in (("--json", ""), ("--json", str(tmp_path)), ("--json", same, "--html", same)):
        assert call(*words).exit_code == 2, words
    told = call("--json", str(tmp_path / "none" / "x.json"))
    assert "--json" in told.output


def test_letters_that_a_terminal_lacks_do_not_end_the_work():
    words = [sys.executable, "-m", "papers", "claims", "--list"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=needs.ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"L-5 " in done.stdout
