"""Times on the reader's machine."""

from __future__ import annotations

from matplotlib.figure import Figure as Canvas

from benchmarks import maps
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Figure, Table, Tour

ORDER = 90

_INTRO = """
Every map is timed in turn, over and over, in one process on one thread, and shown as a ratio to
`torch.softmax` on the same rows, with the smallest and the largest of the rounds. Read the spread
before the ratio; if the machine was too busy to measure, the caption says so. Rows this few mostly
show the fixed cost of a call; `python -m benchmarks maps` measures a larger size.
"""


def chapter(tour: Tour) -> Chapter:
    settings = maps.Settings(rows=16, length=32, repeats=2) if tour.quick else _SETTINGS
    report = maps.run(settings)
    return Chapter("Timings", _INTRO, (_chart(report),), (_table(report),))


_SETTINGS = maps.Settings(rows=128, length=256, repeats=5)


def _table(report: maps.Report) -> Table:
    rows = []
    for forward, backward in zip(report.timings[::2], report.timings[1::2], strict=True):
        rows.append((forward.name, str(forward.rows), str(forward), str(backward)))
    caption = (
        f"Ratio to torch.softmax (smallest..largest), {report.settings.length} keys, "
        f"{report.settings.repeats} rounds, one thread, float32."
    )
    return Table(caption, ("map", "rows", *maps.DIRECTIONS), tuple(rows))


def _chart(report: maps.Report) -> Figure:
    styles = {"forward": ("o", draw.BLUE, -0.16), "forward+backward": ("s", draw.VERMILION, 0.16)}
    names = [f"{t.name}, {t.rows} rows" for t in report.timings[::2]]

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for direction, (marker, color, offset) in styles.items():
            chosen = [t for t in report.timings if t.direction == direction]
            y = [place + offset for place in range(len(chosen))]
            low, high = zip(*(t.spread for t in chosen), strict=True)
            ax.hlines(y, low, high, color=color)
            ratios = [t.ratio for t in chosen]
            ax.plot(ratios, y, marker, color=color, markersize=4, label=direction)
        ax.axvline(1, color=draw.FAINT, linewidth=0.8)
        ax.set_xscale("log")
        ax.set_xlabel("time relative to torch.softmax (logarithmic)")
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.grid(True, axis="x", color=draw.FAINT, alpha=0.35, linewidth=0.5)
        ax.legend(loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=2)

    caption = "Dots are medians, bars reach from the fastest to the slowest round; left is faster."
    caption = f"{report.warning} {caption}".strip()  # a warning is read first or not at all
    alt = "Ratio of each map's time to torch.softmax with its spread, forward and with backward."
    return Figure((draw.panel(paint, "wide", 3.6),), caption, alt, "wide")
