"""The command, killed at any moment and begun again, ends with the numbers of one that was not."""

import json
import os
import random
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from papers.__main__ import app
from papers.experiments.checkpoint import Checkpoints
from tests import needs

VIT = ["vit", "--preset", "smoke", "--attention", "transport", "--seeds", "1"]  # at two rates
VQA = ["vqa", "--preset", "smoke", "--attention", "softmax", "--seeds", "1"]
PATIENCE = 120.0  # seconds for a start and a few steps, on a busy machine


def words(study, out):
    return ["experiment", *study, "--out", str(out)]


def to_the_end(study, out):
    result = CliRunner().invoke(app, words(study, out))
    assert result.exit_code == 0, result.output


def lines(out):
    """Of the metrics of each run, with the number of its file, which is another once it is cut."""
    return {
        path: (path.stat().st_ino, path.read_bytes().count(b"\n"))
        for path in out.rglob("metrics.jsonl")
    }


def kill(study, out, moment, late):
    """SIGKILL when the runs together are `moment` steps far, and `late` seconds after that."""
    before = lines(out)
    command = [sys.executable, "-m", "papers", *words(study, out)]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=needs.ROOT, **pipes) as process:
        end = time.monotonic() + PATIENCE
        while not reached(lines(out), before, moment):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < end, f"step {moment} was not reached"
            time.sleep(0.005)
        time.sleep(late)
        process.kill()
        assert process.wait() == -9, "it was done before it was killed"


def reached(now, before, moment):
    begun = any(now[path][0] != before.get(path, (0, 0))[0] for path in now)
    return begun and sum(count for _, count in now.values()) >= moment


def results(out):
    """All that is stored, but for the seconds it took."""
    runs = {}
    for path in sorted(out.rglob("*-0.json")):
        document = json.loads(path.read_text())
        document["cost"].pop("seconds")
        state, aside = Checkpoints(path.with_suffix(""), {}).newest()
        assert aside == []
        metrics = (path.with_suffix("") / "metrics.jsonl").read_text()
        runs[path.relative_to(out)] = (document, metrics, state.step, state.tensors)
    return runs


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert left
    for name, (document, metrics, step, tensors) in left.items():
        assert (document, metrics, step) == right[name][:3]
        other = right[name][3]
        assert tensors.keys() == other.keys()
        assert all(torch.equal(x, other[key]) for key, x in tensors.items())


def lose_half_of_the_curve(out):
    """Of the run that is not done, as a disk that fails would."""
    (path,) = (
        path
        for path in out.rglob("metrics.jsonl")
        if not path.parent.with_name(f"{path.parent.name}.json").exists()
    )
    os.truncate(path, path.stat().st_size // 2)


def test_killed_twice(tmp_path):
    """In the middle of the first run, and of the second; half of the curve is lost besides."""
    to_the_end(VIT, tmp_path / "whole")
    for moment in (20, 70):
        kill(VIT, tmp_path / "killed", moment, late=0.0)
        lose_half_of_the_curve(tmp_path / "killed")
    to_the_end(VIT, tmp_path / "killed")
    assert_same(results(tmp_path / "killed"), results(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("study", [VIT, VQA], ids=["vit", "vqa"])
def test_killed_at_ten_random_moments(tmp_path, study):
    to_the_end(study, tmp_path / "whole")
    whole = results(tmp_path / "whole")
    steps = sum(step for _, _, step, _ in whole.values())
    draw = random.Random(0)
    for moment in sorted(draw.sample(range(1, steps - 5), 10)):
        kill(study, tmp_path / "killed", moment, late=draw.uniform(0, 0.02))
    to_the_end(study, tmp_path / "killed")
    assert_same(results(tmp_path / "killed"), whole)


def test_the_comparison_sees_a_difference():
    """A checker that cannot fail would be none."""
    whole = {"a": ({"scores": 1}, "", 3, {"x": torch.ones(2)})}
    for other in (
        {},
        {"a": ({"scores": 2}, "", 3, {"x": torch.ones(2)})},
        {"a": ({"scores": 1}, "", 3, {"x": torch.tensor([1.0, 1.0000001])})},
    ):
        with pytest.raises(AssertionError):
            assert_same(whole, other)
    assert_same(whole, {"a": ({"scores": 1}, "", 3, {"x": torch.ones(2)})})
