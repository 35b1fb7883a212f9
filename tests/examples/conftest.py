"""What the tests of the examples share."""

import pytest

from tests import needs


@pytest.fixture
def minilm():
    return needs.model("minilm", "examples 04, 05, 09 and 11 with a real model")
