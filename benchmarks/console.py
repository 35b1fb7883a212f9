"""How the commands of `benchmarks` and `papers` show tables and write files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks.extras import INSTALL
from benchmarks.tables import Listing


def shares(progress: Progress) -> Callable[[str, float], object]:
    task = progress.add_task("timing", total=1.0)
    return lambda what, share: progress.update(task, description=what, advance=share)


def tell(document: dict[str, Any], listings: Sequence[Listing], out: Path | None) -> None:
    """Tables, the warning, and the files where they are wanted."""
    console = Console()
    for number, listing in enumerate(listings):
        if number:
            console.print()
        console.print(Text(listing.title, style="italic"), soft_wrap=True)  # not cut to the table
        table = Table()
        figures = range(1, len(listing.header) - listing.words)
        for place, name in enumerate(listing.header):
            side: Literal["left", "right"] = "right" if place in figures else "left"
            table.add_column(name, justify=side, overflow="fold")
        for row in listing.rows:
            table.add_row(*(Text(cell) for cell in row))  # Text: brackets are not markup
        console.print(table)
    if document["warning"]:
        Console(stderr=True).print(Text(document["warning"], style="yellow"))
    if out is not None:
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        typer.echo(out)
        typer.echo(_picture(document, out.with_suffix(".svg")))


def _picture(document: dict[str, Any], path: Path) -> str:
    try:
        from benchmarks.pictures import save_picture
    except ModuleNotFoundError as missing:
        return no_picture(missing)
    return str(save_picture(document, path))


def no_picture(missing: ModuleNotFoundError) -> str:
    """What stands in place of a path."""
    return f"no picture: {missing.name} is missing; {INSTALL}"
