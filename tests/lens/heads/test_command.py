"""`fenchel audit`: whatever the sittings and the processes, the same bytes; bad input is said."""

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
import torch
from PIL import Image
from typer.testing import CliRunner

from fenchel.cli import app
from fenchel.lens.heads import auditing, processes, store
from fenchel.lens.heads.datasets import Texts
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.loading import load
from tests.lens.heads import folders

TEXTS = ["a b c d", "e f", "g h i j k", "a a b", "c", "d e f g h i", "b", "k l m", "n o p q r"]
TABLES = ("heads.csv", "summary.json", "recipe.json")
QUICK = ("--measures", "weights,what_if", "--no-figures", "--chunk", "2")
MANY = ("--measures", "weights,what_if,certificate,geometry,model,recipe", "--no-figures")
MANY = (*MANY, "--chunk", "1", "--probe", "2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Small models, texts and images."""
    base = tmp_path_factory.mktemp("audit")
    for name in ("bert", "t5", "gpt2", "llama", "bart", "vit"):
        folders.save(name, base / name)
    (base / "texts.txt").write_text("\n".join(TEXTS))
    (base / "few.txt").write_text("x y\n" * len(TEXTS))
    (base / "images").mkdir()
    for number in range(3):
        Image.new("RGB", (16, 16), (80 * number, 90, 20)).save(base / f"images/{number}.png")
    return base


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arguments(base, out, *more, model="bert"):
    shown = ("--images", base / "images") if model == "vit" else ("--texts", base / "texts.txt")
    given = () if "--texts" in more or "--images" in more else shown
    return [str(word) for word in ("audit", base / model, *given, "--out", out, *more)]


def run(base, out, *more, model="bert"):
    return CliRunner().invoke(app, arguments(base, out, *more, model=model))


def ok(*given, **more):
    result = run(*given, **more)
    assert result.exit_code == 0, result.output
    return result


def refused(code, said, *given, **more):
    result = run(*given, **more)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert said in result.stderr
    return result


def tables(out):
    return [(out / name).read_bytes() if (out / name).exists() else None for name in TABLES]


# ---- what comes out


@pytest.mark.parametrize("model", ["bert", "t5", "gpt2", "llama", "bart", "vit"])
def test_every_kind_of_model(base, tmp_path, model):
    more = ("--targets", base / "few.txt") if model == "bart" else ()  # T5 writes its own
    more = (*more, "--sample", 3, "--layers", "1", "--heads", "0,2-3")
    result = ok(base, tmp_path, *QUICK, *more, model=model)
    assert str(tmp_path / "report.html") in result.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    rows = (tmp_path / "heads.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * (3 if model in ("t5", "bart") else 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["model"]["name"] == model
    assert summary["inputs"]["count"] == 3
    assert not (tmp_path / "recipe.json").exists()
    assert not (tmp_path / "figures").exists()


def test_figures(base, tmp_path):
    ok(base, tmp_path, "--measures", "certificate", "--layers", 0)
    made = {path.suffix for path in (tmp_path / "figures").iterdir()}
    assert made == {".png", ".svg"}


def test_targets_are_drawn_with_their_texts(base, tmp_path, monkeypatch):
    (tmp_path / "targets.txt").write_text("\n".join(TEXTS))
    more = ("--targets", tmp_path / "targets.txt", "--sample", 4, "--seed", 3)
    seen = []
    real = Texts.__post_init__
    monkeypatch.setattr(Texts, "__post_init__", lambda self: (seen.append(self), real(self)))
    result = ok(base, tmp_path / "out", *QUICK, *more, "--dtype", "float64", model="t5")
    assert len(seen[0].texts) == 4
    assert seen[0].texts == seen[0].targets
    assert json.loads((tmp_path / "out/summary.json").read_text())["inputs"]["count"] == 4
    assert 6 <= len(result.stdout.splitlines()) <= 14


def test_long_texts_are_cut_and_counted(base, tmp_path):
    (tmp_path / "long.txt").write_text("a b c\n" + "a " * 100 + "\n")
    texts = ("--texts", tmp_path / "long.txt")
    for measures in ("weights", "geometry"):
        more = (*texts, "--measures", measures, "--no-figures", "--longest", 16)
        result = ok(base, tmp_path / measures, *more)
        assert "1 of 2 texts were longer" in result.stderr
        inputs = json.loads((tmp_path / measures / "summary.json").read_text())["inputs"]
        assert (inputs["truncated"], inputs["tokens"], inputs["longest"]) == (1, 5 + 16, 16)


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_the_implementation_of_attention_does_not_matter(base, model):
    """Not a bit: while the audit watches, attention is computed by the audit's own function."""
    found = []
    for implementation in ("eager", "sdpa"):
        loaded, tokenizer = load(base / model)
        loaded.set_attn_implementation(implementation)
        assert loaded.config._attn_implementation == implementation
        measures = ("weights", "what_if", "certificate", "geometry", "advantage", "local", "model")
        run = auditing.AuditRun(
            loaded, Texts(tokenizer, TEXTS[:3]), AuditSettings(measures, probe=1)
        )
        found.append(run.audit().to_csv())
    assert found[0] == found[1]


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
        found = processes.carry_out(run, processes.Team(), resume, *nothing)
        return (
            found.to_csv(),
            json.dumps(found.summary().to_json()),
            json.dumps(found.recipe()),
            found,
        )

    *once, found = carry_out(tmp_path / "once", resume=False)
    assert found.recipe() is not None
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
    ok(base, tmp_path / "once", *QUICK)
    with monkeypatch.context() as patch:
        stopping(patch, 2, KeyboardInterrupt())
        result = refused(130, "--resume", base, tmp_path / "out", *QUICK)
    command = result.stderr.partition("To go on: fenchel ")[2].split()
    assert command[-1] == "--resume"
    assert len(list((tmp_path / "out/units").glob("*.npz"))) == 2
    again = CliRunner().invoke(app, command)
    assert "going on: 2 of 5 units are there" in again.stderr
    assert tables(tmp_path / "out") == tables(tmp_path / "once")


def test_without_resume_it_begins_again(base, tmp_path):
    ok(base, tmp_path, *MANY[:2], "--no-figures", "--probe", 1, "--layers", 0)
    assert (tmp_path / "recipe.json").exists()
    result = ok(base, tmp_path, *QUICK)
    assert "beginning again" in result.stderr
    assert len(list((tmp_path / "units").glob("*.npz"))) == 5
    assert not (tmp_path / "recipe.json").exists(), "it was of another run"


def test_other_settings_are_refused_and_nothing_is_lost(base, tmp_path):
    ok(base, tmp_path, *QUICK)
    before = tables(tmp_path)
    refused(
        2,
        'dtype was "float32", is "float64"',
        base,
        tmp_path,
        *QUICK,
        "--resume",
        "--dtype",
        "float64",
    )
    refused(2, "texts was", base, tmp_path, *QUICK, "--resume", "--sample", "3")
    refused(2, "weights was", base, tmp_path, *QUICK, "--resume", model="gpt2")
    assert tables(tmp_path) == before
    assert "5 of 5" in ok(base, tmp_path, *QUICK, "--resume").stderr


def test_the_folder_may_move(base, tmp_path):
    ok(base, tmp_path / "out", *QUICK)
    shutil.copytree(base / "bert", tmp_path / "elsewhere" / "bert")
    shutil.copy(base / "texts.txt", tmp_path / "elsewhere")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    result = ok(tmp_path / "elsewhere", tmp_path / "moved", *QUICK, "--resume")
    assert "5 of 5" in result.stderr


def test_a_damaged_unit_is_made_again(base, tmp_path):
    ok(base, tmp_path, *QUICK)
    before = tables(tmp_path)
    path = tmp_path / "units/chunk-000001.npz"
    path.write_bytes(path.read_bytes()[:-9])
    result = ok(base, tmp_path, *QUICK, "--resume")
    assert "chunk-000001.damaged was damaged: set aside" in result.stderr
    assert "going on: 4 of 5" in result.stderr
    assert tables(tmp_path) == before


def test_killed_and_resumed(base, tmp_path):
    more = (*MANY, "--threads", 1, "--layers", 0, "--heads", 0)
    ok(base, tmp_path / "once", *more)
    words = arguments(base, tmp_path / "out", *more)
    process = subprocess.Popen([sys.executable, "-m", "fenchel", *words], stderr=subprocess.DEVNULL)
    units = tmp_path / "out/units"
    end = time.monotonic() + 60
    while len(list(units.glob("*.npz"))) < 3 and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out/heads.csv").exists()
    result = ok(base, tmp_path / "out", *more, "--resume")
    assert "going on: 0" not in result.stderr
    assert tables(tmp_path / "out") == tables(tmp_path / "once")


# ---- several processes


def test_two_processes_give_the_same_bytes(base, tmp_path):
    """The work of each, one after the other, in one folder."""
    ok(base, tmp_path / "one", *QUICK)
    model, tokenizer = load(base / "bert")
    wanted = AuditSettings(measures=("weights", "what_if"))
    runs = []
    for number in (1, 0):
        kept = store.Store(tmp_path / "units", {"of": "this"})
        kept.open(resume=True)
        runs.append(auditing.AuditRun(model, Texts(tokenizer, TEXTS), wanted, 2, kept))
        runs[-1].work(processes.Team(number, 2).takes, lambda unit: None)
        assert len(kept.names()) == (2 if number else 5)
    found = runs[-1].audit().to_csv().encode()
    assert found == (tmp_path / "one/heads.csv").read_bytes()


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
    ok(base, tmp_path / "one", *MANY, "--threads", 1)
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
        own = common | {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fenchel", *words]
        started.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
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
    refused(1, "several processes need accelerate", base, tmp_path, *QUICK)


# ---- bad input


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--layers", "5-3"), "--layers takes numbers and ranges such as 0,3-5; got '5-3'"),
        (("--layers", "x"), "--layers takes numbers"),
        (("--layers", "7"), "no layer 7"),
        (("--heads", ","), "--heads takes numbers"),
        (("--heads", "9"), "no head 9"),
        (("--alphas", "1.5,x"), "--alphas takes numbers such as 1.5,2"),
        (("--alphas", "0.5"), "lies in (1, 4], got 0.5"),
        (("--measures", "heat"), "measures must be of weights"),
        (("--tolerance", "2"), "tolerance must lie in (0, 1)"),
        (("--dtype", "int8"), "dtype must be of float32"),
        (("--images", "images"), "this model reads texts"),
        (("--texts", "nowhere.txt"), "there is no file nowhere.txt"),
    ],
)
def test_usage(base, tmp_path, more, said):
    refused(2, said, base, tmp_path, *more)


def test_what_does_not_go_together(base, tmp_path):
    texts, images = ("--texts", base / "texts.txt"), ("--images", base / "images")
    refused(2, "give either --texts FILE or --images", base, tmp_path, *texts, *images)
    refused(2, "looks at images", base, tmp_path, *texts, model="vit")
    targets = ("--targets", base / "texts.txt")
    refused(2, "leave them out", base, tmp_path, *targets)
    refused(2, "--targets goes with --texts", base, tmp_path, *images, *targets, model="vit")
    (tmp_path / "few.txt").write_text("a\nb\n")
    few = ("--targets", tmp_path / "few.txt")
    refused(2, f"holds 2 targets for {len(TEXTS)} texts", base, tmp_path, *few, model="t5")
    result = CliRunner().invoke(app, ["audit", str(base / "bert"), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "give either" in result.stderr


def test_models_that_cannot_be_opened(base, tmp_path):
    refused(2, "the folder does not exist", base, tmp_path, model="nowhere")
    folders.pickled(base / "bert", tmp_path / "pickled")
    shutil.copy(base / "texts.txt", tmp_path)
    refused(1, "save_pretrained", tmp_path, tmp_path / "out", model="pickled")
    words = ["audit", "nobody/nothing", "--texts", str(base / "texts.txt"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "hf download nobody/nothing" in result.stderr


def test_folders_that_cannot_be_written(base, tmp_path):
    (tmp_path / "file").write_text("")
    refused(2, "is a file; give a folder", base, tmp_path / "file", *QUICK)
    refused(1, "cannot write into", base, "/proc/fenchel", *QUICK)


def test_a_full_disk(base, tmp_path, monkeypatch):
    ok(base, tmp_path / "once", *QUICK)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stopping_disk(patch, 4)
        refused(1, "the disk is full", base, out, *QUICK)
    names = sorted(path.name for path in (out / "units").iterdir())
    assert names == ["chunk-000000.npz", "chunk-000001.npz", "settings.json"]
    assert not [path for path in out.iterdir() if path.name != "units"]
    assert "going on: 2 of 5" in ok(base, out, *QUICK, "--resume").stderr
    assert tables(out) == tables(tmp_path / "once")


def stopping_disk(monkeypatch, count):
    """Full after so many files."""
    real, left = os.fsync, [count]

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["audit", "--help"])
    assert "Example: fenchel audit" in result.stdout


def test_a_model_without_attention(base, tmp_path):
    import transformers as hf

    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    hf.MambaModel(hf.MambaConfig(**sizes)).save_pretrained(tmp_path / "mamba")
    folders.tokenizer().save_pretrained(tmp_path / "mamba")
    more = ("--texts", base / "texts.txt")
    refused(2, "found no attention in MambaModel", tmp_path, tmp_path / "out", *more, model="mamba")
