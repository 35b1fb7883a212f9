"""A table is a queue of runs. Each is stored as a small JSON when it is done, and the same command
goes on with those that are not; several processes may work on one queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fenchel import __version__
from fenchel.lens.files import write_whole
from fenchel.lens.launcher import world_size
from papers.experiments.checkpoint import OtherConfig, differences, read_metrics
from papers.experiments.flops import step_flops
from papers.experiments.loop import Outcome, Study, Training, naming, trained
from papers.experiments.processes import agreed, alone, is_main

_PARTS: dict[str, type] = {
    "settings": dict,
    "note": str,
    "scores": dict,
    "facts": dict,
    "cost": dict,
    "curve": list,
    "versions": dict,
}
_KEYS = {  # what tables and the page ask for
    "settings": ("study", "preset", "data", "variant", "attention", "size", "training"),
    "settings.size": ("width", "layers", "heads", "dropout"),
    "settings.training": ("seed", "rate", "steps", "batch", "weight_decay"),
    "cost": ("steps", "seconds", "flops", "parameters", "threads"),
}


_FEW = 500  # test examples of a run of the first steps alone


@dataclass(frozen=True)
class Job:
    """One run of a table.

    variant: the attention, and what else differs between the rows of a table. config: everything
    else that its numbers depend on, as JSON can hold it.
    """

    study: str
    preset: str
    data: str
    variant: str
    config: dict[str, Any]
    training: Training

    @property
    def name(self) -> str:
        return f"{self.data} · {self.variant} · seed {self.training.seed}"

    def settings(self) -> dict[str, Any]:
        """As JSON gives them back."""
        settings: dict[str, Any] = {"study": self.study, "preset": self.preset, "data": self.data}
        settings |= {"variant": self.variant, **self.config, "training": asdict(self.training)}
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain

    def file(self, out: Path) -> Path:
        """Of its result; its checkpoints lie in a folder of that name, without the ending."""
        folder = out / self.study / self.preset / self.data
        return folder / f"{self.variant}-{self.training.seed}.json"


def shortened(job: Job, steps: int) -> Job:
    """The first steps of it, to see that it runs, tested on few examples; stored beside the whole
    runs, not among them."""
    count = min(steps, job.training.steps)
    training = replace(job.training, steps=count, evaluate_every=count, save_every=count)
    config = {**job.config, "tested": _FEW}
    return replace(job, preset=of_first(job.preset, steps), config=config, training=training)


def of_first(preset: str, steps: int | str | None) -> str:
    """Where the first steps of a preset's runs are stored; None: all of them. "*": a pattern."""
    return preset if steps is None else f"{preset}-first-{steps}"


def stored(job: Job, out: Path) -> dict[str, Any] | None:
    """The result of a run that is done; one with other settings is refused."""
    path = job.file(out)
    return agreed(_as_wanted(path, job) if path.exists() else None)


def is_written_since(job: Job, out: Path, began: float) -> bool:
    """Whether its result was written after that moment."""
    path = job.file(out)
    return agreed(path.exists() and path.stat().st_mtime >= began)


def _as_wanted(path: Path, job: Job) -> dict[str, Any]:
    document = _whole(path)
    changed = differences(document["settings"], job.settings())
    if changed:
        raise OtherConfig(
            f"{path} holds a run with other settings: {'; '.join(changed)}. Choose another --out, "
            "or begin again with --again"
        )
    return document


def read_result(path: Path) -> dict[str, Any]:
    """With all that tables and the page ask for; anything else is refused with what it lacks."""
    document = _whole(path)
    missing = [name for part, names in _KEYS.items() for name in _lacking(document, part, names)]
    if missing:
        raise ValueError(f"{path} is no result of a run (no {', '.join(missing)}); remove it")
    return document


def _whole(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wrong = [name for name, kind in _PARTS.items() if not isinstance(document[name], kind)]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"{path} is no result of a run ({problem!r}); remove it") from problem
    if wrong:
        raise ValueError(f"{path} is no result of a run (in {', '.join(wrong)}); remove it")
    return document


def _lacking(document: dict[str, Any], part: str, names: tuple[str, ...]) -> list[str]:
    """Of a part such as settings.size, which is in the document."""
    value: Any = document
    for name in part.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    none = not isinstance(value, dict)
    return [f"{part}.{name}" for name in names if none or name not in value]


def carry_out(
    job: Job,
    study: Study,
    out: Path,
    *,
    note: str = "",
    again: bool = False,
    advance: Callable[[int, dict[str, float]], object] | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Train it, from its newest checkpoint where there is one, and store what it found.

    note: what is to be said of the data beside the result. again: not from a checkpoint; a result
    that is stored is removed first, so that one that is stopped is not taken for done.
    """
    path = job.file(out)
    folder = path.with_suffix("")
    with alone(folder):
        if again and is_main():
            path.unlink(missing_ok=True)
        settings = job.settings()
        outcome = trained(
            study, job.training, folder, settings, resume=not again, advance=advance, say=say
        )
        with naming(outcome.steps, folder):
            document = _document(job, study, outcome, folder, note)
        if is_main():
            text = json.dumps(document, indent=1, allow_nan=False)
            write_whole(path, f"{text}\n".encode())
    return document


def _document(job: Job, study: Study, outcome: Outcome, folder: Path, note: str) -> dict[str, Any]:
    flops = step_flops(study, outcome.model, job.training.batch)
    outcome.model.eval()
    with torch.no_grad():
        facts = study.facts(outcome.model, folder)
    return {
        "settings": job.settings(),
        "note": note,
        "scores": outcome.scores,
        "facts": facts,
        "cost": {
            "steps": outcome.steps,
            "seconds": round(outcome.seconds, 1),
            "flops": flops * outcome.steps,
            "parameters": outcome.parameters,
            "threads": torch.get_num_threads(),
            "processes": world_size(),
        },
        "curve": _curve(folder),
        "versions": {"fenchel": __version__, "torch": torch.__version__},
    }


def _curve(folder: Path) -> list[dict[str, float]]:
    """At each evaluation: the mean loss since the one before, and the scores."""
    points, losses = [], []
    for line in read_metrics(folder):
        losses.append(line["loss"])
        if len(line) > len(("step", "loss", "rate")):
            scores = {name: line[name] for name in line if name not in ("loss", "rate")}
            points.append({**scores, "loss": round(fmean(losses), 6)})
            losses = []
    return points
