"""The picture of an estimate, and the chapter that shows it."""

import pytest
import torch
from matplotlib.colors import to_hex

from fenchel import dual
from fenchel.lens.pictures import draw, estimation_figure
from papers.tour.chapter import Tour
from papers.tour.chapters import estimation


def test_the_marks_are_where_the_means_are():
    problem = estimation.scene(Tour())
    figure = estimation_figure(*problem, reliabilities=(2.0, 0.5))
    for ax, reliability in zip(figure.axes, (2.0, 0.5), strict=True):
        marks = {
            c.get_label(): c.get_offsets()[0].tolist() for c in ax.collections if c.get_label()
        }
        for name, solve in (
            ("exact", dual.estimate),
            ("ordinary attention", dual.first_order),
            ("second order", dual.second_order),
        ):
            assert marks[name] == pytest.approx(solve(*problem, reliability).mean.tolist())
        assert marks["prior mean"] == pytest.approx((problem[1] @ problem[0]).tolist())
        weights = dual.estimate(*problem, reliability).weights
        rings = ax.collections[1].get_sizes()
        assert rings[int(weights.argmax())] == max(rings)


def test_alone_it_has_colours_of_its_own():
    figure = estimation_figure(*estimation.scene(Tour()))
    colors = {to_hex(c) for part in figure.axes[0].collections for c in part.get_facecolors()}
    assert draw.LIGHT[draw.BLUE] in colors
    assert not colors & {draw.BLUE, draw.VERMILION, draw.INK}


def test_bad_input():
    with pytest.raises(ValueError, match=r"templates must be \(n, 2\)"):
        estimation_figure(torch.ones(3, 3), None, torch.ones(3))
    with pytest.raises(ValueError, match="at least one"):
        estimation_figure(torch.ones(3, 2), None, torch.ones(2), ())


def test_chapter_shows_the_measured_orders():
    chapter = estimation.chapter(Tour(quick=True))
    curves = estimation.errors(estimation.scene(Tour()))
    assert estimation.slope(curves["λ, first order"]) == pytest.approx(2, abs=0.1)
    assert estimation.slope(curves["λ, second order"]) == pytest.approx(3, abs=0.1)
    assert len(chapter.figures[0].panels) == 3
    rows = chapter.tables[0].rows
    shares = [float(row[1].removesuffix(" %")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert all(float(row[4].replace("−", "-")) < 1e-20 for row in rows)
