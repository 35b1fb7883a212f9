"""Tables as HTML: cells hold bars, stars and angles, which Markdown would take for its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers_from: int = 1,
    words: int = 0,
    ids: Sequence[str] = (),
    escaped: bool = False,
) -> str:
    """numbers_from: the first column that is set to the right. words: the last columns that are
    not. ids: one a row, for links.
    escaped: cells are HTML already."""
    told = str if escaped else escape
    figures = range(numbers_from, len(header) - words)
    lines = ["<table>", f"<thead>{_row(header, 'th', figures, escape)}</thead>", "<tbody>"]
    for place, row in enumerate(rows):
        identity = f' id="{escape(ids[place])}"' if ids else ""
        lines.append(_row(row, "td", figures, told, identity))
    return "\n".join([*lines, "</tbody>", "</table>"])


def _row(
    cells: Sequence[str],
    tag: str,
    figures: range,
    told: Callable[[str], str],
    identity: str = "",
) -> str:
    right = ' style="text-align: right"'
    made = (
        f"<{tag}{right if place in figures else ''}>{told(cell)}</{tag}>"
        for place, cell in enumerate(cells)
    )
    return f"<tr{identity}>{''.join(made)}</tr>"
