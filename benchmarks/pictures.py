"""Pictures of `python -m benchmarks`, of all but `maps` and `attention`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import (
    continuous_methods,
    integrals,
    integrals_methods,
    serve_picture,
    wasserstein,
)
from fenchel.lens.pictures import draw

_FLOOR = 1e-16  # errors below it are rounding, and zero has no logarithm


def save_picture(document: dict[str, Any], path: Path) -> Path:
    """The curve of a benchmark as an SVG file."""
    paint, size = _PICTURES[document["bench"]]
    return draw.save(paint(document), path, size)


def _grid(ax: Axes) -> None:
    ax.grid(True, color=draw.FAINT, alpha=0.3, linewidth=0.5)


# ---- integrals


def _errors(document: dict[str, Any]) -> Callable[[Figure], None]:
    title = (
        "Largest error of expectations under truncated paraboloids, relative to 1 + |value|\n"
        f"{document['settings']['densities']} densities, {document['settings']['functions']} "
        "functions; dotted: the hundred angles of the thesis"
    )

    def paint(canvas: Figure) -> None:
        canvas.suptitle(title, x=0.01, ha="left", fontsize=9, linespacing=1.5)
        names = [case["name"] for case in document["settings"]["cases"]]
        axes = canvas.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for ax, name in zip(axes, names, strict=True):
            ax.axvline(document["settings"]["angles"], color=draw.FAINT, linestyle=":")
            for curve in error_curves(document, name):
                look: Any = {"color": curve.color, "linestyle": curve.dash, "marker": curve.marker}
                ax.plot(curve.x, curve.y, label=curve.label, markersize=3.8, **look)
            ax.set(title=name, xlabel="nodes along the angle", xscale="log", yscale="log")
            _grid(ax)
        axes[0].set_ylabel("largest error")
        handles, labels = axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=2, handlelength=3)

    return paint


def error_curves(document: dict[str, Any], setting: str) -> Iterator[draw.Curve]:
    """Ours over the most nodes that a window can have, which is not to our favour."""
    looks = (
        (integrals.TRAPEZOID, "equal steps of the angle", draw.VERMILION, "s"),
        (
            integrals_methods.OURS,
            f"fenchel, tolerance varied ({document['settings']['pieces']} pieces counted)",
            draw.BLUE,
            "o",
        ),
    )
    for method, label, color, marker in looks:
        points = [
            (e["most"], max(e["largest_error"], _FLOOR))
            for e in document["curves"]
            if (e["setting"], e["method"]) == (setting, method)
        ]
        x, y = ([point[i] for point in sorted(points)] for i in (0, 1))
        yield draw.Curve(label, x, y, color, marker=marker)


# ---- continuous


def _layers(document: dict[str, Any]) -> Callable[[Figure], None]:
    sizes = document["settings"]["layers"]
    title = (
        f"Forward time of a transformer layer, width {sizes['embed']}, {sizes['heads']} heads, "
        f"{document['settings']['threads']} thread(s)"
    )

    def paint(canvas: Figure) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        for curve in layer_curves(document):
            look: Any = {"color": curve.color, "linestyle": curve.dash, "marker": curve.marker}
            ax.plot(curve.x, curve.y, label=curve.label, markersize=3.8, **look)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="tokens", ylabel="milliseconds", yscale="log")
        _grid(ax)
        ax.legend(labelcolor=draw.INK)

    return paint


def layer_curves(document: dict[str, Any]) -> Iterator[draw.Curve]:
    functions = document["settings"]["layers"]["functions"]
    looks = (
        (continuous_methods.STANDARD, "torch, every token", draw.VERMILION, "s"),
        (continuous_methods.CONTINUOUS, f"fenchel, {functions} functions", draw.BLUE, "o"),
    )
    for method, label, color, marker in looks:
        points = [
            (e["n"], 1e3 * e["seconds"])
            for e in document["layers"]
            if e["method"] == method and e["seconds"] is not None
        ]
        x, y = ([point[i] for point in points] for i in (0, 1))
        yield draw.Curve(label, x, y, color, marker=marker)


# ---- dual


def _solvers(document: dict[str, Any]) -> Callable[[Figure], None]:
    settings = document["settings"]
    title = f"Exact estimates of {settings['rows']} rows to a gap of {settings['gap']:g}"

    def paint(canvas: Figure) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        for curve in solver_curves(document):
            look: Any = {"color": curve.color, "linestyle": curve.dash, "marker": curve.marker}
            ax.plot(curve.x, curve.y, label=curve.label, markersize=4, **look)
        ax.set(xlabel="reliability", ylabel="seconds", xscale="log", yscale="log")
        _grid(ax)
        ax.legend(labelcolor=draw.INK)

    return paint


def solver_curves(document: dict[str, Any]) -> Iterator[draw.Curve]:
    methods = dict.fromkeys(e["method"] for e in document["results"])
    looks = zip(
        (draw.FAINT, draw.VERMILION, draw.GREEN, draw.BLUE, draw.BLUE), "^sDoo", strict=True
    )
    for method, (color, marker) in zip(methods, looks, strict=True):
        points = [
            (e["reliability"], e["seconds"])
            for e in document["results"]
            if e["method"] == method and e["seconds"] is not None
        ]
        x, y = ([point[i] for point in points] for i in (0, 1))
        dash = ":" if method.endswith("rounding") else "-"
        yield draw.Curve(method, x, y, color, dash=dash, marker=marker)


# ---- wasserstein


def _distances(document: dict[str, Any]) -> Callable[[Figure], None]:
    title = f"One Wasserstein-1 distance, {document['settings']['threads']} thread(s)"

    def paint(canvas: Figure) -> None:
        ax = canvas.subplots()
        ax.set_title(title)
        for curve in distance_curves(document):
            look: Any = {"color": curve.color, "linestyle": curve.dash, "marker": curve.marker}
            ax.plot(curve.x, curve.y, label=curve.label, markersize=4, **look)
        ax.set(xlabel="atoms", ylabel="milliseconds", xscale="log", yscale="log")
        _grid(ax)
        ax.legend(labelcolor=draw.INK)

    return paint


def distance_curves(document: dict[str, Any]) -> Iterator[draw.Curve]:
    """Dotted off the line."""
    looks = (("line, even weights", "on the line", "-"), ("assignment", "elsewhere", ":"))
    methods = ((wasserstein.POT, draw.VERMILION, "s"), (wasserstein.OURS, draw.BLUE, "o"))
    for (case, where, dash), (method, color, marker) in itertools.product(looks, methods):
        points = [
            (e["n"], 1e3 * e["seconds"])
            for e in document["results"]
            if (e["case"], e["method"]) == (case, method) and e["seconds"] is not None
        ]
        x, y = ([point[i] for point in points] for i in (0, 1))
        yield draw.Curve(f"{method}, {where}", x, y, color, dash=dash, marker=marker)


# ---- structure


def _ratios(document: dict[str, Any]) -> Callable[[Figure], None]:
    threads = min(e["threads"] for e in document["results"])

    def paint(canvas: Figure) -> None:
        ax = canvas.subplots()
        ax.set_title(f"Time of entmax-1.5, beside torch or our plain call ({threads} thread(s))")
        names, values = ratio_bars(document, threads)
        widths = [value - 1 for value in values]  # from one, to either side
        ax.barh(range(len(names)), widths, left=1.0, color=draw.BLUE, height=0.6)
        ax.axvline(1.0, color=draw.FAINT)
        ax.set_yticks(range(len(names)), names, fontsize=6)
        ax.set_xscale("log")
        ax.invert_yaxis()  # the first on top

    return paint


def ratio_bars(document: dict[str, Any], threads: int) -> tuple[list[str], list[float]]:
    """Every method but the measures, which are the first of their cases."""
    every = [e for e in document["results"] if e["threads"] == threads and e["ratio"] is not None]
    seen: set[tuple[str, str]] = set()
    bars = []
    for e in every:
        case = (e["case"], e["direction"])
        if case in seen:
            bars.append((f"{e['case']}, {e['direction']}: {e['method']}", e["ratio"]))
        seen.add(case)
    return [name for name, _ in bars], [value for _, value in bars]


# ---- steps of training


def _steps(document: dict[str, Any]) -> Callable[[Figure], None]:
    def paint(canvas: Figure) -> None:
        ax = canvas.subplots()
        ax.set_title("Steps a second, softmax = 1")
        names, values = step_bars(document)
        ax.barh(range(len(names)), values, color=draw.BLUE, height=0.6)
        ax.axvline(1.0, color=draw.FAINT)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()  # the first on top

    return paint


def step_bars(document: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Every attention but softmax, as a share of the speed of softmax in the same network."""
    every = [e for e in document["results"] if e["seconds"] is not None]
    base = {e["case"]: e["seconds"] for e in every if e["attention"] == "softmax"}
    others = [e for e in every if e["attention"] != "softmax" and e["case"] in base]
    names = [f"{e['case']}: {e['attention']}" for e in others]
    return names, [base[e["case"]] / e["seconds"] for e in others]


_Picture = Callable[[dict[str, Any]], Callable[[Figure], None]]
_PICTURES: dict[str, tuple[_Picture, tuple[float, float]]] = {
    "integrals": (_errors, (9.6, 3.6)),
    "continuous": (_layers, (5.4, 3.6)),
    "dual": (_solvers, (5.4, 3.6)),
    "wasserstein": (_distances, (5.4, 3.6)),
    "structure": (_ratios, (8.4, 7.2)),
    "serve": (serve_picture.paint_times, (8.4, 6.6)),
    "steps": (_steps, (7.2, 4.2)),
}
