"""How accuracy and loss went while a table's runs were trained: a small table, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.tables import Listing
from fenchel.lens.pictures import draw
from papers.experiments.tables import NOTHING, Document

_MOST = 5  # columns of the table
_DASHES = ("-", draw.DASHES[1], draw.DASHES[3])

Curve = dict[int, float]  # by the number of the step


def mean_curve(documents: Sequence[Document], attention: str, what: str) -> Curve:
    """Over the runs of an attention, at each step at which all of them were evaluated."""
    curves = [
        {int(point["step"]): float(point[what]) for point in document["curve"] if what in point}
        for document in documents
        if document["settings"]["variant"] == attention
    ]
    if not curves:
        return {}
    common = sorted(set(curves[0]).intersection(*curves[1:]))
    return {step: fmean(curve[step] for curve in curves) for step in _apart(common, what)}


def _apart(steps: list[int], what: str) -> list[int]:
    """A last evaluation soon after another says the same; its loss is a mean of few steps."""
    if len(steps) < 3 or 2 * (steps[-1] - steps[-2]) > steps[-2] - steps[-3]:
        return steps
    return steps[:-1] if what == "loss" else [*steps[:-2], steps[-1]]


def table(documents: Sequence[Document], names: dict[str, str], what: str) -> Listing:
    """Of at most five steps, the last of them included."""
    curves = {attention: mean_curve(documents, attention, what) for attention in names}
    every = sorted({step for curve in curves.values() for step in curve})
    steps = _chosen(every)
    rows = [
        (names[attention], *(_percent(curve.get(step)) for step in steps))
        for attention, curve in curves.items()
        if curve
    ]
    title = "While learning: test accuracy in per cent after so many steps, mean over seeds"
    return Listing(title, ("", *(f"{step:,}" for step in steps)), rows)


def _chosen(steps: Sequence[int]) -> list[int]:
    if len(steps) <= _MOST:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (_MOST - 1))] for place in range(_MOST)]


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f}"


def picture(
    documents: Sequence[Document], names: dict[str, str], what: str, title: str, path: Path
) -> Path:
    """Loss and accuracy of each attention over the steps, as an SVG file."""

    def paint(canvas: Figure) -> None:
        canvas.suptitle(title, x=0.01, ha="left", fontsize=9)
        for ax, score, label in zip(
            canvas.subplots(1, 2), ("loss", what), ("loss", "test accuracy, %"), strict=True
        ):
            _paint(ax, documents, names, score, label)
        handles, labels = canvas.axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower left", ncols=3, labelcolor=draw.INK)

    return draw.save(paint, path, (7.2, 3.4))


def _paint(
    ax: Axes, documents: Sequence[Document], names: dict[str, str], score: str, label: str
) -> None:
    scale = 1 if score == "loss" else 100
    for number, (attention, name) in enumerate(names.items()):
        curve = mean_curve(documents, attention, score)
        color = draw.SERIES[number % len(draw.SERIES)]
        dash = _DASHES[number // len(draw.SERIES) % len(_DASHES)]
        values = [scale * value for value in curve.values()]
        ax.plot(list(curve), values, color=color, linestyle=dash, label=name)
    ax.set(xlabel="steps", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.grid(True, color=draw.FAINT, alpha=0.35, linewidth=0.5)
