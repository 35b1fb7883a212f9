"""The benchmark of the GPU's kernels, without a device. No test depends on a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fenchel as fl
from benchmarks import gpu, gpu_command, gpu_parity, gpu_speed
from benchmarks.attention_rounds import Rounds
from benchmarks.command import commands
from benchmarks.gpu_parity import CAUSAL, FULL, LEAVES, LITTLE, SAMPLE, Case, Outcome
from tests import needs
from tests.needs import ROOT

CPU = torch.device("cpu")
HERE = gpu_speed.Place(CPU, time.perf_counter, torch.float32, flash=False)
SMALL = gpu_speed.Sweep(sizes=(16, 24), heads=2, width=8, rounds=Rounds(1, 1, 0.1))
CASE = Case(1.5, CAUSAL, torch.float32)
NAMES = ("output", *LEAVES)
RIGHT = Outcome(CASE, dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 1.0))


def unfit(*operands: Tensor) -> Tensor:
    raise NotImplementedError("not here: it compiles for a minute")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_speed, "_flex", unfit)
        patch.setattr(gpu_parity, "compare", lambda cases, *rest: [RIGHT])
        report = gpu.run(gpu.Sweep(speed=SMALL), HERE, "Some GPU")
    return json.loads(json.dumps(report.as_json()))


# ---- the command


@pytest.mark.smoke
@needs.unless(gpu.has_triton(), "triton is not installed", covers="the benchmark of GPU kernels")
def test_the_command_checks_the_kernels_in_the_interpreter(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", "--interpret"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| Tsallis")]
    assert len(rows) == len(SAMPLE)
    assert all("| yes |" in row for row in rows)
    assert list(tmp_path.iterdir()) == []


@needs.unless(gpu.has_triton(), "triton is not installed", covers="the benchmark of GPU kernels")
def test_another_process_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        asked.append((command[1:], env["TRITON_INTERPRET"]))
        return SimpleNamespace(returncode=7)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    assert CliRunner().invoke(commands, ["gpu", "--interpret"]).exit_code == 7
    assert asked == [(["-m", "benchmarks", "gpu", "--interpret"], "1")]


def test_without_a_device_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(commands, ["gpu"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("no CUDA device is here")
    assert "--interpret" in result.stderr


def test_a_device_needs_triton_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    assert "unset it" in CliRunner().invoke(commands, ["gpu"]).stderr
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    for words in (["gpu"], ["gpu", "--interpret"]):
        result = CliRunner().invoke(commands, words)
        assert result.exit_code == 1
        assert "triton is not installed" in result.stderr


def test_interpreted_results_have_no_file(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    result = CliRunner().invoke(commands, ["gpu", "--interpret", "--out", str(out)])
    assert result.exit_code == 2
    assert "writes no file" in " ".join(result.output.split())


@pytest.mark.parametrize("failures", [0, 1])
def test_the_command_on_a_device(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = replace(RIGHT, errors={}) if failures else RIGHT
    report = gpu.Report(gpu.FULL, "Some GPU (80 GB)", "bfloat16", (outcome,), left_out=("x",))
    monkeypatch.setattr(gpu_command, "_why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: report.device)
    monkeypatch.setattr(gpu_speed, "cuda", lambda: HERE)
    monkeypatch.setattr(gpu, "run", lambda *rest: report)
    monkeypatch.chdir(tmp_path)
    assert "there is no folder" in CliRunner().invoke(commands, ["gpu"]).output
    (tmp_path / "results").mkdir()
    result = CliRunner().invoke(commands, ["gpu"])
    assert result.exit_code == failures
    written = json.loads((tmp_path / "results" / "gpu-Some-GPU-80-GB.json").read_text())
    assert (written["device"], written["parity_failures"]) == (report.device, failures)
    assert "| Tsallis(1.5), causal | float32 |" in result.stdout
    assert "Left out: x." in result.stdout
    assert ("1 of 1 cases are wrong" in result.stderr) == bool(failures)


# ---- parity


def test_cases_are_what_is_promised() -> None:
    assert {case.alpha for case in SAMPLE} == {1.3, 1.5, 2.0}
    assert {case.form for case in SAMPLE} == set(gpu_parity.FORMS)
    assert {case.dtype for case in SAMPLE} == set(gpu_parity.DTYPES)
    assert len(set(FULL)) == len(FULL) == (3 * 2 + 3) * 3
    assert set(SAMPLE) < set(FULL)


def results_of(case: Case) -> tuple[Any, ...]:
    """In torch's operations: as if they were a device's, exactly, and plainly."""
    operands = gpu_parity._operands(case, LITTLE, CPU)
    found = gpu_parity._differentiate(gpu_parity._ours(case, LITTLE, "torch"), operands)
    doubles = [x.double() for x in operands]
    exact = gpu_parity._differentiate(gpu_parity._ours(case, LITTLE, "torch"), doubles)
    plain = gpu_parity._differentiate(
        lambda q, k, v: gpu_parity.attend_plainly(case, LITTLE, q, k, v), operands
    )
    return found, exact, plain


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_another_call_is_noticed(case: Case) -> None:
    """Of another alpha, or with a gradient that is off by a twentieth or is not a number."""
    found, exact, plain = results_of(case)
    bars = gpu_parity.allowed(case, plain, exact)

    def passes(results: dict[str, Tensor]) -> bool:
        return Outcome(case, gpu_parity.measure(results, exact), bars).passes

    assert passes(found)
    assert not passes(results_of(case._replace(alpha=case.alpha - 0.15))[0])
    for name in ("output", *LEAVES):
        wrong = found[name] + 0.05 * found[name].abs().max() * found[name].sign()
        assert not passes({**found, name: wrong})
        assert not passes({**found, name: found[name] * torch.nan})


def test_every_form_is_another_call() -> None:
    outputs = [results_of(Case(1.5, form, torch.float32))[0]["output"] for form in gpu_parity.FORMS]
    same_heads = [x for x in outputs if x.shape[1] == LITTLE.heads]
    assert len(same_heads) == len(outputs) - 1
    for i, one in enumerate(same_heads):
        assert all((one - other).abs().max() > 1e-3 for other in same_heads[i + 1 :])


def test_other_kernels_than_the_gpus_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels refuse a call, torch's operations would agree with themselves."""
    route = fl.Route("torch's operations", {gpu_parity.PATH: "too old"})
    monkeypatch.setattr(fl, "use", lambda kernels: torch.no_grad())
    monkeypatch.setattr(fl, "explain", lambda *rest, **options: route)
    (outcome,) = gpu_parity.compare([CASE], LITTLE, CPU)
    assert not outcome.passes
    assert "too old" in outcome.error


def test_nothing_compared_does_not_pass() -> None:
    assert RIGHT.passes
    assert not Outcome(CASE, {}, {}).passes
    assert not Outcome(CASE, {"output": 0.0}, {"output": 1.0}).passes


# ---- speed


def test_every_method_is_timed_beside_sdpa(document: dict[str, Any]) -> None:
    entries = document["results"]
    names = {"SDPA", "fl Tsallis(1.5)", "fl Tsallis(2)", "FlexAttention"}
    assert names <= {e["method"] for e in entries}
    assert len(entries) == 2 * 2 * 2 * len({e["method"] for e in entries})
    for entry in entries:
        if entry["method"] == "FlexAttention":
            assert entry["error"].startswith("NotImplementedError: not here")
        elif entry["method"] in names:
            assert entry["error"] == ""
            assert entry["ratio_min"] <= entry["ratio"] <= entry["ratio_max"]
    assert document["left_out"] == ["9 cases in bfloat16, which this device lacks"]
    _, speed = gpu.listings(document)
    rows = {row[:3]: row[3:] for row in speed.rows}
    assert speed.header[3:] == ("16", "24")
    assert rows["FlexAttention", "forward", "1"] == ("NotImplementedError",) * 2
    assert float(rows["fl Tsallis(2)", "forward+backward", "4"][0]) > 0
    assert rows["SDPA, time", "forward", "1"][0].endswith("s")


def test_scores_have_the_deviation_that_they_are_called_by() -> None:
    for deviation in SMALL.deviations:
        query, key, _, _ = gpu_speed.draw(replace(SMALL, width=64), HERE, 512, deviation)
        assert float((query @ key.mT / 8).std()) == pytest.approx(deviation, rel=0.05)


def test_wrong_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(RIGHT, errors={**RIGHT.errors, "key": float("nan")})
    monkeypatch.setattr(gpu_parity, "compare", lambda *rest: [RIGHT, wrong])
    report = gpu.run(gpu.Sweep(speed=SMALL), HERE, "Some GPU")
    assert (report.failures, report.speed) == (1, ())


def test_what_time_or_the_device_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parity, "compare", lambda cases, *rest: [RIGHT for _ in cases])
    late = gpu.Sweep(speed=replace(SMALL, seconds=-1.0))
    report = gpu.run(late, HERE, "Some GPU")
    lost = sum(case.dtype == torch.bfloat16 for case in FULL)
    assert len(report.outcomes) == len(FULL) - lost
    assert report.left_out[0].startswith(f"{lost} cases in bfloat16")
    assert [words.partition(":")[0] for words in report.left_out[1:]] == ["16 tokens", "24 tokens"]


def test_adasplash_is_asked_for_powers_of_two_alone() -> None:
    with pytest.raises(NotImplementedError, match="powers of two, got 24"):
        gpu_speed._adasplash(*gpu_speed.draw(SMALL, HERE, 24, 1.0)[:3])


def test_times_of_events_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 1500.0, 4000.0))  # milliseconds

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = next(now)

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: Event) -> float:
            return later.time - self.time

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = gpu_speed.EventClock()
    assert [clock(), clock()] == [1.5, 4.0]
