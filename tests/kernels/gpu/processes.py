"""Tests that a child process runs, one at a time, when their turn comes in the parent.

The child is pytest itself, started for one folder with this file as a plugin. It collects, then
waits at one end of a pipe for the names of tests, and answers with what became of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from tests import needs

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
ROLES = ("interpreted", "compiled")  # folders beside this file
_ROLE, _PIPE = "FENCHEL_GPU_TESTS", "FENCHEL_GPU_PIPE"


def role() -> str | None:
    """What this process is for; None in the parent."""
    return os.environ.get(_ROLE)


class Verdict(NamedTuple):
    """What became of a test. text: the report of a failure, or the reason of a skip."""

    outcome: str  # "passed", "failed" or "skipped"
    text: str
    output: list[tuple[str, str]]  # what was printed: (title, text)


# ---- the parent


class ChildFailure(Exception):
    """A test failed in the child. Its report is the message."""


class DelegatedTest(pytest.Item):
    """Stands for a test of the same name that the child runs."""

    role: str

    def runtest(self) -> None:
        verdict = child(self.role).run(self.nodeid)
        for title, text in verdict.output:
            self.add_report_section("call", title, text)
        if verdict.outcome == "skipped":
            absent, _, covers = verdict.text.partition(needs.SEPARATOR)
            needs.skip(absent, covers)
        if verdict.outcome == "failed":
            raise ChildFailure(verdict.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo, style: str | None = None) -> str:
        if isinstance(excinfo.value, ChildFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def delegate(item: pytest.Item) -> pytest.Item:
    """The test itself where this process may run it, else one that a child runs."""
    folders = item.path.relative_to(HERE).parts if item.path.is_relative_to(HERE) else ()
    if role() is not None or not folders or folders[0] not in ROLES:
        return item
    stand_in = DelegatedTest.from_parent(item.parent, name=item.name)
    stand_in.role = folders[0]
    stand_in.own_markers.extend(item.own_markers)
    stand_in.keywords.update({mark.name: mark for mark in item.own_markers})
    return stand_in


class Child:
    """A running child."""

    def __init__(self, name: str, folder: Path, root: Path = ROOT) -> None:
        here, there = Pipe()
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - `stop` closes it
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-p", "tests.kernels.gpu.processes"),
                *("-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-p", "no:xdist"),
                *("--rootdir", str(root), "-c", str(ROOT / "pyproject.toml"), str(folder)),
            ],
            cwd=ROOT,
            env={**_environment(), _ROLE: name, _PIPE: str(there.fileno())},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        there.close()
        self._pipe = here

    def run(self, test: str) -> Verdict:
        try:
            self._pipe.send(test)
            verdict: Verdict = self._pipe.recv()
        except (EOFError, OSError):
            child.cache_clear()  # the next test gets another child
            return Verdict("failed", self._last_words(), [])
        return verdict

    def stop(self) -> None:
        self._pipe.close()
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        return f"the child process ended with code {code}; it said:\n{self._log.read()[-5000:]}"


@cache
def child(name: str) -> Child:
    """Started when its first test comes."""
    started = Child(name, HERE / name)
    _CHILDREN.append(started)
    return started


_CHILDREN: list[Child] = []


def stop() -> None:
    """End every child of this process."""
    while _CHILDREN:
        _CHILDREN.pop().stop()


def _environment() -> dict[str, str]:
    """Without what makes pytest believe that it is a worker, and without a choice of triton's."""
    told = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS")
    dropped = (*told, "PYTEST_CURRENT_TEST", "TRITON_INTERPRET")
    return {name: value for name, value in os.environ.items() if name not in dropped}


# ---- the child


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Instead of running what was collected: run what the parent asks for."""
    if _PIPE not in os.environ:
        return None
    tests = {item.nodeid: item for item in session.items}
    with Connection(int(os.environ[_PIPE])) as pipe:
        while True:
            try:
                name = pipe.recv()
            except EOFError:  # the parent is done
                return True
            pipe.send(_verdict(tests[name]) if name in tests else _unknown(name))


def _verdict(item: pytest.Item) -> Verdict:
    reports = runtestprotocol(item, log=False)
    decisive = next((report for report in reports if not report.passed), reports[-1])
    text = decisive.longreprtext
    if decisive.skipped and isinstance(decisive.longrepr, tuple):
        text = decisive.longrepr[2].removeprefix("Skipped: ")
    sections = [section for report in reports for section in report.sections]
    return Verdict(decisive.outcome, text, list(dict(sections).items()))


def _unknown(name: str) -> Verdict:
    return Verdict("failed", f"the child process did not collect {name}", [])
