"""What several commands need: letters, progress and folders."""

from __future__ import annotations

import io
import sys
from pathlib import Path

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

MOST_THREADS = 1024  # of one process; torch does not survive tens of thousands


def replace_letters() -> None:
    """A Greek letter that the terminal lacks must not end an hour of work: it becomes a `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def progress_bar(count: ProgressColumn | None = None) -> Progress:
    """On standard error, so that standard output holds only the result."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), count or MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


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
