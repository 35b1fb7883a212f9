"""Example 14: decoding from a cache."""

import pytest

from tests.attention.test_decode import shadows
from tests.examples.running import number, row, run


@shadows
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_little_is_read_and_the_rest_is_proved(alpha):
    text = run("14_decode_from_a_cache", "--quick", "--tokens", 3000, "--alpha", alpha)
    assert "over all keys: yes" in text
    assert row("keys per query", text) == [3016]
    assert row("scored, on average", text)[0] < 400
    assert row("bytes read / all bytes", text)[0] < 0.35
    assert number(r"nearer to the cut than (\S+)", text) >= 0
