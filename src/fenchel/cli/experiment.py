"""`fenchel experiment`: the papers' tables, trained here, a queue of runs at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fenchel.cli.failures import explained
from fenchel.cli.shared import tell

if TYPE_CHECKING:
    from fenchel.experiments.loop import Study
    from fenchel.experiments.runs import Job

_VIT = "fenchel experiment vit --preset smoke --out build/experiments"
_VQA = "fenchel experiment vqa --preset smoke --out build/experiments"
_PAGE = "fenchel experiment page --results results/experiments --out docs/results.md"
_SAME = "The same command goes on."

commands = typer.Typer(no_args_is_help=True, epilog=f"Example: {_VIT}")

_Option = typer.Option
_Preset = Annotated[str, _Option(help="smoke (seconds), cpu (2 cores), paper (GPUs).")]
_Out = Annotated[Path, _Option(file_okay=False, help="Folder for results and checkpoints.")]
_Data = Annotated[Path | None, _Option(help="Folder with the data. (Default: $FENCHEL_DATA)")]
_Sets = Annotated[str | None, _Option(help="Data sets, by commas. (Default: the preset's)")]
_Attention = Annotated[
    str | None, _Option("--attention", help="By commas. (Default: the preset's)")
]
_Seeds = Annotated[int | None, _Option(min=1, help="How many. (Default: the preset's)")]
_Resume = Annotated[
    bool,
    _Option("--resume/--again", help="Go on with what is in --out, or make it all again."),
]
_Tables = Annotated[bool, _Option("--tables", help="Only the tables of what is stored.")]
_Steps = Annotated[
    int | None, _Option("--first-steps", min=1, help="Only the first steps of each run.")
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
    commands at once share the queue. Data: fashion-mnist, cifar-10, cifar-100.

    Several processes: put accelerate launch --multi_gpu --num_processes 2 -m
    or torchrun --nproc-per-node 2 -m before the command.
    """
    with explained(context, lambda: _SAME):
        from fenchel.experiments.runs import of_first, shortened
        from fenchel.experiments.vit import presets
        from fenchel.experiments.vit.tables import listings

        own = _one_of(presets.PRESETS, preset, "--preset")
        queue = _Queue(out, own.threads, again=not resume)
        if not tables:
            for name in _parts(sets) or list(own.epochs):
                _one_of(own.epochs, name, "--sets")
                loaded = presets.load(name, _folder(data))
                wanted = _parts(attention) or own.attentions
                jobs = presets.jobs(preset, loaded, wanted, seeds or own.seeds)
                if first_steps is not None:
                    jobs = [shortened(job, first_steps) for job in jobs]
                queue.work(jobs, partial(presets.study, data=loaded), loaded.note)
        queue.show(presets.STUDY, of_first(preset, first_steps), listings)


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
    functions), K-mca-N (K modes). Data sets: shapes is generated; easy is the
    package easy-vqa; daquar and vqa-v2 are read from --data. Runs are stored
    and shared as in fenchel experiment vit.
    """
    with explained(context, lambda: _SAME):
        from fenchel.experiments.runs import of_first, shortened
        from fenchel.experiments.vqa import presets
        from fenchel.experiments.vqa.tables import listings

        own = _one_of(presets.PRESETS, preset, "--preset")
        queue = _Queue(out, own.threads, again=not resume)
        if not tables:
            for name in _parts(sets) or list(own.courses):
                course = _one_of(own.courses, name, "--sets")
                with queue.errors.status(f"loading {name}"):
                    loaded = presets.load(name, _folder(data), out / "features")
                wanted = _parts(attention) or course.attentions()
                jobs = presets.jobs(preset, loaded, wanted, seeds or own.seeds)
                if first_steps is not None:
                    jobs = [shortened(job, first_steps) for job in jobs]
                queue.work(jobs, partial(presets.study, data=loaded), loaded.note)
        queue.show(presets.STUDY, of_first(preset, first_steps), listings)


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
    with explained(context, lambda: _SAME):
        from fenchel._files import write_whole
        from fenchel.experiments.vqa.presets import load
        from fenchel.report.experiments.figures import save_figures, save_shapes_picture
        from fenchel.report.experiments.page import page_text

        if not out.parent.is_dir():
            raise ValueError(f"there is no folder {out.parent} for {out.name}; make it first")
        loaded = cache(lambda name: load(name, _folder(data), results / "features"))
        write_whole(out, page_text(results).encode())
        made = [out, save_shapes_picture(results, out, loaded)]
        made += save_figures(results, figures, loaded, partial(typer.echo, err=True))
        typer.echo("\n".join(str(path) for path in made if path is not None))


class _Queue:
    """Runs, one after another; only the main process talks."""

    def __init__(self, out: Path, threads: int | None, again: bool) -> None:
        import torch

        self.out, self.again = out, again
        self.main = int(os.environ.get("RANK", "0")) == 0
        self.errors = Console(stderr=True, soft_wrap=True, quiet=not self.main)
        if threads is not None:
            torch.set_num_threads(threads)

    def work(self, jobs: Sequence[Job], study: Callable[[Job], Study], note: str) -> None:
        from fenchel.experiments.runs import Busy, carry_out, stored

        for number, job in enumerate(jobs, 1):
            if not self.again and stored(job, self.out) is not None:
                continue
            with self._bar(f"{number}/{len(jobs)} {job.name}", job.training.steps) as advance:
                try:
                    document = carry_out(
                        job,
                        study(job),
                        self.out,
                        note=note,
                        again=self.again,
                        advance=advance,
                        say=self.say,
                    )
                except Busy:
                    self.say(f"{job.name}: another process is at it")
                    continue
            scores = ", ".join(f"{name} {value:.4f}" for name, value in document["scores"].items())
            self.say(f"{job.name}: {scores} ({document['cost']['seconds']:.0f} s)")

    def show(
        self, study: str, preset: str, listings: Callable[[Sequence[dict[str, Any]]], list[Any]]
    ) -> None:
        from fenchel.experiments.tables import read_results

        if not self.main:
            return
        documents = read_results(self.out / study / preset)
        if not documents:
            raise ValueError(f"no run of {study} {preset} is stored in {self.out}")
        tell({"warning": None}, listings(documents), None)

    def say(self, text: str) -> None:
        self.errors.print(Text(text))

    def _bar(self, title: str, steps: int) -> Any:
        if not self.errors.is_terminal or not self.main:
            self.say(title)
            return nullcontext(None)
        return _Bar(title, steps, self.errors)


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


def _folder(data: Path | None) -> Path | None:
    found = os.environ.get("FENCHEL_DATA")
    return data if data is not None or found is None else Path(found)


def _parts(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _one_of(known: Any, name: str, option: str) -> Any:
    if name not in known:
        raise ValueError(f"{option} must be of {', '.join(known)}, got {name!r}")
    return known[name]
