"""The commands of `python -m benchmarks`, one per benchmark."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import TaskProgressColumn
from rich.table import Table
from rich.text import Text

from benchmarks import (
    attention,
    continuous,
    dual,
    gpu_command,
    integrals,
    maps,
    models,
    serve,
    structure,
    wasserstein,
)
from benchmarks.attention_rounds import Advance
from benchmarks.attention_tables import draw_attention, print_attention
from benchmarks.console import shares, tell
from benchmarks.serve_models import ModelDtype
from benchmarks.tables import Listing
from fenchel.cli.shared import MOST_THREADS, check_folder, progress_bar, replace_letters

commands = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    epilog="Example: python -m benchmarks maps --quick",
)


def _check_parent(out: Path | None) -> Path | None:
    """Before the work."""
    if out is not None:
        check_folder(out.parent)
    return out


_Out = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        callback=_check_parent,
        help="Also write the figures as JSON, and a picture (SVG).",
    ),
]
_Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, seconds.")]


@commands.callback()
def root() -> None:
    """Measure on this machine, as ratios to plain torch and to other packages."""
    replace_letters()


@commands.command("maps", epilog="Example: python -m benchmarks maps --rows 256 --out maps.json")
def bench_maps(
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of scores. [1024; quick: 64]")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Keys in a row. [1024; quick: 256]")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds; the median is shown. [7; quick: 3]")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_THREADS, help="Above one only on an idle machine: waits go unnoticed."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, callback=_check_parent, help="Also write the figures as JSON."
        ),
    ] = None,
    quick: _Quick = False,
) -> None:
    """Time every map, forward and forward+backward, as a ratio to torch.softmax."""
    given = {"rows": rows, "length": length, "repeats": repeats}
    chosen = {name: value for name, value in given.items() if value is not None}
    start = maps.QUICK if quick else maps.Settings()
    settings = dataclasses.replace(start, threads=threads, **chosen)
    with progress_bar() as progress:
        task = progress.add_task("timing", total=maps.steps(settings))
        report = maps.run(settings, lambda: progress.advance(task))
    Console().print(_timing_table(report))
    if report.warning:
        Console(stderr=True).print(Text(report.warning, style="yellow"))
    if out is not None:
        out.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        typer.echo(out)


@commands.command(
    "attention", epilog="Example: python -m benchmarks attention --quick --out attention.json"
)
def bench_attention(
    largest: Annotated[
        int | None, typer.Option(min=1, help="Leave longer sequences out. [16384; quick: 2048]")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_THREADS,
            help="Of torch and of the kernels. (Default: as many as torch has.)",
        ),
    ] = None,
    out: _Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences, a minute.")] = False,
) -> None:
    """Time attention, forward and forward+backward, as a ratio to torch's own (SDPA).

    Ours at several alphas and deviations of the scores, plain softmax, the entmax package and
    FlexAttention in the same process, and the peak memory of each in a process of its own. The
    full sweep takes about ten minutes on two idle cores.
    """
    sweep = dataclasses.replace(attention.QUICK if quick else attention.FULL, threads=threads)
    if largest is not None:
        try:
            sweep = sweep.up_to(largest)
        except ValueError as problem:
            raise typer.BadParameter(str(problem), param_hint="--largest") from None
    with progress_bar(TaskProgressColumn()) as progress:
        document = attention.run(sweep, shares(progress)).as_json()
    print_attention(document)
    if out is not None:
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        typer.echo(out)
        typer.echo(draw_attention(document, out.with_suffix(".svg")))


@commands.command(
    "integrals", epilog="Example: python -m benchmarks integrals --quick --out integrals.json"
)
def bench_integrals(
    out: _Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer integrals, seconds.")] = False,
) -> None:
    """Error and time of integrals over ellipses: adaptive, a hundred angles, and ours.

    Expectations of Gaussians under truncated paraboloids in the plane, as in Table 4.1 of Farinhas,
    Visual Attention with Sparse and Continuous Transformations (2021), and how the error falls with
    the number of nodes. One thread; the full run takes about two minutes.
    """
    sweep = integrals.QUICK if quick else integrals.FULL
    _measure(partial(integrals.run, sweep), integrals.listings, out)


@commands.command(
    "continuous", epilog="Example: python -m benchmarks continuous --quick --out continuous.json"
)
def bench_continuous(
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_THREADS, help="Of torch. (Default: as many as torch has.)"),
    ] = None,
    out: _Out = None,
    quick: _Quick = False,
) -> None:
    """Time continuous attention, mixtures and layers as ratios to what they replace.

    Attention over a grid against softmax with the same head, batched EM against scikit-learn, a
    layer on functions against one on tokens. The full run takes about three minutes.
    """
    chosen = continuous.QUICK if quick else continuous.FULL
    sweep = dataclasses.replace(chosen, threads=threads)
    _measure(partial(continuous.run, sweep), continuous.listings, out)


@commands.command(
    "dual", epilog="Example: python -m benchmarks dual --model minilm --text story.txt"
)
def bench_dual(
    model: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="Folder of any BERT, as from_pretrained loads it; needs the extra hf. Without it, "
            "a random layer.",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(dir_okay=False, exists=True, help="What the model reads.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Of the model, from 0. [2]")] = None,
    out: _Out = None,
    quick: _Quick = False,
) -> None:
    """Time the exact estimates of one attention layer against gradient methods.

    All heads and queries of the layer to a duality gap of 1e-8, at several reliabilities. The full
    run takes some minutes, nearly all of them in gradient ascent.
    """
    if (model is None) != (text is None):
        raise typer.BadParameter("--model and --text go together")
    if layer is not None and model is None:
        raise typer.BadParameter("--layer is of a model; give --model and --text as well")
    chosen = dual.QUICK if quick else dual.FULL
    if model is not None and text is not None:
        words, number = text.read_text(encoding="utf-8"), 2 if layer is None else layer
        try:
            layer_of_model = dual.of_model(model, words, number, chosen.tokens)
        except (ImportError, OSError, TypeError, ValueError) as problem:
            raise typer.BadParameter(str(problem)) from None
        chosen = dataclasses.replace(chosen, layer=layer_of_model)
    _measure(partial(dual.run, chosen), dual.listings, out)


@commands.command(
    "structure", epilog="Example: python -m benchmarks structure --quick --out structure.json"
)
def bench_structure(
    out: _Out = None,
    quick: _Quick = False,
) -> None:
    """Time masks, biases, one query and short rows, beside torch's attention or our plain call.

    The full run takes about ten minutes.
    """
    chosen = structure.QUICK if quick else structure.FULL
    _measure(partial(structure.run, chosen), structure.listings, out)


@commands.command(
    "serve",
    epilog="Example: python -m benchmarks serve --model smollm2 --texts wikitext.txt "
    "--out serve.json",
)
def bench_serve(
    model: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="Folder of a Llama-like decoder, as from_pretrained loads it. Without it, only "
            "random scores and a random model.",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(dir_okay=False, exists=True, help="A long text for the model, in UTF-8."),
    ] = None,
    dtype: Annotated[
        ModelDtype, typer.Option(help="Of whole models; attention alone is measured in both.")
    ] = ModelDtype.float32,
    largest: Annotated[
        int | None, typer.Option(min=1, help="Leave longer pasts out. [32768; quick: 1024]")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_THREADS,
            help="Of torch and of the kernels. (Default: as many as torch has.)",
        ),
    ] = None,
    out: _Out = None,
    quick: _Quick = False,
) -> None:
    """Time decoding: one query against cached keys, and whole models token by token.

    `fl.decode` beside torch's attention (SDPA) with random and real scores, then transformers'
    models with its caches and with `fenchel.hf.Cache`. In float32 the random model of a billion
    parameters needs 13 GB of memory at 32,768 tokens; less with --dtype or --largest. The full run
    takes about half an hour.
    """
    if (model is None) != (texts is None):
        raise typer.BadParameter("--model and --texts go together")
    sweep = dataclasses.replace(serve.QUICK if quick else serve.FULL, threads=threads)
    try:
        sweep = serve.chosen(sweep, dtype.torch, largest, model, texts)
    except (ImportError, OSError, TypeError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from None
    for missing in serve.left_out(sweep):
        typer.echo(missing, err=True)
    _measure(partial(serve.run, sweep), serve.listings, out)


@commands.command(
    "models",
    epilog="Example: python -m benchmarks models --transformers transformers --out models.json",
)
def bench_models(
    transformers: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help=f"Checkout of transformers' repository; to get one: {models.CLONE}",
        ),
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="Folder of tests/models; may be repeated. [all]")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Longest time for one class of models.")
    ] = models.SECONDS,
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, callback=_check_parent, help="Write the results as JSON as they come."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep what --out holds, and run the families that it lacks, or those of --family.",
        ),
    ] = False,
) -> None:
    """Convert every model family of transformers, and compare outputs and gradients.

    fenchel:softmax with the model's own attention, fenchel:entmax15 with the package entmax, on the
    tiny models of transformers' own tests, in float64. About half an hour.
    """
    try:
        checkout, known = models.find_families(transformers)
        before = models.read(out) if resume else None
        sweep = models.Sweep(checkout, models.choose(known, family or (), before), seconds)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    with progress_bar() as progress:
        task = progress.add_task("families", total=len(sweep.families))
        document = models.run(
            sweep,
            out,
            before,
            lambda what, done: progress.update(task, description=what, completed=done),
        )
    tell(document, models.listings(document), None)
    if out is not None:
        typer.echo(out)


@commands.command(
    "wasserstein", epilog="Example: python -m benchmarks wasserstein --quick --out wasserstein.json"
)
def bench_wasserstein(
    out: _Out = None,
    quick: _Quick = False,
) -> None:
    """Time Wasserstein distances against POT: on the line, by assignment, between bounds.

    POT's exact solver with its matrix of costs is the measure; needs the extra `transport`. The
    full run takes about a minute.
    """
    chosen = wasserstein.QUICK if quick else wasserstein.FULL
    _measure(partial(wasserstein.run, chosen), wasserstein.listings, out)


commands.command("gpu", epilog=f"Example: {gpu_command.EXAMPLE}")(gpu_command.bench_gpu)


class _Report(Protocol):
    def as_json(self) -> dict[str, Any]: ...


def _measure(
    run: Callable[[Advance], _Report],
    listings: Callable[[dict[str, Any]], Sequence[Listing]],
    out: Path | None,
) -> None:
    """Run, show the tables, write the files."""
    with progress_bar(TaskProgressColumn()) as progress:
        document = run(shares(progress)).as_json()
    tell(document, listings(document), out)


def _timing_table(report: maps.Report) -> Table:
    chosen = report.settings
    size = f"{chosen.length} keys, {chosen.repeats} rounds, {chosen.threads} thread(s)"
    table = Table(title=f"Time relative to torch.softmax ({size})", title_justify="left")
    table.add_column("map")
    table.add_column("rows", justify="right")
    for direction in maps.DIRECTIONS:
        table.add_column(f"{direction}, ratio (min..max)", justify="right")
    pairs = zip(report.timings[::2], report.timings[1::2], strict=True)
    for forward, backward in pairs:
        table.add_row(forward.name, str(forward.rows), str(forward), str(backward))
    return table
