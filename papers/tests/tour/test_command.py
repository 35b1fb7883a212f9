"""`python -m papers tour`: one file, its path on standard output, clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from papers.__main__ import app
from papers.tour import chapters
from papers.tour.chapter import Chapter, Tour

run = CliRunner().invoke
pytestmark = pytest.mark.smoke


class _Stub:
    """A chapter that costs nothing."""

    __name__ = "papers.tour.chapters.stub"
    ORDER = 1

    def chapter(self, tour: Tour) -> Chapter:
        return Chapter(f"Stub {tour.seed}", "Nothing to see.")


def test_one_file_is_written_and_its_path_printed(
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


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    result = run(app, ["tour", "--out", str(taken)])
    assert result.exit_code == 2
    assert taken.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(app, ["tour", "--out", str(tmp_path / "file" / "sub")])
    assert result.exit_code == 2
    assert "cannot make the folder" in result.output.replace("\n", " ")


@pytest.mark.parametrize("command", [[], ["tour"], ["claims"], ["experiment"], ["study"]])
def test_help_shows_an_example(command: list[str]) -> None:
    result = run(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: python -m papers {' '.join(command)}" in " ".join(result.output.split())
