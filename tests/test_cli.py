"""The command line: every command runs, says what it does, and fails clearly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fenchel as fl
from benchmarks import maps
from fenchel import __main__ as entry
from fenchel import _info as machine
from fenchel._kernels import library
from fenchel.cli import app
from papers.tour import chapters
from papers.tour.chapter import Chapter, Tour

run = CliRunner().invoke


@pytest.mark.parametrize("command", [[], ["info"], ["tour"], ["bench"], ["bench", "maps"]])
def test_help_shows_an_example(command: list[str]) -> None:
    result = run(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"Example: fenchel {' '.join(command)}".strip() in " ".join(result.output.split())


def test_version() -> None:
    assert run(app, ["--version"]).output.strip() == f"fenchel {fl.__version__}"


def test_info_lists_every_fast_path_with_a_reason() -> None:
    result = run(app, ["info"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for path in machine.fast_paths():
        assert path.name in result.output
        assert path.why in result.output  # brackets of pip commands must survive rich's markup


def test_info_as_json_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fenchel", "info", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert facts["fenchel"] == fl.__version__
    assert facts["threads"] >= 1
    native = {path["name"]: path for path in facts["fast_paths"]}["native kernels"]
    assert native == {
        "name": "native kernels",
        "active": library.native() is not None,
        "why": library.describe(),
    }


def test_info_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    paths = {path.name: path for path in machine.fast_paths()}
    assert 'pip install -c constraints.txt ".[hf]"' in paths["extra: hf"].why
    assert not paths["torch.compile"].active
    assert "no C++ compiler" in paths["torch.compile"].why


def test_compiler_is_named_without_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/some/where/cc++")
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    assert machine.cxx_compiler() == "cc++"


def test_bench_maps_prints_ratios_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "maps.json"
    sizes = ["--rows", "16", "--length", "8", "--repeats", "2"]
    result = run(app, ["bench", "maps", "--quick", *sizes, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "fl.sparsemax" in result.output
    document = json.loads(out.read_text())
    assert document["settings"]["rows"] == 16  # what is given wins over --quick
    assert document["settings"]["repeats"] == 2
    assert document["machine"]["torch"]
    assert {entry["direction"] for entry in document["results"]} == {"forward", "forward+backward"}


def test_bench_warns_when_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = tuple(maps.Timing("x", d, 1, (1.0,), 1.0, busy=0.1) for d in maps.DIRECTIONS)
    monkeypatch.setattr(maps, "run", lambda settings, advance: maps.Report(settings, timings))
    result = run(app, ["bench", "maps", "--quick"])
    assert result.exit_code == 0  # a warning, never a gate
    assert "Do not trust these ratios" in result.stderr


def test_bench_refuses_no_rows() -> None:
    result = run(app, ["bench", "maps", "--rows", "0"])
    assert result.exit_code == 2


class _Stub:
    """A chapter that costs nothing."""

    __name__ = "papers.tour.chapters.stub"
    ORDER = 1

    def chapter(self, tour: Tour) -> Chapter:
        return Chapter(f"Stub {tour.seed}", "Nothing to see.")


def test_tour_writes_one_file_and_prints_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(chapters, "discover", lambda: [_Stub()])
    monkeypatch.setattr("webbrowser.open", opened.append)
    out = tmp_path / "new"
    result = run(app, ["tour", "--out", str(out), "--seed", "7", "--open"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out / "tour.html")
    assert [path.name for path in out.iterdir()] == ["tour.html"]
    assert "Stub 7" in (out / "tour.html").read_text(encoding="utf-8")
    assert opened == [(out / "tour.html").as_uri()]


def test_tour_refuses_a_file_as_directory(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    result = run(app, ["tour", "--out", str(taken)])
    assert result.exit_code == 2
    assert taken.read_text() == "mine"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_extra_is_explained(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "fenchel.cli")
    monkeypatch.delattr(fl, "cli")
    monkeypatch.setitem(sys.modules, package, None)  # import of it now fails
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert package in message
    assert 'pip install -c constraints.txt ".[report]"' in message


def test_other_missing_modules_are_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fenchel.cli")
    monkeypatch.delattr(fl, "cli")
    monkeypatch.setitem(sys.modules, "fenchel._info", None)
    monkeypatch.delattr(fl.bench, "machine")
    with pytest.raises(ModuleNotFoundError):
        entry.main()


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "sub"
    result = CliRunner().invoke(app, ["tour", "--out", str(blocked)])
    assert result.exit_code == 2
    assert "cannot make the folder" in result.output.replace("\n", " ")


@pytest.mark.parametrize("command", ["maps", "attention", "integrals", "continuous"])
def test_figures_go_into_a_folder_that_is_there(tmp_path, command):
    """A misspelt one is refused before the work, not made."""
    out = tmp_path / "misspelt" / "x.json"
    result = CliRunner().invoke(
        app, ["bench", command, "--quick", "--out", str(out)], env={"COLUMNS": "500"}
    )
    assert result.exit_code == 2
    assert "there is no folder" in result.output
    assert not out.parent.exists()
