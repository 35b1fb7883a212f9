"""The suite watches itself: how much is searched, and that each checker can say no."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import fenchel as fl

from . import checks
from .families import ALL, budget, tsallis
from .runner import QUICK, SLOW, examine
from .strategies import feasible_weights, score_rows


def _properties() -> list[object]:
    package = __package__ or ""
    names = [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    modules = [importlib.import_module(f"{package}.{n}") for n in names if n.startswith("test_")]
    tests = [f for m in modules for f in vars(m).values() if inspect.isfunction(f)]
    return [f for f in tests if "profile" in inspect.signature(f).parameters and _marks(f)]


def _marks(test: object) -> list[pytest.Mark]:
    marks = getattr(test, "pytestmark", [])
    return [mark for mark in marks if mark.name == "parametrize"]


def test_the_slow_run_searches_thousands_of_examples() -> None:
    """Every property runs SLOW examples for each of its parameters; `examine` asserts that they
    were really run. At the time of writing: 339 cases, 33,900 examples."""
    cases = 0
    for test in _properties():
        sizes = [len(list(m.args[1])) for m in _marks(test) if m.args[0] != "profile"]
        cases += math.prod(sizes)
    assert settings.get_profile("slow").max_examples == SLOW > 4 * QUICK
    assert cases * SLOW >= 2000
    assert len(_properties()) >= 25


def test_a_false_property_fails() -> None:
    def claim(rows: torch.Tensor) -> None:
        assert rows.shape[-1] < 30

    with pytest.raises(AssertionError):
        examine(claim, "slow", {"rows": score_rows()}, {})


def test_too_few_examples_fail() -> None:
    with pytest.raises(AssertionError, match="examples ran"):
        examine(lambda flag: None, "quick", {"flag": st.booleans()}, {})


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_a_wrong_row_is_seen(family) -> None:
    """A weight moved by a thousandth fails every check that a right row passes."""
    scores = torch.linspace(0.0, 0.5, 6, dtype=torch.float64).expand(2, 6)
    solution = family.solve(scores)
    wrong = solution.weights + 1e-3 * torch.tensor([1, 0, 0, 0, 0, -1.0], dtype=torch.float64)
    with pytest.raises(AssertionError):
        checks.assert_near(wrong, solution.weights, checks.weight_error(family, scores))
    loss = fl.fenchel_young_loss(scores, wrong, family.regularizer(scores), reduction="none")
    with pytest.raises(AssertionError):
        checks.assert_not_above(loss, torch.zeros(2), checks.gap_limit(family, scores))


def test_infeasible_rows_are_seen() -> None:
    family, ones = tsallis(1.5), torch.ones(3, dtype=torch.float64)
    scores = torch.tensor([[0.0, 1.0, 0.5]], dtype=torch.float64)
    good = family.solve(scores)
    checks.assert_feasible(family, scores, ones, good)
    masked = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    with pytest.raises(AssertionError, match="masked"):
        checks.assert_feasible(family, scores, masked, good)
    with pytest.raises(AssertionError, match="off by"):
        checks.assert_feasible(budget(0.9), scores, ones, good)
    with pytest.raises(AssertionError, match="NONFINITE"):
        checks.assert_solved(family.solve(scores / 0))


@pytest.mark.parametrize("total", [1.0, 2.5])
def test_drawn_weights_are_feasible(total: float) -> None:
    q = feasible_weights(torch.Size([100, 7]), total, torch.Generator().manual_seed(0))
    assert bool(((q >= 0) & (q <= 1)).all())
    torch.testing.assert_close(q.sum(-1), torch.full((100,), total, dtype=torch.float64))
    assert float(q.std()) > 0.05
