"""Attention: what one sparse head looks at, and what it costs on the reader's machine."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

import fenchel as fl
from benchmarks import attention, attention_picture, attention_summary
from benchmarks.attention_methods import Shape
from benchmarks.attention_rounds import Rounds
from benchmarks.maps import DIRECTIONS
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Figure, Table, Tour, number

ORDER = 95

_INTRO = """
`fl.attention` takes the arguments of `scaled_dot_product_attention` and a regulariser. Nothing of
size n × n is stored: a row keeps its threshold and the few keys above it.

    out = fl.attention(q, k, v, fl.Tsallis(1.5), is_causal=True)
    sol = fl.attention_solution(q, k, v, fl.Tsallis(1.5), is_causal=True)
    sol.support_size, sol.gap      # keys used, certificate
    sol.head(0, 3)            # one head as a sparse matrix

The times are ratios to torch's own attention, which computes softmax, measured in turn in this
process. A key far below the threshold is skipped, so that the time depends on how widely the
scores spread; their standard deviation is given. `python -m benchmarks attention` measures longer
sequences, more alphas, memory, and other libraries.
"""

_SWEEP = attention.Sweep(
    sizes=(512, 2048),
    deviations=(1.0, 2.0),
    alphas=(1.5, 2.0),
    focus=0,
    peers=(),
    memory=(),
    row_maps=None,
    rounds=Rounds(3, 5, 3.0),
)
_TINY = attention.Sweep(
    sizes=(16, 32),
    deviations=(1.0, 2.0),
    alphas=(1.5, 2.0),
    focus=0,
    peers=(),
    memory=(),
    row_maps=None,
    shape=Shape(heads=2, dim=8),
    rounds=Rounds(2, 2, 0.1),
)


def chapter(tour: Tour) -> Chapter:
    results = attention.run(_TINY if tour.quick else _SWEEP).as_json()
    return Chapter("Attention", _INTRO, (support_figure(tour), _times(results)), (_table(results),))


# ---- the support of one head

_LENGTH = 4.0  # of a key: the sharper the longer


def support_figure(tour: Tour) -> Figure:
    n = 40 if tour.quick else 200
    query, key, value = _head(tour, n)
    solution = fl.attention_solution(query, key, value, fl.Tsallis(1.5), is_causal=True)
    sizes = solution.support_size.flatten()
    visible = n * (n + 1) // 2
    caption = (
        f"One causal head with Tsallis(1.5) on {n} tokens that drift and, half way, start the "
        f"same path again: queries find their neighbours and the first visit. A dot is a weight "
        f"that is not zero, {number(100 * int(sizes.sum()) / visible, 2)}"
        f" % of the cells on and below the diagonal. A query uses {int(sizes.median())} keys at "
        f"the median and {int(sizes.max())} at most; the largest gap is "
        f"{number(float(solution.gap.max()), 2)}."
    )
    alt = "Dots where a causal sparse head has weight, and how many queries use how many keys."
    panels = (_dots(solution), _histogram(sizes))
    return Figure(panels, caption, alt, "medium")


def _head(tour: Tour, n: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Directions that drift, the second half along the path of the first: (1, n, dim) each."""
    noise = torch.randn(3, n, dim, generator=tour.generator(), dtype=torch.float64)
    path = noise[0, : -(-n // 2)]
    for place in range(1, len(path)):
        path[place] += 0.9 * path[place - 1]
    path = path.repeat(2, 1)[:n]
    key = _LENGTH * path / path.norm(dim=-1, keepdim=True)  # equally long: no key is loud
    query = key + 0.3 * noise[1]
    return query.unsqueeze(0), key.unsqueeze(0), noise[2:]


def _dots(solution: fl.AttentionSolution) -> str:
    n = solution.shape[-1]
    rows = torch.repeat_interleave(torch.arange(len(solution.rows) - 1), solution.rows.diff())

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("keys with weight")
        ax.fill([0, n, n], [0, 0, n], color=draw.FAINT, alpha=0.15, linewidth=0)
        ax.plot(solution.keys + 0.5, rows + 0.5, "o", color=draw.BLUE, markersize=180 / n / 1.3)
        ax.set_xlim(0, n)
        ax.set_ylim(n, 0)
        ax.set_aspect("equal")
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.text(0.68 * n, 0.25 * n, "the future", ha="center", color=draw.FAINT)

    return draw.panel(paint, "medium", 3.2)


def _histogram(sizes: Tensor) -> str:
    counts = torch.bincount(sizes)[1:]

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.set_title("size of the support")
        ax.bar(range(1, len(counts) + 1), counts.tolist(), width=0.85, color=draw.BLUE)
        ax.set_xlabel("keys with weight")
        ax.set_ylabel("queries")
        ax.set_xlim(0.3, len(counts) + 0.7)
        ax.locator_params(axis="both", nbins=6, integer=True)

    return draw.panel(paint, "medium", 3.2)


# ---- times


def _times(results: dict[str, Any]) -> Figure:
    caption = (
        "Time over that of torch's attention, on logarithmic axes; below the line is faster. Lines "
        "are medians at deviation 1, the shade reaches to deviation 2."
    )
    caption = f"{results['warning']} {caption}".strip()  # a warning is read first or not at all
    alt = "Ratio of the time of sparse attention to torch's, over the number of tokens."
    return Figure(
        (draw.panel(attention_picture.paint_ratios(results), "wide", 2.9),), caption, alt, "wide"
    )


def _table(results: dict[str, Any]) -> Table:
    entries = results["results"]
    sizes = attention_summary.sizes_of(entries)
    pairs = [(direction, n) for direction in DIRECTIONS for n in sizes]
    header = ("attention", *(f"{attention_summary.short(d)}, n = {n}" for d, n in pairs))
    rows = []
    for row in attention_summary.rows(entries):
        cells = (attention_summary.cell(entries, row, n, direction) for direction, n in pairs)
        rows.append((str(row), *cells))
    shape = results["settings"]
    caption = (
        f"Ratio to torch's attention: {shape['heads']} heads of {shape['dim']}, float32, "
        f"{shape['threads']} thread(s); kernels: {results['kernels']}."
    )
    return Table(caption, header, tuple(rows))
