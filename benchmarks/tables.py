"""What a benchmark shows, as text: the command line draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Listing(NamedTuple):
    """A table with its title; every row is as long as the header.

    words: how many of the last columns hold sentences; all but the first hold figures otherwise.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 0


def pipes(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> str:
    """A table in Markdown, of cells without pipes; words: as in a listing."""
    figures = len(header) - words - 1
    rule = ["---", *["---:"] * figures, *["---"] * words]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def seconds(value: float | None) -> str:
    """Three digits and a unit."""
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def error(value: float | None) -> str:
    """Two digits: of an error nobody needs more."""
    return "–" if value is None else f"{value:.1e}"
