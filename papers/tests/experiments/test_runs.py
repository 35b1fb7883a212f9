"""A queue of runs: each is made once, stored whole, and never mistaken for another."""

import copy
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel import NonFiniteError
from papers.experiments import runs
from papers.experiments.checkpoint import Checkpoints, OtherConfig
from papers.experiments.loop import Diverged
from papers.experiments.processes import Busy
from papers.experiments.runs import carry_out, of_first, read_result, shortened, stored
from papers.tests.experiments.tiny import Line, line_job

JOB = line_job()


def quiet(text):
    pass


def run_job(out, job=JOB, study=None, **settings):
    return carry_out(job, study or Line(), out, say=quiet, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that is done, and its result."""
    out = tmp_path_factory.mktemp("whole")
    return out, run_job(out, note="of points")


def without_seconds(document):
    cost = {name: value for name, value in document["cost"].items() if name != "seconds"}
    return document | {"cost": cost}


def test_a_result_is_what_is_stored(whole):
    out, document = whole
    path = out / "line" / "small" / "points" / "plain-0.json"
    assert json.loads(path.read_text()) == document
    assert stored(JOB, out) == document
    assert document["note"] == "of points"
    assert document["cost"]["steps"] == 12
    assert document["cost"]["parameters"] == 2
    # 2 per example forward, 2 backward for the weight; a quarter of the steps has one example
    assert document["cost"]["flops"] == 12 * (0.25 * 4 + 0.75 * 4 * 4)
    state, _ = Checkpoints(path.with_suffix(""), {}).newest()
    assert document["facts"] == {"intercept": float(state.tensors["model.bias"])}
    assert document["scores"]["slope"] == float(state.tensors["model.weight"])


def test_nothing_is_stored_before_the_end(tmp_path):
    assert stored(JOB, tmp_path) is None
    seen = []
    run_job(tmp_path, advance=lambda step, numbers: seen.append(stored(JOB, tmp_path)))
    assert seen == [None] * 12


def test_a_run_whose_result_was_not_written_is_not_trained_again(whole, tmp_path):
    run_job(tmp_path)
    JOB.file(tmp_path).unlink()
    study = Line()
    again = run_job(tmp_path, study=study, note="of points")
    assert study.steps == 0
    assert without_seconds(again) == without_seconds(whole[1])


def test_one_that_stopped_early_is_not_trained_further(tmp_path):
    job = line_job(patience=2, evaluate_every=2)
    first = run_job(tmp_path, job, Line(told=[0.5, 0.4, 0.3]))
    assert first["cost"]["steps"] == 6
    job.file(tmp_path).unlink()
    study = Line()
    assert without_seconds(run_job(tmp_path, job, study)) == without_seconds(first)
    assert study.steps == 0


def test_again_begins_at_the_first_step(whole, tmp_path):
    run_job(tmp_path)
    study = Line()
    said = []
    document = carry_out(JOB, study, tmp_path, note="of points", again=True, say=said.append)
    assert study.steps == 12
    assert said == []
    assert without_seconds(document) == without_seconds(whole[1])


def test_the_curve_is_what_the_metrics_say(whole):
    out, document = whole
    lines = (JOB.file(out).with_suffix("") / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert [point["step"] for point in document["curve"]] == [4, 8, 12]
    for point in document["curve"]:
        before = [line["loss"] for line in metrics if point["step"] - 4 < line["step"]][:4]
        assert point["loss"] == pytest.approx(sum(before) / 4, abs=1e-6)
        assert point["score"] == metrics[point["step"] - 1]["score"]
    assert document["curve"][-1]["slope"] == document["scores"]["slope"]


# ---- settings


def test_a_result_of_other_settings_is_refused_with_the_difference(whole):
    out, _ = whole
    other = line_job(rate=0.5)
    with pytest.raises(OtherConfig, match=r"plain-0\.json .*training\.rate was 0\.0003, is 0\.5\."):
        stored(other, out)
    with pytest.raises(OtherConfig, match=r"width was None, is 8\. .*--again"):
        stored(line_job(config={"width": 8}), out)
    assert stored(line_job(seed=1), out) is None  # another file


def test_settings_survive_json(tmp_path):
    """A tuple comes back as a list; that is no difference."""
    job = line_job(config={"functions": (100, 49), "share": 0.1, "none": None})
    assert json.loads(json.dumps(job.settings())) == job.settings()
    assert job.settings()["functions"] == [100, 49]
    run_job(tmp_path, job)
    assert stored(job, tmp_path) is not None
    other = line_job(config={"functions": (100, 50), "share": 0.1, "none": None})
    with pytest.raises(OtherConfig, match=r"functions was \[100, 49\], is \[100, 50\]"):
        stored(other, tmp_path)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_job(tmp_path, advance=stop_at(7))
    with pytest.raises(OtherConfig, match=r"training\.batch was 4, is 2"):
        run_job(tmp_path, line_job(batch=2))
    assert run_job(tmp_path, line_job(batch=2), again=True)["settings"]["training"]["batch"] == 2


def stop_at(stop):
    def advance(step, numbers):
        if step == stop:
            raise KeyboardInterrupt

    return advance


def test_damaged_settings_of_a_checkpoint_are_named(tmp_path):
    run_job(tmp_path)
    JOB.file(tmp_path).unlink()
    (JOB.file(tmp_path).with_suffix("") / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged .*--again"):
        run_job(tmp_path)
    run_job(tmp_path, again=True)


@pytest.mark.parametrize(
    "content",
    ["", '{"settings": {', "[]", "{}", '{"settings": 1, "scores": 1, "cost": 1}', "[" * 100_000],
)
def test_a_damaged_result_is_named(tmp_path, content):
    path = JOB.file(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match=r"plain-0\.json is no result of a run.*; remove it"):
        stored(JOB, tmp_path)


PARTS = ("settings", "note", "scores", "facts", "cost", "curve", "versions")
WHOLE = {
    "attention": "softmax",
    "size": {"width": 8, "layers": 1, "heads": 2, "dropout": 0.0},
}


@pytest.mark.parametrize(
    "lost",
    [
        *((part,) for part in PARTS),
        *(("cost", name) for name in ("steps", "seconds", "flops", "parameters", "threads")),
        *(("settings", name) for name in ("study", "preset", "data", "variant", "attention")),
        ("settings", "size"),
        ("settings", "size", "width"),
        ("settings", "training"),
        ("settings", "training", "seed"),
    ],
    ids=".".join,
)
def test_what_a_result_lacks_for_tables_is_named(whole, tmp_path, lost):
    document = json.loads(json.dumps(whole[1]))
    document["settings"] |= copy.deepcopy(WHOLE)
    path = tmp_path / "plain-0.json"
    path.write_text(json.dumps(document))
    assert read_result(path) == document
    inside = document
    for name in lost[:-1]:
        inside = inside[name]
    del inside[lost[-1]]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"plain-0\.json is no result of a run .*{lost[-1]}"):
        read_result(path)


def test_facts_that_are_no_numbers_are_not_stored(tmp_path):
    class Odd(Line):
        def facts(self, model, folder):
            return {"share": float("nan")}

    with pytest.raises(ValueError, match="JSON compliant"):
        run_job(tmp_path, study=Odd())
    assert not JOB.file(tmp_path).exists()


def test_facts_of_a_network_that_diverged_are_told_with_the_step(tmp_path):
    class Odd(Line):
        def facts(self, model, folder):
            raise NonFiniteError("weights must be finite; they hold NaN or infinity")

    with pytest.raises(
        Diverged, match=r"weights must be finite; .* at step 12; the last checkpoint"
    ):
        run_job(tmp_path, study=Odd())


def test_again_that_is_stopped_is_not_taken_for_done(whole, tmp_path):
    run_job(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_job(tmp_path, again=True, advance=stop_at(7))
    assert stored(JOB, tmp_path) is None
    study = Line()
    assert run_job(tmp_path, study=study)["scores"] == whole[1]["scores"]
    assert study.steps == 6


def test_a_busy_run_keeps_its_result_though_it_is_to_be_made_again(tmp_path):
    run_job(tmp_path)
    with (JOB.file(tmp_path).with_suffix("") / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Busy):
            run_job(tmp_path, again=True)
    assert stored(JOB, tmp_path) is not None


@pytest.mark.parametrize("left", [None, 0, 100, 500])
def test_lost_metrics_do_not_change_the_curve(whole, tmp_path, left):
    """left: bytes of the file; None: it is not there."""
    run_job(tmp_path)
    JOB.file(tmp_path).unlink()
    path = JOB.file(tmp_path).with_suffix("") / "metrics.jsonl"
    kept = path.read_bytes()
    assert len(kept) > 500
    path.unlink()
    if left is not None:
        path.write_bytes(kept[:left])
    assert run_job(tmp_path)["curve"] == whole[1]["curve"]
    assert path.read_bytes() == kept


def test_half_written_files_of_a_kill_are_removed(tmp_path):
    folder = JOB.file(tmp_path).with_suffix("")
    folder.mkdir(parents=True)
    (folder / ".step-00000003.safetensors.77").write_bytes(b"half")
    run_job(tmp_path)
    assert not list(folder.glob(".step-*"))


def test_the_first_steps_are_stored_apart(whole):
    out, _ = whole
    short = shortened(JOB, 2)
    assert short.training == replace(JOB.training, steps=2, evaluate_every=2, save_every=2)
    assert short.preset == of_first("small", 2) == "small-first-2"
    assert of_first("small", None) == "small"
    assert (short.variant, short.data) == (JOB.variant, JOB.data)
    assert short.config == {**JOB.config, "tested": 500}
    assert stored(short, out) is None  # the whole run is not taken for it
    assert shortened(JOB, 1000).training.steps == 12


# ---- several processes on one queue

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_run_of_another_process_is_left_to_it_until_that_is_killed(whole, tmp_path):
    folder = JOB.file(tmp_path).with_suffix("")
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, str(folder / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        study = Line()
        with pytest.raises(Busy, match=r"another process is at the run in .*plain-0"):
            run_job(tmp_path, study=study)
        assert study.steps == 0
        run_job(tmp_path, line_job(seed=1))  # others are free
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert run_job(tmp_path)["scores"] == whole[1]["scores"]


def test_the_lock_is_held_to_the_end_and_then_free(tmp_path):
    path = JOB.file(tmp_path).with_suffix("") / "lock"

    def free():
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    seen = []
    run_job(tmp_path, advance=lambda step, numbers: seen.append(free()))
    assert seen == [False] * 12
    assert free()


def test_only_the_main_process_stores(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(runs, "write_whole", lambda path, content: written.append(Path(path)))
    with monkeypatch.context() as second:
        second.setattr(runs, "is_main", lambda: False)
        run_job(tmp_path / "other")
    assert written == []
    run_job(tmp_path / "main")
    assert [path.name for path in written] == ["plain-0.json"]


def test_a_damaged_checkpoint_changes_nothing_but_the_way(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_job(tmp_path, advance=stop_at(8))
    newest = JOB.file(tmp_path).with_suffix("") / "step-00000006.json"
    newest.write_text(newest.read_text().replace("0.", "1.", 1))
    study, said = Line(), []
    document = carry_out(JOB, study, tmp_path, note="of points", say=said.append)
    assert study.steps == 9
    assert without_seconds(document) == without_seconds(whole[1])
    assert "step-00000006 does not match its checksum: set aside" in said[0]


def test_random_numbers_before_a_run_do_not_change_it(whole, tmp_path):
    torch.rand(7)
    assert run_job(tmp_path)["curve"] == whole[1]["curve"]
