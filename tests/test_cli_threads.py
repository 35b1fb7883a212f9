"""`--threads` takes what torch survives, and refuses the rest before any work."""

import pytest
from typer.testing import CliRunner

from fenchel.cli import app

COMMANDS = {
    "maps": ("bench", "maps", "--quick"),
    "attention": ("bench", "attention", "--quick"),
    "continuous": ("bench", "continuous", "--quick"),
    "audit": ("audit", "no-such-model", "--texts", "none.txt"),
}


@pytest.mark.parametrize(("count", "limit"), [(0, 1), (-1, 1), (1025, 1024), (100_000, 1024)])
@pytest.mark.parametrize("name", COMMANDS)
def test_nonsense_is_refused(name, count, limit):
    result = CliRunner().invoke(app, [*COMMANDS[name], f"--threads={count}"])
    assert result.exit_code == 2
    _, message = result.output.rsplit("--threads", 1)
    assert str(limit) in message
