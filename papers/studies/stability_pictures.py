"""The bounds of a layer: for every head what is certified, what an attack reached, and
what the text's own queries see."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

from fenchel.lens.pictures import draw

_STEPS = [base * 10.0**power for power in range(-4, 7) for base in (1, 2, 5)]


def paint_heads(ax: Axes, bound: Tensor, attacked: Tensor, local: Tensor) -> None:
    """One column per head, from 0: the bound a bar, the attack a cross, the queries a dot."""
    heads = range(len(bound))
    ax.hlines(bound, [h - 0.38 for h in heads], [h + 0.38 for h in heads], color=draw.BLUE,
              linewidth=1.8, label="certified, all queries")  # fmt: skip
    ax.plot(heads, attacked, "x", color=draw.VERMILION, markersize=4.5, label="strongest attack")
    ax.plot(heads, local, "o", color=draw.GREEN, markersize=3.2, label="at the text's queries")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(_STEPS))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xticks([h for h in heads if h % 4 == 0])
    low, high = float(local[local > 0].min()), float(bound.max())
    ax.set_ylim(low / 1.4, high * 1.4)
