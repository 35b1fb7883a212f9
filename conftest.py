"""Settings of every test, and the list of what a run did not cover."""

from __future__ import annotations

import os
from collections import Counter

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

# Dear files with many variants of one test: every third variant runs here, the others in test-slow.
THINNED = (
    "tests/attention/test_derivatives.py",
    "tests/attention/test_dropout.py",
    "tests/attention/test_reference.py",
    "tests/attention/test_tiles.py",
    "tests/attention/test_unchanged.py",
    "tests/continuous/test_density_derivatives.py",
    "tests/continuous/test_expectations.py",
    "tests/contracts/test_your_own.py",
    "tests/dual/test_estimate.py",
    "tests/dual/test_transport_derivatives.py",
    "tests/lens/heads/test_auditing.py",
    "tests/lens/heads/test_reference.py",
    "tests/nn/test_lipschitz.py",
    "tests/nn/test_lipschitz_extremes.py",
    "tests/nn/test_universal.py",
    "tests/peers/test_entmax_losses.py",
    "tests/peers/test_entmax_maps.py",
    "tests/test_derivatives.py",
    "tests/test_implicit.py",
    "tests/test_losses.py",
)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The other variants are slow tests."""
    seen: Counter[str] = Counter()
    for item in items:
        path, _, rest = item.nodeid.partition("::")
        name, _, variant = rest.partition("[")
        if path not in THINNED or not variant:
            continue
        if seen[path + name] % 3:
            item.add_marker(pytest.mark.slow)
        seen[path + name] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each thing that was absent, with what would have been covered."""
    skipped = terminalreporter.stats.get("skipped", [])
    lines = needs.uncovered([report.longrepr[2] for report in skipped])
    if lines:
        terminalreporter.section("not covered", sep="-")
    for line in lines:
        terminalreporter.line(line)
