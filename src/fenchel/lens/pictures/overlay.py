"""Attention painted over an image: the photograph in grey, attention in colour, lines on top.

The colours are fixed: a photograph is the same on light and dark pages. Axes are (column, row) in
[0, 1], row downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from fenchel.lens.pictures.layers import Layer, Numbers

_EXTENT = (0.0, 1.0, 1.0, 0.0)  # left, right, bottom, top
_LUMINANCE = (0.299, 0.587, 0.114)
_GREY = 0.5  # the middle of what a greyed photograph shows
_MOST_OPAQUE = 0.8

# White within black is seen on snow and on soil.
_THIN: dict[str, Any] = {"color": "white", "linewidth": 1.1}
_LOOKS: dict[float, dict[str, Any]] = {  # broken, both: an edge alone is a whole line
    0.5: {**_THIN, "linestyle": (0, (1.5, 2.5))},
    0.9: {**_THIN, "linestyle": (0, (6, 2.5))},
}
_EDGE: dict[str, Any] = {"color": "white", "linewidth": 2.4, "linestyle": "-"}
_CELLS: dict[str, Any] = {**_EDGE, "linewidth": 1.4}  # round a small cell 2.4 would hide it
_HALO = 1.4  # points of black, both sides together
_ENTRY = 2.2  # inches that a line of the legend needs


def show_image(ax: Axes, image: Numbers) -> None:
    """The image as it is, (H, W, 3), on axes of its own shape and without ticks."""
    height, width = image.shape[:2]
    ax.imshow(image, extent=_EXTENT, aspect=height / width)
    ax.set_xlim(0, 1)
    ax.set_ylim(1, 0)
    ax.set_autoscale_on(False)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():  # a frame, where a picture is as bright as the page
        spine.set_visible(True)
        spine.set(edgecolor="grey", linewidth=0.5)


def show_layer(ax: Axes, image: Numbers, layer: Layer, top: float) -> None:
    """The image in grey, full colour where the layer has density `top` or more."""
    show_image(ax, greyed(image))
    ax.imshow(
        layer.values,
        extent=_EXTENT,
        aspect=image.shape[0] / image.shape[1],
        cmap=_colors(),
        norm=Normalize(0, top),
        interpolation="bilinear" if layer.smooth else "nearest",
    )
    for mass, line in layer.mass.items():
        show_line(ax, line, _LOOKS[mass])
    show_line(ax, layer.edge, _EDGE if layer.smooth else _CELLS)


def show_line(ax: Axes, line: Numbers, look: dict[str, Any] = _CELLS) -> None:
    """line (P, 2) of (row, column), broken at NaN."""
    if len(line):
        ax.plot(line[:, 1], line[:, 0], solid_capstyle="projecting", **_add_halo(look))


def greyed(image: Numbers) -> Numbers:
    """Without colour and with less contrast, so that what is laid over it can be read."""
    grey = 0.2 + 0.6 * (image @ np.array(_LUMINANCE))
    return np.repeat(grey[..., None], 3, -1)


def color_bar(figure: Figure, axes: Sequence[Axes], top: float, beyond: bool) -> None:
    """beyond: some density is larger than `top`."""
    table = np.asarray(_colors()(np.linspace(0, 1, 256)))
    shades = table[:, :3] * table[:, 3:] + _GREY * (1 - table[:, 3:])  # over a grey photograph
    scale = ScalarMappable(Normalize(0, top), ListedColormap(shades))
    extend = "max" if beyond else "neither"
    bar = figure.colorbar(scale, ax=list(axes), extend=extend, pad=0.015, fraction=0.04)
    bar.set_label("density (1 = even)")


def legend(figure: Figure, layers: Sequence[Layer]) -> None:
    """What the lines are, as far as there are any; the figure grows by its height."""
    drawn = {mass for layer in layers for mass, line in layer.mass.items() if len(line)}
    entries = [(f"holds {100 * mass:.0f} % of the mass", _LOOKS[mass]) for mass in sorted(drawn)]
    if any(len(layer.edge) for layer in layers):
        entries.append(("edge of the support", _EDGE))
    if not entries:
        return
    handles = [Line2D([], [], label=label, **_add_halo(look)) for label, look in entries]
    width, height = figure.get_size_inches()
    across = min(len(entries), max(1, int(width / _ENTRY)))
    figure.set_size_inches(width, height + 0.15 + 0.2 * -(-len(entries) // across))
    look: dict[str, Any] = {"frameon": False, "handlelength": 3, "fontsize": 9}
    figure.legend(handles=handles, loc="outside lower left", ncols=across, **look)


def _add_halo(look: dict[str, Any]) -> dict[str, Any]:
    width = look["linewidth"] + _HALO
    return {**look, "path_effects": [withStroke(linewidth=width, foreground="black")]}


def _colors() -> ListedColormap:
    """Clear at zero; opacity grows faster than the colour, lest little attention be invisible."""
    level = np.linspace(0, 1, 256)
    table = np.array(colormaps["plasma"](0.2 + 0.8 * level))  # its dark end is lost on grey
    table[:, 3] = _MOST_OPAQUE * level**0.6
    return ListedColormap(table)
