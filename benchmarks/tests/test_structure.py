"""The benchmark of masks, biases, one query and short rows. No test depends on a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import pictures, structure
from benchmarks.attention_rounds import Rounds
from benchmarks.command import commands

TINY = structure.Sweep((1, 40), ((4, 2, 8),), (16,), 64, 300, (1, 2), Rounds(1, 1, 0.1))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(json.dumps(structure.run(TINY).as_json()))


def test_every_case_is_measured_beside_its_first_method(document: dict[str, Any]) -> None:
    assert {e["threads"] for e in document["results"]} == {1, 2}
    for entry in document["results"]:
        assert entry["error"] == ""
        assert entry["seconds"] > 0
        assert entry["least"] <= entry["ratio"] <= entry["most"]
    firsts = [e for e in document["results"] if e["method"] in ("torch", "plain", "dense")]
    assert firsts
    assert all(e["ratio"] == 1 for e in firsts)
    cases = {e["case"] for e in document["results"]}
    assert any("one query" in case for case in cases)
    assert any("documents" in case for case in cases)


def test_bars_leave_the_measures_out(document: dict[str, Any]) -> None:
    names, values = pictures.ratio_bars(document, 1)
    assert len(names) == len(values)
    assert any(name.endswith("window") for name in names)
    assert not any(name.endswith((": torch", ": plain", ": dense")) for name in names)


@pytest.mark.smoke
def test_the_command_writes_figures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "QUICK", TINY)
    out = tmp_path / "structure.json"
    result = CliRunner().invoke(commands, ["structure", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Entmax-1.5, beside the first method of each case" in result.output
    assert json.loads(out.read_text())["bench"] == "structure"
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
