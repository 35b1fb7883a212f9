"""`python -m papers tour`: the page of everything, computed here."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fenchel.cli.shared import make_folder, progress_bar

EXAMPLE = "python -m papers tour --out build/tour --open"


def tour(
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Directory to write tour.html into.")
    ] = Path("build/tour"),
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
    from papers.tour import chapters, page  # matplotlib and jinja2 load only for this command
    from papers.tour.chapter import Tour

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
