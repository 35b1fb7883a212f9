"""The estimation problem in the plane: templates, preference, evidence, and where the mean goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from fenchel import dual
from fenchel.lens.pictures import draw

_MARKS: tuple[tuple[str, Any, str, str, float], ...] = (
    ("exact", dual.estimate, draw.BLUE, "o", 52.0),
    ("ordinary attention", dual.first_order, draw.VERMILION, "s", 34.0),
    ("second order", dual.second_order, draw.GREEN, "D", 26.0),
)
_DISC = 700.0  # area of the disc of a weight of one, in points


def estimation_figure(
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    reliabilities: Sequence[float] = (4.0, 1.0, 0.25),
) -> Canvas:
    """A panel for each reliability: exact and approximate means of one problem in the plane.

    templates (n, 2), preference (n) or None, evidence (2). `.savefig("estimate.svg")` keeps it.
    """
    if templates.dim() != 2 or templates.shape[1] != 2:
        raise ValueError(f"templates must be (n, 2) to be drawn, got {tuple(templates.shape)}")
    if not reliabilities:
        raise ValueError("reliabilities must name at least one")
    count = len(reliabilities)
    canvas = Canvas(figsize=(3.4 * count, 3.9), layout="constrained")
    axes = canvas.subplots(1, count, squeeze=False)[0]
    for ax, reliability in zip(axes, reliabilities, strict=True):
        ax.set_title(f"reliability {reliability:g}")
        paint_estimate(ax, templates, preference, evidence, reliability, draw.LIGHT)
    handles, labels = axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return canvas


def paint_estimate(
    ax: Axes,
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    reliability: float,
    colors: Mapping[str, str] | None = None,
) -> None:
    """Discs: the preference (grey) and the exact weights (blue rings). Arrow: the evidence.

    colors: what to draw in place of the page's colours.
    """
    shade = (colors or {}).get
    blue, ink = shade(draw.BLUE, draw.BLUE), shade(draw.INK, draw.INK)
    grey = shade(draw.FAINT, draw.FAINT)
    exact = dual.estimate(templates, preference, evidence, reliability)
    even = torch.ones_like(templates[:, 0]) if preference is None else preference
    sizes = (even / even.sum()).tolist()
    x, y = templates.T.tolist()
    ax.scatter(x, y, [_DISC * s for s in sizes], color=grey, alpha=0.45, linewidths=0)
    assert exact.weights is not None
    rings = [_DISC * w for w in exact.weights.tolist()]
    ax.scatter(x, y, rings, facecolors="none", edgecolors=blue, linewidths=1.2)
    start = tuple(exact.prior_mean.tolist())
    end = tuple((exact.prior_mean + evidence).tolist())
    arrow = {"arrowstyle": "->", "color": ink, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=arrow)
    ax.scatter([start[0]], [start[1]], 40, color=ink, marker="+", label="prior mean")
    for name, solve, color, marker, size in _MARKS:
        to, up = solve(templates, preference, evidence, reliability).mean.tolist()
        look: Any = {"color": shade(color, color), "marker": marker, "label": name, "zorder": 3}
        ax.scatter([to], [up], size, edgecolors="white", linewidths=0.6, **look)
    ax.update_datalim([end])
    ax.autoscale_view()
    ax.margins(0.12)
    ax.set_aspect("equal", adjustable="datalim")
    ax.tick_params(labelsize=7)
