"""`python -m papers study deviation`: from a folder and a text file to JSON and pictures."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fenchel import lens
from papers.__main__ import app
from tests.lens.models import model_of, transformers

WORDS = ["a", "man", "is", "playing", "the", "guitar", "and", "nobody", "knew", "it"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small BERT with a tokenizer, as from_pretrained likes it."""
    path = tmp_path_factory.mktemp("models") / "tiny-bert"
    model_of("bert", torch.float32).save_pretrained(path)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    transformers.BertTokenizer(vocab=numbers).save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.tsv"
    path.write_text("a man is playing\t1\n\n the guitar \t0\nnobody knew it\t1\n", encoding="utf-8")
    return path


@pytest.mark.smoke
def test_the_command(folder, text, tmp_path):
    out = tmp_path / "out"
    command = ["study", "deviation", str(folder), "--text", str(text), "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--sentences", "2"])
    assert result.exit_code == 0, result.output
    (run,) = json.loads((out / "deviations.json").read_text())["runs"]
    assert (run["model"], run["sentences"], run["queries"]) == ("tiny-bert", 2, 10)
    assert run["scaling"] == pytest.approx(8**-0.5)
    model, tokenizer = lens.load(folder)
    inputs = lens.encode(tokenizer, lens.sentences(text, 2))
    expected = float(lens.deviation(model, inputs).multiplier[1].nanmean())
    assert run["summary"][1]["multiplier"]["mean"] == pytest.approx(expected, rel=1e-4)
    assert (run["first_layer"], run["summary"][0]["layer"]) == (0, 0)
    assert len(list(out.glob("scaling-0.353553/tiny-bert-encoder-*.svg"))) == 4
    assert "mean deviations, scaling 0.353553" in " ".join(result.output.split())


def test_runs_at_several_scalings_are_kept(folder, text, tmp_path):
    out = tmp_path / "out"
    command = ["study", "deviation", str(folder), "--text", str(text), "--out", str(out)]
    for options in (["--sentences", "1"], ["--scaling", "0.1"], ["--sentences", "2"]):
        assert CliRunner().invoke(app, [*command, *options]).exit_code == 0
    found = json.loads((out / "deviations.json").read_text())["runs"]
    kept = [(run["scaling"], run["sentences"]) for run in found]
    assert kept == [(0.1, 3), (pytest.approx(8**-0.5), 2)]  # the third in place of the first
    assert len(list(out.glob("scaling-*/tiny-bert-encoder-*.svg"))) == 8


def test_help_shows_an_example():
    words = ["study", "deviation", "--help"]
    output = CliRunner().invoke(app, words, env={"COLUMNS": "120"}).output
    assert "Example: python -m papers study deviation" in " ".join(output.split())
    for word in ("parameter", "Layers count from 1", "the extras hf and report"):
        assert word in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nobody/nothing-of-the-kind"}, "cannot load 'nobody/nothing-of-the-kind'"),
        ({"model": "/nowhere/at-all"}, "cannot load '/nowhere/at-all': the folder does not exist"),
        ({"model": "build/models/not-there"}, "the folder does not exist"),
        ({"--attention": "cross"}, "no cross attention"),
        ({"--text": "missing.txt"}, "missing.txt"),
    ],
)
def test_the_command_fails_clearly(folder, text, tmp_path, changes, message):
    given = {"--text": str(text), "--out": str(tmp_path), "--attention": "encoder", **changes}
    options = [part for name, value in given.items() if name != "model" for part in (name, value)]
    command = ["study", "deviation", changes.get("model", str(folder)), *options]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
