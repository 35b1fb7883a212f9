"""The preset `smoke` of both studies, whole, as a user runs it."""

import json

import pytest
from typer.testing import CliRunner

from papers.__main__ import app
from papers.experiments.vit.presets import PRESETS as VIT
from papers.experiments.vqa.presets import PRESETS as VQA

WIDE = {"COLUMNS": "200"}


def carried_out(study, out):
    """What it prints on standard output."""
    result = CliRunner().invoke(app, ["experiment", study, "--out", str(out)], env=WIDE)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.xdist_group("smoke")
def test_vit(tmp_path):
    text = carried_out("vit", tmp_path)
    preset = VIT["smoke"]
    files = list((tmp_path / "vit/smoke/toy").glob("*.json"))
    assert len(files) == len(preset.attentions) * preset.seeds * len(preset.rates)
    for name in (
        "Table 2",
        "Difference to ViT",
        "Table 1",
        "Cost",
        "OT-ViT",
        "continuous sparsemax",
    ):
        assert name in text
    scores = [json.loads(path.read_text())["scores"]["test accuracy"] for path in files]
    assert sum(scores) / len(scores) > 0.5  # of four classes: it learns


@pytest.mark.xdist_group("smoke")
def test_vqa(tmp_path):
    text = carried_out("vqa", tmp_path)
    course = VQA["smoke"].courses["shapes-tiny"]
    files = list((tmp_path / "vqa/smoke/shapes-tiny").glob("*.json"))
    assert {path.stem for path in files} == {f"{name}-0" for name in course.attentions()}
    for name in ("Table 6.2", "Table 6.3", "Table 6.4", "test-MCA", "mass inside", "question only"):
        assert name in text
    again = carried_out("vqa", tmp_path)  # nothing is left to do
    assert again == text
