"""Tests of `interpreted` and of `compiled` run in a child process each, however pytest is started.

A process interprets Triton's kernels or compiles them, never both, and decides before triton is
imported. Here the tests of these folders are replaced by ones that a child runs: they are chosen,
shared out and reported like all others. To debug in one process:

    FENCHEL_GPU_TESTS=interpreted python -m pytest --pdb tests/kernels/gpu/interpreted
"""

import importlib.util
import os

import pytest

from tests.kernels.gpu import processes

if processes.role() == "interpreted" and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.gpu import interpreter  # noqa: F401 - from here on, launches are checked


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    items[:] = [processes.delegate(item) for item in items]


def pytest_sessionfinish():
    processes.stop()
