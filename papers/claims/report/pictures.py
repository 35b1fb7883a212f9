"""What a claim drew as numbers, as SVG for the page."""

from __future__ import annotations

from itertools import cycle

import numpy as np
from matplotlib.figure import Figure

from fenchel.lens.pictures import draw
from papers.claims import Curves, Fields

_FEW = 14  # points of a line that are marked one by one


def drawn(picture: Curves | Fields) -> str:
    """One SVG element."""
    if isinstance(picture, Curves):
        return draw.panel(lambda canvas: _curves(canvas, picture), "wide", 2.6)
    width = "wide" if len(picture.panels) > 1 else "square"
    return draw.panel(lambda canvas: _fields(canvas, picture), width, 2.5)


def _curves(canvas: Figure, picture: Curves) -> None:
    ax = canvas.subplots()
    ax.set_title(picture.title)
    looks = zip(cycle(draw.SERIES), cycle(draw.DASHES), strict=False)
    for (name, (x, y)), (color, dash) in zip(picture.lines.items(), looks, strict=False):
        marker = "o" if len(x) <= _FEW else ""
        ax.plot(x, y, color=color, linestyle=dash, label=name, marker=marker, markersize=3)
    ax.set_xlabel(picture.x)
    ax.set_ylabel(picture.y)
    if "x" in picture.logarithmic:
        ax.set_xscale("log")
    if "y" in picture.logarithmic:
        ax.set_yscale("log")
    ax.grid(True, color=draw.FAINT, alpha=0.35, linewidth=0.5)
    if len(picture.lines) > 1:
        ax.legend(labelcolor=draw.INK, handlelength=2.6)


def _fields(canvas: Figure, picture: Fields) -> None:
    canvas.suptitle(picture.title, fontsize=9, x=0.01, ha="left")
    several = canvas.subplots(1, len(picture.panels), squeeze=False)[0]
    left, right, bottom, top = picture.extent
    for place, (ax, (name, rows)) in enumerate(zip(several, picture.panels.items(), strict=True)):
        values = np.asarray(rows, dtype=float)
        x = np.linspace(left, right, values.shape[1] + 1)
        y = np.linspace(bottom, top, values.shape[0] + 1)
        for sign, color in ((1, draw.BLUE), (-1, draw.VERMILION)):
            part = np.ma.masked_equal(np.clip(sign * values, 0, None), 0)
            top_value = float(np.abs(values).max()) or 1.0
            mesh = ax.pcolormesh(x, y, part, cmap=draw.opacity(color), vmin=0, vmax=top_value)
            mesh.set_gid(f"cells-{place}-{len(ax.collections)}")
        ax.set_title(name)
        ax.set_aspect("equal")
