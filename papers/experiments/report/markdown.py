"""Tables and words in Markdown, whatever signs they hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.tables import Listing, pipes
from papers.experiments.tables import filled

_WIDE = 76  # letters of a line that every page shows whole


def plain(text: str) -> str:
    """Words that stay words, on one line: signs that Markdown or HTML would read are escaped.

    Those of a list, a heading or a box count at the start alone.
    """
    line = " ".join(text.splitlines()).strip()
    line = re.sub(r"([\\`*_{}|\[\]])", r"\\\1", line)
    line = re.sub(r"^([#!]|[+-](?= |$)|-(?=-+$)|\d+(?=[.)] ))", _first, line)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _first(match: re.Match[str]) -> str:
    """A number of a list keeps its digits: the sign after it is what is read."""
    return f"{match[0]}\\" if match[0].isdigit() else f"\\{match[0]}"


def table(listing: Listing) -> str:
    """The title in bold, then the table, its first column to the left.

    A column in which no row has anything is left out.
    """
    shown = filled(listing)
    head, *body = ([plain(part) or " " for part in row] for row in (shown.header, *shown.rows))
    title = plain(listing.title[:1].upper() + listing.title[1:])
    for row in (head, *body):
        row[0] = _together(row[0])
    return f"**{title}**\n\n{pipes(head, body)}"


def _together(name: str) -> str:
    """Lines break between the parts of a name, not within them."""
    return re.sub(r" = |(?<=2D) ", lambda match: match[0].replace(" ", "\N{NO-BREAK SPACE}"), name)


def command(line: str) -> str:
    """Broken before an option where it is long."""
    lines = [""]
    for word in re.split(r" (?=--)", " ".join(line.split())):
        if len(lines[-1]) + len(word) > _WIDE:
            lines.append("")
        lines[-1] += f" {word}"
    return "```console\n$" + " \\\n   ".join(lines) + "\n```"


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
