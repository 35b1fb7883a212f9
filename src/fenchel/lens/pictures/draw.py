"""Panels in SVG that take their colours and their font from the page.

Matplotlib writes colours as hexadecimal numbers. We draw with placeholders and replace them by
CSS variables, so that one picture serves light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogFormatterMathtext, NullLocator
from numpy.typing import NDArray

INK, FAINT, PAPER = "#0a0b00", "#0a0b01", "#0a0b02"
BLUE, VERMILION, GREEN, PURPLE, AMBER = "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06", "#0a0b07"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, INK)
DASHES = ("-", (0, (5, 1.5)), "-.", (0, (1.2, 1.2)), (0, (7, 2, 1, 2, 1, 2)))

_CSS = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    PAPER: "var(--paper)",
    BLUE: "var(--blue)",
    VERMILION: "var(--vermilion)",
    GREEN: "var(--green)",
    PURPLE: "var(--purple)",
    AMBER: "var(--amber)",
}

# The light colours of the page, for pictures that stand alone.
LIGHT = {
    INK: "#1d2126",
    FAINT: "#8a9099",
    PAPER: "#fdfdfb",
    BLUE: "#0072b2",
    VERMILION: "#d55e00",
    GREEN: "#008060",
    PURPLE: "#b3548b",
    AMBER: "#b07a00",
}

# Inches. The page shows each at about 1.3 times its size, so that type looks alike in all.
WIDTHS = {"small": 2.5, "medium": 3.3, "square": 2.9, "wide": 5.4}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fenchel",
    "font.size": 8.5,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlepad": 5,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.unicode_minus": True,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}

_Paint = Callable[[Figure], None]
Dash = str | tuple[float, tuple[float, ...]]


def panel(paint: _Paint, width: str = "medium", height: float = 2.1) -> str:
    """Call `paint` on an empty figure and return it as an SVG element. height: inches."""
    return _for_page(_document(paint, (WIDTHS[width], height), _STYLE))


def save(paint: _Paint, path: Path, size: tuple[float, float]) -> Path:
    """The picture as an SVG file of its own, in the light colours. size: inches."""
    style = {**_STYLE, "svg.fonttype": "path", "figure.facecolor": PAPER}
    document = _document(paint, size, style)
    for placeholder, color in LIGHT.items():
        document = document.replace(placeholder, color)
    path.write_text(document, encoding="utf-8")
    return path


def _document(paint: _Paint, size: tuple[float, float], style: dict[str, Any]) -> str:
    with matplotlib.rc_context(style):  # type: ignore[arg-type]  # dict of str is not accepted
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        take_literally(figure)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        background = style["figure.facecolor"]
        figure.savefig(buffer, format="svg", facecolor=background, metadata=nothing)
    return buffer.getvalue()


def take_literally(figure: Figure) -> None:
    """Show every text as it stands, once all are there: a folder's name may hold two `$`, and what
    is between them is a formula to matplotlib. Only powers on logarithmic axes are formulas."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        for ticks, formatter in (
            (axis.get_major_ticks(), axis.get_major_formatter()),
            (axis.get_minor_ticks(), axis.get_minor_formatter()),
        ):
            for tick in ticks if isinstance(formatter, LogFormatterMathtext) else ():
                tick.label1.set_parse_math(True)
                tick.label2.set_parse_math(True)


def _for_page(document: str) -> str:
    """From a document of its own to an element of an HTML page."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version)="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    opening, _, rest = svg.partition(">")
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", opening)
    svg = f"{opening}>{rest}"
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--sans)", svg)
    for placeholder, variable in _CSS.items():
        svg = svg.replace(placeholder, variable)
    return svg.strip()


def unique_ids(svg: str, prefix: str) -> str:
    """Several drawings share one page: give the ids of each a prefix of its own."""
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    return re.sub(r'href="#', f'href="#{prefix}-', svg)


def bars(ax: Axes, values: Sequence[float], color: str = BLUE, start: int = 0) -> None:
    """One bar per key; a key that gets exactly nothing is an empty ring on the line."""
    places = list(range(start, start + len(values)))
    ax.bar(places, values, width=0.72, color=color)
    empty = [place for place, value in zip(places, values, strict=True) if value == 0]
    ax.scatter(
        empty, [0] * len(empty), s=7, facecolors="none", edgecolors=FAINT, linewidths=0.7, zorder=3
    ).set_clip_on(False)
    ax.set_xlim(start - 0.7, places[-1] + 0.7)
    ax.margins(y=0.08)


def keys_only(ax: Axes, *, label: str = "") -> None:
    """Key axis without numbers where the numbers say nothing."""
    ax.set_xticks([])
    ax.set_xlabel(label)


def heat(ax: Axes, values: NDArray[np.float64], *, color: str = BLUE, top: float) -> None:
    """Cells whose opacity is value / top; zero is empty paper, on light and dark pages alike."""
    mesh = ax.pcolormesh(np.ma.masked_equal(values, 0), cmap=opacity(color), vmin=0, vmax=top)
    mesh.set_gid(f"cells-{len(ax.collections)}")
    _square(ax)


def diverging_heat(ax: Axes, values: NDArray[np.float64], *, top: float) -> None:
    """As `heat`, blue above zero and vermilion below."""
    for sign, color in ((1, BLUE), (-1, VERMILION)):
        heat(ax, np.clip(sign * values, 0, None), color=color, top=top)


def _square(ax: Axes) -> None:
    ax.set_aspect("equal")
    ax.yaxis.set_inverted(True)  # the first row on top
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(True)
        spine.set_linewidth(0.6)


def opacity(color: str, levels: int = 64) -> ListedColormap:
    """From nothing to the colour."""
    return ListedColormap([(*to_rgb(color), level / (levels - 1)) for level in range(levels)])


def lines(
    ax: Axes,
    x: Sequence[float],
    series: Sequence[tuple[str, Sequence[float]]],
    place: Literal["upper left", "lower center", "lower right"],
) -> None:
    """Up to five curves, told apart by colour and by dash. place: of the legend."""
    looks = zip(SERIES, DASHES, strict=True)
    for (label, y), (color, dash) in zip(series, looks, strict=False):
        ax.plot(x, y, color=color, linestyle=dash, label=label)
    ax.grid(True, color=FAINT, alpha=0.35, linewidth=0.5)
    columns = 3 if place == "lower center" else 1
    ax.legend(loc=place, handlelength=2.6, labelcolor=INK, ncols=columns)


class Curve(NamedTuple):
    """Ratios over sizes. band: the lowest and the highest at each size, shaded."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    dash: Dash = "-"
    marker: str = ""
    band: tuple[Sequence[float], Sequence[float]] | None = None


_ROUND = [base * 10.0**power for power in range(-4, 6) for base in (1, 2, 5)]


def ratios(ax: Axes, curves: Sequence[Curve]) -> None:
    """Both axes logarithmic, with plain numbers on them and a line where the ratio is one."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.axhline(1, color=INK, linewidth=1.2, zorder=1.5)
    for curve in curves:
        if curve.band is not None:
            ax.fill_between(curve.x, *curve.band, color=curve.color, alpha=0.12, linewidth=0)
            for edge in curve.band:
                ax.plot(curve.x, edge, color=curve.color, alpha=0.55, linewidth=0.7)
        look: Any = {"color": curve.color, "linestyle": curve.dash, "marker": curve.marker}
        ax.plot(curve.x, curve.y, label=curve.label, markersize=3.8, **look)
    sizes = sorted({size for curve in curves for size in curve.x})
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    ax.yaxis.set_major_locator(FixedLocator(_ROUND))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.grid(True, color=FAINT, alpha=0.3, linewidth=0.5)


def _tokens(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"
