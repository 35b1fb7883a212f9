"""Training in fewer bits: that it is done, and that where it stopped does not show."""

from dataclasses import replace

import accelerate
import pytest
import torch
from torch import nn

from papers.experiments.checkpoint import Checkpoints
from papers.experiments.loop import Training, train
from papers.tests.experiments.tiny import Line

PLAIN = Training(steps=12, batch=4, warmup=2, evaluate_every=4, save_every=3)


class Noting(nn.Linear):
    """Keeps the kinds of numbers it gave, before they are widened for the caller."""

    def forward(self, x):
        output = super().forward(x)
        self.kinds = getattr(self, "kinds", set()) | {output.dtype}
        return output


class Noted(Line):
    def build(self):
        self.layer = Noting(1, 1)
        return self.layer


def run(folder, precision="no", resume=False, stop=None):
    def advance(step, numbers):
        if step == stop:
            raise KeyboardInterrupt

    study, training = Noted(), replace(PLAIN, precision=precision)
    quiet = {"say": lambda text: None, "advance": advance}
    if stop is None:
        train(study, training, folder, {}, resume=resume, **quiet)
    else:
        with pytest.raises(KeyboardInterrupt):
            train(study, training, folder, {}, resume=resume, **quiet)
    state, _ = Checkpoints(folder, {}).newest()
    return study.layer.kinds, state


def test_bf16_is_that_of_the_layers_and_the_weights_stay_float32(tmp_path):
    plain, lowered = run(tmp_path / "no")[0], run(tmp_path / "bf16", "bf16")
    assert plain == {torch.float32}
    assert lowered[0] == {torch.bfloat16}
    assert {x.dtype for x in lowered[1].tensors.values()} == {torch.float32}
    assert run(tmp_path / "again")[0] == {torch.float32}  # and the next run has its own


@pytest.mark.parametrize("stop", [4, 7, 11])
def test_bf16_goes_on_to_the_same_bits(tmp_path, stop):
    whole = run(tmp_path / "whole", "bf16")[1]
    run(tmp_path / "cut", "bf16", stop=stop)
    assert_same(run(tmp_path / "cut", "bf16", resume=True)[1], whole)


def test_fp16_is_refused_where_it_would_be_float32(tmp_path):
    with pytest.raises(ValueError, match="fp16 needs a GPU, here is cpu; take bf16 or no"):
        run(tmp_path, "fp16")
    assert not list(tmp_path.glob("step-*"))


class Scaling(accelerate.Accelerator):
    """As on a GPU: a scale of the loss that doubles after five steps without an overflow."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)


def test_fp16_goes_on_with_its_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate, "Accelerator", Scaling)
    whole = run(tmp_path / "whole", "fp16")[1]
    assert whole.facts["scaler"]["scale"] == 2.0**10
    run(tmp_path / "cut", "fp16", stop=7)
    assert_same(run(tmp_path / "cut", "fp16", resume=True)[1], whole)


def assert_same(left, right):
    keys = set(left.facts) - {"seconds"}
    assert {key: left.facts[key] for key in keys} == {key: right.facts[key] for key in keys}
    assert left.tensors.keys() == right.tensors.keys()
    assert all(torch.equal(x, right.tensors[name]) for name, x in left.tensors.items())
