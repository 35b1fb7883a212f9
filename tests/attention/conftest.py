"""Which kernels run underneath: every test of a module that uses `kernels` goes through each."""

import sys

import pytest

from tests import needs


@pytest.fixture(params=["native", "torch"])
def kernels(request, monkeypatch):
    """The name of the path."""
    library = sys.modules.get("fenchel._kernels.library")
    if library is not None:
        monkeypatch.setattr(library._State, "enabled", request.param == "native")
        if request.param == "native" and library.native() is None:
            needs.skip("no native kernels", "attention through them")
    return request.param


@pytest.fixture
def tiles(monkeypatch):
    """A function that sets how many scores a tile holds; it has sixteen rows at least."""
    module = sys.modules["fenchel._attention.tiled"]  # fenchel.attention itself is the function
    return lambda size: monkeypatch.setattr(module, "TILE", size)
