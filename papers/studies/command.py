"""`python -m papers study`: what measures and their distances say about a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TaskProgressColumn
from rich.text import Text

from benchmarks.console import tell
from fenchel.cli.shared import make_folder, progress_bar
from papers.studies.attack import ATTACK, attack

_ROBUSTNESS = (
    "python -m papers study robustness build/models/minilm --text sentences.txt --out build/study"
)
_DEPTH = "python -m papers study depth build/models/minilm --text sentences.txt --out build/study"
_NEGATION = (
    "python -m papers study negation build/models/minilm --data data/negation --out build/study"
)

commands = typer.Typer(no_args_is_help=True, epilog=f"Example: {_ROBUSTNESS}")
commands.command("attack", epilog=f"Example: {ATTACK}")(attack)

_Model = Annotated[str, typer.Argument(help="Folder of a BERT, or its name on the hub.")]
_Out = Annotated[Path, typer.Option(file_okay=False, help="Folder for the JSON and the picture.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of what is drawn.")]


@commands.command("robustness", epilog=f"Example: {_ROBUSTNESS}")
def study_robustness(
    model: _Model,
    text: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="A sentence a line; .tsv: first column."),
    ],
    out: _Out,
    layer: Annotated[int, typer.Option(min=0, help="Counted from 0.")] = 2,
    count: Annotated[int, typer.Option("--sentences", min=1, help="From the start.")] = 100,
    draws: Annotated[int, typer.Option(min=1, help="Choices of keys, a sentence and share.")] = 20,
    seed: _Seed = 0,
) -> None:
    """Leave keys out of attention at random: how far do outputs move, and what is certified?

    Exact W1 between the outputs with 90, 75, 50 and 25 % of the keys, against the bound for the
    worst choice of keys. A hundred sentences take about a minute.
    """
    make_folder(out)
    from fenchel import lens
    from papers import studies

    with _working() as advance:
        texts = lens.sentences(text, count)
        loaded = lens.load(model)
        report = studies.robustness(
            *loaded, texts, layer=layer, draws=draws, seed=seed, advance=advance
        )
    settings = {"model": Path(model).name, "text": text.name, "seed": seed}
    _told({**report.as_json(), **settings}, out)


@commands.command("depth", epilog=f"Example: {_DEPTH}")
def study_depth(
    out: _Out,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a BERT, or its name on the hub. Random stacks alone without."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Its lines 1 and 2 are a pair, 3 and 4, …"),
    ] = None,
    count: Annotated[int, typer.Option("--sentences", min=2, help="From the start.")] = 200,
    layers: Annotated[int, typer.Option(min=1, help="Of the random stacks.")] = 12,
    pairs: Annotated[int, typer.Option(min=1, help="Of inputs to a random stack.")] = 30,
    seed: _Seed = 0,
) -> None:
    """Follow two inputs through the layers: the distance between them, and the spread of each.

    Of pairs of sentences through a model, if one is given, and always of random clouds through
    random stacks: attention alone, with residual and layer norm, with a certified constant. Takes
    under a minute.
    """
    if (model is None) != (text is None):
        raise typer.BadParameter("MODEL and --text go together; without both, random stacks alone")
    make_folder(out)
    from fenchel import lens
    from papers import studies

    part = 1.0 if model is None else 0.5
    sizes = {"layers": layers, "pairs": pairs, "tokens": 16, "width": 16, "seed": seed}
    of_model = None
    with _working() as advance:
        if model is not None and text is not None:
            texts = lens.sentences(text, count)
            loaded = lens.load(model)
            name = Path(model).name
            of_model = studies.depth_of_model(
                *loaded, texts, name=name, advance=lambda share: advance(0.5 * share)
            )
        stacks = studies.depth_of_stacks(**sizes, advance=lambda share: advance(part * share))
    document = studies.depth_document(of_model, stacks)
    text_name = None if text is None else text.name
    _told({**document, "text": text_name, "settings": sizes}, out)


@commands.command("negation", epilog=f"Example: {_NEGATION}")
def study_negation(
    model: _Model,
    out: _Out,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with lama/*.jsonl and neg-nli/*.tsv. [$FENCHEL_DATA/negation]"),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Of each source, at most.")] = 300,
    seed: _Seed = 0,
) -> None:
    """Does a "not" move a sentence's embeddings further than a word that changes nothing?

    Exact W1 between the tokens of a sentence and of its negation, layer by layer, against neutral
    words at the same place and against other sentences. The full run takes some minutes.
    """
    make_folder(out)
    from fenchel import lens
    from papers import studies

    with _working() as advance:
        facts = studies.read_facts(studies.negation_folder(data))
        cases = studies.drawn_cases(facts, pairs, seed)
        report = studies.negation(*lens.load(model), cases, advance=advance)
    _told({**report.as_json(), "model": Path(model).name, "seed": seed}, out)


@contextmanager
def _working() -> Iterator[Callable[[float], object]]:
    """A bar that is told of shares of the work; what goes wrong is said without a traceback."""
    try:
        with progress_bar(TaskProgressColumn()) as progress:
            task = progress.add_task("loading", total=1.0)
            yield lambda share: progress.update(task, description="measuring", advance=share)
    except (ImportError, OSError, TypeError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from None


def _told(document: dict[str, Any], out: Path) -> None:
    """Tables, what they say, and the files: study_NAME.json and study_NAME.svg."""
    from papers import studies
    from papers.studies import pictures as picture

    tell({"warning": ""}, picture.listings(document), None)
    console = Console()
    for line in picture.findings(document):
        console.print(Text(f"- {line}"), soft_wrap=False)
    path = out / f"study_{document['study']}.json"
    typer.echo(studies.write(document, path))
    typer.echo(picture.save_picture(document, path.with_suffix(".svg")))
