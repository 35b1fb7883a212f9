"""The benchmark of the estimation problem measures what it says. No test depends on a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import dual
from benchmarks import dual_methods as methods
from benchmarks.attention_rounds import Rounds
from benchmarks.command import commands
from fenchel import dual as estimation
from tests import needs

TINY = dual.Sweep(
    tokens=9, width=12, heads=3, reliabilities=(1.0, 10.0), rounds=Rounds(1, 1, 0.1), seed=3
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(json.dumps(dual.run(TINY).as_json()))


def test_every_method_reaches_the_gap(document: dict[str, Any]) -> None:
    pairs = [(e["reliability"], e["method"]) for e in document["results"]]
    assert pairs == [(a, name) for a in (1.0, 10.0) for name in methods.METHODS]
    for entry in document["results"]:
        assert entry["error"] == ""
        assert 0 <= entry["largest_gap"] <= 1e-8
        assert entry["seconds"] > 0
    assert document["settings"]["rows"] == 27
    assert document["settings"]["templates"] == [9, 12]


@pytest.mark.parametrize("name", methods.METHODS)
def test_methods_stop_where_the_exact_multiplier_is(name: str, monkeypatch: Any) -> None:
    """A gap of 1e-20 leaves nothing to differ by; a loose one stops earlier."""
    layer = methods.synthetic(9, 12, 3, seed=0)
    tight, loose = (methods.METHODS[name](layer, 2.0, gap) for gap in (1e-16, 1e-2))
    assert tight.gap <= 1e-13
    if name.startswith(methods.OURS):
        return
    assert loose.iterations < tight.iterations
    assert loose.gap > tight.gap


def test_the_dual_of_the_gradient_methods_is_the_estimates() -> None:
    layer = methods.synthetic(9, 12, 3, seed=0)
    exact = estimation.estimate(layer.templates, None, layer.evidence, 2.0)
    value, gradient = methods._Dual(layer, 2.0).slope(exact.multiplier)
    torch.testing.assert_close(value, exact.dual_value, rtol=1e-12, atol=1e-12)
    assert gradient.abs().max() < 1e-9


def test_listings_name_every_method(document: dict[str, Any]) -> None:
    result_tables = dual.listings(document)
    assert [len(listing.rows) for listing in result_tables] == [len(methods.METHODS)] * 2
    assert result_tables[0].rows[3][2] == "1"


@pytest.mark.smoke
def test_command_writes_json_and_picture(tmp_path: Path) -> None:
    out = tmp_path / "dual.json"
    result = CliRunner().invoke(commands, ["dual", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["bench"] == "dual"
    assert (tmp_path / "dual.svg").read_text().startswith("<?xml")
    result = CliRunner().invoke(commands, ["dual", "--model", str(tmp_path)])
    assert result.exit_code != 0
    assert "go together" in result.output
    result = CliRunner().invoke(commands, ["dual", "--quick", "--layer", "1"])
    assert result.exit_code == 2
    assert "--layer is of a model" in result.output


def test_quick_sizes_say_that_they_are_small() -> None:
    assert "Quick sizes" in dual.Report(dual.QUICK, methods.synthetic(4, 6, 2, 0), ()).warning
    assert dual.Report(dual.FULL, methods.synthetic(4, 6, 2, 0), ()).warning == ""


def save_bert(folder: Path) -> Any:
    """A small BERT with its tokenizer."""
    transformers = needs.package("transformers", "the benchmark of estimates on a model")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=16, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxy"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return model


def test_layer_of_a_model_gives_its_own_attention(tmp_path: Path, capfd: Any) -> None:
    """softmax(<t, z>) is the model's attention (CLAIMS D-E19a)."""
    transformers = needs.package("transformers", "the benchmark of estimates on a model")
    model = save_bert(tmp_path)
    capfd.readouterr()
    layer = methods.of_model(tmp_path, "a b c d e f", layer=1, tokens=6)
    assert "Loading" not in capfd.readouterr().err
    assert layer.source == f"{tmp_path.name}, layer 1 of 0 to 1"
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(
        "a b c d e f", return_tensors="pt", truncation=True, max_length=6
    )
    with torch.no_grad():
        wanted = model.double()(**ids, output_attentions=True).attentions[1][0]  # (heads, n, n)
    weights = estimation.first_order(layer.templates, None, layer.evidence, 1.0).weights
    torch.testing.assert_close(weights.unflatten(0, (3, 6)), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer", ["2", "-1"])
def test_a_layer_that_is_not_there_is_named(tmp_path: Path, layer: str) -> None:
    save_bert(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a b c", encoding="utf-8")
    command = ["dual", "--quick", "--model", str(tmp_path), "--text", str(text)]
    result = CliRunner().invoke(commands, [*command, "--layer", layer], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"layer must be 0..1 for the 2 layers of {tmp_path.name}, got {layer}" in result.output


def test_a_t5_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    transformers = needs.package("transformers", "the benchmark of estimates on a model")
    config = transformers.T5Config(
        vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    model = transformers.T5Model(config)
    monkeypatch.setattr(methods, "load", lambda folder: (model, None))
    text = tmp_path / "text.txt"
    text.write_text("a b c", encoding="utf-8")
    command = ["dual", "--quick", "--model", str(tmp_path), "--text", str(text)]
    result = CliRunner().invoke(commands, command, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "needs a BERT or its kin, got T5Model" in result.output
