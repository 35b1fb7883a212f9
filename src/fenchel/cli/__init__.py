"""The `fenchel` command: what is installed here, the tour, the benchmarks, the audits."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fenchel import __version__
from fenchel.bench import machine
from fenchel.cli import audit, bench, claims, experiment, lens, study
from fenchel.cli.shared import make_folder, progress_bar

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    epilog="Example: fenchel tour --out build/tour",
)
app.add_typer(bench.commands, name="bench", help="Times on this machine, as ratios to plain torch.")
app.add_typer(lens.commands, name="lens", help="Audits of pretrained models.")
app.add_typer(study.commands, name="study", help="What measures and distances say of a model.")
app.add_typer(experiment.commands, name="experiment", help="The papers' tables, trained here.")
app.command("audit", epilog=f"Example: {audit.EXAMPLE}")(audit.audit)
app.command("claims", epilog=f"Example: {claims.EXAMPLE}")(claims.claims)


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
    for stream in (sys.stdout, sys.stderr):  # a Greek letter must not end an hour of work
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@app.command(epilog="Example: fenchel info --json")
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Versions, devices, and which fast paths are open here (with the reason where not)."""
    facts, paths = machine.summary(), machine.fast_paths()
    if as_json:
        document = {**facts, "fast_paths": [dataclasses.asdict(path) for path in paths]}
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console()
    listing = Table(show_header=False, box=None)
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        listing.add_row(Text(name.replace("_", " "), style="dim"), Text(shown))
    console.print(listing)
    console.print(_path_table(paths))


def _path_table(paths: list[machine.FastPath]) -> Table:
    table = Table("fast path", "active", "why", title="Fast paths", title_justify="left")
    for path in paths:
        mark = Text("yes", style="green") if path.active else Text("no", style="yellow")
        table.add_row(Text(path.name), mark, Text(path.why))  # Text: brackets are not markup
    return table


@app.command(epilog="Example: fenchel tour --out build/tour --open")
def tour(
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Directory to write tour.html into.")
    ] = Path("fenchel-tour"),
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the scores that are shown.")
    ] = 0,
    model: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, exists=True, help="Of a BERT: shown in place of a random layer."
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML page about every regulariser, computed here, and print its path.

    The page needs no network. It takes under a minute; the derivatives and the timings are the
    slow part.
    """
    make_folder(out)
    from fenchel.report import chapters, page  # matplotlib and jinja2 load only for this command
    from fenchel.report.chapter import Tour

    order = chapters.discover()
    written = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(order))
        for module in order:
            progress.update(task, description=module.__name__.rpartition(".")[2])
            written.append(module.chapter(Tour(seed=seed, model=model)))
            progress.advance(task)
    path = page.write(out / "tour.html", written, seed=seed)
    typer.echo(path)
    if open_page:
        webbrowser.open(path.resolve().as_uri())
