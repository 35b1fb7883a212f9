"""The chapter on attention: its pictures show what was measured and solved."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
import torch

import fenchel as fl
from benchmarks.maps import DIRECTIONS
from fenchel.lens.pictures import draw
from papers.tour.chapter import Tour
from papers.tour.chapters import attention

QUICK = Tour(seed=0, quick=True)


@pytest.mark.smoke
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


@pytest.mark.parametrize("name", ["ink", "faint", "paper", "blue", "vermilion", "green", "purple"])
def test_pictures_that_stand_alone_have_the_light_colours_of_the_page(name: str) -> None:
    css = files("papers.tour").joinpath("tour.css").read_text(encoding="utf-8")
    light = re.search(rf"--{name}: (#\w+)", css)  # the first is the light one
    assert light is not None
    assert draw.LIGHT[getattr(draw, name.upper())] == light[1]
