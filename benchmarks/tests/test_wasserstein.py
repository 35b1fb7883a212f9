"""The benchmark of the Wasserstein distances measures what it says. No test depends on a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import wasserstein
from benchmarks.attention_rounds import Rounds
from benchmarks.command import commands
from tests import needs

needs.package("ot", "the benchmark of Wasserstein distances")
TINY = wasserstein.Sweep(
    line=(5, 9), plane=(4, 6), bounds=7, batch=3, small=4, rounds=Rounds(1, 1, 0.1), seed=3
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(json.dumps(wasserstein.run(TINY).as_json()))


def test_every_method_finds_the_same_distance(document: dict[str, Any]) -> None:
    cases = {(e["case"], e["n"], e["batch"]) for e in document["results"]}
    lines = {(f"line, {kind}", n, 1) for kind in ("even weights", "weights") for n in (5, 9)}
    planes = {("assignment", 4, 1), ("assignment", 6, 1), ("bounds", 7, 1)}
    assert cases == lines | planes | {("batch, line", 4, 3), ("batch, assignment", 4, 3)}
    for entry in document["results"]:
        assert entry["error"] == ""
        assert entry["seconds"] > 0
        if entry["method"] == wasserstein.BOUNDS:
            assert 0 <= entry["off"] <= entry["proven"] + 1e-12
        else:
            assert entry["off"] < 1e-12


def test_a_method_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        wasserstein,
        "_pot",
        lambda mu, nu: wasserstein.Distance(1.01 * wasserstein._ours(mu, nu)[0]),
    )
    results = wasserstein.run(replace(TINY, line=(5,), plane=())).results
    assert all(abs(e["off"] - 0.01) < 1e-9 for e in results if e["method"] == wasserstein.POT)


def test_a_method_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(mu: object, nu: object) -> wasserstein.Distance:
        raise ImportError("no POT here")

    monkeypatch.setattr(wasserstein, "_pot", missing)
    document = wasserstein.run(replace(TINY, line=(5,), plane=())).as_json()
    (listing,) = wasserstein.listings(document)
    assert "no POT here" in listing.rows[0][5]
    assert listing.rows[1][4] == "–"


def test_listing_has_a_row_for_each_measurement(document: dict[str, Any]) -> None:
    (listing,) = wasserstein.listings(document)
    assert len(listing.rows) == len(document["results"]) == 8 * 2 + 3
    assert {row[4] for row in listing.rows if row[2] == wasserstein.POT} == {"1"}
    assert "3 x 4" in {row[1] for row in listing.rows}


@pytest.mark.smoke
def test_command_writes_json_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasserstein, "QUICK", TINY)
    out = tmp_path / "wasserstein.json"
    result = CliRunner().invoke(commands, ["wasserstein", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["bench"] == "wasserstein"
    assert (tmp_path / "wasserstein.svg").read_text().startswith("<?xml")
    shown = CliRunner().invoke(commands, ["wasserstein", "--help"])
    assert "Example: python -m benchmarks wasserstein --quick" in " ".join(shown.output.split())
