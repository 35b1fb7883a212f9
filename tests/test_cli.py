"""The command line: every command runs, says what it does, and fails clearly."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import fenchel as fl
from fenchel import __main__ as entry
from fenchel import _info as machine
from fenchel._kernels.route import describe_native
from fenchel.cli import app
from fenchel.cli.audit_settings import CommandSettings

run = CliRunner().invoke


@pytest.mark.parametrize("command", [[], ["info"], ["audit"]])
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
    active, why = describe_native()
    assert native == {"name": "native kernels", "active": active, "why": why}


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
    monkeypatch.delattr(fl, "_info")
    with pytest.raises(ModuleNotFoundError):
        entry.main()


@pytest.mark.parametrize(("count", "limit"), [(0, 1), (-1, 1), (1025, 1024), (100_000, 1024)])
def test_threads_that_torch_does_not_survive_are_refused(count, limit):
    given = ["audit", "no-such-model", "--texts", "none.txt", f"--threads={count}"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    _, message = result.output.rsplit("--threads", 1)
    assert str(limit) in message


@pytest.mark.parametrize(("shown", "chunk"), [("--texts", 32), ("--images", 4)])
def test_the_audit_is_given_one_object(shown, chunk, monkeypatch):
    """Every option has its place in it, as numbers and not as text."""
    calls: list[CommandSettings] = []
    monkeypatch.setattr("fenchel.cli.audit.carry_out", calls.append)
    given = ["audit", "m", shown, "s", "--out", "o", "--layers", "0,2-3", "--alphas", "1.2"]
    given += ["--measures", "weights, local", "--threads", "3", "--seed", "5", "--no-figures"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    (settings,) = calls
    assert settings.chunk == chunk
    assert (settings.model.name, settings.inputs.seed, settings.inputs.longest) == ("m", 5, 512)
    assert (settings.output.figures, settings.output.resume) == (False, False)
    assert settings.resources.threads == 3
    assert settings.audit.layers == (0, 2, 3)
    assert settings.audit.measures == ("weights", "local")
    assert settings.audit.alphas == (1.2,)
