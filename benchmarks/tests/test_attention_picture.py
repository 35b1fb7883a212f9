"""The picture of the benchmark of attention shows what was measured."""

from __future__ import annotations

from typing import Any

from benchmarks import attention_picture as picture


def entry(method: str, n: int, deviation: float, ratio: float | None) -> dict[str, Any]:
    return {
        "method": method,
        "variant": "plain",
        "n": n,
        "deviation": deviation,
        "direction": "forward",
        "ratio": ratio,
        "error": "" if ratio else "why",
    }


def test_curves_have_a_band_over_the_deviations_of_the_sweep() -> None:
    entries = [entry("torch SDPA", n, 1.0, 1.0) for n in (8, 16)]
    ratios = {0.2: (4.0, 5.0), 1.0: (2.0, 3.0), 2.0: (1.0, 0.5)}
    for deviation, pair in ratios.items():
        entries += [
            entry("fl Tsallis(1.5)", n, deviation, r) for n, r in zip((8, 16), pair, strict=True)
        ]
    entries.append(entry("fl Tsallis(1.5)", 16, 0.02, 99.0))  # at one size only: no part of it
    entries += [entry("plain softmax", 8, 1.0, 7.0), entry("plain softmax", 16, 1.0, None)]
    ours, softmax = picture.curves(entries, "forward")
    assert (ours.label, ours.x, ours.y) == ("fenchel Tsallis(1.5)", [8, 16], [2.0, 3.0])
    assert ours.band == ([1.0, 0.5], [4.0, 5.0])
    assert (softmax.label, softmax.x, softmax.y) == ("plain softmax", [8], [7.0])
    assert softmax.band is None
    assert list(picture.curves(entries, "forward+backward")) == []


def test_looks_differ() -> None:
    looks = [*picture._OURS, *picture._PEERS]
    assert len(set(looks)) == len(looks)
    assert all(len(set(column)) == 3 for column in zip(*picture._OURS, strict=True))
