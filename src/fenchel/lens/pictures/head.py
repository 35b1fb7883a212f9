"""The weights of one head: a cell for each query and key, empty where the weight is zero."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from fenchel.lens.pictures import draw

_CELL, _MARGIN = 0.22, 1.2  # inches
_SMALLEST, _LARGEST = 2.4, 9.0  # inches of the longer side


def head_figure(
    weights: Tensor,
    title: str,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
) -> Figure:
    """weights (query, key), queries down, keys across. queries, keys: their tokens, as labels.

    `.savefig("head.svg")` keeps it.
    """
    values = weights.detach().cpu().double().numpy()
    rows, columns = values.shape
    cell = min(max(_CELL, _SMALLEST / max(rows, columns, 1)), _LARGEST / max(rows, columns, 1))
    size = (columns * cell + _MARGIN, rows * cell + _MARGIN)
    with matplotlib.rc_context({"font.sans-serif": ["DejaVu Sans"], "font.size": 8}):
        figure = Figure(figsize=size, layout="constrained")
        ax = figure.subplots()
        top = float(np.nan_to_num(values).max(initial=0)) or 1.0
        draw.heat(ax, values, color=draw.LIGHT[draw.BLUE], top=top)
        ax.set_title(title, loc="left")
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        if keys is not None:
            ax.set_xticks(np.arange(columns) + 0.5, list(keys), rotation=90)
        if queries is not None:
            ax.set_yticks(np.arange(rows) + 0.5, list(queries))
        draw.take_literally(figure)
    return figure
