"""The benchmark counts what it says it counts. No test depends on a time."""

from __future__ import annotations

import sys

import pytest
import torch

from fenchel.bench import maps

SMALL = maps.Settings(rows=32, length=8, repeats=3)


@pytest.fixture(scope="module")
def report() -> maps.Report:
    return maps.run(SMALL)


def test_every_case_is_timed_in_both_directions(report: maps.Report) -> None:
    names = {case.name for case in maps.cases()}
    for direction in maps.DIRECTIONS:
        assert {t.name for t in report.timings if t.direction == direction} == names
    assert all(len(t.seconds) == SMALL.repeats for t in report.timings)


def test_slow_maps_are_compared_on_their_own_rows(report: maps.Report) -> None:
    fused = [t for t in report.timings if t.name == "fl Fused(0.1)"]
    assert {t.rows for t in fused} == {2}
    softmax = [t for t in report.timings if t.name == "torch.softmax"]
    assert {t.rows for t in softmax} == {32, 2}
    assert all(t.ratio == pytest.approx(1) for t in softmax)


def test_ratio_and_spread() -> None:
    timing = maps.Timing("x", "forward", 1, (4.0, 2.0, 6.0), baseline=2.0)
    assert timing.ratio == 2
    assert timing.spread == (1, 3)
    assert str(timing) == "2 (1..3)"
    assert str(maps.Timing("x", "forward", 1, (4321.4, 1.0, 5e4), 1.0)) == "4321 (1..50000)"


def test_progress_reaches_its_total() -> None:
    calls: list[int] = []
    maps.run(SMALL, lambda: calls.append(1))
    assert len(calls) == maps.steps(SMALL)


def test_cases_return_distributions() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for case in maps.cases():
        total = 4.0 if "Budget" in case.name else 1.0
        torch.testing.assert_close(case.call(x).sum(-1), torch.full((3,), total))


def test_without_the_entmax_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    assert not [case for case in maps.cases() if case.name.startswith("entmax.")]


def test_settings_refuse_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="repeats must be >= 1, got 0"):
        maps.Settings(repeats=0)
