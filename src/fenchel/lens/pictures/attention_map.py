"""Attention over an image: weights on a grid, densities, or several of them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.continuous import Density, Mixture
from fenchel.lens.pictures.layers import Layer, Numbers, as_array, layer_of
from fenchel.nn.continuous import Expectation

if TYPE_CHECKING:  # matplotlib loads when something is drawn
    from matplotlib.figure import Figure

Thing = Density | Mixture | Expectation | Tensor | ArrayLike

_PANEL = 2.7  # inches
_MARGIN = 0.08  # inches above the titles
_TALLEST = 2.0  # height over width of a panel, beyond which it gets narrower instead


def attention_map(
    image: Tensor | ArrayLike,
    what: Thing | Mapping[str, Thing],
    *,
    top: float | None = None,
    columns: int = 5,
) -> Figure:
    """The image, and beside it each attention drawn over it in one scale of colours.

    >>> import fenchel.continuous as fc
    >>> image, weights = torch.rand(60, 80, 3), torch.rand(196).softmax(-1)
    >>> density = fc.match_moments(weights, fc.cell_centers(14, 14), fc.Paraboloid)
    >>> grid = weights.reshape(14, 14)
    >>> figure = attention_map(image, {"softmax": grid, "sparsemax": density})
    >>> len(figure.axes)  # the image, two maps, the scale
    4

    image: (H, W, 3) or (H, W); uint8, or floats in [0, 1].
    what: one thing or {title: thing}. A thing is
        weights (rows, columns) >= 0, divided by their sum, drawn cell by cell; or
        a density or mixture without a batch over [0, 1]^2, in (row, column) from the upper left
        (`layer(features, scores).density[0]`), or what a layer returned without a batch.
    top: the density that gets full colour; by default the largest of all. 1 is even attention.
    columns: panels in a row.

    A dotted and a dashed line border the smallest regions with 50 % and 90 % of a density's mass:
    exact ellipses for one density, to about 0.1 % of the mass for a mixture. A whole, thick line is
    the edge of the support, of cells or of a sparse density; Gaussians have none. A density with
    less than half of its mass on the image says so below its title.
    """
    picture = checked_image(image)
    layers = _layers(what)
    check_whole(columns, "columns", 1)
    largest = max(layer.peak for layer in layers.values())
    if top is not None and not 0 < top < float("inf"):
        raise ValueError(f"top must be a finite number > 0, got {top}")
    return _draw(picture, layers, largest if top is None else float(top), columns)


def checked_image(image: Any) -> Numbers:
    """(H, W, 3), floats in [0, 1]."""
    array = as_array(image, "image")
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, -1)
    if array.ndim != 3 or array.shape[-1] != 3 or 0 in array.shape:
        raise ValueError(f"image must be (H, W, 3) or (H, W), got {array.shape}{_way_out(array)}")
    if array.dtype == np.uint8:
        return array / 255.0
    if array.dtype.kind != "f":
        raise TypeError(f"image must be uint8, or floats in [0, 1], got {array.dtype}")
    if not np.isfinite(array).all():
        raise ValueError("image must be finite; it holds NaN or infinity")
    if array.min() < 0 or array.max() > 1:
        raise ValueError(
            f"image must lie in [0, 1], got {array.min():g} to {array.max():g}; divide it by 255, "
            "or undo the normalisation of the model's input"
        )
    return array.astype(np.float64)


def _way_out(array: Any) -> str:
    if array.ndim == 4:
        return "; take one of the batch: image[0]"
    if array.ndim == 3 and array.shape[0] in (1, 3):
        return "; move the channels last: image.permute(1, 2, 0)"
    if array.ndim == 3 and array.shape[-1] == 4:
        return "; leave out the opacity: image[..., :3]"
    return ""


def _layers(what: Any) -> dict[str, Layer]:
    if not isinstance(what, Mapping):
        layer = layer_of(what)
        return {layer.title: layer}
    if not what:
        raise ValueError("what must hold at least one attention to draw, got an empty mapping")
    return {str(title): layer_of(thing, f"what[{title!r}]") for title, thing in what.items()}


def _draw(image: Numbers, layers: Mapping[str, Layer], top: float, columns: int) -> Figure:
    try:
        from matplotlib.figure import Figure

        from fenchel.lens.pictures import overlay
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f'attention_map needs {missing.name}: pip install "fenchel[report]"', name=missing.name
        ) from missing
    count = 1 + len(layers)
    columns = min(columns, count)
    rows = -(-count // columns)
    slope = image.shape[0] / image.shape[1]
    width = _PANEL / max(1.0, slope / _TALLEST)
    title = 0.35 + 0.2 * any(layer.note for layer in layers.values())
    size = (columns * width + 1.0, rows * (width * slope + title) + _MARGIN)
    figure = Figure(figsize=size, layout="compressed")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    overlay.show_image(axes[0], image)
    axes[0].set_title("image")
    for ax, (name, layer) in zip(axes[1:], layers.items(), strict=False):
        overlay.show_layer(ax, image, layer, top)
        ax.set_title(f"{name}\n({layer.note})" if layer.note else name)
    for ax in axes[count:]:
        ax.remove()
    beyond = any(layer.peak > top for layer in layers.values())
    overlay.color_bar(figure, axes[:count].tolist(), top, beyond)
    overlay.legend(figure, list(layers.values()))
    top_edge = 1 - _MARGIN / figure.get_size_inches()[1]  # or titles touch it
    figure.set_layout_engine("compressed", rect=(0, 0, 1, top_edge))
    return figure
