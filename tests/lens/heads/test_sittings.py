"""`fenchel audit`: whatever the sittings and the processes, the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fenchel.cli import app
from fenchel.lens.heads import auditing, processes, store
from fenchel.lens.heads.datasets import Texts
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.loading import load
from tests.lens.heads.audits import (
    MANY,
    QUICK,
    TEXTS,
    arguments,
    assert_refused,
    assert_succeeds,
    one_thread,
    tables,
    write_inputs,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("audit"), ("bert", "gpt2"))


@pytest.fixture(autouse=True)
def threads():
    with one_thread():
        yield


# ---- in several sittings


def stopping(monkeypatch, count, problem):
    """The store fails after so many units."""
    real, left = store.Store.save, [count]

    def save(self, unit, tallies):
        if left[0] == 0:
            raise problem
        left[0] -= 1
        real(self, unit, tallies)

    monkeypatch.setattr(store.Store, "save", save)


def test_stopped_at_twenty_points_and_resumed(base, tmp_path, monkeypatch):
    model, tokenizer = load(base / "bert")
    wanted = AuditSettings(tuple(MANY[1].split(",")), (1.5,), layers=(1,), heads=(3,), probe=1)

    def carry_out(folder, resume):
        kept = store.Store(folder, {"of": "this"})
        run = auditing.AuditRun(model, Texts(tokenizer, TEXTS[:4]), wanted, 1, kept)
        nothing = (lambda units, there: None, lambda unit: None)
        audit = processes.carry_out(run, processes.Team(), resume, *nothing)
        return (
            audit.to_csv(),
            json.dumps(audit.summary().to_json()),
            json.dumps(audit.recipe()),
            audit,
        )

    *once, audit = carry_out(tmp_path / "once", resume=False)
    assert audit.recipe() is not None
    units = len(store.Store(tmp_path / "once", {}).names())
    draw = random.Random(7)
    for trial in range(20):
        stop = draw.randrange(units)
        with monkeypatch.context() as patch:
            stopping(patch, stop, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                carry_out(tmp_path / f"{trial}", resume=False)
        assert len(store.Store(tmp_path / f"{trial}", {}).names()) == stop
        assert carry_out(tmp_path / f"{trial}", resume=True)[:3] == tuple(once)


def test_an_interruption_says_what_to_type(base, tmp_path, monkeypatch):
    assert_succeeds(base, tmp_path / "once", *QUICK)
    with monkeypatch.context() as patch:
        stopping(patch, 2, KeyboardInterrupt())
        result = assert_refused(130, "--resume", base, tmp_path / "out", *QUICK)
    command = result.stderr.partition("To go on: fenchel ")[2].split()
    assert command[-1] == "--resume"
    assert len(list((tmp_path / "out/units").glob("*.npz"))) == 2
    again = CliRunner().invoke(app, command)
    assert "going on: 2 of 5 units are there" in again.stderr
    assert tables(tmp_path / "out") == tables(tmp_path / "once")


def test_without_resume_it_begins_again(base, tmp_path):
    assert_succeeds(base, tmp_path, *MANY[:2], "--no-figures", "--probe", 1, "--layers", 0)
    assert (tmp_path / "recipe.json").exists()
    result = assert_succeeds(base, tmp_path, *QUICK)
    assert "beginning again" in result.stderr
    assert len(list((tmp_path / "units").glob("*.npz"))) == 5
    assert not (tmp_path / "recipe.json").exists(), "it was of another run"


def test_other_settings_are_refused_and_nothing_is_lost(base, tmp_path):
    assert_succeeds(base, tmp_path, *QUICK)
    before = tables(tmp_path)
    assert_refused(
        2,
        'dtype was "float32", is "float64"',
        base,
        tmp_path,
        *QUICK,
        "--resume",
        "--dtype",
        "float64",
    )
    assert_refused(2, "texts was", base, tmp_path, *QUICK, "--resume", "--sample", "3")
    assert_refused(2, "weights was", base, tmp_path, *QUICK, "--resume", model="gpt2")
    assert tables(tmp_path) == before
    assert "5 of 5" in assert_succeeds(base, tmp_path, *QUICK, "--resume").stderr


def test_the_folder_may_move(base, tmp_path):
    assert_succeeds(base, tmp_path / "out", *QUICK)
    shutil.copytree(base / "bert", tmp_path / "elsewhere" / "bert")
    shutil.copy(base / "texts.txt", tmp_path / "elsewhere")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    result = assert_succeeds(tmp_path / "elsewhere", tmp_path / "moved", *QUICK, "--resume")
    assert "5 of 5" in result.stderr


def test_a_damaged_unit_is_made_again(base, tmp_path):
    assert_succeeds(base, tmp_path, *QUICK)
    before = tables(tmp_path)
    path = tmp_path / "units/chunk-000001.npz"
    path.write_bytes(path.read_bytes()[:-9])
    result = assert_succeeds(base, tmp_path, *QUICK, "--resume")
    assert "chunk-000001.damaged was damaged: set aside" in result.stderr
    assert "going on: 4 of 5" in result.stderr
    assert tables(tmp_path) == before


def test_killed_and_resumed(base, tmp_path):
    more = (*MANY, "--threads", 1, "--layers", 0, "--heads", 0)
    assert_succeeds(base, tmp_path / "once", *more)
    words = arguments(base, tmp_path / "out", *more)
    process = subprocess.Popen([sys.executable, "-m", "fenchel", *words], stderr=subprocess.DEVNULL)
    units = tmp_path / "out/units"
    end = time.monotonic() + 60
    while len(list(units.glob("*.npz"))) < 3 and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out/heads.csv").exists()
    result = assert_succeeds(base, tmp_path / "out", *more, "--resume")
    assert "going on: 0" not in result.stderr
    assert tables(tmp_path / "out") == tables(tmp_path / "once")


# ---- several processes


def test_two_processes_give_the_same_bytes(base, tmp_path):
    """The work of each, one after the other, in one folder."""
    assert_succeeds(base, tmp_path / "one", *QUICK)
    model, tokenizer = load(base / "bert")
    wanted = AuditSettings(measures=("weights", "what_if"))
    runs = []
    for number in (1, 0):
        kept = store.Store(tmp_path / "units", {"of": "this"})
        kept.open(resume=True)
        runs.append(auditing.AuditRun(model, Texts(tokenizer, TEXTS), wanted, 2, kept))
        runs[-1].work(processes.Team(number, 2).takes, lambda unit: None)
        assert len(kept.names()) == (2 if number else 5)
    table = runs[-1].audit().to_csv().encode()
    assert table == (tmp_path / "one/heads.csv").read_bytes()


def test_the_main_process_waits_for_the_others(base, tmp_path):
    """And the others begin only when it has opened the folder."""
    model, tokenizer = load(base / "bert")
    met = []

    def carry_out(number, wait):
        kept = store.Store(tmp_path / "units", {"of": "this"})
        run = auditing.AuditRun(
            model, Texts(tokenizer, TEXTS), AuditSettings(("weights",)), 2, kept
        )
        team = processes.Team(number, 2, wait)
        return processes.carry_out(run, team, False, lambda units, there: None, met.append)

    def other():
        if not met:  # the first meeting of the main process: the other one does all its work
            assert (tmp_path / "units/settings.json").exists()
            assert carry_out(1, lambda: None) is None
            assert len(met) == 2

    assert carry_out(0, other) is not None
    assert len(met) == 5


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_launched(base, tmp_path, launcher):
    assert_succeeds(base, tmp_path / "one", *MANY, "--threads", 1)
    start = {
        "accelerate": "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0",
        "torchrun": "torchrun --nproc-per-node 2",
    }[launcher].split()
    start[0] = str(Path(sys.executable).parent / start[0])
    words = arguments(base, tmp_path / "two", *MANY, "--threads", 1)
    done = subprocess.run([*start, "-m", "fenchel", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.html") == 1, "only the main process talks"
    assert tables(tmp_path / "two") == tables(tmp_path / "one")


@pytest.mark.slow
def test_a_process_that_stops_is_noticed(base, tmp_path):
    """The second is given a model that is not there; the first does not wait for ever."""
    common = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    started = []
    for number, model in enumerate(("bert", "nowhere")):
        words = arguments(base, tmp_path, *QUICK, "--threads", 1, model=model)
        environment = common | {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "fenchel", *words]
        started.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=100)[1] for process in started]
    assert [process.returncode for process in started] == [1, 2], said
    assert "another process of this run has stopped" in said[0]
    assert "process 1: cannot load" in said[1]


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_several_processes_need_accelerate(base, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert_refused(1, "several processes need accelerate", base, tmp_path, *QUICK)
