"""The sweep over models tells what is equal, refused, wrong, or did not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import models
from benchmarks.command import commands
from tests import needs

needs.package("transformers", "the sweep over models")
needs.package("entmax", "the sweep over models")

run = CliRunner().invoke

# A tester as transformers writes them. What stands at {change} makes the family what it is called.
TESTER = """
import unittest
import no_such_package
from transformers import BertConfig, BertModel, NoSuchModel
from transformers.testing_utils import no_such_decorator
from ...shared_tester import token_ids
import fenchel.hf

convert = fenchel.hf.convert
{change}

class BertTester:
    def prepare_config_and_inputs_for_common(self):
        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        config = BertConfig(vocab_size=20, intermediate_size=16, **sizes)
        return config, {{"input_ids": token_ids()}}

class BertTest(no_such_package.Mixin, unittest.TestCase):
    all_model_classes = (BertModel,)

    def setUp(self):
        self.model_tester = BertTester()

    @no_such_decorator("reason")
    def test_nothing(self):
        pass
"""

CHANGES = {
    "crashing": """
def broken(*arguments, **options):
    raise RuntimeError("no luck")

def change(model, regularizer):
    model.forward = broken
    return model

fenchel.hf.convert = change
""",
    "different": """
def change(model, regularizer):
    model.embeddings.word_embeddings.weight.data *= 1.001
    return convert(model, regularizer)

fenchel.hf.convert = change
""",
    "dying": "import os\nfenchel.hf.convert = lambda model, regularizer: os._exit(3)",
    "equal": "",
    "importing": "import torch\ntorch.no_such_name",
    "older": "BertModel = NoSuchModel",
    "plain": "fenchel.hf.convert = lambda model, regularizer: model",
    "inputs": """
def change(model, regularizer, inputs=None):
    if inputs is None:
        raise ValueError("pass inputs=")
    return convert(model, regularizer, inputs=inputs)

fenchel.hf.convert = change
""",
    "refused": """
def change(model, regularizer, inputs=None):
    raise ValueError("BertModel is not for us")

fenchel.hf.convert = change
""",
    "skipped": """
class Other(unittest.TestCase):
    all_model_classes = ()
    __unittest_skip__ = True
    __unittest_skip_why__ = "no time"
""",
    "slow": "import time\nfenchel.hf.convert = lambda model, regularizer: time.sleep(600)",
}
SHARED = """
import torch
import transformers.testing_utils
from transformers import BertModel

def token_ids():
    return torch.arange(14).reshape(2, 7)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    package = root / "tests"
    for family, change in CHANGES.items():
        folder = package / "models" / family
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        text = TESTER.format(change=change)
        (folder / f"test_modeling_{family}.py").write_text(text, encoding="utf-8")
    for folder in (package, package / "models"):
        (folder / "__init__.py").write_text("")
    (package / "shared_tester.py").write_text(SHARED, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def document(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All families but the slow one, run once."""
    out = tmp_path_factory.mktemp("out") / "models.json"
    families = tuple(name for name in CHANGES if name != "slow")
    models.run(models.Sweep(checkout, families), out, None, lambda what, done: None)
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


def outcome(document: dict[str, Any], family: str) -> dict[str, Any]:
    entry: dict[str, Any] = document["families"][family]["BertModel"]
    return entry


@pytest.mark.smoke
def test_what_is_right_is_equal(document: dict[str, Any]) -> None:
    """Although names that its test file imports are absent."""
    equal = outcome(document, "equal")
    assert equal["status"] == models.EQUAL
    assert equal["own"] == "sdpa"
    assert 0 <= equal["softmax"] <= 1e-10
    assert 0 < equal["entmax"] <= 1e-10


@pytest.mark.smoke
def test_what_stays_on_softmax_is_found(document: dict[str, Any]) -> None:
    plain = outcome(document, "plain")
    assert plain["status"] == models.STAYS
    assert plain["why"] == "all 1 attentions"
    assert plain["softmax"] == 0
    assert plain["entmax"] > 1e-3


def test_other_numbers_are_different(document: dict[str, Any]) -> None:
    different = outcome(document, "different")
    assert different["status"] == models.DIFFERENT
    assert different["why"] == "softmax"
    assert 1e-10 < different["softmax"] < 1


def test_refusals_and_errors_say_why(document: dict[str, Any]) -> None:
    refused = {"status": models.REFUSED, "why": "BertModel is not for us"}
    assert outcome(document, "refused") == refused
    crashing = {"status": models.CRASHES, "why": "forward: RuntimeError: no luck"}
    assert outcome(document, "crashing") == crashing


def test_inputs_are_given_where_a_refusal_asks_for_them(document: dict[str, Any]) -> None:
    assert outcome(document, "inputs")["status"] == models.EQUAL


def test_a_process_that_dies_ends_nothing_else(document: dict[str, Any]) -> None:
    dying = outcome(document, "dying")
    assert dying["status"] == models.CRASHES
    assert dying["why"] == "fenchel: the process ended with code 3"
    assert set(document["families"]) == set(CHANGES) - {"slow"}


def test_what_cannot_run_says_why(document: dict[str, Any]) -> None:
    families = document["families"]
    (importing,) = families["importing"].values()
    assert importing["status"] == models.NOT_RUN
    assert importing["why"].startswith("import fails: AttributeError")
    (older,) = families["older"].values()
    assert older == {"status": models.NOT_RUN, "why": "not in the installed transformers"}
    assert families["skipped"]["Other"]["why"] == "its tests skip: no time"


def test_a_model_that_takes_too_long_is_left(checkout: Path, document: dict[str, Any]) -> None:
    """Here, ten minutes; the server of the processes runs by now."""
    (left,) = models.run_family(models.Sweep(checkout, ("slow",), seconds=5), "slow").values()
    assert left["status"] == models.NOT_RUN
    assert left["why"].endswith("more than 5 seconds")


def test_totals_count_families_by_their_worst_class(document: dict[str, Any]) -> None:
    totals, table = models.listings(document)
    counts = {row[0]: row[1:] for row in totals.rows}
    assert counts[models.EQUAL] == ("3", "3")  # one of them has a test case that is skipped
    assert counts[models.CRASHES] == ("2", "2")
    assert counts["all"] == (str(len(CHANGES) - 1), str(len(CHANGES)))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["refused"] == ("1", "0", "1 refused: the model is not for us")
    assert rows["equal"] == ("1", "1", "")
    assert rows["plain"][2].startswith("1 stays on softmax: all 1 attentions, by ")


def test_reasons_are_told_once() -> None:
    entry = {
        "AModel": {"status": models.REFUSED, "why": "AModel is odd"},
        "AForMaskedLM": {"status": models.REFUSED, "why": "AForMaskedLM is odd"},
        "AEncoder": {"status": models.NOT_RUN, "why": "no attention was seen"},
        "ADecoder": {"status": models.NOT_RUN, "why": "too old"},
    }
    assert models.status_of(entry) == models.REFUSED
    (row,) = models.listings({"transformers": "5", "families": {"a": entry}})[1].rows
    assert (
        row[3]
        == "2 refused: the model is odd; 2 not run: no attention was seen (and 1 more reasons)"
    )


# ---- the command


def test_without_a_checkout_the_way_to_one_is_told(tmp_path: Path) -> None:
    for arguments in ([], ["--transformers", str(tmp_path)]):
        result = run(commands, ["models", *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert "git clone --depth 1 https://github.com/huggingface/transformers" in result.output


def test_families_that_are_not_there_are_refused(checkout: Path, tmp_path: Path) -> None:
    arguments = ["models", "--transformers", str(checkout)]
    result = run(commands, [*arguments, "--family", "bird"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "no tester for bird" in result.output
    missing = tmp_path / "none.json"
    result = run(commands, [*arguments, "--resume", "--out", str(missing)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--resume goes on with the file of --out" in result.output


def test_an_interrupted_run_is_kept_and_resumed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_family(sweep: models.Sweep, family: str) -> dict[str, Any]:
        if family == "equal" and "equal" not in ran:
            ran.append(family)
            raise KeyboardInterrupt
        ran.append(family)
        return {"BertModel": {"status": models.EQUAL}}

    monkeypatch.setattr(models, "run_family", run_family)
    out = tmp_path / "models.json"
    arguments = ["models", "--transformers", str(checkout), "--out", str(out)]
    assert run(commands, arguments).exit_code != 0
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert list(kept["families"]) == ["crashing", "different", "dying"]
    result = run(commands, [*arguments, "--resume"])
    assert result.exit_code == 0, result.output
    whole = json.loads(out.read_text(encoding="utf-8"))
    assert list(whole["families"]) == sorted(CHANGES)
    assert ran == [*sorted(CHANGES)[:3], "equal", *sorted(CHANGES)[3:]]
    assert run(commands, [*arguments, "--resume", "--family", "dying"]).exit_code == 0
    assert ran[-1] == "dying"


# ---- a real checkout

SAMPLE = ("bert", "clip", "gpt2", "llama", "t5", "vit", "whisper")


@pytest.mark.slow
def test_a_sample_of_the_families_of_transformers() -> None:
    folder = needs.transformers_checkout("a sample of the sweep over models")
    for family in SAMPLE:
        entry = models.run_family(models.Sweep(folder, SAMPLE), family)
        assert models.status_of(entry) == models.EQUAL, entry
