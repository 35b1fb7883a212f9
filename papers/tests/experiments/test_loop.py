"""The training loop: it learns, stops where it should, and refuses what is no number."""

import json
from dataclasses import replace

import pytest
import torch

from fenchel import NonFiniteError
from papers.experiments import loop
from papers.experiments.checkpoint import Checkpoints
from papers.experiments.loop import Diverged, Training
from papers.experiments.vit.study import VitStudy
from papers.tests.experiments.short_runs import (
    LINE,
    SIZE,
    TRAINING,
    train_line,
    train_vit,
)
from papers.tests.experiments.tiny import Line


def test_it_learns(study, tmp_path):
    training = replace(TRAINING, steps=60, evaluate_every=60, save_every=60, rate=1e-2)
    plain = VitStudy(study.data, replace(SIZE, dropout=0.0), "softmax")
    outcome, metrics, _ = train_vit(plain, tmp_path, training=training)
    losses = [json.loads(line)["loss"] for line in metrics.splitlines()]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert outcome.best["test accuracy"] > 0.3  # chance is a quarter; there are 64 images


def test_a_loss_that_is_no_number_stops_it(study, tmp_path, monkeypatch):
    real = VitStudy.loss
    calls = []

    def broken(self, model, batch):
        calls.append(1)
        return real(self, model, batch) * (float("nan") if len(calls) == 8 else 1.0)

    monkeypatch.setattr(VitStudy, "loss", broken)
    with pytest.raises(Diverged, match="at step 8; the last checkpoint is kept"):
        train_vit(study, tmp_path)
    assert Checkpoints(tmp_path, {}).newest()[0].step == 6


def test_early_stopping_watches_what_is_held_back(study, tmp_path, monkeypatch):
    held = VitStudy(study.data, SIZE, "softmax", held=16)
    assert len(held.train) == 48
    monkeypatch.setattr(VitStudy, "_accuracy", lambda self, model, split: 0.5)
    training = replace(TRAINING, patience=2, evaluate_every=2)
    outcome, _, _ = train_vit(held, tmp_path, training=training)
    assert outcome.steps == 6  # evaluated at 2, 4, 6: the last two are no better
    assert outcome.scores == {"accuracy": 0.5, "test accuracy": 0.5}


def test_the_rate_rises_then_falls_as_a_cosine():
    training = Training(steps=110, batch=2, rate=1.0, warmup=10)
    assert [training.rate_at(step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert training.rate_at(60) == pytest.approx(0.5)
    assert training.rate_at(109) < 1e-3


def test_random_numbers_of_steps_are_far_apart():
    seeds = {loop._mixed(seed, step, -1) for seed in range(20) for step in range(2_000)}
    assert len(seeds) == 40_000


# ---- what is no number


def spoilt(model):
    with torch.no_grad():
        model.weight.fill_(float("nan"))


def test_answers_that_are_no_numbers_have_no_score(study, tmp_path):
    """The largest of NaN has a place, which may be the right one."""
    model = study.build().eval()
    with torch.no_grad():
        model.answer.bias[0] = float("nan")
        with pytest.raises(Diverged, match="answers are not finite"):
            study.scores(model)


def test_a_network_spoilt_before_its_evaluation_is_told_with_the_step(tmp_path):
    class Spoilt(Line):
        def scores(self, model):
            if self.steps == 8:
                spoilt(model)
            return super().scores(model)

    with pytest.raises(Diverged, match=r"scores are not finite at step 8; .*another preset"):
        train_line(tmp_path, Spoilt())
    assert Checkpoints(tmp_path, {}).newest()[0].step == 6
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 7


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    class Hidden(Line):
        def scores(self, model):
            spoilt(model)
            return {"score": 0.5}

    with pytest.raises(Diverged, match="weights are not finite at step 9"):
        train_line(tmp_path, Hidden(), replace(LINE, evaluate_every=9))
    state = Checkpoints(tmp_path, {}).newest()[0]
    assert state.step == 6
    assert all(bool(x.isfinite().all()) for x in state.tensors.values())


def test_a_gradient_that_is_no_number_stops_before_the_step(tmp_path):
    class Steep(Line):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            if self.steps == 5:  # 0 forward, 0 / 0 backward
                loss = loss + (model.weight - model.weight.detach()).square().sum().sqrt()
            return loss

    with pytest.raises(Diverged, match=r"the norm of the gradient is nan at step 5;"):
        train_line(tmp_path, Steep())
    assert Checkpoints(tmp_path, {}).newest()[0].step == 3


def test_a_density_that_refuses_its_scores_has_diverged(tmp_path):
    class Density(Line):
        def loss(self, model, batch):
            if self.steps == 5:
                raise NonFiniteError("weights must be finite; they hold NaN or infinity")
            return super().loss(model, batch)

    with pytest.raises(Diverged, match="the loss is nan at step 5"):
        train_line(tmp_path, Density())


def test_other_errors_are_not_taken_for_it(tmp_path):
    class Wrong(Line):
        def loss(self, model, batch):
            raise ValueError("the rate must be finite, got inf")

    with pytest.raises(ValueError, match="the rate must be finite, got inf"):
        train_line(tmp_path, Wrong())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rate": 0.0}, "rate must be a finite number > 0, got 0.0"),
        ({"rate": float("inf")}, "rate must be a finite number > 0, got inf"),
        ({"rate": float("nan")}, "rate must be a finite number > 0, got nan"),
        ({"clip": 0.0}, "clip must be a finite number > 0"),
        ({"clip": -1.0}, "clip must be a finite number > 0"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number >= 0"),
        ({"weight_decay": float("inf")}, "weight_decay must be a finite number >= 0"),
        ({"warmup": -5}, "warmup must be >= 0"),
        ({"patience": 0}, "patience must be >= 1"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"seed": 2**31}, r"seed must be < 2\^31"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        replace(LINE, **settings)


def test_settings_at_the_border_are_not_refused():
    replace(LINE, warmup=0, weight_decay=0.0, seed=2**31 - 1, patience=1)
    replace(LINE, warmup=1000)  # longer than the run
    with pytest.raises(TypeError, match="warmup must be a whole number"):
        replace(LINE, warmup=0.5)
