"""`python -m papers experiment`: what it says, what it refuses, and what is left when it fails."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from papers.__main__ import app
from papers.experiments import checkpoint, loop
from papers.experiments.checkpoint import Checkpoints
from papers.experiments.data.shapes import load_shapes
from papers.experiments.data.toy import load_toy
from papers.experiments.vit import presets as vit_presets
from papers.experiments.vit.model import Size
from papers.experiments.vit.study import VitStudy
from papers.experiments.vqa import presets as vqa_presets
from papers.tests.experiments import tiny
from tests import needs

WIDE = {"COLUMNS": "200"}
TINY = replace(
    vit_presets.PRESETS["smoke"],
    size=Size(width=8, inner=8, layers=2, heads=2, dropout=0.1),
    epochs={"toy": 3},
    batch=8,
    rates=(1e-2,),
    attentions=("softmax", "transport"),
    seeds=1,
    warmup=2,
)  # 12 steps, evaluated and saved at 4, 8 and 12


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.delenv("FENCHEL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)  # where no folder data is
    monkeypatch.setitem(vit_presets.PRESETS, "smoke", TINY)
    monkeypatch.setattr(vit_presets, "load_toy", lambda: load_toy(train=32, test=8))
    course = vqa_presets.PRESETS["smoke"].courses["shapes-tiny"]
    course = replace(course, size=tiny.SIZE, epochs=1, batch=64)
    monkeypatch.setitem(
        vqa_presets.PRESETS,
        "smoke",
        replace(vqa_presets.PRESETS["smoke"], courses={"shapes-tiny": course}),
    )
    monkeypatch.setattr(
        vqa_presets, "_tiny", lambda: replace(load_shapes(images=(40, 30)), name="shapes-tiny")
    )


def ran(study, out, *options):
    return CliRunner().invoke(app, ["experiment", study, "--out", str(out), *options], env=WIDE)


def done(study, out, *options):
    result = ran(study, out, *options)
    assert result.exit_code == 0, result.output
    return result


def refused(code, text, study, out, *options):
    result = ran(study, out, *options)
    assert result.exit_code == code, result.output
    assert text in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output
    return result


def result_of(out, name="softmax-0"):
    document = json.loads((out / "vit" / "smoke" / "toy" / f"{name}.json").read_text())
    del document["cost"]["seconds"]
    return document


@pytest.fixture
def steps(monkeypatch):
    """The steps that are made, and what is to happen at one of them, by its number from 1 on."""
    taken, strikes = [], {}
    real = loop._Run._trained

    def trained(self, step):
        taken.append(step)
        strikes.get(len(taken), lambda: None)()
        return real(self, step)

    monkeypatch.setattr(loop._Run, "_trained", trained)
    return taken, strikes


# ---- what it says


@pytest.mark.smoke
@pytest.mark.parametrize("study", ["", "vit", "vqa"])
def test_help_has_an_example(study):
    result = CliRunner().invoke(app, ["experiment", *study.split(), "--help"], env=WIDE)
    assert result.exit_code == 0
    assert f"Example: python -m papers experiment {study or 'vit'} --preset smoke" in result.output


def test_a_run_is_made_once_and_shown_each_time(tmp_path, steps):
    first = done("vit", tmp_path)
    assert len(steps[0]) == 2 * 12
    for text in ("Table 2", "OT-ViT − ViT", "Cost"):
        assert text in first.stdout
    assert "1/2 toy · softmax · seed 0" in first.stderr
    assert "toy: 2 runs, 0 of them stored" in first.stderr
    assert re.search(r"toy · transport · seed 0: test accuracy \d+\.\d\d %", first.stderr)
    second = done("vit", tmp_path)
    assert second.stderr.strip() == "toy: 2 runs, 2 of them stored"
    assert second.stdout == first.stdout
    assert len(steps[0]) == 2 * 12
    assert done("vit", tmp_path, "--tables").stdout == first.stdout
    done("vit", tmp_path, "--seeds", "2", "--attention", "softmax")
    assert len(steps[0]) == 3 * 12
    done("vit", tmp_path, "--again", "--attention", "softmax,softmax")
    assert len(steps[0]) == 4 * 12


def test_what_another_command_made_meanwhile_is_not_made_again(tmp_path, steps):
    """Two commands with --again: the first finds what the second has done since it began."""
    done("vit", tmp_path)
    both = len(steps[0])
    steps[1][both + 3] = lambda: done("vit", tmp_path, "--again", "--attention", "transport")
    said = done("vit", tmp_path, "--again").stderr
    assert len(steps[0]) == 2 * both  # softmax once, transport once
    assert "toy · softmax · seed 0: test" in said
    assert "transport" not in said


@pytest.mark.smoke
def test_questions(tmp_path):
    result = done("vqa", tmp_path, "--attention", "question-only, continuous-softmax-9")
    for text in ("Table 6.2", "Table 6.3", "Table 6.4", "question only", "mass inside", "Cost"):
        assert text in result.stdout
    stored = sorted(path.name for path in (tmp_path / "vqa/smoke/shapes-tiny").glob("*.json"))
    assert stored == ["continuous-softmax-9-0.json", "question-only-0.json"]


@pytest.mark.smoke
def test_first_steps_are_not_taken_for_runs(tmp_path, steps):
    done("vit", tmp_path, "--attention", "softmax")
    whole = done("vit", tmp_path, "--tables").stdout
    shown = done("vit", tmp_path, "--attention", "softmax", "--first-steps", "2").stdout
    assert len(steps[0]) == 12 + 2
    assert shown != whole
    assert done("vit", tmp_path, "--tables").stdout == whole
    assert done("vit", tmp_path, "--tables", "--first-steps", "2").stdout == shown


def test_tables_of_the_sets_that_are_named(tmp_path):
    """With the runs that are published."""
    stored = needs.ROOT / "papers/results/experiments"
    for name, other in (("cifar-10", "fashion-mnist"), ("fashion-mnist", "cifar-10")):
        shown = done("vit", stored, "--tables", "--preset", "cpu", "--sets", name).stdout
        assert name in shown
        assert other not in shown
    easy = done("vqa", stored, "--tables", "--preset", "cpu", "--sets", "easy").stdout
    assert "yes/no" in easy
    assert "number" not in easy  # which none of its questions ask for
    folder = tmp_path / "vit/cpu/cifar-10"
    folder.mkdir(parents=True)
    shutil.copy(stored / "vit/cpu/cifar-10/softmax-0.json", folder)
    text = (
        f"no run of vit cpu on fashion-mnist is stored in {tmp_path}; there are runs of cpu on ci"
    )
    refused(2, text, "vit", tmp_path, "--tables", "--preset", "cpu", "--sets", "fashion-mnist")


def test_a_busy_run_is_left_out(tmp_path):
    folder = tmp_path / "vit/smoke/toy/softmax-0"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = done("vit", tmp_path)
    assert "toy · softmax · seed 0: another process is at it" in result.stderr
    assert "OT-ViT" in result.stdout
    assert not (tmp_path / "vit/smoke/toy/softmax-0.json").exists()


# ---- what it refuses


@pytest.mark.parametrize(
    ("study", "options", "text"),
    [
        ("vit", ["--preset", "huge"], "--preset must be of smoke, cpu, paper, got 'huge'"),
        ("vqa", ["--preset", "huge"], "--preset must be of smoke, cpu, paper, got 'huge'"),
        ("vit", ["--sets", "mnist"], "--sets of --preset smoke must be of toy, got 'mnist'"),
        (
            "vqa",
            ["--sets", "daquar"],
            "--sets of --preset smoke must be of shapes-tiny, got 'daquar'",
        ),
        ("vit", ["--attention", "softmax,hardmax"], "attention must be of softmax, entmax,"),
        ("vqa", ["--attention", "softmax,hardmax"], "K-mca-N (N functions, K modes), got"),
        ("vqa", ["--attention", "softmax,02-mca-9"], "is spelt '2-mca-9'"),
        ("vqa", ["--attention", "softmax,1-mca-9"], "is spelt 'continuous-softmax-9'"),
        ("vqa", ["--attention", "softmax,2-mca-10"], "N must be 1, 4, 9, 16"),
        ("vqa", ["--attention", "softmax,65-mca-9"], "65 modes are more than the"),
        ("vit", ["--attention", ","], "--attention names nothing, got ','"),
        ("vqa", ["--attention", " "], "--attention names nothing"),
        ("vit", ["--sets", ","], "--sets names nothing"),
        ("vit", ["--sets", "toy,mnist"], "--sets of --preset smoke must be of toy, got 'mnist'"),
        ("vit", ["--tables"], "no run of vit smoke is stored in"),
        ("vqa", ["--tables"], "no run of vqa smoke is stored in"),
        ("vit", ["--tables", "--sets", "mnist"], "--sets of --preset smoke must be of toy, got"),
        (
            "vqa",
            ["--tables", "--seeds", "2", "--attention", "softmax", "--again"],
            "shows every run that is stored: leave out --attention, --seeds, --again",
        ),
        ("vit", ["--preset", "cpu", "--data", "nowhere"], "nowhere"),
        ("vqa", ["--preset", "cpu", "--sets", "daquar", "--data", "nowhere"], "nowhere"),
        ("vqa", ["--preset", "cpu", "--sets", "daquar"], "give one that holds daquar/ with --data"),
        ("vqa", ["--preset", "paper", "--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_told_before_any_run(tmp_path, steps, study, options, text):
    refused(2, text, study, tmp_path, *options)
    assert steps[0] == []
    assert not list(tmp_path.rglob("*-0*"))


@pytest.mark.parametrize("count", ["0", "1001", "9000000000"])
def test_seeds_that_nobody_wants(tmp_path, count):
    """A queue of so many would be made before the first run."""
    result = ran("vit", tmp_path, "--seeds", count)
    assert result.exit_code == 2
    assert "Invalid value for '--seeds'" in result.stderr


def test_the_folder_of_the_data_may_be_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FENCHEL_DATA", str(tmp_path / "from-there"))
    refused(2, "from-there", "vit", tmp_path, "--preset", "cpu")


def test_an_empty_folder_in_the_environment_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("FENCHEL_DATA", "")
    text = "there is no folder data; give one that holds daquar/ with --data"
    refused(2, text, "vqa", tmp_path, "--preset", "cpu", "--sets", "daquar")


def test_letters_that_standard_output_lacks(tmp_path):
    done("vit", tmp_path, "--seeds", "2")
    words = ["experiment", "vit", "--out", str(tmp_path), "--tables"]
    result = CliRunner(charset="ascii").invoke(app, words, env=WIDE)
    assert result.exit_code == 0, result.output
    assert "OT-ViT - ViT" in result.stdout
    assert " +- " in result.stdout
    assert "10^12 operations" in result.stdout


def test_letters_that_standard_error_lacks(tmp_path):
    words = ["experiment", "vit", "--out", str(tmp_path), "--attention", "softmax"]
    result = CliRunner(charset="ascii").invoke(app, words, env=WIDE)
    assert "toy . softmax . seed 0: test accuracy" in result.stderr


def test_standard_output_may_be_closed():
    stored = needs.ROOT / "papers/results/experiments"
    line = f"{sys.executable} -m papers experiment vit --preset cpu --tables --out '{stored}' >&-"
    result = subprocess.run(
        ["sh", "-c", line], cwd=needs.ROOT, stderr=subprocess.PIPE, check=False, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_results_of_other_data_are_refused(tmp_path, monkeypatch):
    done("vit", tmp_path, "--attention", "softmax")
    monkeypatch.setattr(vit_presets, "load_toy", lambda: load_toy(seed=1, train=32, test=8))
    refused(2, "other settings: data_digest was", "vit", tmp_path, "--attention", "softmax")


def test_results_of_other_settings_are_refused(tmp_path, monkeypatch):
    done("vit", tmp_path, "--attention", "softmax")
    monkeypatch.setitem(vit_presets.PRESETS, "smoke", replace(TINY, warmup=5))
    text = "softmax-0.json holds a run with other settings: training.warmup was 2, is 5"
    refused(2, text, "vit", tmp_path, "--attention", "softmax")
    done("vit", tmp_path, "--attention", "softmax", "--again")
    assert result_of(tmp_path)["settings"]["training"]["warmup"] == 5


def test_a_damaged_result_is_named(tmp_path):
    folder = tmp_path / "vit/smoke/toy"
    folder.mkdir(parents=True)
    (folder / "softmax-0.json").write_text("{")
    for options in ([], ["--tables"]):
        refused(2, "softmax-0.json is no result of a run", "vit", tmp_path, *options)


# ---- what is left when it fails


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Made in the first test that needs it, under the small presets."""
    return tmp_path_factory.mktemp("whole")


def assert_ends_as_undisturbed(out, whole):
    if not list(whole.iterdir()):
        done("vit", whole, "--attention", "softmax")
    result = done("vit", out, "--attention", "softmax")
    assert result_of(out) == result_of(whole)
    return result.stderr


def test_a_full_disk(tmp_path, whole, monkeypatch):
    real = checkpoint.write_whole

    def full(path, content):
        if path.name.startswith("step-00000008"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_whole", full)
        text = f"the disk is full ({tmp_path}); what is stored is kept. Make room. The same command"
        refused(1, text, "vit", tmp_path, "--attention", "softmax")
    assert "going on at step 4 of 12" in assert_ends_as_undisturbed(tmp_path, whole)


def test_a_full_disk_while_metrics_are_written(tmp_path, whole, monkeypatch):
    """Half a line is on the disk."""
    real = loop._Run._note

    def full(self, numbers):
        real(self, numbers)
        if self.step == 6:
            path = self.checkpoints.folder / "metrics.jsonl"
            path.write_bytes(path.read_bytes()[:-9])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(loop._Run, "_note", full)
        refused(1, "the disk is full", "vit", tmp_path, "--attention", "softmax")
    assert_ends_as_undisturbed(tmp_path, whole)


def test_a_loss_that_is_no_number(tmp_path, whole, monkeypatch):
    calls, real = [], VitStudy.loss

    def broken(self, model, batch):
        calls.append(1)
        return real(self, model, batch) * (float("nan") if len(calls) == 7 else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(VitStudy, "loss", broken)
        text = "the loss is nan at step 7; the last checkpoint is kept in"
        refused(1, text, "vit", tmp_path, "--attention", "softmax")
    folder = tmp_path / "vit/smoke/toy/softmax-0"
    assert Checkpoints(folder, {}).newest()[0].step == 4
    assert not folder.with_suffix(".json").exists()
    assert_ends_as_undisturbed(tmp_path, whole)


def test_one_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    real = VitStudy.loss

    def broken(self, model, batch):
        return real(self, model, batch) * (float("nan") if self.attention == "softmax" else 1.0)

    monkeypatch.setattr(VitStudy, "loss", broken)
    text = "1 of the runs failed. toy · softmax · seed 0: the loss is nan at step 1"
    result = refused(1, text, "vit", tmp_path)
    assert "see metrics.jsonl; another preset, or a rate of your own in Python, is" in result.stderr
    assert "OT-ViT" in result.stdout
    assert (tmp_path / "vit/smoke/toy/transport-0.json").exists()
    assert not (tmp_path / "vit/smoke/toy/softmax-0.json").exists()
    text = "2 of the runs failed. toy · softmax · seed 0"  # nothing to show is no other failure
    refused(1, text, "vit", tmp_path / "none", "--attention", "softmax", "--seeds", "2")


def test_again_that_is_stopped_goes_on_without_it(tmp_path, whole, steps):
    done("vit", tmp_path, "--attention", "softmax")
    steps[1][12 + 10] = interrupt
    text = "what is stored is kept. The same command without --again goes on."
    refused(130, text, "vit", tmp_path, "--attention", "softmax", "--again")
    assert not (tmp_path / "vit/smoke/toy/softmax-0.json").exists()
    assert "going on at step 8 of 12" in assert_ends_as_undisturbed(tmp_path, whole)


def interrupt():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # until it is heard


@pytest.mark.parametrize("stop", [interrupt, terminate])
def test_an_interruption(tmp_path, whole, steps, stop):
    steps[1][10] = stop
    text = "stopped; what is stored is kept. The same command goes on."
    refused(130, text, "vit", tmp_path, "--attention", "softmax")
    assert "going on at step 8 of 12" in assert_ends_as_undisturbed(tmp_path, whole)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(tmp_path, whole, steps):
    steps[1][10] = interrupt
    refused(130, "stopped", "vit", tmp_path, "--attention", "softmax")
    newest = tmp_path / "vit/smoke/toy/softmax-0/step-00000008.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    said = assert_ends_as_undisturbed(tmp_path, whole)
    assert "step-00000008 does not match its checksum: set aside" in said
    assert "going on at step 4 of 12" in said
