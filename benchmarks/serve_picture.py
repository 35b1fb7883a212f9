"""The picture of `python -m benchmarks serve`: times over the length of the past."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.serve_attention import DECODE, SDPA
from benchmarks.serve_models import ENTMAX, METHODS
from fenchel.lens.pictures import draw

Entry = dict[str, Any]
_Look = tuple[str, draw.Dash, str]

_DTYPE = "float32"
_ROUND = [base * 10.0**power for power in range(-6, 10) for base in (1, 2, 5)]
_DOTTED: draw.Dash = (0, (1.2, 1.2))
_DASHED: draw.Dash = (0, (5, 1.5))
_ENTMAX: tuple[_Look, ...] = (
    (draw.BLUE, "-", "o"),
    (draw.GREEN, _DASHED, "s"),
    (draw.PURPLE, "-.", "^"),
)
_PEERS: tuple[_Look, ...] = (
    (draw.VERMILION, "-", "D"),
    (draw.AMBER, _DASHED, "v"),
    (draw.FAINT, _DOTTED, "x"),
)


def paint_times(document: Entry) -> Callable[[Figure], None]:
    """A panel for each shape of heads, then one for each model."""
    title = (
        "Decoding one token: time of one attention call, and of a whole model\n"
        f"batch 1, {document['settings']['threads']} thread(s); calls in {_DTYPE}, models in "
        f"{document['settings']['model_dtype']}"
    )

    def paint(canvas: Figure) -> None:
        canvas.suptitle(title, x=0.01, ha="left", fontsize=9, linespacing=1.5)
        shown = list(panels(document))
        axes = canvas.subplots(ceil(len(shown) / 2), 2, squeeze=False).flatten()
        for ax, (name, unit, curves) in zip(axes, shown, strict=False):
            _paint_panel(ax, curves)
            ax.set(title=name, ylabel=unit)
        for ax in axes[len(shown) :]:
            ax.remove()

    return paint


def _paint_panel(ax: Axes, curves: list[draw.Curve]) -> None:
    for curve in curves:
        look: Any = {"color": curve.color, "linestyle": curve.dash, "marker": curve.marker}
        ax.plot(curve.x, curve.y, label=curve.label, markersize=3.8, **look)
    _mark(ax, curves)
    ax.set_xlabel("keys of the past")
    ax.grid(True, color=draw.FAINT, alpha=0.3, linewidth=0.5)
    ax.legend(labelcolor=draw.INK, handlelength=3, fontsize=7)


def _mark(ax: Axes, curves: list[draw.Curve]) -> None:
    """Both axes logarithmic, with plain numbers on them, from one round number to another."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    sizes = sorted({size for curve in curves for size in curve.x})
    times = [time for curve in curves for time in curve.y]
    if times:
        ax.set_ylim(
            max(x for x in _ROUND if x <= min(times)), min(x for x in _ROUND if x >= max(times))
        )
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.yaxis.set_major_locator(FixedLocator(_ROUND))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(NullLocator())


def panels(document: Entry) -> Iterator[tuple[str, str, list[draw.Curve]]]:
    """Title, label of the times, and curves of each."""
    calls = [e for e in document["results"] if e["dtype"] == _DTYPE]
    for shape in dict.fromkeys(map(_shape, calls)):
        curves = call_curves([e for e in calls if _shape(e) == shape])
        yield f"one query, {shape}", "microseconds", list(curves)
    for model in dict.fromkeys(e["model"] for e in document["tokens"]):
        curves = model_curves([e for e in document["tokens"] if e["model"] == model])
        yield model, "milliseconds per token", list(curves)


def _shape(entry: Entry) -> str:
    return f"{entry['heads']}/{entry['kv_heads']} heads of {entry['width']}"


def call_curves(entries: list[Entry]) -> Iterator[draw.Curve]:
    """SDPA, which does not depend on the scores, and ours for each kind of them."""
    plain = [e for e in entries if e["method"] == SDPA]
    yield _curve("SDPA", _times(plain, 1e6, "keys"), _PEERS[0])
    kinds = dict.fromkeys(map(_kind, entries))
    for kind, look in zip(kinds, _ENTMAX, strict=False):
        ours = [e for e in entries if e["method"] == DECODE and _kind(e) == kind]
        yield _curve(f"{DECODE}, {kind}", _times(ours, 1e6, "keys"), look)


def _kind(entry: Entry) -> str:
    """Of the scores: layers of a model are one kind."""
    return str(entry["scores"].partition(",")[0])


def model_curves(entries: list[Entry]) -> Iterator[draw.Curve]:
    """What does not depend on the scores once, entmax for each kind of them."""
    names = [f"{attention}, {cache}" for attention, cache in METHODS if attention != ENTMAX]
    for name, look in zip(names, _PEERS, strict=True):
        same = [e for e in entries if e["method"] == name]
        yield _curve(name, _times(same, 1e3, "context"), look)
    for kind, look in zip(dict.fromkeys(map(_kind, entries)), _ENTMAX, strict=False):
        ours = [e for e in entries if e["method"].startswith(ENTMAX) and _kind(e) == kind]
        yield _curve(f"{ENTMAX}, {kind}", _times(ours, 1e3, "context"), look)


def _times(entries: list[Entry], unit: float, length: str) -> dict[int, float]:
    """Of each length, the median of all entries that have it."""
    times: dict[int, list[float]] = {}
    for e in entries:
        if e["seconds"] is not None:
            times.setdefault(e[length], []).append(unit * e["seconds"])
    return {n: median(values) for n, values in sorted(times.items())}


def _curve(label: str, times: dict[int, float], look: _Look) -> draw.Curve:
    return draw.Curve(label, list(times), list(times.values()), *look)
