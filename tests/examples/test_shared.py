"""What the examples share: options, data, models, and the table that lists them."""

import re
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, load

DATA = load("_data")
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("[0-9][0-9]_*.py"))


def test_data_lie_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("FENCHEL_SHARED", "/somewhere")
    assert DATA.shared_data() == Path("/somewhere/data")
    monkeypatch.delenv("FENCHEL_SHARED")
    assert DATA.shared_data() == EXAMPLES.parents[1] / "shared" / "data"


@pytest.mark.parametrize(
    ("arguments", "steps"), [([], 7), (["--quick"], 2), (["--quick", "--steps", "5"], 5)]
)
def test_steps_are_the_given_or_the_usual(arguments, steps):
    options = DATA.parser("text", "examples/x.py")
    DATA.add_steps(options, usual=7, quick=2)
    assert DATA.steps_of(options.parse_args(arguments)) == steps


def test_no_steps_are_refused(capsys):
    options = DATA.parser("text", "examples/x.py")
    DATA.add_steps(options, usual=7, quick=2)
    with pytest.raises(SystemExit):
        options.parse_args(["--steps", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err


def test_a_missing_model_ends_with_the_way_out(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        DATA.need_model(tmp_path)
    assert stopped.value.code == 2
    assert "make demo" in capsys.readouterr().err
    (tmp_path / "config.json").touch()
    DATA.need_model(tmp_path)


def test_what_takes_the_place_is_said(tmp_path, capsys):
    assert DATA.found(tmp_path, "nothing")
    assert capsys.readouterr().out == ""
    assert not DATA.found(tmp_path / "none", "a generated text")
    assert capsys.readouterr().out.endswith("none is not there: a generated text takes its place\n")


def test_every_item_is_tracked():
    assert list(DATA.track(range(4), "counting")) == [0, 1, 2, 3]


def test_the_table_lists_every_example():
    listed = re.findall(
        r"^\| \[(\d\d_\w+\.py)\]\(\1\) \|", (EXAMPLES / "README.md").read_text(), re.M
    )
    assert listed == SCRIPTS
    assert len(listed) == 14


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_example_says_its_idea_and_how_to_run_it(name):
    docstring = (EXAMPLES / name).read_text().split('"""')[1]
    assert f"\n    python examples/{name}" in docstring
