"""Runs that were stopped and go on: where one stopped does not show in its numbers."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from papers.experiments import checkpoint
from papers.experiments.checkpoint import Checkpoints, OtherConfig, State
from papers.experiments.processes import Busy, alone
from papers.tests.experiments.short_runs import (
    LINE,
    TRAINING,
    stop_at,
    train_line,
    train_vit,
)
from papers.tests.experiments.tiny import Line


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory):
    """An undisturbed run: its outcome, its metrics and its last weights."""
    return train_vit(study, tmp_path_factory.mktemp("whole"))


def assert_same(left, right):
    assert left[0].scores == right[0].scores
    assert left[0].best == right[0].best
    assert left[1] == right[1]
    assert left[2].keys() == right[2].keys()
    assert all(torch.equal(value, right[2][name]) for name, value in left[2].items())


def test_interrupted_at_ten_moments_it_ends_the_same(study, whole, tmp_path):
    """Each interruption leaves what a kill would: files that were written whole."""

    class Killed(BaseException):
        pass

    moments = sorted(random.Random(0).sample(range(1, 12), 10))
    for stop in moments:

        def die(step, numbers, stop=stop):
            if step == stop:
                raise Killed

        with pytest.raises(Killed):
            train_vit(study, tmp_path, resume=True, advance=die)
    assert_same(train_vit(study, tmp_path, resume=True), whole)


def test_a_finished_run_is_not_trained_again(study, whole, tmp_path):
    train_vit(study, tmp_path)
    steps = []
    again = train_vit(
        study, tmp_path, resume=True, advance=lambda step, numbers: steps.append(step)
    )
    assert steps == []
    assert_same(again, whole)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(study, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train_vit(study, tmp_path, advance=stop_at(7))
    newest = tmp_path / "step-00000006.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[-3] ^= 1
    newest.write_bytes(raw)
    said = []
    assert_same(train_vit(study, tmp_path, resume=True, say=said.append), whole)
    assert any("step-00000006" in text and "checksum" in text for text in said)
    assert any("going on at step 3 of 12" in text for text in said)
    assert (tmp_path / "step-00000006.safetensors.damaged").exists()


def test_a_half_written_checkpoint_does_not_count(study, whole, tmp_path):
    """Tensors without their JSON, as a kill between the two would leave them."""
    with pytest.raises(KeyboardInterrupt):
        train_vit(study, tmp_path, advance=stop_at(7))
    (tmp_path / "step-00000006.json").unlink()
    assert_same(train_vit(study, tmp_path, resume=True), whole)


def test_another_configuration_is_refused_with_the_difference(study, tmp_path):
    train_vit(study, tmp_path)
    with pytest.raises(OtherConfig, match=r"training.rate was 0.003, is 0.1"):
        train_vit(study, tmp_path, resume=True, training=replace(TRAINING, rate=0.1))
    assert Checkpoints(tmp_path, {}).newest()[0].step == 12  # nothing lost


def test_only_the_two_newest_checkpoints_are_kept(tmp_path):
    kept = Checkpoints(tmp_path, {})
    kept.open(resume=False)
    for step in (1, 2, 3):
        kept.save(State(step, {"x": torch.ones(2)}, {}))
    assert sorted(path.name for path in tmp_path.glob("step-*.json")) == [
        "step-00000002.json",
        "step-00000003.json",
    ]


# ---- what is on the disk


def without_marks(folder):
    """Checkpoints as they were before each held a mark of its settings."""
    for path in folder.glob("step-*.json"):
        document = json.loads(path.read_text())
        del document["sha256"], document["config"]
        content = path.with_suffix(".safetensors").read_bytes()
        document["sha256"] = checkpoint._digest(content, document)
        path.write_text(json.dumps(document))


def interrupt_line(folder):
    with pytest.raises(KeyboardInterrupt):
        train_line(folder, advance=stop_at(7))


def test_a_checkpoint_without_a_mark_beside_its_settings_is_used(tmp_path):
    interrupt_line(tmp_path)
    without_marks(tmp_path)
    said = []
    train_line(tmp_path, resume=True, say=said.append)
    assert said == ["going on at step 6 of 12"]


def test_a_checkpoint_that_says_nothing_of_its_settings_is_not_used(tmp_path):
    interrupt_line(tmp_path)
    without_marks(tmp_path)
    (tmp_path / "config.json").unlink()
    study, said = Line(), []
    train_line(tmp_path, study, resume=True, say=said.append)
    assert study.steps == 12
    assert "step-00000006.json.other is of other settings, or does not say of which" in "".join(
        said
    )
    assert said[-1] == "beginning anew"


def test_a_checkpoint_of_other_settings_is_not_used_without_its_settings(tmp_path):
    interrupt_line(tmp_path)
    (tmp_path / "config.json").unlink()
    study = Line()
    train_line(tmp_path, study, replace(LINE, rate=0.5), resume=True)
    assert study.steps == 12
    interrupt_line(tmp_path)
    (tmp_path / "config.json").unlink()
    study = Line()
    train_line(tmp_path, study, resume=True)  # of its own settings it is
    assert study.steps == 6


def test_a_new_setting_that_is_none_does_not_make_checkpoints_foreign(tmp_path):
    """As it makes no difference between two settings."""
    kept = Checkpoints(tmp_path, {"size": {"width": 3}})
    kept.open(resume=False)
    kept.save(State(1, {"x": torch.ones(2)}, {}))
    assert Checkpoints(tmp_path, {"size": {"width": 3, "head": None}}).open(resume=True) == []
    assert kept.newest()[0].step == 1


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"7", b"null", b'"x"', b"{}", b"\xff\xfe", b'{"sha256": 1, "step": []}']
)
def test_any_damaged_checkpoint_is_set_aside(tmp_path, content):
    interrupt_line(tmp_path)
    (tmp_path / "step-00000006.json").write_bytes(content)
    said = []
    train_line(tmp_path, resume=True, say=said.append)
    assert said[-1] == "going on at step 3 of 12"
    assert (tmp_path / "step-00000006.json.damaged").read_bytes() == content


def test_damaged_lines_of_the_metrics_are_left_out_one_by_one(tmp_path):
    interrupt_line(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    spoiled = [b"{", b"[]", b"3", b'{"loss": 1.0}', b'{"step": 2}', b"\xff\xfe", b""]
    path.write_bytes(b"\n".join([lines[0], *spoiled, *lines[1:]]) + b"\n")
    assert [line["step"] for line in checkpoint.read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    train_line(tmp_path, resume=True)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(1, 13))
    path.unlink()
    assert list(checkpoint.read_metrics(tmp_path)) == []


def lost_end(raw):
    return raw[: len(raw) // 3]


def lost_middle(raw):
    lines = raw.splitlines(keepends=True)
    return b"".join(lines[:1] + lines[3:])


def lost_all(raw):
    return b""


def changed(raw):
    return raw.replace(b'"loss": ', b'"loss": 1', 1)


def twice(raw):
    return raw.splitlines(keepends=True)[0] + raw


@pytest.mark.parametrize("harm", [lost_end, lost_middle, lost_all, changed, twice])
@pytest.mark.parametrize("stop", [7, 12])
def test_the_curve_is_that_of_an_undisturbed_run(study, whole, tmp_path, harm, stop):
    """Whatever happens to its file between two runs; stop: 12 is the end, where nothing is made
    again."""
    with pytest.raises(KeyboardInterrupt):
        train_vit(study, tmp_path, advance=stop_at(stop))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(harm(path.read_bytes()))
    assert_same(train_vit(study, tmp_path, resume=True), whole)


def test_a_curve_that_is_harmed_during_the_run_is_whole_at_its_end(study, whole, tmp_path):
    def harm(step, numbers):
        if step == 8:
            (tmp_path / "metrics.jsonl").unlink()

    assert_same(train_vit(study, tmp_path, advance=harm), whole)


def without_curves(folder):
    """Checkpoints as they were before each held the curve up to it."""
    for path in folder.glob("step-*.json"):
        tensors = load_file(path.with_suffix(".safetensors"))
        del tensors["curve"]
        save_file(tensors, path.with_suffix(".safetensors"))
        document = json.loads(path.read_text())
        del document["sha256"]
        content = path.with_suffix(".safetensors").read_bytes()
        document["sha256"] = checkpoint._digest(content, document)
        path.write_text(json.dumps(document))


def test_a_checkpoint_without_its_curve_takes_it_from_the_file(study, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train_vit(study, tmp_path, advance=stop_at(7))
    without_curves(tmp_path)
    assert_same(train_vit(study, tmp_path, resume=True), whole)


@pytest.mark.parametrize("harm", [lost_end, lost_middle, lost_all, twice])
def test_a_checkpoint_without_its_curve_is_refused_where_the_file_lacks_steps(
    study, tmp_path, harm
):
    with pytest.raises(KeyboardInterrupt):
        train_vit(study, tmp_path, advance=stop_at(7))
    without_curves(tmp_path)
    path = tmp_path / "metrics.jsonl"
    harmed = harm(path.read_bytes())
    path.write_bytes(harmed)
    message = (
        r"metrics\.jsonl does not hold steps 1 to 6, .*put it back, or begin again with --again"
    )
    with pytest.raises(ValueError, match=message):
        train_vit(study, tmp_path, resume=True)
    assert path.read_bytes() == harmed  # nothing lost


def test_two_do_not_train_in_one_folder(tmp_path):
    with alone(tmp_path), pytest.raises(Busy, match="another process is at the run"):
        train_line(tmp_path)
    train_line(tmp_path)
