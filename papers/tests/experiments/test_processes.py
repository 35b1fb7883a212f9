"""Two processes that share each batch follow the losses of one, store once, and go on together."""

import atexit
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from papers.experiments import runs
from papers.experiments.data.toy import load_toy
from papers.experiments.loop import Training
from papers.experiments.processes import Busy
from papers.experiments.runs import Job, carry_out, stored
from papers.experiments.vit.model import Size
from papers.experiments.vit.study import VitStudy
from papers.experiments.vqa.study import VqaStudy
from papers.tests.experiments import tiny
from tests import needs

STEPS, STOPPED, SAVED = 100, 57, 40
TRAINING = Training(
    steps=STEPS, batch=8, rate=3e-3, warmup=10, evaluate_every=STEPS, save_every=SAVED
)
STUDIES = ("vit", "vqa")


def study(name):
    if name == "vqa":
        return VqaStudy(tiny.questions(side=16), tiny.SIZE, "softmax", together=2)
    size = Size(width=8, inner=8, layers=2, heads=2, dropout=0.0)
    return VitStudy(load_toy(train=64, test=16), size, "transport", sharing=0.5)


def job(name):
    return Job(name, "tiny", "made", "together", {}, TRAINING)


class Stop(Exception):
    pass


def stop(step, numbers):
    if step == STOPPED:
        raise Stop


def work(rank, port, out):
    """Each run is broken off, then continued; the last one is busy."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    said = []
    if rank == 1:
        runs.write_whole = None  # it would fail if the second process stored a result
    for name in STUDIES:
        its_study, wanted = study(name), job(name)
        try:
            carry_out(wanted, its_study, out, advance=stop, say=said.append)
        except Stop:
            assert stored(wanted, out) is None
        carry_out(wanted, its_study, out, say=said.append)
    busy = replace(job("vit"), variant="busy")
    try:
        carry_out(busy, study("vit"), out, say=said.append)
    except Busy:
        said.append("busy")
    apart = out / f"machine-{rank}"  # a disk of its own; only the first has a checkpoint
    begun = replace(job("vit"), variant="apart")
    said += [refusal(begun, apart, rank, stop), refusal(begun, apart, rank, None)]
    (out / f"said-{rank}.txt").write_text("\n".join(said))
    atexit._run_exitfuncs()  # which a process that was spawned ends without
    assert not dist.is_initialized(), "its threads may abort the process as it ends"


def refusal(wanted, out, rank, advance):
    try:
        carry_out(wanted, study("vit"), out, advance=advance, say=lambda text: None)
    except Stop:
        if rank:
            shutil.rmtree(out)
        return "stopped"
    except ValueError as problem:
        return str(problem).replace(str(out), "OUT")
    return "done"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    out = tmp_path_factory.mktemp("together")
    busy = replace(job("vit"), variant="busy").file(out).with_suffix("")
    busy.mkdir(parents=True)
    with (busy / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mp.spawn(work, args=(free_port(), out), nprocs=2)
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    for name in STUDIES:
        carry_out(job(name), study(name), out, say=lambda text: None)
    return out


def losses(out, name):
    folder = job(name).file(out).with_suffix("")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.parametrize("name", STUDIES)
def test_two_follow_the_losses_of_one(together, alone, name):
    one, two = losses(alone, name), losses(together, name)
    assert list(two) == list(one) == list(range(1, STEPS + 1))
    assert max(abs(one[step] - two[step]) for step in one) < 1e-4
    assert max(one.values()) - min(one.values()) > 0.1, "nothing was learnt"


@pytest.mark.parametrize("name", STUDIES)
def test_the_result_is_that_of_one(together, alone, name):
    one, two = stored(job(name), alone), stored(job(name), together)
    assert (one["cost"]["processes"], two["cost"]["processes"]) == (1, 2)
    assert one["cost"]["flops"] == two["cost"]["flops"]
    assert one["scores"] == pytest.approx(two["scores"], abs=0.07)  # one test question of 12


def test_only_the_main_process_talks_and_both_leave_a_busy_run(together):
    main, other = ((together / f"said-{rank}.txt").read_text().splitlines()[:-2] for rank in (0, 1))
    assert main == [f"going on at step {SAVED} of {STEPS}"] * 2 + ["busy"]
    assert other == ["busy"]


def test_machines_that_share_no_disk_are_refused(together):
    for rank in (0, 1):
        first, second = (together / f"said-{rank}.txt").read_text().splitlines()[-2:]
        assert first == "stopped"
        assert f"apart-0 stand at different steps: 0, {SAVED}; give an --out on a disk" in second


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_launched(tmp_path, launcher):
    start = {
        "accelerate": "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0",
        "torchrun": "torchrun --nproc-per-node 2",
    }[launcher].split()
    start[0] = str(Path(sys.executable).parent / start[0])
    words = ["--preset", "smoke", "--attention", "transport", "--seeds", "1", "--first-steps", "4"]
    command = [*start, "-m", "papers", "experiment", "vit", *words, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=needs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Table 2") == 1, "only the main process talks"
    results = sorted(path.name for path in tmp_path.rglob("transport*.json"))
    assert results == ["transport-0.json", "transport-rate-0.003-0.json"]
    again = subprocess.run(command, cwd=needs.ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
