"""Histograms of an audit: what is in them, and that nothing is drawn from padding."""

from itertools import pairwise

import pytest
import torch

from fenchel.lens import Deviations
from papers.studies import deviation_pictures as picture


def made(layers=3, heads=2, attention="encoder"):
    """Two sentences of 4 and 2 words."""
    generator = torch.Generator().manual_seed(0)
    values = 0.1 * torch.rand(layers, 2, heads, 4, generator=generator, dtype=torch.float64)
    values[:, 1, :, 2:] = torch.nan
    codes = torch.where(values.isnan(), -1, 0).to(torch.int8)
    rest = {"model": "tiny", "attention": attention, "scaling": 0.25, "reliability": 1.0}
    return Deviations(values, 2 * values, 3 * values, 4 * values, codes, **rest)


def texts(monkeypatch, found, path, **options):
    """All that is written in the picture, before fonts become outlines; and its axes."""
    kept = {}

    def save(paint, path, size):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.canvas.draw()
        kept["figure"] = figure
        return path

    monkeypatch.setattr(picture.draw, "save", save)
    picture.histograms(found, path, **options)
    return kept["figure"]


def test_a_panel_a_layer_with_its_mean(monkeypatch, tmp_path):
    found = made()
    figure = texts(monkeypatch, found, tmp_path / "x.svg")
    assert [ax.get_title("left") or ax.get_title() for ax in figure.axes] == [
        "layer 1",
        "layer 2",
        "layer 3",
    ]
    for layer, ax in enumerate(figure.axes):
        mean = float(found.multiplier[layer].nanmean())
        (line,) = ax.lines
        assert line.get_xdata()[0] == pytest.approx(mean)
        assert [text.get_text() for text in ax.texts] == [f"{mean:#.3g}"]
        heights = _heights(ax)
        assert sum(heights) == 6  # words, not padding
    title = figure.get_suptitle()
    for part in ("tiny", "encoder self-attention", "2 sentences", "6 queries", "times 0.25"):
        assert part in title


def _heights(ax):
    """Of a step histogram's bars."""
    (outline,) = ax.patches
    points = outline.get_path().vertices
    return [b[1] for a, b in pairwise(points) if a[1] == b[1] and b[1] > 0 and b[0] > a[0]]


def test_a_panel_a_head(monkeypatch, tmp_path):
    found = made()
    figure = texts(monkeypatch, found, tmp_path / "x.svg", measure="mean", heads=True)
    assert len(figure.axes) == 6
    mean = float(found.mean[1, :, 1].nanmean())
    assert figure.axes[3].texts[0].get_text() == f"{mean:#.2g}"
    assert figure.axes[2].get_ylabel() == "layer 2"
    assert "mean" in figure.get_supxlabel()


def test_nothing_solved_leaves_the_panel_empty(monkeypatch, tmp_path):
    found = made(layers=5)
    found.multiplier[1] = torch.nan
    figure = texts(monkeypatch, found, tmp_path / "x.svg")
    assert len(figure.axes) == 5  # the sixth place of the grid is left out
    assert not figure.axes[1].lines


def test_all_files(tmp_path):
    paths = picture.save_all(made(attention="cross"), tmp_path)
    assert [path.name for path in paths] == [
        "tiny-cross-multiplier.svg",
        "tiny-cross-multiplier-heads.svg",
        "tiny-cross-mean.svg",
        "tiny-cross-mean-heads.svg",
    ]
    for path in paths:
        assert path.read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_table():
    listing = picture.listing(made().as_json())
    assert listing.header == ["layer", "multiplier", "mean", "mean_shift", "parameter"]
    assert len(listing.rows) == 3
    assert listing.rows[2][2] == f"{float(made().mean[2].nanmean()):.3g}"


def test_an_unknown_measure_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one of multiplier, mean, mean_shift, parameter, got 'x'"):
        picture.histograms(made(), tmp_path / "x.svg", measure="x")
