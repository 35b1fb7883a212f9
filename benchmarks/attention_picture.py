"""The picture of `python -m benchmarks attention`: ratios to torch's own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from benchmarks import attention_summary
from benchmarks.attention_methods import PLAIN
from benchmarks.attention_summary import Row
from benchmarks.maps import DIRECTIONS
from fenchel.lens.pictures import draw

# Colour, dash and marker: no two agree in all three, ours are told apart by each.
_Look = tuple[str, draw.Dash, str]
_DOTTED: draw.Dash = (0, (1.2, 1.2))
_DASHED: draw.Dash = (0, (5, 1.5))
_OURS: tuple[_Look, ...] = (
    (draw.BLUE, "-", "o"),
    (draw.GREEN, _DASHED, "s"),
    (draw.PURPLE, "-.", "^"),
)
_PEERS: tuple[_Look, ...] = (
    (draw.INK, _DOTTED, "."),
    (draw.AMBER, _DOTTED, "D"),
    (draw.VERMILION, _DOTTED, "v"),
    (draw.VERMILION, _DASHED, "<"),
    (draw.FAINT, _DASHED, "x"),
    (draw.FAINT, _DOTTED, "+"),
)


def save_picture(results: dict[str, Any], path: Path) -> Path:
    """The ratios of `python -m benchmarks attention` as an SVG file."""
    shape, deviations = results["settings"], _deviations(results["results"])
    setting = (
        f"{shape['heads']} heads of {shape['dim']}, {shape['dtype']}, {shape['threads']} threads"
    )
    title = (
        "Time of attention relative to torch's scaled_dot_product_attention (the line at 1)\n"
        f"{setting}; ours: lines at scores of deviation 1, shades from {deviations[0]:g} to "
        f"{deviations[-1]:g}"
    )
    return draw.save(paint_ratios(results, title), path, (8.2, 5.0))


def _deviations(entries: list[dict[str, Any]]) -> list[float]:
    rows = attention_summary.rows(entries)
    return sorted({row.deviation for row in rows if row.ours and _swept(entries, row)})


def paint_ratios(results: dict[str, Any], title: str = "") -> Callable[[Canvas], None]:
    """Panels of forward and forward+backward over the number of tokens."""
    entries = results["results"]

    def paint(canvas: Canvas) -> None:
        if title:
            canvas.suptitle(title, x=0.01, ha="left", fontsize=9, linespacing=1.5)
        axes = canvas.subplots(1, len(DIRECTIONS), sharey=True)
        for ax, direction in zip(axes, DIRECTIONS, strict=True):
            draw.ratios(ax, list(curves(entries, direction)))
            ax.set_title(direction)
            ax.set_xlabel("tokens")
        axes[0].set_ylabel("time ÷ SDPA")
        handles, labels = axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=3)

    return paint


def curves(entries: list[dict[str, Any]], direction: str) -> Iterator[draw.Curve]:
    """Ours at deviation 1 with a band over all deviations, then the peers."""
    rows = [row for row in attention_summary.rows(entries) if row.variant == PLAIN]
    ours = [row for row in rows if row.ours and row.deviation == 1 and "per head" not in row.method]
    others = [row for row in rows if not row.ours]
    for row, (color, dash, marker) in zip(ours, _OURS, strict=False):
        ratios = _ratios(entries, row, direction)
        if not ratios:
            continue
        same = [other for other in rows if other.method == row.method and _swept(entries, other)]
        each = [_ratios(entries, other, direction) for other in same]
        columns = [[line[n] for line in each if n in line] for n in ratios]
        band = ([min(column) for column in columns], [max(column) for column in columns])
        name = row.method.replace("fl ", "fenchel ")
        yield draw.Curve(name, list(ratios), list(ratios.values()), color, dash, marker, band)
    for row, (color, dash, marker) in zip(others, _PEERS, strict=False):
        ratios = _ratios(entries, row, direction)
        if ratios:
            yield draw.Curve(row.method, list(ratios), list(ratios.values()), color, dash, marker)


def _swept(entries: list[dict[str, Any]], row: Row) -> bool:
    """Measured at several sizes, not at one of many alone."""
    sizes = {e["n"] for e in entries if attention_summary.row_of(e) == row}
    return len(sizes) > 1 or sizes == set(attention_summary.sizes_of(entries))


def _ratios(entries: list[dict[str, Any]], row: Row, direction: str) -> dict[int, float]:
    return {
        e["n"]: e["ratio"]
        for e in entries
        if attention_summary.row_of(e) == row
        and e["direction"] == direction
        and e["ratio"] is not None
    }
