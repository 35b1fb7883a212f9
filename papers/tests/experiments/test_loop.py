"""The training loop: where it stopped does not show in its numbers."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fenchel import NonFiniteError
from papers.experiments import checkpoint, loop
from papers.experiments.checkpoint import Checkpoints, OtherConfig, State
from papers.experiments.data.images import load_images
from papers.experiments.loop import Diverged, Training, train
from papers.experiments.processes import Busy, alone
from papers.experiments.vit.model import Size
from papers.experiments.vit.study import VitStudy
from papers.tests.experiments.files import write_fashion
from papers.tests.experiments.tiny import Line

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
    with pytest.raises(Diverged, match="at step 8; the last checkpoint is kept"):
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


# ---- what is no number

LINE = Training(steps=12, batch=4, warmup=2, evaluate_every=4, save_every=3)


def line_run(folder, study=None, training=LINE, resume=False, **settings):
    settings = {"say": lambda text: None} | settings
    return train(study or Line(), training, folder, CONFIG, resume=resume, **settings)


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
        line_run(tmp_path, Spoilt())
    assert Checkpoints(tmp_path, {}).newest()[0].step == 6
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 7


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    class Hidden(Line):
        def scores(self, model):
            spoilt(model)
            return {"score": 0.5}

    with pytest.raises(Diverged, match="weights are not finite at step 9"):
        line_run(tmp_path, Hidden(), replace(LINE, evaluate_every=9))
    state = Checkpoints(tmp_path, {}).newest()[0]
    assert state.step == 6
    assert all(bool(x.isfinite().all()) for x in state.tensors.values())


def test_a_gradient_that_is_no_number_stops_before_the_step(tmp_path):
    class Steep(Line):
        def loss(self, model, batch):
            found = super().loss(model, batch)
            if self.steps == 5:  # 0 forward, 0 / 0 backward
                found = found + (model.weight - model.weight.detach()).square().sum().sqrt()
            return found

    with pytest.raises(Diverged, match=r"the norm of the gradient is nan at step 5;"):
        line_run(tmp_path, Steep())
    assert Checkpoints(tmp_path, {}).newest()[0].step == 3


def test_a_density_that_refuses_its_scores_has_diverged(tmp_path):
    class Density(Line):
        def loss(self, model, batch):
            if self.steps == 5:
                raise NonFiniteError("weights must be finite; they hold NaN or infinity")
            return super().loss(model, batch)

    with pytest.raises(Diverged, match="the loss is nan at step 5"):
        line_run(tmp_path, Density())


def test_other_errors_are_not_taken_for_it(tmp_path):
    class Wrong(Line):
        def loss(self, model, batch):
            raise ValueError("the rate must be finite, got inf")

    with pytest.raises(ValueError, match="the rate must be finite, got inf"):
        line_run(tmp_path, Wrong())


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


# ---- what is on the disk


def without_marks(folder):
    """Checkpoints as they were before each held a mark of its settings."""
    for path in folder.glob("step-*.json"):
        document = json.loads(path.read_text())
        del document["sha256"], document["config"]
        content = path.with_suffix(".safetensors").read_bytes()
        document["sha256"] = checkpoint._digest(content, document)
        path.write_text(json.dumps(document))


def begun(folder):
    with pytest.raises(KeyboardInterrupt):
        line_run(folder, advance=_stop_at(7))


def test_a_checkpoint_without_a_mark_beside_its_settings_is_used(tmp_path):
    begun(tmp_path)
    without_marks(tmp_path)
    said = []
    line_run(tmp_path, resume=True, say=said.append)
    assert said == ["going on at step 6 of 12"]


def test_a_checkpoint_that_says_nothing_of_its_settings_is_not_used(tmp_path):
    begun(tmp_path)
    without_marks(tmp_path)
    (tmp_path / "config.json").unlink()
    study, said = Line(), []
    line_run(tmp_path, study, resume=True, say=said.append)
    assert study.steps == 12
    assert "step-00000006.json.other is of other settings, or does not say of which" in "".join(
        said
    )
    assert said[-1] == "beginning anew"


def test_a_checkpoint_of_other_settings_is_not_used_without_its_settings(tmp_path):
    begun(tmp_path)
    (tmp_path / "config.json").unlink()
    study = Line()
    line_run(tmp_path, study, replace(LINE, rate=0.5), resume=True)
    assert study.steps == 12
    begun(tmp_path)
    (tmp_path / "config.json").unlink()
    study = Line()
    line_run(tmp_path, study, resume=True)  # of its own settings it is
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
    begun(tmp_path)
    (tmp_path / "step-00000006.json").write_bytes(content)
    said = []
    line_run(tmp_path, resume=True, say=said.append)
    assert said[-1] == "going on at step 3 of 12"
    assert (tmp_path / "step-00000006.json.damaged").read_bytes() == content


def test_damaged_lines_of_the_metrics_are_left_out_one_by_one(tmp_path):
    begun(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    spoiled = [b"{", b"[]", b"3", b'{"loss": 1.0}', b'{"step": 2}', b"\xff\xfe", b""]
    path.write_bytes(b"\n".join([lines[0], *spoiled, *lines[1:]]) + b"\n")
    assert [line["step"] for line in checkpoint.read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    line_run(tmp_path, resume=True)
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
        ended(study, tmp_path, advance=_stop_at(stop))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(harm(path.read_bytes()))
    assert_same(ended(study, tmp_path, resume=True), whole)


def test_a_curve_that_is_harmed_during_the_run_is_whole_at_its_end(study, whole, tmp_path):
    def harm(step, numbers):
        if step == 8:
            (tmp_path / "metrics.jsonl").unlink()

    assert_same(ended(study, tmp_path, advance=harm), whole)


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
        ended(study, tmp_path, advance=_stop_at(7))
    without_curves(tmp_path)
    assert_same(ended(study, tmp_path, resume=True), whole)


@pytest.mark.parametrize("harm", [lost_end, lost_middle, lost_all, twice])
def test_a_checkpoint_without_its_curve_is_refused_where_the_file_lacks_steps(
    study, tmp_path, harm
):
    with pytest.raises(KeyboardInterrupt):
        ended(study, tmp_path, advance=_stop_at(7))
    without_curves(tmp_path)
    path = tmp_path / "metrics.jsonl"
    harmed = harm(path.read_bytes())
    path.write_bytes(harmed)
    message = (
        r"metrics\.jsonl does not hold steps 1 to 6, .*put it back, or begin again with --again"
    )
    with pytest.raises(ValueError, match=message):
        ended(study, tmp_path, resume=True)
    assert path.read_bytes() == harmed  # nothing lost


def test_two_do_not_train_in_one_folder(tmp_path):
    with alone(tmp_path), pytest.raises(Busy, match="another process is at the run"):
        line_run(tmp_path)
    line_run(tmp_path)
