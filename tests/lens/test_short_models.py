"""A model with 32 positions, in a folder whose name matplotlib takes for a formula."""

import csv
import json

import pytest
from typer.testing import CliRunner

from fenchel import lens
from fenchel.cli import app
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


def test_the_audit_cuts_what_is_too_long_and_draws(folder, text, tmp_path):
    assert lens.load(folder)[1].model_max_length > 10**9
    measures = "deviation,certificate,local,attack"
    words = ["audit", folder, "--texts", text, "--out", tmp_path, "--measures", measures]
    words += ["--trials", 2]
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["inputs"]["longest"] == POSITIONS
    assert summary["inputs"]["truncated"] == 2
    assert summary["settings"]["trials"] == 2
    assert next((tmp_path / "figures").glob("map_*.svg"), None)
    model, tokenizer = lens.load(folder)
    inputs = lens.encode(tokenizer, text.read_text().splitlines(), model=model)
    deviations = lens.deviation(model, inputs)
    for row in csv.DictReader((tmp_path / "heads.csv").read_text().splitlines()):
        layer, head = int(row["layer"]), int(row["head"])
        for name in ("multiplier", "mean", "mean_shift", "parameter"):
            expected = float(getattr(deviations, name)[layer, :, head].nanmean())
            assert float(row[f"token_deviation_{name}"]) == pytest.approx(expected, rel=1e-6)
        assert 0 < float(row["attacked"]) <= float(row["largest_bound"]) * (1 + 1e-9)


def test_inputs_that_are_too_long_are_refused(folder):
    model, tokenizer = lens.load(folder)
    inputs = lens.encode(tokenizer, [" ".join(WORDS * 5)])
    message = r"inputs have 52 tokens, but BertModel reads at most 32; cut them: lens\.encode"
    with pytest.raises(ValueError, match=message):
        lens.deviation(model, inputs)
    cut = lens.encode(tokenizer, [" ".join(WORDS * 5)], model=model)
    assert cut["input_ids"].shape == (1, POSITIONS)
