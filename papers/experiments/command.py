"""`python -m papers experiment`: the papers' tables, trained here, a queue of runs at a time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from benchmarks.console import shares, tell
from benchmarks.extras import INSTALL
from benchmarks.tables import Listing
from fenchel.cli.failures import explain_failures
from fenchel.cli.shared import check_folder, make_folder, progress_bar
from fenchel.lens.launcher import rank

if TYPE_CHECKING:
    from papers.experiments.data.images import ImageData
    from papers.experiments.data.questions import QuestionData
    from papers.experiments.loop import Study
    from papers.experiments.runs import Job

_VIT = "python -m papers experiment vit --preset smoke --out build/experiments"
_VQA = "python -m papers experiment vqa --preset smoke --out build/experiments"
_THROUGHPUT = "python -m papers experiment throughput --quick --out steps.json"
_PAGE = (
    "python -m papers experiment page --results papers/results/experiments --out docs/results.md"
)
_SAME = "The same command goes on."
_WITHOUT = "The same command without --again goes on."
_ASCII = str.maketrans(
    {
        "±": "+-",
        "−": "-",
        "–": "-",
        "·": ".",
        "λ": "lambda",
        "γ": "gamma",
        "¹": "^1",
        "²": "2",
        "…": "...",
    }
)

commands = typer.Typer(no_args_is_help=True, epilog=f"Example: {_VIT}")

_Option = typer.Option
_Preset = Annotated[str, _Option(help="smoke (a minute), cpu (hours on 2 cores), paper (GPUs).")]
_Out = Annotated[Path, _Option(file_okay=False, help="Folder for results and checkpoints.")]
_Data = Annotated[
    Path | None, _Option(help="Folder with the data. (Default: $FENCHEL_DATA, or data)")
]
_Sets = Annotated[str | None, _Option(help="Data sets, by commas. (Default: the preset's)")]
_Attention = Annotated[
    str | None, _Option("--attention", help="By commas. (Default: the preset's)")
]
_Seeds = Annotated[int | None, _Option(min=1, max=1000, help="How many. (Default: the preset's)")]
_Resume = Annotated[
    bool,
    _Option("--resume/--again", help="Go on with what is in --out, or make it all again."),
]
_Tables = Annotated[bool, _Option("--tables", help="Only the tables of what is stored.")]
_Steps = Annotated[
    int | None, _Option("--first-steps", min=1, help="Runs of so many steps at most, stored apart.")
]


@commands.command("vit", epilog=f"Example: {_VIT}")
def vit(
    context: typer.Context,
    out: _Out,
    preset: _Preset = "smoke",
    data: _Data = None,
    sets: _Sets = None,
    attention: _Attention = None,
    seeds: _Seeds = None,
    resume: _Resume = True,
    first_steps: _Steps = None,
    tables: _Tables = False,
) -> None:
    """Vision transformers whose class token looks by softmax, transport, entmax, …

    Tables 1 and 2 of the paper on transport attention: test accuracies over
    seeds with 95 % intervals, and differences between runs of the same seed.
    A run that is done is a JSON file in --out and is not made again; several
    commands at once share the queue. Attentions: softmax (ViT in the tables),
    transport (OT-ViT), transport-head (with ViT's own scale), entmax, sparsemax,
    continuous. Data sets: toy (smoke), fashion-mnist, cifar-10 (cpu, paper),
    cifar-100 (paper). The tables are of all that is stored, of the data sets in
    --sets where it is given.

    Several processes: put accelerate launch --multi_gpu --num_processes 2 -m
    or torchrun --nproc-per-node 2 -m before the command.
    """
    with explain_failures(context, lambda: _SAME if resume else _WITHOUT):
        from papers.experiments.runs import of_first
        from papers.experiments.vit import presets
        from papers.experiments.vit.tables import listings

        chosen = _one_of(presets.PRESETS, preset, "--preset")
        queue = _Queue(out, chosen.threads, again=not resume)
        names = _sets(sets, chosen.epochs, preset)
        _check_tables(tables, attention, seeds, resume)
        if not tables:
            asked = _parts(attention, "--attention") or chosen.attentions
            for loaded in [presets.load(name, _folder(data)) for name in names]:
                jobs = presets.jobs(preset, loaded, asked, seeds or chosen.seeds)
                queue.work(jobs, first_steps, partial(presets.study, data=loaded), loaded)
        queue.show(presets.STUDY, of_first(preset, first_steps), names if sets else [], listings)


@commands.command("vqa", epilog=f"Example: {_VQA}")
def vqa(
    context: typer.Context,
    out: _Out,
    preset: _Preset = "smoke",
    data: _Data = None,
    sets: _Sets = None,
    attention: _Attention = None,
    seeds: _Seeds = None,
    resume: _Resume = True,
    first_steps: _Steps = None,
    tables: _Tables = False,
) -> None:
    """Questions about pictures, read by discrete or continuous attention.

    Tables 6.2 to 6.4 of the thesis on continuous attention, with a network that
    sees the question alone beside them. Attentions: question-only, softmax,
    entmax, sparsemax, continuous-softmax-N, continuous-sparsemax-N (N
    functions, a square number), K-mca-N (K modes). Data sets: shapes is
    generated; easy is the package easy-vqa; daquar and vqa-v2 are read from
    --data. Runs are stored and shared as in python -m papers experiment vit.
    """
    with explain_failures(context, lambda: _SAME if resume else _WITHOUT):
        from papers.experiments.runs import of_first
        from papers.experiments.vqa import presets
        from papers.experiments.vqa.tables import listings

        chosen = _one_of(presets.PRESETS, preset, "--preset")
        queue = _Queue(out, chosen.threads, again=not resume)
        names = _sets(sets, chosen.courses, preset)
        _check_tables(tables, attention, seeds, resume)
        if not tables:
            asked = _parts(attention, "--attention")
            with queue.errors.status(f"loading {', '.join(names)}"):
                every = [presets.load(name, _folder(data), out / "features") for name in names]
            for loaded in every:
                wanted = asked or chosen.courses[loaded.name].attentions()
                jobs = presets.jobs(preset, loaded, wanted, seeds or chosen.seeds)
                queue.work(jobs, first_steps, partial(presets.study, data=loaded), loaded)
        queue.show(presets.STUDY, of_first(preset, first_steps), names if sets else [], listings)


@commands.command("page", epilog=f"Example: {_PAGE}")
def page(
    context: typer.Context,
    out: Annotated[Path, _Option(dir_okay=False, help="Markdown file to write.")],
    results: Annotated[Path, _Option(file_okay=False, exists=True, help="Folder of the runs.")],
    figures: Annotated[Path, _Option(file_okay=False, help="Folder for pictures.")] = Path(
        "build/results"
    ),
    data: _Data = None,
) -> None:
    """The page of results: every table, its command, seeds and cost, and whether claims held.

    Of the presets cpu and paper. Beside the page comes one picture, of where
    attentions looked in Shapes-VQA; --figures gets learning curves and the maps
    of every data set that is generated, installed or found in --data.
    """
    with explain_failures(context, lambda: _SAME):
        import torch

        from papers.experiments.report.figures import publish
        from papers.experiments.vqa.presets import PRESETS, load

        threads = PRESETS["cpu"].threads  # features that are learnt here are those of the runs
        if threads is not None:
            torch.set_num_threads(threads)
        make_folder(out.parent)
        loaded = cache(lambda name: load(name, _folder(data), results / "features"))
        with Console(stderr=True).status("writing the page and drawing its pictures"):
            paths = publish(results, out, figures, loaded, partial(typer.echo, err=True))
        typer.echo("\n".join(str(path) for path in paths))


class _Queue:
    """Runs, one after another; only the main process talks."""

    def __init__(self, out: Path, threads: int | None, again: bool) -> None:
        import torch

        self.out, self.again, self.began = out, again, time.time()
        self.failed: list[str] = []
        self.main = rank() == 0
        self.errors = Console(stderr=True, soft_wrap=True, quiet=not self.main)
        if threads is not None:
            torch.set_num_threads(threads)

    def work(
        self,
        jobs: Sequence[Job],
        first_steps: int | None,
        study: Callable[[Job], Study],
        data: ImageData | QuestionData,
    ) -> None:
        """One that diverges does not stop the others; it is told again in the end."""
        from papers.experiments.loop import Diverged
        from papers.experiments.processes import Busy
        from papers.experiments.runs import carry_out, is_written_since, shortened, stored

        if first_steps is not None:
            jobs = [shortened(job, first_steps) for job in jobs]

        def done(job: Job) -> bool:
            """Again: by a command beside this one."""
            if self.again:
                return is_written_since(job, self.out, self.began)
            return stored(job, self.out) is not None

        note = f" ({data.note})" if data.note else ""
        self.say(f"{data.name}{note}: {len(jobs)} runs, {sum(map(done, jobs))} of them stored")
        for number, job in enumerate(jobs, 1):
            if done(job):  # asked again: another process may have made it meanwhile
                continue
            with self._bar(f"{number}/{len(jobs)} {job.name}", job.training.steps) as advance:
                try:
                    document = carry_out(
                        job,
                        study(job),
                        self.out,
                        note=data.note,
                        again=self.again,
                        advance=advance,
                        say=self.say,
                    )
                except Busy:
                    self.say(f"{job.name}: another process is at it")
                    continue
                except Diverged as problem:
                    self.failed.append(f"{job.name}: {problem}")
                    self.say(self.failed[-1])
                    continue
            pairs = document["scores"].items()
            scores = ", ".join(f"{name} {100 * value:.2f} %" for name, value in pairs)
            self.say(f"{job.name}: {scores} ({document['cost']['seconds']:.0f} s)")

    def show(
        self,
        study: str,
        preset: str,
        sets: Sequence[str],
        listings: Callable[[Sequence[dict[str, Any]]], list[Any]],
    ) -> None:
        """Of these data sets; of none: of all that is stored."""
        from papers.experiments.tables import read_results

        every = read_results(self.out / study / preset) if self.main else []
        documents = [one for one in every if not sets or one["settings"]["data"] in sets]
        if documents:
            tell({"warning": None}, [_printable(one) for one in listings(documents)], None)
        if self.failed:
            told = "; ".join(self.failed)
            raise ArithmeticError(f"{len(self.failed)} of the runs failed. {told}")
        if self.main and not documents:
            asked = f" on {', '.join(sets)}" if sets else ""
            there = sorted({f"{preset} on {one['settings']['data']}" for one in every}) or sorted(
                path.name for path in (self.out / study).glob("*") if path.is_dir()
            )
            others = f"; there are runs of {', '.join(there)}" if there else ""
            raise ValueError(f"no run of {study} {preset}{asked} is stored in {self.out}{others}")

    def say(self, text: str) -> None:
        self.errors.print(Text(_letters(text, sys.stderr)))

    def _bar(self, title: str, steps: int) -> Any:
        if not self.errors.is_terminal or not self.main:
            self.say(title)
            return nullcontext(partial(self._log, steps))
        return _Bar(title, steps, self.errors)

    def _log(self, steps: int, step: int, numbers: dict[str, float]) -> None:
        """A line at each evaluation but the last, which is told with the run."""
        scores = {name: value for name, value in numbers.items() if name not in ("loss", "rate")}
        if scores and step < steps:
            told = ", ".join(f"{name} {100 * value:.2f} %" for name, value in scores.items())
            self.say(f"  step {step:,} of {steps:,}: {told}")


class _Bar:
    def __init__(self, title: str, steps: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
        self.progress = Progress(*columns, *times, console=console, transient=True)
        self.task = self.progress.add_task(title, total=steps)
        self.title = title

    def __enter__(self) -> Callable[[int, dict[str, float]], object]:
        self.progress.start()
        return self.advance

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, step: int, numbers: dict[str, float]) -> None:
        shown = f"{self.title} loss {numbers['loss']:.3f}"
        self.progress.update(self.task, completed=step, description=shown)


def _folder(data: Path | None) -> Path:
    """An empty variable is as good as none."""
    return data if data is not None else Path(os.environ.get("FENCHEL_DATA") or "data")


def _sets(text: str | None, known: dict[str, Any], preset: str) -> list[str]:
    """All are looked up before the first of them is trained on."""
    names = _parts(text, "--sets") or list(known)
    for name in names:
        _one_of(known, name, f"--sets of --preset {preset}")
    return names


def _check_tables(tables: bool, attention: str | None, seeds: int | None, resume: bool) -> None:
    """What chooses runs would be ignored."""
    given = {"--attention": attention, "--seeds": seeds, "--again": None if resume else True}
    extra = [name for name, value in given.items() if value is not None]
    if tables and extra:
        raise ValueError(f"--tables shows every run that is stored: leave out {', '.join(extra)}")


def _parts(text: str | None, option: str) -> list[str]:
    """None given: none; but one that names nothing is a slip."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{option} names nothing, got {text!r}; leave it out for the preset's")
    return list(dict.fromkeys(parts))


def _one_of(known: Any, name: str, option: str) -> Any:
    if name not in known:
        raise ValueError(f"{option} must be of {', '.join(known)}, got {name!r}")
    return known[name]


def _printable(listing: Listing) -> Listing:
    """In the letters that standard output has, without empty columns."""
    from papers.experiments.tables import filled

    listing = filled(listing)
    rows = [[_letters(cell) for cell in row] for row in listing.rows]
    return Listing(_letters(listing.title), [_letters(name) for name in listing.header], rows)


def _letters(text: str, stream: TextIO | None = None) -> str:
    """stream: None for standard output, which may be closed."""
    try:
        text.encode(getattr(stream or sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode("ascii", "replace").decode()
    return text


@commands.command("throughput", epilog=f"Example: {_THROUGHPUT}")
def experiment_throughput(
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also write the figures as JSON, and a picture (SVG)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, seconds.")] = False,
) -> None:
    """Time a training step of the experiments' networks with each attention against softmax.

    Random inputs of the data's shapes, one thread, processor time; needs the extra `papers`.
    The full run takes some minutes, most of them with the papers' sizes.
    """
    if out is not None:
        check_folder(out.parent)
    try:
        from papers.experiments import throughput
    except ModuleNotFoundError as missing:
        raise typer.BadParameter(f"{missing.name} is missing; {INSTALL}") from None
    chosen = throughput.QUICK if quick else throughput.FULL
    with progress_bar(TaskProgressColumn()) as progress:
        report = throughput.run(chosen, shares(progress))
    document = report.as_json()
    tell(document, throughput.listings(document), out)
