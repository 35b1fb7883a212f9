"""What a launcher says in the environment is a number in its place, or told to be none."""

import pytest
from typer.testing import CliRunner

from fenchel.cli import app
from fenchel.lens.launcher import check_environment, rank, world_size

WRONG = [
    (
        {"RANK": "abc"},
        "RANK is 'abc', expected a whole number >= 0; unset it, or start by torchrun",
    ),
    ({"RANK": "-1"}, "RANK is '-1', expected a whole number >= 0"),
    ({"RANK": "1.0"}, "RANK is '1.0', expected a whole number >= 0"),
    ({"RANK": "--1"}, "RANK is '--1', expected a whole number >= 0"),
    ({"RANK": "3"}, "RANK is 3, expected less than WORLD_SIZE, which is 1"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, expected less than WORLD_SIZE, which is 2"),
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', expected a whole number >= 1"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', expected a whole number >= 1"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', expected a whole number >= -1"),
    ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x', expected a whole number >= 1"),
    ({"MASTER_PORT": "xyz"}, "MASTER_PORT is 'xyz', expected a whole number >= 0"),
]


@pytest.fixture(autouse=True)
def none(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_none_is_one_process(monkeypatch):
    check_environment()
    assert (rank(), world_size()) == (0, 1)
    monkeypatch.setenv("RANK", " ")
    monkeypatch.setenv("LOCAL_RANK", "-1")
    check_environment()
    assert (rank(), world_size()) == (0, 1)


def test_numbers(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_environment()
    assert (rank(), world_size()) == (1, 2)


@pytest.mark.parametrize(("environment", "message"), WRONG)
def test_what_is_wrong_is_named(monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"the environment variable {message}"):
        check_environment()


@pytest.mark.parametrize("environment", [{"RANK": "abc"}, {"WORLD_SIZE": "x"}, {"RANK": "3"}])
def test_the_command_says_it_in_one_line(tmp_path, environment):
    """Before any work; there is no model in this folder."""
    words = ["audit", str(tmp_path), "--texts", "a.txt", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words, env=environment)
    assert_told(result, "audit", environment)
    assert not (tmp_path / "out").exists()


def assert_told(result, command, environment):
    """One line that names the variable and its value."""
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    name, value = next(iter(environment.items()))
    assert f"{command}: the environment variable {name} is " in line
    assert value in line
