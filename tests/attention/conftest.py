"""Which kernels run underneath: every test of a module that uses `kernels` goes through each."""

import sys

import pytest

import fenchel as fl
from fenchel._kernels import library
from tests import needs


@pytest.fixture(params=["native", "torch"])
def kernels(request):
    """The name of the path."""
    if request.param == "native" and library.loaded() is None:
        needs.skip("no native kernels", "attention through them")
    with fl.use(request.param):
        yield request.param


@pytest.fixture
def tiles(monkeypatch):
    """A function that sets how many scores a tile holds; it has sixteen rows at least."""
    module = sys.modules["fenchel._attention.tiled"]  # fenchel.attention itself is the function
    return lambda size: monkeypatch.setattr(module, "TILE", size)
