"""Ratios, growth and tables from made-up times."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import attention_summary as summary
from benchmarks.attention_summary import Row
from benchmarks.maps import DIRECTIONS


def entry(method: str, n: int, direction: str, seconds: float, **other: Any) -> dict[str, Any]:
    base = 1e-6 * n**2
    named = {"method": method, "n": n, "direction": direction, "error": ""}
    named |= {"deviation": 1.0, "variant": "plain"} | other
    return {**summary.timed((seconds,), base), **named}


@pytest.fixture
def results() -> dict[str, Any]:
    """Ours is half of SDPA's time forward and a quarter with backward."""
    entries = []
    for n in (128, 1024, 4096):
        for share, direction in zip((0.5, 0.25), DIRECTIONS, strict=True):
            base = 1e-6 * n**2
            entries.append(entry("torch SDPA", n, direction, base))
            entries.append(entry("fl Tsallis(1.5)", n, direction, share * base))
            entries.append(entry("fl Tsallis(2)", n, direction, 9 * base, deviation=2.0))
    entries.append(entry("plain softmax", 1024, "forward", 3e-6 * 1024**2))
    entries.append({**entry("plain softmax", 1024, "forward+backward", 1.0)})
    entries[-1] |= {"seconds": None, "ratio": None, "error": "NotImplementedError: none"}
    memory = [
        {"method": "torch SDPA", "n": 4096, "extra_bytes": 2**20, "ratio": 1.0},
        {"method": "fl Tsallis(1.5)", "n": 4096, "extra_bytes": 3 * 2**20, "ratio": 3.0},
    ]
    return {"results": entries, "memory": memory, "growth": summary.growth(entries)}


def test_median_and_ratios() -> None:
    times = summary.timed((4.0, 2.0, 9.0), 2.0)
    assert times["seconds"] == 4
    assert (times["ratio"], times["ratio_min"], times["ratio_max"]) == (2, 1, 4.5)
    assert times["rounds"] == 3
    assert summary.timed((), 2.0)["seconds"] is None
    assert summary.timed((1.0,), None)["ratio"] is None


@pytest.mark.parametrize("power", [1.0, 2.0, 1.37])
def test_exponent_of_a_power_law(power: float) -> None:
    sizes = (512, 1024, 4096, 16384)
    assert summary.exponent(sizes, [3e-7 * n**power for n in sizes]) == pytest.approx(power)


def test_exponent_is_the_least_squares_slope() -> None:
    assert summary.exponent((1, 2, 4), (1.0, 8.0, 4.0)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="two different sizes"):
        summary.exponent((512, 512), (1.0, 2.0))


def test_growth_leaves_short_sequences_and_failures_out(results: dict[str, Any]) -> None:
    fitted = {(e["method"], e["direction"]): e for e in results["growth"]}
    assert set(fitted) == {
        (m, d) for m in ("torch SDPA", "fl Tsallis(1.5)", "fl Tsallis(2)") for d in DIRECTIONS
    }
    for fit in fitted.values():
        assert fit["sizes"] == [1024, 4096]
        assert fit["exponent"] == pytest.approx(2)


def test_rows_keep_a_method_together() -> None:
    cases = [("plain softmax", 1.0, "plain"), ("fl b", 2.0, "plain"), ("fl a", 1.0, "plain")]
    cases += [("fl b", 1.0, "causal"), ("fl b", 0.02, "plain"), ("torch SDPA", 1.0, "plain")]
    entries = [{"method": m, "deviation": d, "variant": v} for m, d, v in cases]
    wanted = ["fl b, deviation 0.02", "fl b, deviation 2", "fl b, deviation 1, causal"]
    assert [str(row) for row in summary.rows(entries)] == [
        *wanted,
        "fl a, deviation 1",
        "plain softmax",
    ]


def test_cells(results: dict[str, Any]) -> None:
    def cell(method: str, n: int, direction: str) -> str:
        return summary.cell(results["results"], Row(method, 1.0, "plain"), n, direction)

    assert cell("fl Tsallis(1.5)", 4096, "forward") == "0.5"
    assert cell("plain softmax", 1024, "forward+backward") == "n/a"
    assert cell("plain softmax", 4096, "forward") == "–"
    assert summary.digits(1234.5) == "1234"
    assert summary.notes(results["results"]) == [
        "plain softmax, forward+backward: NotImplementedError: none"
    ]
