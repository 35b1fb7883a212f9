"""Histograms of an audit's deviations, over queries: a panel for each layer, or for each head.

Figure 4 of the paper on attention as estimation, and its Figures 5 to 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.tables import Listing
from fenchel.lens.deviations import MEASURES, Deviations
from fenchel.lens.pictures import draw
from fenchel.lens.pictures.layers import Numbers

_BINS = 30
_COLUMNS = 4  # of layers
_LABELS = {
    "multiplier": "|λ − λ*| / |λ*|, multiplier",
    "mean": "|h − h*| / |h*|, mean",
    "mean_shift": "|h − h*| / |h* − prior mean|, shift of the mean",
    "parameter": "reliability |Σz| / |z|, small parameter",
}


def histograms(
    deviations: Deviations,
    path: Path,
    *,
    measure: str = "multiplier",
    heads: bool = False,
) -> Path:
    """Write the picture as an SVG file: how the deviations are distributed over the queries.

    One panel a layer, of the average over its heads; or heads=True, one panel a layer and head.
    A red line marks the mean, with its number. All panels share the horizontal axis, beyond which
    lie at most 0.5 % of a panel's values; its last bar counts those too.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    shown = _panels(deviations, measure, heads)
    rows, columns = len(shown), len(shown[0])
    size = (1.05 * columns + 0.9, 0.82 * rows + 1.0) if heads else (2.1 * columns, 1.5 * rows + 1.0)
    return draw.save(_paint(deviations, measure, shown, heads), path, (max(size[0], 6.6), size[1]))


def save_all(deviations: Deviations, folder: Path) -> list[Path]:
    """Of the multiplier and of the mean, by layer and by head: model-attention-measure[-heads]."""
    made = []
    for measure in ("multiplier", "mean"):
        for heads in (False, True):
            ending = "-heads" if heads else ""
            name = f"{deviations.model}-{deviations.attention}-{measure}{ending}.svg"
            made.append(histograms(deviations, folder / name, measure=measure, heads=heads))
    return made


def listing(document: dict[str, Any]) -> Listing:
    """The mean of each measure and layer, from `Deviations.as_json`."""
    rows = [
        [str(entry["layer"] + 1), *(_cell(entry[measure]) for measure in MEASURES)]
        for entry in document["summary"]
    ]
    title = f"{document['model']}, {document['attention']}: mean deviations"
    return Listing(title, ["layer", *MEASURES], rows)


def _cell(summary: dict[str, Any]) -> str:
    return "–" if summary["mean"] is None else f"{summary['mean']:.3g}"


_Panels = list[list[tuple[str, Numbers] | None]]  # title and values, or nothing to fill the row


def _panels(deviations: Deviations, measure: str, heads: bool) -> _Panels:
    def values(layer: int, head: int | None) -> Numbers:
        found: Numbers = deviations.values(measure, layer, head).double().cpu().numpy()
        return found

    layers = range(deviations.layers)
    if heads:
        return [
            [(f"head {head + 1}", values(layer, head)) for head in range(deviations.heads)]
            for layer in layers
        ]
    flat: list[tuple[str, Numbers] | None] = [
        (f"layer {layer + 1}", values(layer, None)) for layer in layers
    ]
    columns = min(len(flat), 3 if len(flat) in (3, 5, 6, 9) else _COLUMNS)
    flat += [None] * (-len(flat) % columns)
    return [flat[start : start + columns] for start in range(0, len(flat), columns)]


def _paint(
    deviations: Deviations, measure: str, shown: _Panels, heads: bool
) -> Callable[[Figure], None]:
    full = [panel[1] for row in shown for panel in row if panel is not None and panel[1].size]
    top = _round_up(max((float(np.quantile(values, 0.995)) for values in full), default=1.0))

    def paint(canvas: Figure) -> None:
        canvas.suptitle(_title(deviations, heads), x=0.01, ha="left", fontsize=9, linespacing=1.5)
        axes = canvas.subplots(len(shown), len(shown[0]), sharex=True, squeeze=False)
        for number, (row, panels) in enumerate(zip(axes, shown, strict=True)):
            for ax, panel in zip(row, panels, strict=True):
                if panel is None:
                    ax.remove()
                    continue
                first = not heads or number == 0
                _panel(ax, panel[1], top, panel[0] if first else "", small=heads)
            if heads:
                row[0].set_ylabel(f"layer {number + 1}")
        if not heads:
            _label_the_lowest(axes, shown)
        canvas.supxlabel(_LABELS[measure], fontsize=9)

    return paint


def _label_the_lowest(axes: Numbers, shown: _Panels) -> None:
    """Numbers also under panels below which the grid is empty."""
    for column in range(len(shown[0])):
        lowest = max(row for row, panels in enumerate(shown) if panels[column] is not None)
        axes[lowest, column].tick_params(labelbottom=True)


def _panel(ax: Axes, values: Numbers, top: float, title: str, *, small: bool) -> None:
    edges = np.linspace(0, top, (20 if small else _BINS) + 1)
    look: Any = {"histtype": "stepfilled", "linewidth": 0, "color": draw.BLUE, "alpha": 0.75}
    ax.hist(np.minimum(values, top), bins=edges.tolist(), **look)
    ax.set(xlim=(0, top), yticks=[])
    ax.spines["left"].set_visible(False)
    ticks = MaxNLocator(2 if small else 4, min_n_ticks=2, steps=[1, 2, 5, 10])
    ax.xaxis.set_major_locator(ticks)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if small:
        ax.tick_params(labelsize=6.5, length=2)
    if title:
        ax.set_title(title, fontsize=7.5 if small else 9)
    if not values.size:
        return
    mean = float(values.mean())
    ax.axvline(min(mean, top), color=draw.VERMILION, linewidth=1.0 if small else 1.4)
    ax.margins(y=0.32 if small else 0.18)
    left = mean < 0.6 * top  # the number on the emptier side of its line
    ax.annotate(
        f"{mean:#.2g}" if small else f"{mean:#.3g}",
        (min(mean, top), 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(2.5 if left else -2.5, 0),
        textcoords="offset points",
        ha="left" if left else "right",
        va="top",
        fontsize=6.5 if small else 8,
        color=draw.VERMILION,
    )


def _title(deviations: Deviations, heads: bool) -> str:
    kind = {"encoder": "encoder self-attention", "decoder": "decoder self-attention"}
    what = "each head" if heads else "average over heads"
    alone = "\nbars at zero: the first word of a sentence, which sees only itself"
    return (
        f"{deviations.model}, {kind.get(deviations.attention, 'cross-attention')}: "
        f"first order against exact, {what}; line: mean\n"
        f"{deviations.sentences} sentences, {deviations.queries} queries; templates are the inputs "
        f"of the keys times {deviations.scaling:.4g}, reliability {deviations.reliability:g}"
        f"{alone if deviations.attention == 'decoder' else ''}"
    )


def _round_up(value: float) -> float:
    """To one or two digits."""
    if not value > 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(value)) / 2
    return step * math.ceil(value / step)
