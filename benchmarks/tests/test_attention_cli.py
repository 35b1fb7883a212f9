"""`python -m benchmarks attention`: tables, JSON, picture, and clear refusals."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import attention
from benchmarks.command import commands
from benchmarks.tests.test_attention import TINY

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUICK", TINY)
    monkeypatch.setattr(attention, "FULL", replace(TINY, sizes=(8,), focus=0, row_maps=None))


def test_help_shows_an_example() -> None:
    result = run(commands, ["attention", "--help"])
    assert result.exit_code == 0
    assert "Example: python -m benchmarks attention --quick" in " ".join(result.output.split())


@pytest.mark.smoke
def test_quick_prints_tables_and_writes_json_and_picture(tmp_path: Path) -> None:
    out = tmp_path / "attention.json"
    arguments = ["attention", "--quick", "--threads", "1", "--out", str(out)]
    result = run(commands, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for text in ("fl Tsallis(1.5), deviation 0.5", "causal", "fl.sparsemax", "no luck"):
        assert text in result.output
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["settings"]["threads"] == 1
    assert {entry["n"] for entry in document["results"]} == {8, 24}
    picture = out.with_suffix(".svg")
    assert result.stdout.splitlines()[-2:] == [str(out), str(picture)]
    ElementTree.parse(picture)
    assert "#0a0b0" not in picture.read_text(encoding="utf-8")  # every placeholder was replaced


def test_the_full_sweep_is_the_default() -> None:
    result = run(commands, ["attention"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "fl Tsallis(1.5), deviation 0.5" in result.output
    assert "24" not in result.output.splitlines()[2]  # one column, for eight tokens


def test_largest_leaves_sizes_out_and_refuses_to_leave_none(tmp_path: Path) -> None:
    out = tmp_path / "attention.json"
    arguments = ["attention", "--quick", "--out", str(out), "--largest"]
    assert run(commands, [*arguments, "8"]).exit_code == 0
    assert {entry["n"] for entry in json.loads(out.read_text())["results"]} == {8}
    refused = run(commands, [*arguments, "7"])
    assert refused.exit_code == 2
    assert "the shortest sequence has 8 tokens" in " ".join(refused.output.split())


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.Neighbours, "share", lambda self: 0.5)
    result = run(commands, ["attention"])
    assert result.exit_code == 0  # a warning, never a gate
    assert "Do not trust these ratios" in result.stderr


def test_without_matplotlib_the_json_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.attention_picture", raising=False)
    monkeypatch.delitem(sys.modules, "fenchel.lens.pictures.draw", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "attention.json"
    result = run(commands, ["attention", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "no picture: matplotlib" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["attention.json"]


def test_a_folder_that_is_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(commands, ["attention", "--out", str(tmp_path / "file" / "x.json")])
    assert result.exit_code == 2
