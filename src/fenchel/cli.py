"""The `fenchel` command: what is installed here, the tour, the benchmarks."""

from __future__ import annotations

import dataclasses
import json
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from fenchel import __version__
from fenchel.bench import attention, attention_summary, continuous, dual, integrals, machine, maps
from fenchel.bench.tables import Listing

_LENS_EXAMPLE = "fenchel lens deviation build/models/minilm --text sentences.txt --out build/lens"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    epilog="Example: fenchel tour --out build/tour",
)
bench = typer.Typer(no_args_is_help=True, epilog="Example: fenchel bench maps --quick")
app.add_typer(bench, name="bench", help="Times on this machine, as ratios to plain torch.")
lens = typer.Typer(no_args_is_help=True, epilog=f"Example: {_LENS_EXAMPLE}")
app.add_typer(lens, name="lens", help="Audits of pretrained models.")


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
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML page about every regulariser, computed here, and print its path.

    The page needs no network. It takes under a minute; the derivatives and the timings are the
    slow part.
    """
    _make_folder(out)
    from fenchel.report import chapters, page  # matplotlib and jinja2 load only for this command
    from fenchel.report.chapter import Tour

    order = chapters.discover()
    written = []
    with _progress() as progress:
        task = progress.add_task("", total=len(order))
        for module in order:
            progress.update(task, description=module.__name__.rpartition(".")[2])
            written.append(module.chapter(Tour(seed=seed)))
            progress.advance(task)
    path = page.write(out / "tour.html", written, seed=seed)
    typer.echo(path)
    if open_page:
        webbrowser.open(path.resolve().as_uri())


@bench.command("maps", epilog="Example: fenchel bench maps --rows 256 --out maps.json")
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
        int, typer.Option(min=1, help="Above one only on an idle machine: waits go unnoticed.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the figures as JSON.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, seconds.")] = False,
) -> None:
    """Time every map, forward and forward+backward, as a ratio to torch.softmax."""
    if out is not None:
        _check_folder(out.parent)
    given = {"rows": rows, "length": length, "repeats": repeats}
    chosen = {name: value for name, value in given.items() if value is not None}
    start = maps.QUICK if quick else maps.Settings()
    settings = dataclasses.replace(start, threads=threads, **chosen)
    with _progress() as progress:
        task = progress.add_task("timing", total=maps.steps(settings))
        report = maps.run(settings, lambda: progress.advance(task))
    Console().print(_timing_table(report))
    if report.warning:
        Console(stderr=True).print(Text(report.warning, style="yellow"))
    if out is not None:
        out.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        typer.echo(out)


@bench.command("attention", epilog="Example: fenchel bench attention --quick --out attention.json")
def bench_attention(
    largest: Annotated[
        int | None, typer.Option(min=1, help="Leave longer sequences out. [16384; quick: 2048]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of torch and of the kernels. [as many as torch has]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also write the figures as JSON, and a picture (SVG)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences, a minute.")] = False,
) -> None:
    """Time attention, forward and forward+backward, as a ratio to torch's own (SDPA).

    Ours at several alphas and deviations of the scores, plain softmax, the entmax package and
    FlexAttention in the same process, and the peak memory of each in a process of its own. The
    full sweep takes about ten minutes on two idle cores.
    """
    if out is not None:
        _check_folder(out.parent)
    sweep = dataclasses.replace(attention.QUICK if quick else attention.FULL, threads=threads)
    if largest is not None:
        try:
            sweep = sweep.up_to(largest)
        except ValueError as problem:
            raise typer.BadParameter(str(problem), param_hint="--largest") from None
    with _progress(TaskProgressColumn()) as progress:
        task = progress.add_task("timing", total=1.0)
        report = attention.run(
            sweep, lambda what, share: progress.update(task, description=what, advance=share)
        )
    document = report.as_json()
    _print_attention(document)
    if out is not None:
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        typer.echo(out)
        typer.echo(_attention_picture(document, out.with_suffix(".svg")))


@bench.command("integrals", epilog="Example: fenchel bench integrals --quick --out integrals.json")
def bench_integrals(
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also write the figures as JSON, and a picture (SVG)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer integrals, seconds.")] = False,
) -> None:
    """Error and time of integrals over ellipses: adaptive, a hundred angles, and ours.

    Expectations of Gaussians under truncated paraboloids in the plane, as in Table 4.1 of Farinhas,
    Visual Attention with Sparse and Continuous Transformations (2021), and how the error falls with
    the number of nodes. One thread; the full run takes about two minutes.
    """
    if out is not None:
        _check_folder(out.parent)
    sweep = integrals.QUICK if quick else integrals.FULL
    with _progress(TaskProgressColumn()) as progress:
        report = integrals.run(sweep, _shares(progress))
    document = report.as_json()
    _tell(document, integrals.listings(document), out)


@bench.command(
    "continuous", epilog="Example: fenchel bench continuous --quick --out continuous.json"
)
def bench_continuous(
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of torch. [as many as torch has]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also write the figures as JSON, and a picture (SVG)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, seconds.")] = False,
) -> None:
    """Time continuous attention, mixtures and layers as ratios to what they replace.

    Attention over a grid against softmax with the same head, batched EM against scikit-learn, a
    layer on functions against one on tokens. The full run takes about three minutes.
    """
    if out is not None:
        _check_folder(out.parent)
    chosen = continuous.QUICK if quick else continuous.FULL
    with _progress(TaskProgressColumn()) as progress:
        report = continuous.run(dataclasses.replace(chosen, threads=threads), _shares(progress))
    document = report.as_json()
    _tell(document, continuous.listings(document), out)


@bench.command("dual", epilog="Example: fenchel bench dual --model minilm --text story.txt")
def bench_dual(
    model: Annotated[
        Path | None,
        typer.Option(file_okay=False, exists=True, help="Folder of a BERT. [a random layer]"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(dir_okay=False, exists=True, help="What the model reads.")
    ] = None,
    layer: Annotated[int, typer.Option(min=0, help="Of the model.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also write the figures as JSON, and a picture (SVG)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, seconds.")] = False,
) -> None:
    """Time the exact estimates of one attention layer against gradient methods.

    All heads and queries of the layer to a duality gap of 1e-8, at several reliabilities. The full
    run takes some minutes, nearly all of them in gradient ascent.
    """
    if out is not None:
        _check_folder(out.parent)
    if (model is None) != (text is None):
        raise typer.BadParameter("--model and --text go together")
    chosen = dual.QUICK if quick else dual.FULL
    if model is not None and text is not None:
        made = dual.of_model(model, text.read_text(encoding="utf-8"), layer, chosen.tokens)
        chosen = dataclasses.replace(chosen, layer=made)
    with _progress(TaskProgressColumn()) as progress:
        report = dual.run(chosen, _shares(progress))
    document = report.as_json()
    _tell(document, dual.listings(document), out)


@lens.command("deviation", epilog=f"Example: {_LENS_EXAMPLE}")
def lens_deviation(
    model: Annotated[str, typer.Argument(help="Folder of a BERT or T5, or its name on the hub.")],
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

    Writes deviations.json, adding to what other models or kinds of attention left there. A decoder
    is given the sentence itself, moved on by one. Deviations depend on the templates' scaling.
    """
    _make_folder(out)
    from fenchel.lens import runs
    from fenchel.report import deviations as picture

    try:
        with _progress(TaskProgressColumn()) as progress:
            task = progress.add_task("loading", total=1.0)
            settings = runs.Settings(model, text, count, attention_kind, scaling)
            run = runs.run(
                settings, lambda share: progress.update(task, description="solving", advance=share)
            )
    except (ImportError, OSError, TypeError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from None
    _tell({"warning": run.warning}, [picture.listing(run.document)], None)
    typer.echo(runs.add(run.document, out / "deviations.json"))
    for path in picture.save_all(run.deviations, out) if pictures else ():
        typer.echo(path)


def _shares(progress: Progress) -> Callable[[str, float], object]:
    task = progress.add_task("timing", total=1.0)
    return lambda what, share: progress.update(task, description=what, advance=share)


def _tell(document: dict[str, Any], listings: Sequence[Listing], out: Path | None) -> None:
    """Tables, the warning, and the files where they are wanted."""
    console = Console()
    for listing in listings:
        table = Table(title=Text(listing.title), title_justify="left")
        for number, name in enumerate(listing.header):
            table.add_column(name, justify="right" if number else "left")
        for row in listing.rows:
            table.add_row(*(Text(cell) for cell in row))  # Text: brackets are not markup
        console.print(table)
    if document["warning"]:
        Console(stderr=True).print(Text(document["warning"], style="yellow"))
    if out is not None:
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        typer.echo(out)
        typer.echo(_bench_picture(document, out.with_suffix(".svg")))


def _bench_picture(document: dict[str, Any], path: Path) -> str:
    try:
        from fenchel.report.measured import save_picture
    except ModuleNotFoundError as missing:
        return f'no picture: {missing.name} is missing; pip install -c constraints.txt ".[report]"'
    return str(save_picture(document, path))


def _print_attention(document: dict[str, Any]) -> None:
    console = Console()
    for direction in maps.DIRECTIONS:
        console.print(_attention_table(document, direction))
    for table in (_row_map_table(document), _memory_table(document)):
        if table.row_count:
            console.print(table)
    for note in attention_summary.notes([*document["results"], *document["memory"]]):
        console.print(Text(note, style="dim"))
    if document["warning"]:
        Console(stderr=True).print(Text(document["warning"], style="yellow"))


def _attention_table(document: dict[str, Any], direction: str) -> Table:
    entries = document["results"]
    sizes = attention_summary.sizes_of(entries)
    title = f"Time relative to SDPA, {direction} ({document['settings']['threads']} thread(s))"
    table = Table("tokens", title=title, title_justify="left")
    for n in sizes:
        table.add_column(str(n), justify="right", no_wrap=True)
    for row in attention_summary.rows(entries):
        cells = [attention_summary.cell(entries, row, n, direction) for n in sizes]
        style = "bold" if row.ours else ""
        table.add_row(Text(str(row), style=style), *cells)
    return table


def _row_map_table(document: dict[str, Any]) -> Table:
    table = Table("map", "rows x keys", "direction", "ratio", title_justify="left")
    table.title = "Maps of rows, time relative to torch.softmax"
    for entry in document["maps"]:
        size = f"{entry['rows']} x {entry['length']}"
        shown = entry["error"] or attention_summary.digits(entry["ratio"])
        table.add_row(entry["method"], size, entry["direction"], shown)
    return table


def _memory_table(document: dict[str, Any]) -> Table:
    table = Table("attention", "tokens", "MiB", "to SDPA", title_justify="left")
    table.title = "Peak memory beyond the inputs, forward+backward"
    for entry in document["memory"]:
        extra, ratio = entry["extra_bytes"], entry["ratio"]
        shown = "–" if extra is None else f"{extra / 2**20:.0f}"
        relative = "–" if ratio is None else attention_summary.digits(ratio)
        table.add_row(entry["method"], str(entry["n"]), shown, relative)
    return table


def _attention_picture(document: dict[str, Any], path: Path) -> str:
    try:
        from fenchel.report.chapters.attention import save_picture
    except ModuleNotFoundError as missing:
        return f'no picture: {missing.name} is missing; pip install -c constraints.txt ".[report]"'
    return str(save_picture(document, path))


def _check_folder(folder: Path) -> None:
    """Before the work; a folder that is not there is more often misspelt than wanted."""
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}; make it first", param_hint="--out")


def _make_folder(folder: Path) -> None:
    """Before the work, so that nobody waits a minute for an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise typer.BadParameter(f"cannot make the folder {folder}: {problem.strerror}") from None


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


def _progress(count: ProgressColumn | None = None) -> Progress:
    """On standard error, so that standard output holds only the result."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), count or MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
