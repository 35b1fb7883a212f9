"""Layer x head maps in matplotlib, and the looks that all figures of an audit share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from fenchel.lens.document import ColumnFacts, Document, ShownRecipe
from fenchel.lens.page.sentences import number
from fenchel.lens.pictures.draw import FAINT, INK, LIGHT, PAPER

Array = NDArray[np.float64]

INK_COLOR, FAINT_COLOR, PAPER_COLOR = LIGHT[INK], LIGHT[FAINT], LIGHT[PAPER]
_HATCH = "#c3c7cc"
_WIDEST, _TALLEST = 9.0, 11.0  # inches of the cells of one map
_WRITTEN = 16  # heads up to which the numbers are written into the cells
_TITLE, _SCALE = 0.75, 0.95  # inches above the cells, and right of them

_STYLE: dict[str, Any] = {
    "svg.hashsalt": "fenchel",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT_COLOR,
    "axes.labelcolor": INK_COLOR,
    "axes.facecolor": "none",
    "text.color": INK_COLOR,
    "xtick.color": FAINT_COLOR,
    "ytick.color": FAINT_COLOR,
    "xtick.labelcolor": INK_COLOR,
    "ytick.labelcolor": INK_COLOR,
    "figure.facecolor": PAPER_COLOR,
    "savefig.facecolor": PAPER_COLOR,
    "hatch.color": _HATCH,
    "hatch.linewidth": 1.0,
}


def map_figure(document: Document, column: str, kind: str | None = None) -> Figure:
    """A column of the audit: layers as rows, heads as columns, one colour scale.

    kind: "encoder", "decoder" or "cross"; all that the model has if left out, one under another.
    What was not measured is hatched.
    """
    facts = column_named(document, column)
    shown = kinds(document) if kind is None else [_check_kind(document, kind)]
    grids = {name: grid(document, name, column) for name in shown}
    numbers = [row[column] for row in document.rows if row.get(column) is not None]
    several = len(kinds(document)) > 1
    return _draw(grids, _title(facts, document), norm_of(numbers, facts.scale), several)


def styled(more: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """The looks of all figures, and more where one differs."""
    style = {**_STYLE, **(more or {})}
    return matplotlib.rc_context(style)  # type: ignore[arg-type]  # dict of str is not accepted


def kinds(document: Document) -> list[str]:
    return list(dict.fromkeys(row.kind for row in document.rows))


def column_named(document: Document, name: str) -> ColumnFacts:
    columns = {column.name: column for column in document.columns}
    if name in columns:
        return columns[name]
    near = get_close_matches(name, columns, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(columns)}"
    raise ValueError(f"no column {name!r}; {hint}")


def _check_kind(document: Document, kind: str) -> str:
    if kind not in kinds(document):
        raise ValueError(f"kind must be of {', '.join(kinds(document))}, got {kind!r}")
    return kind


class Grid:
    """values (layers, heads), masked where there is no number; the numbers of both axes."""

    def __init__(self, cells: Iterable[tuple[int, int, float | None]]) -> None:
        """cells: (layer, head, number)"""
        cells = list(cells)
        self.layers = sorted({layer for layer, _, _ in cells})
        self.heads = sorted({head for _, head, _ in cells})
        across = {head: place for place, head in enumerate(self.heads)}
        down = {layer: place for place, layer in enumerate(self.layers)}
        values = np.full((len(self.layers), len(self.heads)), np.nan)
        for layer, head, value in cells:
            if value is not None:
                values[down[layer], across[head]] = value
        self.values = np.ma.masked_invalid(values)


def grid(document: Document, kind: str, column: str) -> Grid:
    rows = (row for row in document.rows if row.kind == kind)
    return Grid((row.layer, row.head, row.get(column)) for row in rows)


def norm_of(values: Sequence[float], scale: str) -> Normalize:
    """From the least to the largest; around zero where both signs occur."""
    if not values:
        return Normalize(0, 1)
    low, high = min(values), max(values)
    if low < 0 < high:
        return Normalize(-max(-low, high), max(-low, high))
    positive = [value for value in values if value > 0]
    if scale == "log" and positive and min(positive) < high:
        return LogNorm(min(positive), high, clip=True)
    return Normalize(low, high) if low < high else Normalize(low - 0.5, high + 0.5)


def colors_of(norm: Normalize) -> Colormap:
    both = (norm.vmin or 0) < 0 < (norm.vmax or 0)
    return matplotlib.colormaps["RdBu_r" if both else "viridis"]


def _title(column: ColumnFacts, document: Document) -> str:
    apart = column.name == "distance" and document.inputs.what == "images"
    unit = "patches, in reading order" if apart else column.unit
    return f"{column.title} ({unit})" if unit else column.title


def recipe_figure(recipe: ShownRecipe, kind: str, several: bool) -> Figure:
    """The recipe's alpha of every head. several: whether the model has other kinds too."""
    cells = ((head.layer, head.head, head.alpha) for head in recipe.heads if head.kind == kind)
    alphas = [head.alpha for head in recipe.heads if head.alpha is not None]
    return _draw({kind: Grid(cells)}, "recipe: alpha", norm_of(alphas, "linear"), several)


def _cell_size(grids: Sequence[Grid]) -> tuple[float, float]:
    """Inches of a cell, so that maps of any model fit a page."""
    heads = max(len(one.heads) for one in grids)
    layers = sum(len(one.layers) for one in grids)
    return min(0.55, _WIDEST / heads), min(0.34, _TALLEST / layers)


def _draw(grids: Mapping[str, Grid], title: str, norm: Normalize, several: bool) -> Figure:
    """Places are reckoned in inches: a layout engine would take longer than the drawing."""
    wide, high = _cell_size(list(grids.values()))
    heads = max(len(one.heads) for one in grids.values())
    left, right = 0.65, max(_SCALE, 3.2 - heads * wide)  # room for the title over few heads
    width = max(left + heads * wide + right, title_width(title))
    gap = 0.65
    cells = sum(len(one.layers) for one in grids.values()) * high
    height = _TITLE + cells + gap * len(grids)
    with styled():
        figure = Figure(figsize=(width, height))
        top = height - _TITLE
        for kind, one in grids.items():
            tall, across = len(one.layers) * high, len(one.heads) * wide
            box = (left / width, (top - tall) / height, across / width, tall / height)
            ax = figure.add_axes(box)
            _cells(ax, one, norm)
            if several:
                ax.set_title(kind, color=FAINT_COLOR, fontsize=9, pad=3)
            top -= tall + gap
        figure.text(0.12 / width, 1 - 0.28 / height, title, fontsize=11, va="center")
        bar = min(cells, 2.6)
        beside = (left + heads * wide + 0.18) / width
        place = (beside, (height - _TITLE - bar) / height, 0.13 / width, bar / height)
        _scale(figure, place, norm)
    return figure


def title_width(title: str) -> float:
    """Inches that a title of 11 points needs at most, with margins."""
    return 0.3 + 0.1 * len(title)


def _cells(ax: Axes, one: Grid, norm: Normalize) -> None:
    layers, heads = one.values.shape
    edge = 0.6 if heads <= 32 and layers <= 48 else 0.0
    ax.patch.set(facecolor="#f2f3f4", hatch="////", edgecolor=_HATCH)
    colors = colors_of(norm)
    ax.pcolormesh(one.values, norm=norm, cmap=colors, edgecolors=PAPER_COLOR, linewidth=edge)
    ax.set(xlim=(0, heads), ylim=(layers, 0), xlabel="head", ylabel="layer")
    for axis, names in ((ax.xaxis, one.heads), (ax.yaxis, one.layers)):
        every = 1 if len(names) <= 32 else 4 if len(names) <= 64 else 8
        places = range(0, len(names), every)
        axis.set_ticks([p + 0.5 for p in places], [str(names[p]) for p in places])
    ax.tick_params(length=0, labelsize=8)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if heads <= _WRITTEN and layers <= 40:
        _write(ax, one.values, norm, colors)


def _write(ax: Axes, values: Any, norm: Normalize, colors: Colormap) -> None:
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "parse_math": False}
    for (layer, head), value in np.ndenumerate(values.filled(np.nan)):
        if np.isfinite(value):
            red, green, blue, _ = colors(float(norm(value)))
            light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.51
            color = "#101418" if light else "white"
            ax.text(head + 0.5, layer + 0.53, _brief(value), color=color, **look)


def _brief(value: float) -> str:
    size = abs(value)
    if 0 < size < 0.0005 or size >= 9999.5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if 0 < size < 0.005:
        return f"{value:.3f}"
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 9.95 else f"{value:.2f}"


def _scale(figure: Figure, place: tuple[float, float, float, float], norm: Normalize) -> None:
    ax = figure.add_axes(place)
    bar = figure.colorbar(ScalarMappable(norm, colors_of(norm)), cax=ax)
    low, high = float(norm.vmin or 0), float(norm.vmax or 0)
    space = np.geomspace if isinstance(norm, LogNorm) else np.linspace
    tall = place[3] * figure.get_size_inches()[1]
    ticks = space(low, high, 5 if tall > 1.2 else 3)[1:-1].tolist()
    bar.set_ticks([low, *ticks, high], labels=[number(x) for x in (low, *ticks, high)])
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(length=0, labelsize=8)
    for spine in bar.ax.spines.values():
        spine.set_visible(False)
