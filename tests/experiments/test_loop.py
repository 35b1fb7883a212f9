"""The training loop: where it stopped does not show in its numbers."""

import json
import random
from dataclasses import replace

import pytest
import torch

from fenchel.experiments import loop
from fenchel.experiments.checkpoint import Checkpoints, OtherConfig, State
from fenchel.experiments.data.images import load_images
from fenchel.experiments.loop import Diverged, Training, train
from fenchel.experiments.vit.model import Size
from fenchel.experiments.vit.study import VitStudy
from tests.experiments.files import write_fashion

TRAINING = Training(
    steps=12, batch=8, rate=3e-3, warmup=2, evaluate_every=4, save_every=3, weight_decay=0.01
)
SIZE = Size(width=16, inner=16, layers=2, heads=2)
CONFIG = {"study": "vit"}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = write_fashion(tmp_path_factory.mktemp("data") / "fashion-mnist")
    return VitStudy(load_images("fashion-mnist", folder), SIZE, "transport", sharing=0.5)


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory):
    """An undisturbed run: its outcome, its metrics and its last weights."""
    folder = tmp_path_factory.mktemp("whole")
    return ended(study, folder)


def ended(study, folder, resume=False, training=TRAINING, say=lambda text: None, **settings):
    outcome = train(study, training, folder, CONFIG, resume=resume, say=say, **settings)
    state, _ = Checkpoints(folder, {}).newest()
    return outcome, (folder / "metrics.jsonl").read_text(), state.tensors


def assert_same(left, right):
    assert left[0].scores == right[0].scores
    assert left[0].best == right[0].best
    assert left[1] == right[1]
    assert left[2].keys() == right[2].keys()
    assert all(torch.equal(value, right[2][name]) for name, value in left[2].items())


def test_it_learns(study, tmp_path):
    training = replace(TRAINING, steps=60, evaluate_every=60, save_every=60, rate=1e-2)
    plain = VitStudy(study.data, replace(SIZE, dropout=0.0), "softmax")
    outcome, metrics, _ = ended(plain, tmp_path, training=training)
    losses = [json.loads(line)["loss"] for line in metrics.splitlines()]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert outcome.best["test accuracy"] > 0.3  # chance is a quarter; there are 64 images


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
            ended(study, tmp_path, resume=True, advance=die)
    assert_same(ended(study, tmp_path, resume=True), whole)


def test_a_finished_run_is_not_trained_again(study, whole, tmp_path):
    ended(study, tmp_path)
    steps = []
    again = ended(study, tmp_path, resume=True, advance=lambda step, numbers: steps.append(step))
    assert steps == []
    assert_same(again, whole)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(study, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ended(study, tmp_path, advance=_stop_at(7))
    newest = tmp_path / "step-00000006.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[-3] ^= 1
    newest.write_bytes(raw)
    said = []
    assert_same(ended(study, tmp_path, resume=True, say=said.append), whole)
    assert any("step-00000006" in text and "checksum" in text for text in said)
    assert any("going on at step 3 of 12" in text for text in said)
    assert (tmp_path / "step-00000006.safetensors.damaged").exists()


def _stop_at(stop):
    def advance(step, numbers):
        if step == stop:
            raise KeyboardInterrupt

    return advance


def test_a_half_written_checkpoint_does_not_count(study, whole, tmp_path):
    """Tensors without their JSON, as a kill between the two would leave them."""
    with pytest.raises(KeyboardInterrupt):
        ended(study, tmp_path, advance=_stop_at(7))
    (tmp_path / "step-00000006.json").unlink()
    assert_same(ended(study, tmp_path, resume=True), whole)


def test_another_configuration_is_refused_with_the_difference(study, tmp_path):
    ended(study, tmp_path)
    with pytest.raises(OtherConfig, match=r"training.rate was 0.003, is 0.1"):
        ended(study, tmp_path, resume=True, training=replace(TRAINING, rate=0.1))
    assert Checkpoints(tmp_path, {}).newest()[0].step == 12  # nothing lost


def test_a_loss_that_is_no_number_stops_it(study, tmp_path, monkeypatch):
    real = VitStudy.loss
    calls = []

    def broken(self, model, batch):
        calls.append(1)
        return real(self, model, batch) * (float("nan") if len(calls) == 8 else 1.0)

    monkeypatch.setattr(VitStudy, "loss", broken)
    with pytest.raises(Diverged, match="at step 7; the last checkpoint is kept"):
        ended(study, tmp_path)
    assert Checkpoints(tmp_path, {}).newest()[0].step == 6


def test_early_stopping_watches_what_is_held_back(study, tmp_path, monkeypatch):
    held = VitStudy(study.data, SIZE, "softmax", held=16)
    assert len(held.train) == 48
    monkeypatch.setattr(VitStudy, "_accuracy", lambda self, model, split: 0.5)
    training = replace(TRAINING, patience=2, evaluate_every=2)
    outcome, _, _ = ended(held, tmp_path, training=training)
    assert outcome.steps == 6  # evaluated at 2, 4, 6: the last two are no better
    assert outcome.scores == {"accuracy": 0.5, "test accuracy": 0.5}


def test_the_rate_rises_then_falls_as_a_cosine():
    training = Training(steps=110, batch=2, rate=1.0, warmup=10)
    assert [training.rate_at(step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert training.rate_at(60) == pytest.approx(0.5)
    assert training.rate_at(109) < 1e-3


def test_only_the_two_newest_checkpoints_are_kept(tmp_path):
    kept = Checkpoints(tmp_path, {})
    kept.open(resume=False)
    for step in (1, 2, 3):
        kept.save(State(step, {"x": torch.ones(2)}, {}))
    assert sorted(path.name for path in tmp_path.glob("step-*.json")) == [
        "step-00000002.json",
        "step-00000003.json",
    ]


def test_random_numbers_of_steps_are_far_apart():
    seeds = {loop._mixed(seed, step, -1) for seed in range(20) for step in range(2_000)}
    assert len(seeds) == 40_000
