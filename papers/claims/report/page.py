"""From records of claims to one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
import torch
from markupsafe import Markup

from fenchel import __version__
from fenchel.lens.files import write_whole
from fenchel.lens.pictures import draw
from papers.claims import PAPERS, Check, Record, Verdict
from papers.claims.report.pictures import drawn
from papers.tour.chapter import number

# The colour of each verdict, a class of the style sheet.
_LOOKS = {
    Verdict.CONFIRMED: "good",
    Verdict.CORRECTED: "mended",
    Verdict.REFUTED: "false",
    Verdict.NOT_CHECKABLE: "open",
    Verdict.DEFINITION: "open",
    Verdict.CONTRADICTED: "broken",
}


def render(records: Sequence[Record]) -> str:
    """The page as a string."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(look=_LOOKS.__getitem__, anchor=anchor, told=told, drawn=_drawn)
    papers = {paper: [r for r in records if r.id.startswith(f"{paper}-")] for paper in PAPERS}
    counts = {
        verdict: {
            paper: sum(r.verdict is verdict for r in entries) for paper, entries in papers.items()
        }
        for verdict in Verdict
        if any(r.verdict is verdict for r in records)
    }
    return environment.from_string(_resource("ledger.html")).render(
        papers={paper: entries for paper, entries in papers.items() if entries},
        names=PAPERS,
        counts=counts,
        total=len(records),
        seconds=sum(r.seconds for r in records),
        seed=records[0].seed if records else 0,
        style=Markup(_resource("tour.css", "papers.tour") + _resource("ledger.css")),
        version=__version__,
        torch_version=torch.__version__,
    )


def write(path: Path, records: Sequence[Record]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, render(records).encode("utf-8"))
    return path


def anchor(id: str) -> str:
    """Of an id, for links: letters, digits, and the rest as dashes."""
    return "".join(letter if letter.isalnum() else "-" for letter in id)


def told(check: Check) -> str:
    """The figure and its range: 2.1e−16 (≤ 1e-10); 3 (printed ≤ 1) where it proves that wrong."""
    printed = "printed " if check.as_printed else ""
    return f"{number(check.figure, 4)} ({printed}{check.range()})"


def _drawn(record: Record) -> list[Markup]:
    names = [f"{anchor(record.id)}-{place}" for place in range(len(record.pictures))]
    return [
        Markup(draw.unique_ids(drawn(picture), name))  # our own drawing, not a reader's text
        for picture, name in zip(record.pictures, names, strict=True)
    ]


def _resource(name: str, package: str = __package__) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
