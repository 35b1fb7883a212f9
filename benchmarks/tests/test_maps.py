"""The benchmark counts what it says it counts. No test depends on a time."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from benchmarks import maps

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


def test_threads_are_set_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.softmax(x, -1)

    monkeypatch.setattr(maps, "cases", lambda: [maps.Case("torch.softmax", call)])
    maps.run(maps.Settings(rows=2, length=2, repeats=1, threads=before + 1))
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


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


def test_a_run_that_waited_is_called_disturbed() -> None:
    waiting = maps._time(lambda: time.sleep(0.02), 2)
    assert waiting.processor < 0.5 * waiting.elapsed  # asleep: elapsed, but no work
    timing = maps.Timing("x", "forward", 1, (1.0,), 1.0, waiting.processor / waiting.elapsed)
    report = maps.Report(SMALL, (timing, maps.Timing("y", "forward", 1, (1.0,), 1.0, busy=1.9)))
    assert "Do not trust these ratios: 1 of 2 timings" in report.warning
    assert report.as_json()["warning"] == report.warning


def test_an_undisturbed_run_has_no_warning() -> None:
    report = maps.Report(SMALL, (maps.Timing("x", "forward", 1, (1.0,), 1.0, busy=0.99),))
    assert report.warning == ""


def test_one_stall_does_not_choose_the_number_of_calls() -> None:
    stalls = iter([0.0, 0.02, 0.0, 0.0])  # the warm-up, then three measured calls
    assert maps._calls(lambda: time.sleep(next(stalls))) > 1
