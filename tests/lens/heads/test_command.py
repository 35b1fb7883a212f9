"""`fenchel audit`: what comes out for every kind of model; bad input is said."""

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from fenchel.cli import app
from fenchel.lens.heads import auditing
from fenchel.lens.heads.datasets import Texts
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.loading import load
from tests.lens.heads import folders
from tests.lens.heads.audits import (
    QUICK,
    TEXTS,
    assert_refused,
    assert_succeeds,
    one_thread,
    tables,
    write_inputs,
)

MODELS = ("bert", "t5", "gpt2", "llama", "bart", "vit")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("audit"), MODELS)


@pytest.fixture(autouse=True)
def threads():
    with one_thread():
        yield


# ---- what comes out


@pytest.mark.parametrize("model", ["bert", "t5", "gpt2", "llama", "bart", "vit"])
def test_every_kind_of_model(base, tmp_path, model):
    more = ("--targets", base / "few.txt") if model == "bart" else ()  # T5 writes its own
    more = (*more, "--sample", 3, "--layers", "1", "--heads", "0,2-3")
    result = assert_succeeds(base, tmp_path, *QUICK, *more, model=model)
    assert str(tmp_path / "report.html") in result.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    rows = (tmp_path / "heads.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * (3 if model in ("t5", "bart") else 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["model"]["name"] == model
    assert summary["inputs"]["count"] == 3
    assert not (tmp_path / "recipe.json").exists()
    assert not (tmp_path / "figures").exists()


def test_figures(base, tmp_path):
    assert_succeeds(base, tmp_path, "--measures", "certificate", "--layers", 0)
    suffixes = {path.suffix for path in (tmp_path / "figures").iterdir()}
    assert suffixes == {".png", ".svg"}


def test_targets_are_drawn_with_their_texts(base, tmp_path, monkeypatch):
    (tmp_path / "targets.txt").write_text("\n".join(TEXTS))
    more = ("--targets", tmp_path / "targets.txt", "--sample", 4, "--seed", 3)
    seen = []
    real = Texts.__post_init__
    monkeypatch.setattr(Texts, "__post_init__", lambda self: (seen.append(self), real(self)))
    result = assert_succeeds(
        base, tmp_path / "out", *QUICK, *more, "--dtype", "float64", model="t5"
    )
    assert len(seen[0].texts) == 4
    assert seen[0].texts == seen[0].targets
    assert json.loads((tmp_path / "out/summary.json").read_text())["inputs"]["count"] == 4
    assert 6 <= len(result.stdout.splitlines()) <= 14


def test_long_texts_are_cut_and_counted(base, tmp_path):
    (tmp_path / "long.txt").write_text("a b c\n" + "a " * 100 + "\n")
    texts = ("--texts", tmp_path / "long.txt")
    for measures in ("weights", "geometry"):
        more = (*texts, "--measures", measures, "--no-figures", "--longest", 16)
        result = assert_succeeds(base, tmp_path / measures, *more)
        assert "1 of 2 texts were longer" in result.stderr
        inputs = json.loads((tmp_path / measures / "summary.json").read_text())["inputs"]
        assert (inputs["truncated"], inputs["tokens"], inputs["longest"]) == (1, 5 + 16, 16)


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_the_implementation_of_attention_does_not_matter(base, model):
    """Not a bit: while the audit watches, attention is computed by the audit's own function."""
    head_tables = []
    for implementation in ("eager", "sdpa"):
        loaded, tokenizer = load(base / model)
        loaded.set_attn_implementation(implementation)
        assert loaded.config._attn_implementation == implementation
        measures = ("weights", "what_if", "certificate", "geometry", "advantage", "local", "model")
        run = auditing.AuditRun(
            loaded, Texts(tokenizer, TEXTS[:3]), AuditSettings(measures, probe=1)
        )
        head_tables.append(run.audit().to_csv())
    assert head_tables[0] == head_tables[1]


# ---- bad input


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--layers", "5-3"), "--layers takes numbers and ranges such as 0,3-5; got '5-3'"),
        (("--layers", "x"), "--layers takes numbers"),
        (("--layers", "7"), "no layer 7"),
        (("--heads", ","), "--heads takes numbers"),
        (("--heads", "9"), "no head 9"),
        (("--alphas", "1.5,x"), "--alphas takes numbers such as 1.5,2"),
        (("--alphas", "0.5"), "lies in (1, 4], got 0.5"),
        (("--measures", "heat"), "measures must be of weights"),
        (("--tolerance", "2"), "tolerance must lie in (0, 1)"),
        (("--dtype", "int8"), "dtype must be of float32"),
        (("--images", "images"), "this model reads texts"),
        (("--texts", "nowhere.txt"), "there is no file nowhere.txt"),
    ],
)
def test_usage(base, tmp_path, more, said):
    assert_refused(2, said, base, tmp_path, *more)


def test_what_does_not_go_together(base, tmp_path):
    texts, images = ("--texts", base / "texts.txt"), ("--images", base / "images")
    assert_refused(2, "give either --texts FILE or --images", base, tmp_path, *texts, *images)
    assert_refused(2, "looks at images", base, tmp_path, *texts, model="vit")
    targets = ("--targets", base / "texts.txt")
    assert_refused(2, "leave them out", base, tmp_path, *targets)
    assert_refused(2, "--targets goes with --texts", base, tmp_path, *images, *targets, model="vit")
    (tmp_path / "few.txt").write_text("a\nb\n")
    few = ("--targets", tmp_path / "few.txt")
    assert_refused(2, f"holds 2 targets for {len(TEXTS)} texts", base, tmp_path, *few, model="t5")
    result = CliRunner().invoke(app, ["audit", str(base / "bert"), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "give either" in result.stderr


def test_models_that_cannot_be_opened(base, tmp_path):
    assert_refused(2, "the folder does not exist", base, tmp_path, model="nowhere")
    folders.pickled(base / "bert", tmp_path / "pickled")
    shutil.copy(base / "texts.txt", tmp_path)
    assert_refused(1, "save_pretrained", tmp_path, tmp_path / "out", model="pickled")
    words = ["audit", "nobody/nothing", "--texts", str(base / "texts.txt"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "hf download nobody/nothing" in result.stderr


def test_folders_that_cannot_be_written(base, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(2, "is a file; give a folder", base, tmp_path / "file", *QUICK)
    assert_refused(1, "cannot write into", base, "/proc/fenchel", *QUICK)


def test_a_full_disk(base, tmp_path, monkeypatch):
    assert_succeeds(base, tmp_path / "once", *QUICK)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stopping_disk(patch, 4)
        assert_refused(1, "the disk is full", base, out, *QUICK)
    names = sorted(path.name for path in (out / "units").iterdir())
    assert names == ["chunk-000000.npz", "chunk-000001.npz", "settings.json"]
    assert not [path for path in out.iterdir() if path.name != "units"]
    assert "going on: 2 of 5" in assert_succeeds(base, out, *QUICK, "--resume").stderr
    assert tables(out) == tables(tmp_path / "once")


def stopping_disk(monkeypatch, count):
    """Full after so many files."""
    real, left = os.fsync, [count]

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["audit", "--help"])
    assert "Example: fenchel audit" in result.stdout


def test_a_model_without_attention(base, tmp_path):
    import transformers as hf

    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    hf.MambaModel(hf.MambaConfig(**sizes)).save_pretrained(tmp_path / "mamba")
    folders.tokenizer().save_pretrained(tmp_path / "mamba")
    more = ("--texts", base / "texts.txt")
    assert_refused(
        2, "found no attention in MambaModel", tmp_path, tmp_path / "out", *more, model="mamba"
    )
