"""Settings of every test, and the list of what a run did not cover."""

from __future__ import annotations

import os

import pytest
import torch

from tests import needs

pytest_plugins = ("pytester",)  # for the tests of what stands below

# Models come from configurations and folders. transformers reads this once, when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# Small tensors, and workers that already fill the cores: threads would wait for each other.
torch.set_num_threads(1)

# Warnings are errors here. Torch gives some only the first time in a process, so which test
# met one depended on how the tests were shared out; now every test meets its own.
torch.set_warn_always(True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each thing that was absent, with what would have been covered."""
    skipped = terminalreporter.stats.get("skipped", [])
    lines = needs.uncovered([report.longrepr[2] for report in skipped])
    if lines:
        terminalreporter.section("not covered", sep="-")
    for line in lines:
        terminalreporter.line(line)
