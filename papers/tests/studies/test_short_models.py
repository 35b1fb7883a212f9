"""Studies of a model with 32 positions, in a folder whose name matplotlib takes for a formula."""

import pytest
from typer.testing import CliRunner

from papers.__main__ import app
from tests.lens.models import save_short_bert

POSITIONS = 32
WORDS = list("abcdefghij")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_short_bert(tmp_path_factory.mktemp("models") / r"co$t \in $5", WORDS)


@pytest.fixture
def text(tmp_path):
    """Two texts of 50 words."""
    path = tmp_path / r"te$t \in $5.txt"
    path.write_text(" ".join(WORDS * 5) + "\n" + " ".join(WORDS[::-1] * 5), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "command",
    [
        ("robustness", "--layer", 1, "--draws", 2),
        ("depth", "--pairs", 2, "--layers", 2),
    ],
)
def test_studies(folder, text, tmp_path, command):
    words = ["study", command[0], folder, *command[1:], "--text", text, "--out", tmp_path]
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert next(tmp_path.rglob("*.svg"), None)


def test_the_benchmark(folder, text):
    from benchmarks import dual_methods

    layer = dual_methods.of_model(folder, text.read_text(), layer=1, tokens=64)
    assert len(layer.templates) == POSITIONS
