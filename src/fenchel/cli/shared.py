"""What several commands need: progress, tables, files and folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from fenchel.bench.tables import Listing

MOST_THREADS = 1024  # of one process; torch does not survive tens of thousands


def progress_bar(count: ProgressColumn | None = None) -> Progress:
    """On standard error, so that standard output holds only the result."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), count or MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


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
        for place, name in enumerate(listing.header):
            table.add_column(name, justify="right" if place else "left", overflow="fold")
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
        from fenchel.report.measured import save_picture
    except ModuleNotFoundError as missing:
        return no_picture(missing)
    return str(save_picture(document, path))


def no_picture(missing: ModuleNotFoundError) -> str:
    """What stands in place of a path."""
    return f'no picture: {missing.name} is missing; pip install -c constraints.txt ".[report]"'


def check_folder(folder: Path, option: str = "--out") -> None:
    """Before the work; a folder that is not there is more often misspelt than wanted."""
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}; make it first", param_hint=option)


def make_folder(folder: Path) -> None:
    """Before the work, so that nobody waits a minute for an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise typer.BadParameter(f"cannot make the folder {folder}: {problem.strerror}") from None
