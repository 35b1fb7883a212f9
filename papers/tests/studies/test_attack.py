"""`python -m papers study attack`, on small things, and the help of all studies."""

import json

import pytest
from typer.testing import CliRunner

from papers.__main__ import app
from papers.studies import campaign


def run(*arguments):
    return CliRunner().invoke(app, ["study", *map(str, arguments)])


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(campaign, "MAPS", (campaign.dropped, campaign.query_softmax))
    monkeypatch.setattr(campaign, "TRANSPORT", (campaign.projection,))


def test_the_attack_counts_its_trials(few, tmp_path):
    result = run("attack", "--trials", 400, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "study_attack.json").read_text())
    assert [entry["trials"] for entry in document["bounds"]] == [400, 400, 40]
    assert all(entry["exceeded"] == 0 for entry in document["bounds"])
    assert all(entry["ratio"] > 1 for entry in document["printed"])
    assert len(document["printed"]) == 4


def test_the_attack_goes_on_where_it_was(few, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run("attack", "--trials", 300, "--out", whole)
    path = tmp_path / "part" / "study_attack.json"
    path.parent.mkdir()
    document = json.loads((whole / "study_attack.json").read_text())
    path.write_text(json.dumps({**document, "bounds": document["bounds"][:2]}))
    monkeypatch.setattr(campaign, "MAPS", (campaign.dropped, campaign.query_softmax))
    result = run("attack", "--trials", 300, "--out", path.parent)
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text()) == document
    other = run("attack", "--trials", 500, "--out", path.parent)
    assert other.exit_code != 0
    assert "other settings" in other.output


def test_a_bound_that_is_exceeded_is_shouted(tmp_path, monkeypatch):
    from dataclasses import replace

    def wrong(draw):
        bound = campaign.projection(draw)
        return replace(bound, value=0.5 * bound.value)

    monkeypatch.setattr(campaign, "MAPS", (wrong,))
    monkeypatch.setattr(campaign, "TRANSPORT", ())
    result = run("attack", "--trials", 400, "--out", tmp_path)
    assert result.exit_code == 1
    document = json.loads((tmp_path / "study_attack.json").read_text())
    assert document["bounds"][0]["exceeded"] > 0
    assert "EXCEEDED: wrong" in result.stderr


@pytest.mark.smoke
@pytest.mark.parametrize("command", ["attack", "robustness", "depth", "negation"])
def test_help_shows_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"python -m papers study {command}" in " ".join(result.output.split())


@pytest.mark.smoke
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": {"tri'])
def test_a_damaged_file_is_named(few, tmp_path, content):
    (tmp_path / "study_attack.json").write_text(content)
    result = run("attack", "--trials", 40, "--out", tmp_path)
    assert result.exit_code == 2
    assert "is damaged" in " ".join(result.output.replace("│", " ").split())
