"""`python -m benchmarks`: every command says what it does, and fails clearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import maps
from benchmarks.command import commands

run = CliRunner().invoke
pytestmark = pytest.mark.smoke
COMMANDS = (
    "maps",
    "attention",
    "integrals",
    "continuous",
    "dual",
    "gpu",
    "models",
    "serve",
    "structure",
    "wasserstein",
)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_shows_an_example(command: list[str]) -> None:
    result = run(commands, [*command, "--help"])
    assert result.exit_code == 0
    example = f"Example: python -m benchmarks {' '.join(command)}".strip()
    assert example in " ".join(result.output.split())


def test_maps_prints_ratios_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "maps.json"
    sizes = ["--rows", "16", "--length", "8", "--repeats", "2"]
    result = run(commands, ["maps", "--quick", *sizes, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "fl.sparsemax" in result.output
    document = json.loads(out.read_text())
    assert document["settings"]["rows"] == 16  # what is given wins over --quick
    assert document["settings"]["repeats"] == 2
    assert document["machine"]["torch"]
    assert {entry["direction"] for entry in document["results"]} == {"forward", "forward+backward"}


def test_maps_warns_when_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = tuple(maps.Timing("x", d, 1, (1.0,), 1.0, busy=0.1) for d in maps.DIRECTIONS)
    monkeypatch.setattr(maps, "run", lambda settings, advance: maps.Report(settings, timings))
    result = run(commands, ["maps", "--quick"])
    assert result.exit_code == 0  # a warning, never a gate
    assert "Do not trust these ratios" in result.stderr


def test_maps_refuses_no_rows() -> None:
    assert run(commands, ["maps", "--rows", "0"]).exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_figures_go_into_a_folder_that_is_there(tmp_path: Path, command: str) -> None:
    """A misspelt one is refused before the work, not made."""
    out = tmp_path / "misspelt" / "x.json"
    words = [command, "--out", str(out)]
    result = run(commands, words, env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert "there is no folder" in result.output
    assert not out.parent.exists()


@pytest.mark.parametrize(("count", "limit"), [(0, 1), (-1, 1), (1025, 1024), (100_000, 1024)])
@pytest.mark.parametrize("name", ["maps", "attention", "continuous", "serve"])
def test_threads_that_torch_does_not_survive_are_refused(name: str, count: int, limit: int) -> None:
    result = run(commands, [name, "--quick", f"--threads={count}"])
    assert result.exit_code == 2
    _, message = result.output.rsplit("--threads", 1)
    assert str(limit) in message
