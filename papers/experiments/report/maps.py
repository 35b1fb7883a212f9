"""Where each attention looked at the same pictures, as in Figures 6.4 to 6.11 of the thesis."""

from __future__ import annotations

import hashlib
import io
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from fenchel.lens.files import write_whole
from fenchel.lens.pictures import draw, overlay
from fenchel.lens.pictures.layers import Layer, Numbers
from papers.experiments.data.questions import KINDS, QuestionData
from papers.experiments.tables import Document
from papers.experiments.vqa.measures import unpacked
from papers.experiments.vqa.tables import names, plane

RULE = (
    "Of the first six test questions of each kind there are shown: the first that all the "
    "attentions shown answered right, the first that some did and some did not, and the first that "
    "discrete softmax got right and 2D continuous softmax got wrong."
)
SCALE = (
    "Each map has its own scale: full colour is its largest density, or four times even attention "
    "where that is more, so that an even map stays pale."
)
_LEAST_TOP = 4.0
_DPI = (110, 100, 90, 80, 70)
_DRAWING = 1  # another number where the same looks are drawn otherwise
_RIGHT = 0.5  # what an answer scores, from which on it counts as right

# Inches.
_SIDE, _GAP, _HEADER, _LINE, _ANSWER, _BETWEEN = 1.0, 0.06, 0.34, 0.16, 0.2, 0.06
_LETTER = 0.062
_STYLE = {"font.size": 8, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}


class Look(NamedTuple):
    """density: (rows, columns), of mean 1, which is even attention."""

    density: Numbers
    answer: str
    right: bool


@dataclass(frozen=True, eq=False)
class Example:
    """A question and how each attention, by its name, looked at its picture (H, W, 3).

    region: bool (H, W), what the question is about. why: the rule that chose it.
    """

    picture: Numbers
    question: str
    answer: str
    why: str
    looks: dict[str, Look]
    region: Numbers | None = None


Seen = Mapping[str, Mapping[int, dict[str, Any]]]  # by attention, by question


def seen(documents: Sequence[Document], compact: bool = False) -> Seen:
    """What is stored of the first seed of each attention that looks at all.

    compact: of the continuous ones only those with the most functions, and no entmax.
    """
    by_attention = {}
    for document in documents:
        looks = document["facts"].get("looks", [])
        if document["settings"]["training"]["seed"] == 0 and looks and looks[0]["map"]:
            by_attention[document["settings"]["attention"]] = {
                look["question"]: look for look in looks
            }
    ordered = [name for name in names(documents) if name in by_attention]
    return {name: by_attention[name] for name in (_fewer(ordered) if compact else ordered)}


def _fewer(attentions: Sequence[str]) -> list[str]:
    most = max(
        (settings.functions for settings in map(plane, attentions) if settings is not None),
        default=0,
    )
    return [
        name
        for name in attentions
        if name != "entmax" and ((settings := plane(name)) is None or settings.functions == most)
    ]


def chosen(looks: Seen, kinds: Mapping[int, int]) -> dict[int, str]:
    """The questions that `RULE` chooses, each with the reason. kinds: of each question."""
    reasons_of: dict[int, list[str]] = {}
    for kind in range(len(KINDS)):
        of_kind = [question for question in kinds if kinds[question] == kind]
        for why, applies in _rules(looks).items():
            first = next((question for question in of_kind if applies(question)), None)
            if first is not None:
                reasons_of.setdefault(first, []).append(why)
    return {question: ", ".join(reasons) for question, reasons in reasons_of.items()}


def _rules(looks: Seen) -> dict[str, Callable[[int], bool]]:
    def right(question: int) -> dict[str, bool]:
        return {
            name: of_question[question]["worth"] >= _RIGHT for name, of_question in looks.items()
        }

    rules: dict[str, Callable[[int], bool]] = {
        "all right": lambda question: all(right(question).values()),
        "some right": lambda question: len(set(right(question).values())) == 2,
    }
    continuous = next((name for name in looks if name.startswith("continuous-softmax")), None)
    if continuous is not None and "softmax" in looks:
        rules["softmax right, continuous wrong"] = lambda question: (
            right(question)["softmax"] and not right(question)[continuous]
        )
    return rules


def has_rows(documents: Sequence[Document], *, compact: bool) -> bool:
    """Whether `examples` finds any: some network looked, and one of the rules applies."""
    looks = seen(documents, compact)
    rules = _rules(looks).values()
    return any(applies(question) for question in _common(looks) for applies in rules)


def _common(looks: Seen) -> list[int]:
    """The questions of which every attention has a map."""
    first, *others = looks.values() if looks else [{}]
    return [question for question in first if all(question in other for other in others)]


def examples(documents: Sequence[Document], data: QuestionData, *, compact: bool) -> list[Example]:
    """The rows of the figure; documents: of this data set."""
    _check(documents, data)
    looks = seen(documents, compact)
    kinds = {question: int(data.test.kinds[question]) for question in _common(looks)}
    called = names(documents)
    rows = []
    for question, why in chosen(looks, kinds).items():
        by_name = {called[name]: _look(of[question]) for name, of in looks.items()}
        rows.append(_example(data, question, why, by_name))
    return rows


def _check(documents: Sequence[Document], data: QuestionData) -> None:
    notes = {document["note"] for document in documents}
    if notes != {data.note}:
        raise ValueError(
            f"the runs are of other data ({'; '.join(sorted(notes))}) than what was loaded "
            f"({data.note}): draw them from the data that they were trained on"
        )


def _look(stored: dict[str, Any]) -> Look:
    shares: Numbers = unpacked(stored["map"]).double().numpy()
    density = shares / max(shares.mean(), 1e-30)  # all of it may lie beside the picture
    return Look(density, stored["answer"], stored["worth"] >= _RIGHT)


def _example(data: QuestionData, question: int, why: str, looks: dict[str, Look]) -> Example:
    split = data.test
    shown = split.pictures.shown(int(split.picture[question]))
    picture = np.full((64, 64, 3), 0.5) if shown is None else shown / 255.0
    best = int(split.answers[question, int(split.worth[question].argmax())])
    answer = data.answers[best] if best >= 0 else "none of those it can give"
    region = None if split.regions is None else split.regions[question].numpy()
    return Example(picture, f"{data.text(split, question)}?", answer, why, looks, region)


# ---- drawing


def size(rows: Sequence[Example]) -> tuple[float, float]:
    """Inches that `paint` needs."""
    across = 1 + max(len(row.looks) for row in rows)
    width = across * _SIDE + (across - 1) * _GAP + 0.1
    return width, _HEADER + sum(_height(row, width) for row in rows)


def _height(row: Example, width: float) -> float:
    return len(_title(row, width)) * _LINE + _side(row) + _ANSWER + _BETWEEN


def _side(row: Example) -> float:
    return _SIDE * float(row.picture.shape[0] / row.picture.shape[1])


def _title(row: Example, width: float) -> list[str]:
    return textwrap.wrap(f"{row.question} {row.answer} ({row.why})", int(width / _LETTER))


Colors = Mapping[str, str]  # in place of those of `draw`; empty: the page replaces them


def paint(canvas: Figure, rows: Sequence[Example], colors: Colors) -> None:
    """On a figure of at least this `size`: a row for each example, the picture first."""
    canvas.set_layout_engine("none")  # every place is given
    width, height = canvas.get_size_inches()
    ink = colors.get(draw.INK, draw.INK)
    called = ["picture", *max((list(row.looks) for row in rows), key=len)]
    for column, name in enumerate(called):
        x = 0.05 + column * (_SIDE + _GAP) + _SIDE / 2
        words = textwrap.fill(name.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"), 19)
        place: Any = {"ha": "center", "va": "bottom", "fontsize": 7, "linespacing": 1.1}
        canvas.text(x / width, 1 - (_HEADER - 0.02) / height, words, color=ink, **place)
    top = _HEADER
    for row in rows:
        _paint_row(canvas, row, top, colors)
        top += _height(row, width)


def _paint_row(canvas: Figure, row: Example, top: float, colors: Colors) -> None:
    """top: inches from the upper edge."""
    width, height = canvas.get_size_inches()
    ink = colors.get(draw.INK, draw.INK)
    lines = _title(row, width)
    spot = (0.05 / width, 1 - (top + 0.03) / height)
    canvas.text(*spot, "\n".join(lines), color=ink, va="top", fontsize=8, linespacing=1.15)
    bottom = 1 - (top + len(lines) * _LINE + _side(row)) / height
    for column in range(1 + len(row.looks)):
        left = (0.05 + column * (_SIDE + _GAP)) / width
        ax = canvas.add_axes((left, bottom, _SIDE / width, _side(row) / height))
        if column == 0:
            overlay.show_image(ax, row.picture)
            _outline(ax, row.region)
        else:
            _paint_look(ax, row.picture, list(row.looks.values())[column - 1], colors)


def _outline(ax: Axes, region: Numbers | None) -> None:
    if region is None or not region.any():
        return
    rows, columns = ((np.arange(count) + 0.5) / count for count in region.shape)
    drawn = ax.contour(columns, rows, region.astype(float), [0.5], colors="white", linewidths=1.0)
    drawn.set(path_effects=[withStroke(linewidth=2.2, foreground="black")])


def _paint_look(ax: Axes, picture: Numbers, look: Look, colors: Colors) -> None:
    peak = float(look.density.max())
    layer = Layer("", look.density, peak, smooth=True)
    overlay.show_layer(ax, picture, layer, max(peak, _LEAST_TOP))
    color = draw.GREEN if look.right else draw.VERMILION
    color = colors.get(color, color)
    for spine in ax.spines.values():
        spine.set(edgecolor=color, linewidth=1.8)
    mark = "✓" if look.right else "✗"
    place: Any = {"transform": ax.transAxes, "ha": "center", "va": "top", "fontsize": 7.5}
    ax.text(0.5, -0.035, f"{mark} {look.answer[:18]}", color=color, **place)


# ---- files


def save(rows: Sequence[Example], path: Path, *, mark: str = "", most: int | None = None) -> Path:
    """A PNG of 256 colours; mark: what it was drawn from, kept inside. most: bytes, for which it
    is drawn smaller where it must."""
    if not rows:
        raise ValueError("no example to draw: no run of seed 0 has stored where it looked")
    for dpi in _DPI:
        content = _png(rows, dpi, mark)
        if most is None or len(content) <= most:
            write_whole(path, content)
            return path
    raise ValueError(
        f"{len(rows)} rows take more than {most} bytes even at {_DPI[-1]} dots an inch"
    )


def _png(rows: Sequence[Example], dpi: int, mark: str) -> bytes:
    from PIL import Image, PngImagePlugin

    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]  # dict of str is not accepted
        canvas = Figure(figsize=size(rows), dpi=dpi, facecolor="white")
        FigureCanvasAgg(canvas)
        paint(canvas, rows, draw.LIGHT)
        draw.take_literally(canvas)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="png", facecolor="white")
    inside = PngImagePlugin.PngInfo()
    inside.add_text("looks", mark)
    small = io.BytesIO()
    with Image.open(buffer) as picture:
        reduced = picture.convert("RGB").quantize(256, kmeans=2)  # kmeans: or colours shift
    reduced.save(small, "png", optimize=True, pnginfo=inside)
    return small.getvalue()


def mark_of(documents: Sequence[Document], *, compact: bool) -> str:
    """Of what a picture is drawn from: equal for equal looks."""
    looks = {
        name: list(of_question.values()) for name, of_question in seen(documents, compact).items()
    }
    text = json.dumps([_DRAWING, looks, sorted({document["note"] for document in documents})])
    return hashlib.sha256(text.encode()).hexdigest()


def mark_in(path: Path) -> str | None:
    """Of a picture that is there and whole."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            picture.load()
            mark = picture.info.get("looks")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # none, or damaged
        return None
    return None if mark is None else str(mark)
