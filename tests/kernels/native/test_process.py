"""Threads, forks, and processes where the library is disabled, missing or of another version."""

import faulthandler
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fenchel as fl
from fenchel._kernels import attention, attention_call, library
from tests import needs
from tests.kernels.native.cases import needs_library

pytestmark = needs_library


def _compute():
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 130, 16, generator=g) for _ in range(3))
    query.requires_grad_()
    output = fl.attention(query, key, value, fl.Tsallis(1.5), is_causal=True)
    output.sum().backward()
    return torch.stack([output.detach().sum(), query.grad.sum()])


def test_calls_from_several_threads():
    expected, wrong = _compute(), []

    def work():
        wrong.extend(1 for _ in range(10) if not torch.equal(_compute(), expected))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork():
    """With one thread, as torch's own operators need it too."""
    expected = _compute()
    child = os.fork()
    if child == 0:
        status = 4
        try:
            torch.set_num_threads(1)
            status = 0 if torch.equal(_compute(), expected) else 3
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")


class _Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return _compute()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_loader():
    for batch in torch.utils.data.DataLoader(_Data(), num_workers=2, timeout=60):
        assert torch.equal(batch[0], _compute())


SCRIPT = """
import torch, fenchel as fl
from fenchel._kernels import library
x = torch.linspace(-1, 1, 2 * 9 * 8).reshape(1, 2, 9, 8)
absent = library.is_disabled() or library.loaded() is None
print(absent, "%.3f" % float(fl.attention(x, x, x, fl.Tsallis(1.5)).abs().sum()))
"""


def _in_a_process(package: Path, **environment: str) -> subprocess.CompletedProcess:
    paths = {"PYTHONPATH": str(package), **environment}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def package(tmp_path):
    """A copy of the package whose library a test may spoil."""
    source = Path(fl.__file__).parent
    shutil.copytree(source, tmp_path / "fenchel", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def _library_file(package: Path) -> Path:
    return package / "fenchel/_kernels/_native.so"


def _expected() -> str:
    x = torch.linspace(-1, 1, 2 * 9 * 8).reshape(1, 2, 9, 8)
    return f"{float(fl.attention(x, x, x, fl.Tsallis(1.5)).abs().sum()):.3f}"


@pytest.mark.slow
def test_disabled_by_the_environment(package):
    result = _in_a_process(package, FENCHEL_NATIVE="0")
    assert result.stdout.split() == ["True", _expected()], result.stderr


def test_disabled_beside_a_broken_library(package):
    _library_file(package).write_text("not a library")
    result = _in_a_process(package, FENCHEL_NATIVE="0")
    assert result.stdout.split() == ["True", _expected()], result.stderr


def test_without_the_library(package):
    _library_file(package).unlink()
    result = _in_a_process(package)
    assert result.stdout.split() == ["True", _expected()], result.stderr


@needs.compiler("that a native library of another version is refused")
def test_a_library_of_another_version_is_named(package, tmp_path):
    names = ("attention", "attention_gradient", "row_map", "row_map_gradient", "variant", "choose")
    code = "".join(f"int fenchel_{name}() {{ return 0; }} " for name in names)
    source = tmp_path / "other.cpp"
    source.write_text(f'extern "C" {{ {code} int fenchel_block() {{ return 7; }} }}')
    target = _library_file(package)
    target.unlink()
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", target], check=True)
    result = _in_a_process(package)
    assert "another version" in result.stderr
    assert result.stdout.split() == ["True", _expected()], result.stderr


def test_a_lesser_instruction_set_can_be_chosen():
    loaded = library.loaded()
    best = loaded.variant
    try:
        assert loaded.choose("plain") == "plain"
        assert loaded.variant == "plain"
    finally:
        assert loaded.choose(best) == best


# Each script leaves room for few stacks of threads, as systems do for few threads.
LIMIT = """
import resource
def leave(room):
    with open("/proc/self/statm") as pages:
        size = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.RLIM_INFINITY))
"""
MANY_THREADS = """
import torch, fenchel as fl
x = torch.linspace(-1, 1, 30_000).reshape(1, 30_000, 1, 1).requires_grad_()
results = []
leave(2**32)
for threads in (1, 2, 17, 100_000):
    torch.get_num_threads = lambda: threads  # torch itself would not survive so many
    output = fl.attention(x, x, x.sin(), fl.Tsallis(1.5))
    results.append([output, *torch.autograd.grad(output.sum(), x)])
print(all(torch.equal(a, b) for r in results for a, b in zip(r, results[0])))
"""
# Without torch, there is no pool of OpenMP's: all threads are new.
NO_THREADS = """
import ctypes, sys
from array import array

native, rows, keys = ctypes.CDLL(sys.argv[1]), 2048, 32
scores = array("d", (i * 7 % 101 / 50 for i in range(rows * keys)))
eps, offset = array("d", [0.5]), array("d", bytes(16 * rows))
made = [array("d", bytes(8 * rows * keys)) for _ in range(2)]

def run(weights, threads):
    at = [x.buffer_info()[0] for x in (scores, eps, weights, offset)]
    problem = (ctypes.c_int64 * 10)(rows, keys, 1, 0, at[0], at[1], 0, at[2], at[3], threads)
    return native.fenchel_row_map(problem)

done = run(made[0], 1)
leave(2**20)
print(done == 1 == run(made[1], 8) and made[0] == made[1] and sum(made[0]) > 0)
"""


@needs.unless(Path("/proc/self/statm").exists(), "no /proc (Linux)", "threads that cannot be made")
@pytest.mark.parametrize("script", [MANY_THREADS, NO_THREADS], ids=["too many", "none"])
def test_threads_that_cannot_be_made(script):
    path = _library_file(Path(fl.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", LIMIT + script, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.split() == ["True"], result.stderr


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_operator_without_any_batch():
    """In a process of its own: it dies of SIGFPE."""
    x, eps = torch.zeros(0, 2, 3, 4), torch.zeros(0, 2, 3, dtype=torch.float64)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()
            torch.set_num_threads(1)
            call = attention_call.Arguments(x, x, x, eps, longest_query=3, longest_key=3)
            attention.tsallis_attention(*call, False)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
