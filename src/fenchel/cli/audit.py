"""`fenchel audit`: every head of a pretrained model, as a page, a table and a recipe."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fenchel.cli.failures import explained, unsupported, with_resume
from fenchel.cli.shared import MOST_THREADS

if TYPE_CHECKING:
    from fenchel.lens.heads.auditing import Run, Unit
    from fenchel.lens.heads.launch import Team
    from fenchel.lens.heads.settings import AuditSettings
    from fenchel.lens.heads.table import Audit

EXAMPLE = "fenchel audit build/models/minilm --texts sentences.txt --out build/audit"


_TEXTS, _PICTURES = 32, 4  # of a unit
_FIGURE = re.compile(
    r"(what_if|(map|agreement|entropy_histograms|top_weight_histograms|spectra|preference|recipe)"
    r"_(encoder|decoder|cross)[\w.]*)\.(png|svg)"
)
_MOST = 100_000  # a number of layers or heads that no model has
_EARLY = 10  # per cent done before which nothing is foretold in a log

# Columns of the first alpha and of others; those that were not measured are left out.
_HEADLINES = {
    "entropy_share": "entropy, of that of even weights",
    "mass_first": "weight on the first token",
    "token_deviation_mean": "deviation from the exact estimate, token space",
    "head_deviation_mean": "deviation from the exact estimate, head space",
    "kept_{}": "links kept by entmax-{}",
    "layer_moved_{}": "layer's output moved by it",
    "bound": "certified bound, query to output",
    "tightness": "certificate over strongest attack",
    "recipe_alpha": "alpha of the recipe",
}

_Option = typer.Option
_Model = Annotated[str, typer.Argument(help="Folder of the model, or its name on the hub.")]
_Texts = Annotated[Path | None, _Option(help="A text a line, UTF-8; .tsv: first column.")]
_Images = Annotated[Path | None, _Option(help="Folder of images, for a vision model.")]
_Targets = Annotated[
    Path | None,
    _Option(
        help="What an encoder-decoder is to write, a line a text. (Default: its own 32 tokens)"
    ),
]
_Out = Annotated[Path, _Option(help="Folder for report, tables, figures and units.")]
_Resume = Annotated[bool, _Option("--resume", help="Go on with the units that are in --out.")]
_Layers = Annotated[str | None, _Option(help="Such as 0,3-5; from 0. (Default: all)")]
_Heads = Annotated[str | None, _Option(help="Such as 0-3; from 0. (Default: all)")]
_Sample = Annotated[
    int | None, _Option(min=1, help="So many texts, drawn at random. (Default: all)")
]
_Seed = Annotated[int, _Option(min=0, help="Of the sample.")]
_Threads = Annotated[
    int | None,
    _Option(min=1, max=MOST_THREADS, help="Of each process. (Default: as torch chooses)"),
]
_Dtype = Annotated[str, _Option(help="float32, float64, bfloat16 or float16.")]
_Probe = Annotated[int, _Option(min=1, help="Texts for the slow measures.")]
_Alphas = Annotated[str, _Option(help="Of the what-if: entmax in place of softmax.")]
_Trials = Annotated[int, _Option(min=1, help="Of the attack, for each head.")]
_Tolerance = Annotated[float, _Option(help="Of the recipe: how far an output may move.")]
_Measures = Annotated[
    str | None,
    _Option(
        help="Of weights, deviation, what_if, certificate (all texts); geometry, advantage, local, "
        "attack, model, recipe (the probe). (Default: all)"
    ),
]
_Chunk = Annotated[int | None, _Option(min=1, help="Of a unit of work. (32 texts or 4 images)")]
_Longest = Annotated[int, _Option(min=2, help="Tokens of a text; more are cut.")]
_Trust = Annotated[bool, _Option("--trust-remote-code", help="Run Python code of the model.")]
_NoFigures = Annotated[bool, _Option("--no-figures", help="No PNG and SVG beside the report.")]


def audit(
    context: typer.Context,
    model: _Model,
    out: _Out,
    texts: _Texts = None,
    images: _Images = None,
    targets: _Targets = None,
    resume: _Resume = False,
    layers: _Layers = None,
    heads: _Heads = None,
    sample: _Sample = None,
    seed: _Seed = 0,
    threads: _Threads = None,
    dtype: _Dtype = "float32",
    probe: _Probe = 32,
    alphas: _Alphas = "1.5,2",
    tolerance: _Tolerance = 0.01,
    trials: _Trials = 200,
    measures: _Measures = None,
    chunk: _Chunk = None,
    longest: _Longest = 512,
    trust_remote_code: _Trust = False,
    no_figures: _NoFigures = False,
) -> None:
    """What every head of a pretrained model does: measured, certified, and as a sparse recipe.

    Writes report.html, heads.csv, summary.json, recipe.json (for
    fenchel.hf.convert), figures/ and units/. A run that was stopped goes on
    with --resume and gives the same tables, byte for byte.

    Several processes: put accelerate launch --multi_gpu --num_processes 2 -m
    or torchrun --nproc-per-node 2 -m before the command; no GPU is needed. On
    several machines --out must be on a file system that they share. The tables
    are those of one process. If one process stops, all stop; use --resume.

    Weights are read from safetensors only, and no code of the model's folder
    runs unless you say --trust-remote-code. Needs the extras hf and report.
    """
    with explained(context, lambda: with_resume(context)):
        from fenchel.lens.heads import launch
        from fenchel.lens.heads.settings import MEASURES, AuditSettings

        wanted = AuditSettings(
            measures=MEASURES if measures is None else tuple(_parts(measures)),
            alphas=_alphas(alphas),
            layers=None if layers is None else _numbers(layers, "--layers"),
            heads=None if heads is None else _numbers(heads, "--heads"),
            probe=probe,
            tolerance=tolerance,
            trials=trials,
        )
        _check_writable(out)
        with launch.team() as team, _threads(threads):
            job = _Job(team, out, resume, not no_figures)
            job.load(model, dtype, trust_remote_code)
            job.read((texts, images, targets), sample, seed)
            many = chunk or (_TEXTS if images is None else _PICTURES)
            found = job.carry_out(wanted, {"chunk": many, "longest": longest, "dtype": dtype})
        if found is not None:
            job.write(found)


class _Job:
    """The audit as the command runs it; only the main process talks."""

    def __init__(self, team: Team, out: Path, resume: bool, figures: bool) -> None:
        self.team, self.out, self.resume, self.figures = team, out, resume, figures
        self.minutes = 0  # that were said
        self.errors = Console(stderr=True, soft_wrap=True, quiet=not team.main)
        if team.main:  # what is missing is said before the work
            from fenchel.lens.page import save_figures, write

            self.save_figures, self.write_page = save_figures, write

    def load(self, name: str, dtype: str, trust_remote_code: bool) -> None:
        from fenchel.lens.loading import load

        with self.errors.status(f"loading {name}"):
            self.model, self.reader = load(name, dtype, trust_remote_code)

    def read(
        self, paths: tuple[Path | None, Path | None, Path | None], sample: int | None, seed: int
    ) -> None:
        """The texts and their targets, or the images."""
        from fenchel.lens.input_files import draw_places, read_images, read_targets, read_texts

        texts, images, targets = paths
        _check_kinds(texts, images, targets, hasattr(self.reader, "image_mean"))
        self.targets: list[str] | None = None
        self.shown: list[str] | list[Path]
        if images is not None:
            self.shown = read_images(images, sample, seed)
            return
        assert texts is not None
        every = read_texts(texts)
        places = draw_places(len(every), sample, seed)
        self.shown = [every[place] for place in places]
        if targets is not None:
            lines = read_targets(targets, len(every))
            self.targets = [lines[place] for place in places]

    def carry_out(self, wanted: AuditSettings, more: dict[str, Any]) -> Audit | None:
        import torch

        from fenchel.lens.heads.auditing import Run
        from fenchel.lens.heads.datasets import check_decoder, make_dataset
        from fenchel.lens.heads.launch import carry_out, settings, with_facts
        from fenchel.lens.heads.store import Store

        check_decoder(self.model, self.targets)
        more["threads"] = torch.get_num_threads()
        own = (self.model, self.reader)
        store = Store(self.out / "units", settings(own, self.shown, self.targets, wanted, **more))
        shown = make_dataset(self.reader, self.shown, self.targets, longest=more["longest"])
        with unsupported(self.model):
            run = Run(self.model, shown, wanted, more["chunk"], store)
        if not self.resume and self.team.main and store.names():
            self.say(
                f"beginning again: the {len(store.names())} units of an earlier run in "
                f"{store.folder} go (--resume would go on with them)"
            )
        with self.bar() as progress:
            progress.add_task("units", total=None)
            found = carry_out(
                run,
                self.team,
                self.resume,
                lambda units, there: self.begin(run, progress, units, there),
                lambda unit: self.advance(progress, unit),
            )
        return None if found is None else with_facts(found, run, more)

    def begin(self, run: Run, progress: Progress, units: Sequence[Unit], there: set[str]) -> None:
        """What is there already is done at once; the bar counts the units of this process."""
        mine = [unit for number, unit in enumerate(units) if self.team.mine(number)]
        done = sum(unit.work for unit in mine if unit.name in there)
        task = progress.task_ids[0]
        progress.update(task, total=sum(unit.work for unit in mine), completed=done)
        for path in run.store.set_aside if run.store is not None else ():
            self.say(f"{path} was damaged: set aside, and its unit is made again")
        if self.resume:
            self.say(f"going on: {len(there)} of {len(units)} units are there")

    def bar(self) -> Progress:
        """With an estimate over the last ten minutes, as a unit may take one."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self.errors,
            transient=True,
            disable=not self.errors.is_terminal,
            speed_estimate_period=600,
        )

    def advance(self, progress: Progress, unit: Unit) -> None:
        """On the bar; in a log a line a minute."""
        task = progress.tasks[0]
        progress.update(task.id, advance=unit.work, description=f"after {unit.name}")
        minutes = int(task.elapsed or 0) // 60
        if progress.disable and minutes > self.minutes:
            self.minutes = minutes
            left = task.time_remaining
            early = left is None or task.percentage < _EARLY
            guess = "" if early else f", about {math.ceil((left or 0) / 60)} min left"
            self.say(f"{task.percentage:.0f} % after {minutes} min ({unit.name}){guess}")

    def say(self, text: str) -> None:
        self.errors.print(Text(text, style="yellow"))

    def write(self, found: Audit) -> None:
        """Each file whole or not at all; what an earlier run left is replaced."""
        from fenchel.lens.files import write_whole

        recipe, summary, document = found.recipe(), found.summary(), found.document()
        write_whole(self.out / "heads.csv", found.to_csv().encode())
        write_whole(self.out / "summary.json", _json(summary))
        if recipe is None:
            (self.out / "recipe.json").unlink(missing_ok=True)
        else:
            write_whole(self.out / "recipe.json", _json(recipe))
        page = self.write_page(document, self.out)
        _clear_figures(self.out)
        if self.figures:
            self._draw(document)
        self._tell(summary)
        typer.echo(page)

    def _draw(self, document: dict[str, Any]) -> None:
        with self.bar() as progress:
            task = progress.add_task("figures", total=1.0)
            try:
                self.save_figures(document, self.out, lambda share: progress.advance(task, share))
            except BaseException:
                _clear_figures(self.out)  # the last may be half-written
                raise

    def _tell(self, summary: dict[str, Any]) -> None:
        inputs, model = summary["inputs"], summary["model"]
        console = Console()
        table = Table(
            title=Text(f"{model['name']}: {summary['heads']} heads"),
            title_justify="left",
        )
        table.add_column(f"{inputs['count']} {inputs['what']}")
        table.add_column("median", justify="right")
        table.add_column("least", justify="right")
        table.add_column("largest", justify="right")
        alpha = f"{summary['settings']['alphas'][0]:g}"
        for name, title in _HEADLINES.items():
            spread = summary["columns"].get(name.format(alpha))
            if spread is not None:
                table.add_row(
                    title.format(alpha),
                    *(_shown(spread[k]) for k in ("median", "least", "largest")),
                )
        console.print(table)
        if inputs.get("truncated"):
            self.say(
                f"{inputs['truncated']} of {inputs['count']} texts were longer than the model or "
                "--longest allows and were cut"
            )


# ---- what is asked for


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """ "0,3-5" -> (0, 3, 4, 5)"""
    found: set[int] = set()
    for part in _parts(text):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        whole = all(end.strip().isdecimal() for end in ends)
        if not whole or not int(ends[0]) <= int(ends[1]) <= _MOST:
            raise ValueError(f"{option} takes numbers and ranges such as 0,3-5; got {text!r}")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    if not found:
        raise ValueError(f"{option} takes numbers and ranges such as 0,3-5; got {text!r}")
    return tuple(sorted(found))


def _alphas(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in _parts(text))
    except ValueError:
        raise ValueError(f"--alphas takes numbers such as 1.5,2; got {text!r}") from None
    if not found or len(set(found)) < len(found):
        raise ValueError(f"--alphas takes numbers such as 1.5,2, each once; got {text!r}")
    return found


def _check_kinds(
    texts: Path | None, images: Path | None, targets: Path | None, vision: bool
) -> None:
    if (texts is None) == (images is None):
        raise ValueError("give either --texts FILE or --images FOLDER")
    if images is not None and targets is not None:
        raise ValueError("--targets goes with --texts; images have none")
    if vision and texts is not None:
        raise ValueError("this model looks at images: give --images FOLDER, not --texts")
    if not vision and images is not None:
        raise ValueError("this model reads texts: give --texts FILE, not --images")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- what is written


def _check_writable(folder: Path) -> None:
    """Before the work, so that nobody waits an hour for an error."""
    from fenchel.lens.files import write_whole

    probe = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(probe, b"")
        probe.unlink()
    except FileExistsError:
        raise NotADirectoryError(f"--out {folder} is a file; give a folder") from None
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise
        raise PermissionError(
            f"cannot write into {folder} ({problem.strerror}); give another folder with --out, or "
            "make this one writable"
        ) from None


def _clear_figures(out: Path) -> None:
    """Those of an earlier run, which may have had others; whatever else is there stays."""
    for old in (out / "figures").glob("*.*"):
        if _FIGURE.fullmatch(old.name):
            old.unlink()


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
