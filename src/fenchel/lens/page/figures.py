"""All pictures of an audit as files, each as PNG and as SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fenchel.lens.document import Document, OffsetPreference
from fenchel.lens.page.maps import (
    FAINT_COLOR,
    INK_COLOR,
    kinds,
    map_figure,
    recipe_figure,
    styled,
    title_width,
)
from fenchel.lens.pictures.draw import BLUE, GREEN, LIGHT, PURPLE, VERMILION, take_literally

DPI = 150
_COLUMNS = 6  # small multiples in a row
_SERIES = tuple(LIGHT[name] for name in (BLUE, VERMILION, GREEN, PURPLE))
_MARKS = ("o", "s", "^", "D")

Make = Callable[[], Figure]
Paint = Callable[[Axes, Any], None]
Entry = TypeVar("Entry")


def save_figures(
    document: Document, folder: Path, advance: Callable[[float], object] | None = None
) -> list[Path]:
    """Every figure into folder/figures, as PNG and SVG; the paths in the order of the columns.

    advance: called with the share of the work done since the last call.
    """
    named = list(figures(document))
    target = folder / "figures"
    target.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, make in named:
        paths += save(make(), target / name)
        if advance is not None:
            advance(1 / len(named))
    return paths


def save(figure: Figure, stem: Path) -> list[Path]:
    """stem.png and stem.svg."""
    png, svg = (stem.with_name(f"{stem.name}.{form}") for form in ("png", "svg"))
    with styled():
        take_literally(figure)
        figure.savefig(png, dpi=DPI)
        figure.savefig(svg, metadata={"Date": None})  # the same file from the same numbers
    return [png, svg]


def figures(document: Document) -> Iterator[tuple[str, Make]]:
    """(name, how it is made) of all figures that the document has numbers for."""
    for column in (column.name for column in document.columns):
        for kind in kinds(document):
            if _has(document, kind, column):
                yield f"map_{kind}_{_safe(column)}", partial(map_figure, document, column, kind)
    for kind in kinds(document):
        yield from _of_kind(document, kind)
    if what_if_pairs(document):
        yield "what_if", partial(what_if_figure, document)


def _of_kind(document: Document, kind: str) -> Iterator[tuple[str, Make]]:
    agreement = _layers(document.agreement, kind)
    if any(len(table) > 1 for table in agreement.values()):
        yield f"agreement_{kind}", partial(_agreement_figure, agreement, kind)
    histograms = _layers(document.histograms, kind)
    if histograms:
        shares = {layer: one.entropy_share for layer, one in histograms.items()}
        title = "entropy / largest entropy"
        yield f"entropy_histograms_{kind}", partial(_histograms, shares, kind, title)
        weights = {layer: one.top_weight for layer, one in histograms.items()}
        yield f"top_weight_histograms_{kind}", partial(_histograms, weights, kind, "largest weight")
    spectra = _layers(document.spectra, kind)
    if spectra:
        yield f"spectra_{kind}", partial(_spectra, spectra, kind)
    preference = _layers(document.preference, kind)
    if preference:
        yield f"preference_{kind}", partial(_preference, preference, kind)
    recipe = document.recipe
    if recipe is not None and any(head.kind == kind for head in recipe.heads):
        several = len(kinds(document)) > 1
        yield f"recipe_{kind}", partial(recipe_figure, recipe, kind, several)


def _has(document: Document, kind: str, column: str) -> bool:
    rows = (row for row in document.rows if row.kind == kind)
    return any(row.get(column) is not None for row in rows)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _layers(entries: Mapping[str, Entry], kind: str) -> dict[int, Entry]:
    """Those of one kind by layer, in order. entries: by "kind/layer"."""
    parts = ((name.split("/"), entry) for name, entry in entries.items())
    by_layer = {int(layer): entry for (other, layer), entry in parts if other == kind}
    return dict(sorted(by_layer.items()))


def _multiples(tables: Mapping[int, Any], title: str, paint: Paint, size: float = 1.35) -> Figure:
    """One small panel for each layer, all with the same axes. size: inches, of a panel.

    Placed by hand: with the panels of eighty layers a layout engine takes minutes.
    """
    columns = min(_COLUMNS, len(tables))
    rows = -(-len(tables) // columns)
    left, gap, above, below = 0.6, 0.22, 0.62, 0.35
    width = max(left + columns * (size * 1.15 + gap) + 0.75, title_width(title))
    height = above + rows * (size + gap) + below
    with styled({"axes.titlesize": 8.5, "axes.titlepad": 2}):
        figure = Figure(figsize=(width, height))
        figure.text(0.12 / width, 1 - 0.22 / height, title, fontsize=11, va="center")
        for place, (layer, table) in enumerate(tables.items()):
            row, column = divmod(place, columns)
            x, y = left + column * (size * 1.15 + gap), height - above - row * (size + gap) - size
            ax = figure.add_axes((x / width, y / height, size * 1.15 / width, size / height))
            paint(ax, table)
            ax.set_title(f"layer {layer}")
            last = place + columns >= len(tables)
            ax.tick_params(length=2, labelsize=7, labelleft=column == 0, labelbottom=last)
        _same_limits(figure.axes)
    return figure


def _same_limits(axes: Sequence[Axes]) -> None:
    lows, highs = zip(*(sorted(ax.get_ylim()) for ax in axes), strict=True)
    for ax in axes:
        falling = ax.yaxis_inverted()
        ends = (max(highs), min(lows)) if falling else (min(lows), max(highs))
        ax.set_ylim(*ends)


def _lines(ax: Axes, curves: Sequence[Any]) -> None:
    """Of every head, all in one object. curves: (points, 2) each."""
    alpha = min(0.8, max(0.15, 6 / max(1, len(curves))))
    ax.add_collection(LineCollection(curves, colors=_SERIES[0], alpha=alpha, linewidths=0.8))
    ax.autoscale_view()
    _plain(ax)


def _plain(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _numbers(table: Any) -> Any:
    """As an array, NaN for what is missing."""
    return np.array(table, dtype=np.float64)


def _agreement_figure(tables: Mapping[int, Any], kind: str) -> Figure:
    norm, colors = Normalize(0, 1), matplotlib.colormaps["viridis"]

    def paint(ax: Axes, table: Any) -> None:
        count = len(table)
        values = np.ma.masked_invalid(_numbers(table))
        ax.imshow(values, norm=norm, cmap=colors, interpolation="none", aspect="auto")
        places = sorted({0, (count - 1) // 2, count - 1})
        ax.set_xticks(places, [str(place) for place in places])
        ax.set_yticks(places, [str(place) for place in places])

    figure = _multiples(tables, f"agreement of heads (mean cosine of their weights), {kind}", paint)
    width, height = figure.get_size_inches()
    tall = min(1.6, height - 1.2)
    with styled():
        ax = figure.add_axes(
            (1 - 0.6 / width, 1 - (0.62 + tall) / height, 0.12 / width, tall / height)
        )
        figure.colorbar(ScalarMappable(norm, colors), cax=ax, ticks=[0, 0.5, 1])
        ax.tick_params(length=0, labelsize=8)
    return figure


def _histograms(tables: Mapping[int, Any], kind: str, title: str) -> Figure:
    """Of every head a thin line, of the layer the filled mean."""

    def paint(ax: Axes, table: Any) -> None:
        counts = _numbers(table)
        shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
        edges = np.linspace(0, 1, counts.shape[-1] + 1)
        ax.stairs(shares.mean(0), edges, fill=True, color=_SERIES[0], alpha=0.35)
        corners = np.repeat(edges, 2)[1:-1]
        _lines(ax, [np.stack([corners, np.repeat(head, 2)], -1) for head in shares])
        ax.set(xlim=(0, 1), ylim=(0, 1.05 * shares.max()))
        ax.set_xticks([0, 0.5, 1], ["0", "½", "1"])

    return _multiples(tables, f"share of queries by {title}, {kind}", paint)


def _spectra(tables: Mapping[int, Any], kind: str) -> Figure:
    def paint(ax: Axes, table: Any) -> None:
        ax.set_yscale("log")
        positive = [[value for value in values if value and value > 0] for values in table]
        _lines(ax, [np.stack([np.arange(1, len(v) + 1), v], -1) for v in positive if v])
        ax.yaxis.set_minor_locator(NullLocator())

    return _multiples(tables, f"Fisher spectrum of each head, {kind}", paint)


def _preference(tables: Mapping[int, OffsetPreference], kind: str) -> Figure:
    def paint(ax: Axes, table: OffsetPreference) -> None:
        ax.axvline(0, color=FAINT_COLOR, linewidth=0.6)
        _lines(ax, [np.stack([table.offsets, _numbers(curve)], -1) for curve in table.log])

    return _multiples(tables, f"log preference of each head by key − query, {kind}", paint)


# ---- what if

_KEPT, _MOVED = ("kept", "support_size"), ("moved", "change")


def what_if_pairs(document: Document) -> list[tuple[str, str, str]]:
    """(alpha, column of what is kept, column of what moved), where both are there."""
    names = [column.name for column in document.columns]
    pairs = []
    for alpha in dict.fromkeys(name.partition("_")[2] for name in names if "_" in name):
        kept = next((f"{start}_{alpha}" for start in _KEPT if f"{start}_{alpha}" in names), None)
        moved = next((f"{start}_{alpha}" for start in _MOVED if f"{start}_{alpha}" in names), None)
        if kept is not None and moved is not None:
            pairs.append((alpha, kept, moved))
    return pairs


def what_if_figure(document: Document) -> Figure:
    """Every head as a point for every alpha: what it keeps against how far its output moves."""
    titles = {column.name: column.title for column in document.columns}
    pairs = what_if_pairs(document)
    with styled():
        figure = Figure(figsize=(5.6, 3.8), layout="constrained")
        ax = figure.subplots()
        for place, (alpha, kept, moved) in enumerate(pairs):
            points = _points(document, kept, moved)
            look: dict[str, Any] = {
                "color": _SERIES[place % len(_SERIES)],
                "marker": _MARKS[place % len(_MARKS)],
            }
            ax.scatter(*points, s=16, alpha=0.65, linewidths=0, label=f"alpha {alpha}", **look)
        ax.set_title("each head, switched alone")
        ax.set_xlabel(_common([titles[kept] for _, kept, _ in pairs]))
        ax.set_ylabel(_common([titles[moved] for _, _, moved in pairs]))
        ax.set_ylim(bottom=0)
        ax.grid(True, color=FAINT_COLOR, alpha=0.3, linewidth=0.5)
        ax.legend(frameon=False, labelcolor=INK_COLOR)
        _plain(ax)
    return figure


def _points(document: Document, kept: str, moved: str) -> tuple[list[float], list[float]]:
    pairs = [(row.get(kept), row.get(moved)) for row in document.rows]
    both = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in both], [y for _, y in both]


def _common(titles: Sequence[str]) -> str:
    """The words that all titles end or begin with, so without alpha."""
    words = [title.replace(":", "").replace(",", "").split() for title in titles]
    last = _shared([title[::-1] for title in words])[::-1]
    first = _shared(words)
    if first[-1:] in (["α"], ["alpha"], ["at"]):
        first.pop()
    return " ".join(first if len(first) >= len(last) else last) or titles[0]


def _shared(words: Sequence[Sequence[str]]) -> list[str]:
    """What all begin with."""
    together = zip(*words, strict=False)
    return [same[0] for same in takewhile(lambda same: len(set(same)) == 1, together)]
