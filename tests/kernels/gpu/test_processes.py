"""Tests in a child process: each verdict arrives with its reason, and a dead child is noticed."""

import pytest

from tests.kernels.gpu.processes import Child

TESTS = """
import os
import pytest
from tests import needs

def test_passes():
    print("words")
    assert os.environ["FENCHEL_GPU_TESTS"] == "compiled"
    assert "TRITON_INTERPRET" not in os.environ

def test_fails():
    assert 1 + 1 == 3

@needs.unless(False, "no thing", "its use")
def test_skips(): ...

@pytest.fixture
def broken():
    yield
    raise ValueError("while tidying up")

def test_leaves_a_mess(broken): ...

def test_dies():
    os._exit(3)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    child = Child("compiled", tmp_path, root=tmp_path)
    yield lambda name: child.run(f"test_some.py::{name}")
    child.stop()


def test_verdicts(run):
    passed = run("test_passes")
    assert passed.outcome == "passed"
    assert passed.output == [("Captured stdout call", "words\n")]
    failed = run("test_fails")
    assert failed.outcome == "failed"
    assert "assert (1 + 1) == 3" in failed.text
    assert run("test_skips")[:2] == ("skipped", "no thing; not covered: its use")
    untidy = run("test_leaves_a_mess")
    assert untidy.outcome == "failed"
    assert "while tidying up" in untidy.text
    assert "did not collect" in run("test_of_nothing").text


def test_a_dead_child_is_a_failure(run):
    verdict = run("test_dies")
    assert verdict.outcome == "failed"
    assert "ended with code 3" in verdict.text


def test_another_child_has_its_own_choice(monkeypatch, tmp_path):
    """What the parent's environment says of triton does not reach a child."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "test_some.py").write_text(TESTS)
    child = Child("compiled", tmp_path, root=tmp_path)
    assert child.run("test_some.py::test_passes").outcome == "passed"
    child.stop()
