"""The benchmark of decoding. No test depends on a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fenchel as fl
from benchmarks import pictures, serve, serve_attention, serve_library, serve_models, serve_picture
from benchmarks.attention_rounds import Rounds, Samples
from benchmarks.command import commands
from benchmarks.serve_attention import Calls, Operands
from benchmarks.serve_library import ROOM, Pretrained, Sizes
from benchmarks.serve_models import Tokens

LITTLE = Sizes(32, 32, 3, 4, 2, 50)
ONCE = Rounds(1, 1, 0.1)
TINY = serve.Sweep(
    Calls(((4, 2, 8),), (20, 600), rounds=ONCE),
    Tokens((20, 600), (20, 600), (1.0, 4.0), LITTLE, rounds=ONCE),
    layers=2,
    threads=1,
)
KEYS = {"attention_share", "cache_share", "prefill_seconds", "tokens_per_second", "difference"}


def little_model() -> Pretrained:
    model = serve_library.random_llama(LITTLE, 700, torch.float32)
    ids = torch.randint(50, (1, 700), generator=torch.Generator().manual_seed(1))
    return Pretrained("little", model, ids)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    sweep = replace(TINY, pretrained=little_model())
    return json.loads(json.dumps(serve.run(sweep).as_json()))


def test_every_call_is_measured_beside_sdpa(document: dict[str, Any]) -> None:
    calls = document["results"]
    scores = {"deviation 1", "deviation 4", "real, layer 0", "real, layer 2"}
    assert {e["scores"] for e in calls} == scores
    assert {e["dtype"] for e in calls} == {"float32", "bfloat16"}
    assert len(calls) == len(scores) * 2 * 2 * 3  # dtypes, numbers of keys, methods
    for entry in calls:
        assert entry["error"] == ""
        assert entry["least"] <= entry["ratio"] <= entry["most"]
        assert entry["ratio"] == 1 or entry["method"] != serve_attention.SDPA
    for entry in calls:
        if entry["method"] == serve_attention.DECODE:
            assert 1 <= entry["support"] <= min(entry["scored"], entry["keys"])
            assert entry["bytes"] > 0
            width = 4 if entry["dtype"] == "float32" else 2
            assert entry["bytes_of_all"] == entry["keys"] * 2 * (8 + 8) * width


def test_every_model_is_measured_beside_its_usual_cache(document: dict[str, Any]) -> None:
    tokens = document["tokens"]
    names = {f"{attention}, {cache}" for attention, cache in serve_models.METHODS}
    assert {e["method"] for e in tokens} == names
    assert {(e["model"][:6], e["scores"], e["context"]) for e in tokens} == {
        *(("little", "real", n) for n in (20, 600)),
        *(("random", f"deviation {d}", n) for d in (1, 4) for n in (20, 600)),
    }
    for entry in tokens:
        assert entry["error"] == ""
        assert entry.keys() >= KEYS
        assert entry["tokens_per_second"] == pytest.approx(1 / entry["seconds"])
        assert 0 < entry["attention_share"] < 1
        assert 0 < entry["cache_share"] < 1
        assert (entry["prefill_seconds"] is None) == (entry["scores"] != "real")
        assert (entry["scored"] is None) == ("hf.Cache" not in entry["method"])
        assert (entry["difference"] is None) == ("entmax" in entry["method"])


def test_softmax_reads_the_whole_past(document: dict[str, Any]) -> None:
    """So the contexts are as long as they say."""
    for entry in document["tokens"]:
        if entry["method"].startswith(serve_models.SOFTMAX):
            steps = entry["scored"] - entry["context"]
            assert 1 <= steps <= 2 * ROOM  # two share the cache of the random model


def test_random_scores_have_the_deviation_that_they_are_called_by() -> None:
    model = serve_library.random_llama(Sizes(128, 64, 2, 4, 2, 500), 3000, torch.float32)
    for deviation in (1.0, 4.0):
        start = serve_models._random_start(model, 2000, deviation)
        cache = serve_models.make_cache(serve_models.DYNAMIC, model, 2000)
        serve_models.fill(cache, model, start.past)
        pretrained = Pretrained("random", model, start.ids)
        query = serve_library.record(pretrained, 2, 64)[1].query  # (token, head, d)
        key = start.past[0][0].repeat_interleave(2, 0)  # (head, token, d)
        scores = torch.einsum("nhd,hkd->hnk", query, key) * 32**-0.5
        assert 0.8 * deviation < float(scores.std()) < 1.2 * deviation


def test_recorded_operands_are_those_of_the_layer() -> None:
    pretrained = little_model()
    recorded = serve_library.record(pretrained, 3, 30)
    assert list(recorded) == [0, 1, 2]
    query, key, value = recorded[0]
    assert query.shape == (30, 4, 8)
    layer = pretrained.model.model.layers[0]
    state = layer.input_layernorm(pretrained.model.model.embed_tokens(pretrained.ids[:, :30]))
    expected = layer.self_attn.v_proj(state).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(value, expected)
    assert not torch.equal(key, value)


def test_a_wrong_output_of_decode_is_told() -> None:
    operands = serve_attention._random((4, 2, 8), 100, 1.0, 2)
    cache = fl.KeyValueCache(1, 2, 8)
    cache.append(operands.key, operands.value)
    assert serve_attention.inspect(operands, cache)["error"] == ""
    values = operands.value.clone()
    values[..., 0] += 1e-3
    other = Operands(operands.query, operands.key, values)
    assert "differs from fl.attention by 1.0e-03" in serve_attention.inspect(other, cache)["error"]


def test_logits_of_another_map_are_told() -> None:
    reference = SimpleNamespace(attention="sdpa", logits=torch.tensor([1.0, -2.0]))
    close = SimpleNamespace(attention="fenchel:softmax", logits=torch.tensor([1.0, -2.00001]))
    wrong = SimpleNamespace(attention="fenchel:softmax", logits=torch.tensor([1.0, -1.9]))
    lost = SimpleNamespace(attention="fenchel:softmax", logits=torch.tensor([1.0, torch.nan]))
    entmax = SimpleNamespace(attention=serve_models.ENTMAX, logits=torch.tensor([9.0, 9.0]))

    def told(decoder: Any, dtype: torch.dtype = torch.float32) -> str:
        return serve_models.disagreement(serve_models.difference(decoder, reference), dtype)

    assert told(close) == told(entmax) == told(wrong, torch.bfloat16) == ""
    assert "logits differ from those of sdpa by 5.0e-02" in told(wrong)
    assert "logits differ" in told(lost)


def test_an_error_stands_in_place_of_a_ratio(document: dict[str, Any]) -> None:
    failed = serve_attention.compare(("SDPA", "x"), [Samples((1.0,)), Samples(error="No: such")])
    assert failed[1]["seconds"] is failed[1]["ratio"] is None
    entries = [e | {"error": "No: such"} for e in document["tokens"]]
    shown = serve.listings({**document, "tokens": entries})[-1]
    assert all("No: such" in row for row in shown.rows)
    assert not any("No: such" in row for row in serve.listings(document)[-1].rows)


def test_curves_hold_every_length(document: dict[str, Any]) -> None:
    titles = [title for title, _, _ in serve_picture.panels(document)]
    assert titles[:2] == ["one query, 4/2 heads of 8", "little"]
    for _, _, curves in serve_picture.panels(document):
        assert all(list(curve.x) == [20, 600] for curve in curves)
        looks = [(curve.color, curve.dash, curve.marker) for curve in curves]
        assert len(set(looks)) == len(looks) >= 4
    calls, little, random = (curves for _, _, curves in serve_picture.panels(document))
    assert [curve.label for curve in calls][-1] == "fl.decode, real"  # of all layers
    assert len(little) == 4
    assert len(random) == 5  # entmax at two deviations


def test_what_is_left_out_is_said() -> None:
    (told,) = serve.left_out(TINY)
    assert "--model FOLDER" in told
    assert serve.left_out(replace(TINY, pretrained=little_model())) == []
    short = replace(TINY, pretrained=little_model()._replace(ids=torch.zeros(1, 300).long()))
    assert [text.split(";")[0] for text in serve.left_out(short)] == [
        "Left out: real scores with 600 tokens",
        "Left out: contexts of 600 tokens",
    ]


def test_longer_pasts_can_be_left_out() -> None:
    shorter = TINY.up_to(20)
    assert shorter.calls.keys == shorter.tokens.contexts == (20,)
    assert shorter.tokens.random_contexts == (20,)
    with pytest.raises(ValueError, match="shortest past is 20 tokens"):
        TINY.up_to(19)


def test_a_model_goes_with_a_text(tmp_path: Path) -> None:
    result = CliRunner().invoke(commands, ["serve", "--quick", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "--texts go together" in " ".join(result.output.split())


@pytest.mark.smoke
def test_the_command_writes_figures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace(TINY.calls, keys=(20,), dtypes=(torch.float32,))
    tokens = replace(TINY.tokens, random_contexts=(20,), deviations=(1.0,))
    monkeypatch.setattr(serve, "QUICK", replace(TINY, calls=calls, tokens=tokens))
    out = tmp_path / "serve.json"
    words = ["serve", "--quick", "--dtype", "bfloat16", "--threads", "1", "--out", str(out)]
    result = CliRunner().invoke(commands, words)
    assert result.exit_code == 0, result.output
    assert "Entmax-1.5 of one query, 4/2 heads of 8, float32" in result.output
    assert "--model FOLDER" in result.stderr
    document = json.loads(out.read_text())
    assert document["bench"] == "serve"
    assert document["machine"]["torch"]
    assert any("may stay in the cache" in note for note in document["notes"])
    assert {e["dtype"] for e in document["tokens"]} == {"bfloat16"}
    assert all(e["error"] == "" for e in [*document["results"], *document["tokens"]])
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    assert pictures.save_picture(document, tmp_path / "again.svg").is_file()
