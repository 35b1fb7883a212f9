"""`python -m papers claims`: the papers' results, computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import machine
from benchmarks.extras import INSTALL
from fenchel.cli.shared import check_folder, progress_bar
from fenchel.lens.files import write_whole
from papers import claims as book
from papers.claims import PAPERS, Claim, Record, Verdict
from papers.claims.listed import find

EXAMPLE = "python -m papers claims --paper D --html build/ledger.html"

_COLOURS = {
    Verdict.CONFIRMED: "green",
    Verdict.CORRECTED: "cyan",
    Verdict.REFUTED: "yellow",
    Verdict.NOT_CHECKABLE: "dim",
    Verdict.DEFINITION: "dim",
    Verdict.CONTRADICTED: "bold red",
}
_RESULTS = Path("papers/results/experiments")
_INSTALLED_AS = {"ot": "POT", "sklearn": "scikit-learn"}


def claims(
    paper: Annotated[
        list[str] | None, typer.Option(help="D, M, L or F; may be repeated. (Default: all)")
    ] = None,
    id: Annotated[
        list[str] | None,
        typer.Option("--id", help="An entry, as D-E13 or L-5; may be repeated. (Default: all)"),
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Search longer, in larger cases.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 6, help="The first of five.")] = 0,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also as JSON; - prints it alone.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also as a page with pictures.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help=f"Folder of stored training runs. (Default: {_RESULTS}, where there is one)",
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Only name the entries.")] = False,
) -> None:
    """Every result of the papers, computed with this library, with what came out.

    CONFIRMED, CONFIRMED WITH CORRECTION, REFUTED (with a counterexample), NOT CHECKABLE (with the
    check of consistency that was run) or DEFINITION. CONTRADICTED, and exit code 1: a computation
    does not bear out what the ledger says. Needs the extra `papers`.
    """
    chosen = _chosen(paper or [], id or [])
    _check_outputs(as_json, html)
    if only_list:
        for claim in chosen:
            typer.echo(f"{claim.id:<24} {claim.statement}")
        return
    if results is None and _RESULTS.is_dir():
        results = _RESULTS
    records, missing = [], {}
    with progress_bar() as progress, machine.one_thread():
        task = progress.add_task("", total=len(chosen))
        for claim in chosen:
            progress.update(task, description=claim.id)
            try:
                records.append(book.run(claim, seed=seed, slow=slow, results=results))
            except ImportError as package:
                name = package.name or str(package)  # its words, where it names none
                missing[claim.id] = _INSTALLED_AS.get(name, name)
            progress.advance(task)
    _tell(records, as_json, html)
    if missing:
        names = ", ".join(sorted(set(missing.values())))
        told = f"not computed, for want of {names}: {', '.join(missing)}; {INSTALL}"
        typer.echo(told, err=True)
    if missing or any(record.verdict is Verdict.CONTRADICTED for record in records):
        raise typer.Exit(1)


def _check_outputs(as_json: str | None, html: Path | None) -> None:
    """Before the work, so that nobody waits a minute for an error."""
    if as_json is not None and as_json != "-":
        path = Path(as_json)
        if not as_json or path.is_dir():
            raise typer.BadParameter(f"{as_json!r} is no file; give one, or -", param_hint="--json")
        check_folder(path.parent, "--json")
        if html is not None and path.absolute() == html.absolute():
            raise typer.BadParameter("--json and --html name the same file")
    if html is not None:
        check_folder(html.parent, "--html")
        try:
            import papers.claims.report.page  # noqa: F401
        except ModuleNotFoundError as package:
            raise typer.BadParameter(f"--html needs {package.name}; {INSTALL}") from None


def _chosen(papers: list[str], ids: list[str]) -> list[Claim]:
    """In the order of the ledger; with both, what is of one of the papers or of those ids."""
    wanted = {paper.upper() for paper in papers}
    unknown = wanted - PAPERS.keys()
    if unknown:
        known = "; ".join(f"{letter}: {name}" for letter, name in PAPERS.items())
        raise typer.BadParameter(
            f"no paper {', '.join(sorted(unknown))}; there is {known}", param_hint="--paper"
        )
    try:
        named = {find(each).id for each in ids}
    except KeyError as problem:
        raise typer.BadParameter(problem.args[0], param_hint="--id") from None
    every = list(book.ledger().values())
    if not wanted and not named:
        return every
    return [claim for claim in every if claim.id in named or claim.id[0] in wanted]


def _tell(records: list[Record], as_json: str | None, html: Path | None) -> None:
    document = json.dumps([record.as_json() for record in records], indent=1, ensure_ascii=False)
    if as_json == "-":
        typer.echo(document)
    else:
        _print(records)
        if as_json is not None:
            write_whole(Path(as_json), (document + "\n").encode("utf-8"))
            typer.echo(as_json)
    if html is not None:
        from papers.claims.report import page

        typer.echo(page.write(html, records), err=as_json == "-")


def _print(records: list[Record]) -> None:
    console = Console()
    for paper, name in PAPERS.items():
        of_paper = [record for record in records if record.id[0] == paper]
        if of_paper:
            console.print(Text(f"{paper} · {name}", style="italic"), soft_wrap=True)
            console.print(_table(of_paper))
    for record in records:
        if len(records) <= 3 or record.verdict in (Verdict.REFUTED, Verdict.CONTRADICTED):
            _explain(console, record)
    counts = {verdict: sum(r.verdict is verdict for r in records) for verdict in Verdict}
    told = (
        ", ".join(f"{n} {verdict.value}" for verdict, n in counts.items() if n) or "none computed"
    )
    seconds = sum(record.seconds for record in records)
    console.print(Text(f"{told}; {seconds:.0f} s"), soft_wrap=True)


def _table(records: list[Record]) -> Table:
    """Statements are folded, so that nothing is cut on a narrow terminal."""
    table = Table()
    table.add_column("id", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    table.add_column("statement", ratio=1)
    table.add_column("figure", justify="right", overflow="fold")
    table.add_column("must be", justify="right", overflow="fold")
    for record in records:
        main = record.figure
        verdict = Text(record.verdict.value, style=_COLOURS[record.verdict])
        figure = "" if main is None else f"{main.figure:.4g}"
        bound = "" if main is None else ("not " if main.as_printed else "") + main.range()
        table.add_row(record.id, verdict, Text(record.statement), figure, Text(bound))
    return table


def _explain(console: Console, record: Record) -> None:
    title = Text(f"{record.id} ", style="bold")
    title.append(record.verdict.value, style=_COLOURS[record.verdict])
    console.print(title)
    lines = [("counterexample", record.counterexample), ("holds instead", record.correction)]
    lines += [("", note) for note in record.notes]
    for label, text in lines:
        if text:
            console.print(Text(f"  {label}: {text}" if label else f"  {text}"), soft_wrap=True)
    for check in record.checks:
        mark = "✓" if check.bears_out else "✗"
        printed = "printed " if check.as_printed else ""
        holds = f": {'holds' if check.inside else 'does not hold'}" if check.as_printed else ""
        told = f"  {mark} {check.what}: {check.figure:.6g} ({printed}{check.range()}){holds}"
        console.print(Text(told), soft_wrap=True)
    console.print()
