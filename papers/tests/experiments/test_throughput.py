"""The benchmark of training steps measures what it says. No test depends on a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.attention_rounds import Rounds, Samples
from benchmarks.pictures import step_bars
from papers.__main__ import app
from papers.experiments import throughput

TINY = throughput.Sweep(batches=(4, 2), papers=False, rounds=Rounds(1, 1, 0.1))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    before = torch.get_num_threads()
    content = json.loads(json.dumps(throughput.run(TINY).as_json()))
    assert torch.get_num_threads() == before
    return content


def test_every_attention_is_timed(document: dict[str, Any]) -> None:
    cases = {(e["case"], e["attention"]) for e in document["results"]}
    assert ("ViT, small", "transport") in cases
    assert ("VQA, 14 x 14 cells", "continuous-sparsemax-100") in cases
    assert len(cases) == 3 + 4 + 4
    assert all(e["seconds"] > 0 and e["error"] == "" for e in document["results"])


def test_a_step_drawn_by_lot_is_the_mean_of_its_kinds() -> None:
    case = throughput.Case("x", 4, {})
    parts = [(0.25, Samples((1.0, 2.0, 9.0))), (0.75, Samples((4.0, 6.0, 5.0)))]
    assert throughput._entry(case, "transport", parts)["seconds"] == 0.25 * 2 + 0.75 * 5


def test_transport_steps_are_of_both_kinds() -> None:
    (case, *_) = throughput.cases(TINY)
    study = case.studies["transport"]
    shares = [share for share, _ in study.cases(study.order(0, 4, 0)[0])]
    assert shares == [0.5, 0.5]


def test_ratios_are_to_softmax_of_the_same_network(document: dict[str, Any]) -> None:
    times = {"softmax": 2.0, "transport": 4.0, "entmax": 1.0}
    entries = [e | {"seconds": times.get(e["attention"], 8.0)} for e in document["results"]]
    (listing,) = throughput.listings(document | {"results": entries})
    assert {row[2]: row[4] for row in listing.rows if row[0] == "ViT, small"} == {
        "softmax": "1",
        "transport": "0.5",
        "entmax": "2",
    }
    names, values = step_bars(document | {"results": entries})
    assert dict(zip(names, values, strict=True))["VQA, 8 x 8 cells: 2-mca-36"] == 0.25
    assert len(names) == 2 + 3 + 3


@pytest.mark.smoke
def test_command_writes_json_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "QUICK", TINY)
    out = tmp_path / "steps.json"
    result = CliRunner().invoke(app, ["experiment", "throughput", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["bench"] == "steps"
    assert (tmp_path / "steps.svg").read_text().startswith("<?xml")
