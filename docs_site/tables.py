"""Tables as HTML: cells hold bars, stars and angles, which Markdown would take for its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers_from: int = 1,
    ids: Sequence[str] = (),
    escaped: bool = False,
) -> str:
    """numbers_from: the first column that is set to the right. ids: one a row, for links.
    escaped: cells are HTML already."""
    told = str if escaped else escape
    lines = ["<table>", f"<thead>{_row(header, 'th', numbers_from, escape)}</thead>", "<tbody>"]
    for place, row in enumerate(rows):
        identity = f' id="{escape(ids[place])}"' if ids else ""
        lines.append(_row(row, "td", numbers_from, told, identity))
    return "\n".join([*lines, "</tbody>", "</table>"])


def _row(
    cells: Sequence[str],
    tag: str,
    numbers_from: int,
    told: Callable[[str], str],
    identity: str = "",
) -> str:
    right = ' style="text-align: right"'
    made = (
        f"<{tag}{right if place >= numbers_from else ''}>{told(cell)}</{tag}>"
        for place, cell in enumerate(cells)
    )
    return f"<tr{identity}>{''.join(made)}</tr>"
