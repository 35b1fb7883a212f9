"""Commands on a model with 32 positions, in a folder whose name matplotlib takes for a formula."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fenchel import lens
from fenchel.cli import app
from tests.lens.models import model_of, transformers

POSITIONS = 32
WORDS = list("abcdefghij")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its tokenizer does not say how long a text may be."""
    path = tmp_path_factory.mktemp("models") / r"co$t \in $5"
    model_of("bert", torch.float32).save_pretrained(path)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    transformers.BertTokenizer(vocab=numbers).save_pretrained(path)
    assert lens.load(path)[1].model_max_length > 10**9
    return path


@pytest.fixture
def text(tmp_path):
    """Two texts of 50 words."""
    path = tmp_path / r"te$t \in $5.txt"
    path.write_text(" ".join(WORDS * 5) + "\n" + " ".join(WORDS[::-1] * 5), encoding="utf-8")
    return path


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})


def plain(result):
    return " ".join(result.output.replace("│", " ").split())


def test_certificates(folder, text, tmp_path):
    command = ["study", "certificates", folder, "--text", text, "--out", tmp_path, "--trials", 2]
    result = run(*command)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "study_certificates.json").read_text())
    assert document["tokens"] == POSITIONS
    assert (tmp_path / "study_certificates.svg").exists()
    assert run(*command, "--tokens", 5).exit_code == 0
    assert json.loads((tmp_path / "study_certificates.json").read_text())["tokens"] == 5
    refused = run(*command, "--tokens", 33)
    assert refused.exit_code == 2
    assert "--tokens is 33, but 32 are read at most; give --tokens 32" in plain(refused)


@pytest.mark.parametrize(
    "command",
    [
        ("study", "robustness", "--layer", 1, "--draws", 2),
        ("study", "depth", "--pairs", 2, "--layers", 2),
        ("lens", "deviation"),
    ],
)
def test_other_commands(folder, text, tmp_path, command):
    result = run(*command[:2], folder, *command[2:], "--text", text, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert next(tmp_path.rglob("*.svg"), None)


def test_the_benchmark(folder, text, tmp_path):
    from benchmarks import dual_methods

    found = dual_methods.of_model(folder, text.read_text(), layer=1, tokens=64)
    assert len(found.templates) == POSITIONS


def test_inputs_that_are_too_long_are_refused(folder):
    model, tokenizer = lens.load(folder)
    inputs = lens.encode(tokenizer, [" ".join(WORDS * 5)])
    message = r"inputs have 52 tokens, but BertModel reads at most 32; cut them: lens\.encode"
    for audit in (lens.stability, lens.deviation):
        with pytest.raises(ValueError, match=message):
            audit(model, inputs)
    cut = lens.encode(tokenizer, [" ".join(WORDS * 5)], model=model)
    assert cut["input_ids"].shape == (1, POSITIONS)
