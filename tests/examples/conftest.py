"""What the tests of the examples share."""

import pytest

from tests.examples.running import ROOT

MINILM = ROOT / "build" / "models" / "minilm"


@pytest.fixture
def minilm():
    if not (MINILM / "config.json").is_file():
        pytest.skip(f"{MINILM} is not there; `make demo` fetches it")
    return MINILM
