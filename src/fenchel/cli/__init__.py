"""The `fenchel` command: what is installed here, and the audit of a model."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fenchel import __version__, _info
from fenchel.cli import audit
from fenchel.cli.shared import replace_letters

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    epilog="Example: fenchel info",
)
app.command("audit", epilog=f"Example: {audit.EXAMPLE}")(audit.audit)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fenchel {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Attention as a regularised problem: exact sparse maps with a certificate."""
    replace_letters()


@app.command(epilog="Example: fenchel info --json")
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Versions, devices, and which fast paths are open here (with the reason where not)."""
    if as_json:
        typer.echo(json.dumps(_info.info(), indent=2))
        return
    facts, paths = _info.summary(), _info.fast_paths()
    console = Console()
    listing = Table(show_header=False, box=None)
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        listing.add_row(Text(name.replace("_", " "), style="dim"), Text(shown))
    console.print(listing)
    console.print(_path_table(paths))


def _path_table(paths: list[_info.FastPath]) -> Table:
    table = Table("fast path", "active", "why", title="Fast paths", title_justify="left")
    for path in paths:
        mark = Text("yes", style="green") if path.active else Text("no", style="yellow")
        table.add_row(Text(path.name), mark, Text(path.why))  # Text: brackets are not markup
    return table
