"""The chapter on attention: its pictures show what was measured and solved."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest
import torch

import fenchel as fl
from benchmarks.maps import DIRECTIONS
from fenchel.lens.pictures import draw
from papers.tour.chapter import Tour
from papers.tour.chapters import attention

QUICK = Tour(seed=0, quick=True)


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


def test_the_chapter_renders() -> None:
    chapter = attention.chapter(QUICK)
    assert chapter.title == "Attention"
    assert [len(figure.panels) for figure in chapter.figures] == [2, 1]
    (table,) = chapter.tables
    assert len(table.header) == 1 + len(DIRECTIONS) * 2
    names = [row[0] for row in table.rows]
    assert names == [f"fl Tsallis({a}), deviation {d}" for a in ("1.5", "2") for d in (1, 2)]
    for row in table.rows:
        assert all(float(str(cell)) > 0 for cell in row[1:])


def test_the_support_repeats_with_the_seed() -> None:
    again = attention.support_figure(QUICK)
    assert again == attention.support_figure(QUICK)
    assert again != attention.support_figure(Tour(seed=1, quick=True))


def test_one_dot_for_each_weight_and_none_in_the_future() -> None:
    query, key, value = attention._head(QUICK, 40)
    solution = fl.attention_solution(query, key, value, fl.Tsallis(1.5), is_causal=True)
    dense = solution.head(0).to_dense()
    assert int(dense.triu(1).count_nonzero()) == 0
    drawn = attention._dots(solution).count("<use")
    ticks = attention._dots(_none(solution)).count("<use")
    assert drawn - ticks == int(dense.count_nonzero()) > 40


def _none(solution: fl.AttentionSolution) -> fl.AttentionSolution:
    empty = {"rows": torch.zeros_like(solution.rows), "keys": solution.keys[:0]}
    return fl.AttentionSolution(**{**solution.__dict__, **empty})


def test_curves_have_a_band_over_the_deviations_of_the_sweep() -> None:
    entries = [entry("torch SDPA", n, 1.0, 1.0) for n in (8, 16)]
    ratios = {0.2: (4.0, 5.0), 1.0: (2.0, 3.0), 2.0: (1.0, 0.5)}
    for deviation, pair in ratios.items():
        entries += [
            entry("fl Tsallis(1.5)", n, deviation, r) for n, r in zip((8, 16), pair, strict=True)
        ]
    entries.append(entry("fl Tsallis(1.5)", 16, 0.02, 99.0))  # at one size only: no part of it
    entries += [entry("plain softmax", 8, 1.0, 7.0), entry("plain softmax", 16, 1.0, None)]
    ours, softmax = attention.curves(entries, "forward")
    assert (ours.label, ours.x, ours.y) == ("fenchel Tsallis(1.5)", [8, 16], [2.0, 3.0])
    assert ours.band == ([1.0, 0.5], [4.0, 5.0])
    assert (softmax.label, softmax.x, softmax.y) == ("plain softmax", [8], [7.0])
    assert softmax.band is None
    assert list(attention.curves(entries, "forward+backward")) == []


def test_looks_differ() -> None:
    looks = [*attention._OURS, *attention._PEERS]
    assert len(set(looks)) == len(looks)
    assert all(len(set(column)) == 3 for column in zip(*attention._OURS, strict=True))


@pytest.mark.parametrize("name", ["ink", "faint", "paper", "blue", "vermilion", "green", "purple"])
def test_pictures_that_stand_alone_have_the_light_colours_of_the_page(name: str) -> None:
    css = files("papers.tour").joinpath("tour.css").read_text(encoding="utf-8")
    light = re.search(rf"--{name}: (#\w+)", css)  # the first is the light one
    assert light is not None
    assert draw.LIGHT[getattr(draw, name.upper())] == light[1]
