"""The bounds of a model: for every head what is certified, what an attack reached, and
what the text's own queries see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

from benchmarks.tables import Listing
from fenchel.lens.constants import Stability
from fenchel.lens.pictures import draw

_COLUMNS = 3
_STEPS = [base * 10.0**power for power in range(-4, 7) for base in (1, 2, 5)]


def paint_heads(ax: Axes, bound: Tensor, attacked: Tensor, local: Tensor) -> None:
    """One column a head: the bound a bar, the attack a cross, the text's queries a dot."""
    heads = range(1, len(bound) + 1)
    ax.hlines(bound, [h - 0.38 for h in heads], [h + 0.38 for h in heads], color=draw.BLUE,
              linewidth=1.8, label="certified, all queries")  # fmt: skip
    ax.plot(heads, attacked, "x", color=draw.VERMILION, markersize=4.5, label="strongest attack")
    ax.plot(heads, local, "o", color=draw.GREEN, markersize=3.2, label="at the text's queries")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(_STEPS))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xticks([h for h in heads if h == 1 or h % 4 == 0])
    low, high = float(local[local > 0].min()), float(bound.max())
    ax.set_ylim(low / 1.4, high * 1.4)


def save(found: Stability, path: Path, title: str) -> Path:
    """All layers, as an SVG file."""
    layers = len(found.bound)
    columns = min(_COLUMNS, layers)
    rows = -(-layers // columns)

    def paint(figure: Figure) -> None:
        axes = figure.subplots(rows, columns, squeeze=False)
        for number, ax in enumerate(axes.flat):
            if number >= layers:
                ax.set_visible(False)
                continue
            paint_heads(ax, found.bound[number], found.attacked[number], found.local[number])
            ax.set_title(f"layer {number + 1}")
            if number % columns == 0:
                ax.set_ylabel("|Δoutput| / |Δquery|")
            if number >= layers - columns:
                ax.set_xlabel("head")
        figure.suptitle(title, x=0.01, ha="left")
        handles = axes.flat[0].get_legend_handles_labels()
        figure.legend(*handles, loc="upper right", ncols=3, labelcolor=draw.INK)

    return draw.save(paint, path, (2.9 * columns + 0.6, 2.0 * rows + 0.9))


def listing(document: dict[str, Any]) -> Listing:
    """A row a layer: medians over its heads."""

    def middle(values: list[float]) -> float:
        ordered = sorted(values)
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    rows = []
    for number, bound in enumerate(document["bound"]):
        attacked, local = document["attacked"][number], document["local"][number]
        tight = [b / a for b, a in zip(bound, attacked, strict=True)]
        paper = document["paper"][number]
        cells = (f"{middle(bound):.3g}", f"{middle(tight):.4f}", f"{max(tight):.4f}")
        rows.append([str(number + 1), *cells, f"{middle(local):.3g}", f"1e{middle(paper):.0f}"])
    header = ["layer", "certified", "/ attacked", "worst head", "at the text", "Corollary 24"]
    return Listing("How far an output can move with its query, medians over heads", header, rows)
