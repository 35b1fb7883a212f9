"""`python -m papers study deviation`: how far a model's attention is from the exact estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskProgressColumn

from benchmarks.console import tell
from fenchel.cli.shared import make_folder, progress_bar

EXAMPLE = (
    "python -m papers study deviation build/models/minilm --text sentences.txt --out build/lens"
)


def deviation(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder of any BERT or T5, as from_pretrained loads it, or its name on the hub."
        ),
    ],
    text: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="A sentence a line; .tsv: first column."),
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for JSON and pictures.")],
    count: Annotated[int, typer.Option("--sentences", min=1, help="From the start.")] = 200,
    attention_kind: Annotated[
        str, typer.Option("--attention", help="encoder, decoder or cross.")
    ] = "encoder",
    scaling: Annotated[
        float | None, typer.Option(help="Of the templates. [1 / sqrt of a head's size]")
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Histograms a layer and a head, as SVG.")] = True,
) -> None:
    """How far a model's attention is from the exact estimate that it approximates to first order.

    The table's columns are means over heads and queries: multiplier |lam - lam*| / |lam*|, mean
    |h - h*| / |h*|, mean_shift |h - h*| over what attention does to the prior mean, and parameter,
    reliability |Cov z| / |z|, which foretells the first. Layers count from 1 there and in pictures,
    in JSON from first_layer = 0.

    Writes deviations.json, adding to what other models, kinds of attention or scalings left there,
    and pictures into a folder for each scaling. A decoder is given the sentence itself, moved on by
    one. Deviations depend on the templates' scaling. Needs the extras hf and report.
    """
    make_folder(out)
    from fenchel.lens import runs
    from papers.studies import deviation_pictures as picture

    try:
        with progress_bar(TaskProgressColumn()) as progress:
            task = progress.add_task("loading", total=1.0)
            settings = runs.Settings(model, text, count, attention_kind, scaling)
            run = runs.run(
                settings, lambda share: progress.update(task, description="solving", advance=share)
            )
    except (ImportError, OSError, TypeError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from None
    table, factor = picture.listing(run.document), f"scaling {run.deviations.scaling:.6g}"
    tell({"warning": run.warning}, [table._replace(title=f"{table.title}, {factor}")], None)
    typer.echo(runs.add(run.document, out / "deviations.json"))
    folder = out / factor.replace(" ", "-")
    if pictures:
        make_folder(folder)
    for path in picture.save_all(run.deviations, folder) if pictures else ():
        typer.echo(path)
