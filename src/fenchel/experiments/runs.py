"""A table is a queue of runs. Each is stored as a small JSON when it is done, and the same command
goes on with those that are not; several processes may work on one queue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import IO, Any, TypeVar

import torch

from fenchel._files import write_whole
from fenchel._version import __version__
from fenchel.experiments.checkpoint import OtherConfig, differences
from fenchel.experiments.flops import step_flops
from fenchel.experiments.loop import Outcome, Study, Training, processes, read_metrics, train

Found = TypeVar("Found")


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
        own: dict[str, Any] = {"study": self.study, "preset": self.preset, "data": self.data}
        own |= {"variant": self.variant, **self.config, "training": asdict(self.training)}
        found: dict[str, Any] = json.loads(json.dumps(own))
        return found

    def file(self, out: Path) -> Path:
        """Of its result; its checkpoints lie in a folder of that name, without the ending."""
        folder = out / self.study / self.preset / self.data
        return folder / f"{self.variant}-{self.training.seed}.json"


def shortened(job: Job, steps: int) -> Job:
    """The first steps of it, to see that it runs; stored beside the whole runs, not among them."""
    count = min(steps, job.training.steps)
    training = replace(job.training, steps=count, evaluate_every=count, save_every=count)
    return replace(job, preset=of_first(job.preset, steps), training=training)


def of_first(preset: str, steps: int | None) -> str:
    """Where the first steps of a preset's runs are stored; None: all of them."""
    return preset if steps is None else f"{preset}-first-{steps}"


class Busy(RuntimeError):
    """Another process is at this run."""


def stored(job: Job, out: Path) -> dict[str, Any] | None:
    """The result of a run that is done; one with other settings is refused."""
    path = job.file(out)
    return _agreed(_as_wanted(path, job) if path.exists() else None)


def _as_wanted(path: Path, job: Job) -> dict[str, Any]:
    document = read_result(path)
    changed = differences(document["settings"], job.settings())
    if changed:
        raise OtherConfig(
            f"{path} holds a run with other settings: {'; '.join(changed)}. Choose another --out, "
            "or begin again with --again"
        )
    return document


def read_result(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        settings, scores, cost = document["settings"], document["scores"], document["cost"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{path} is no result of a run ({problem!r}); remove it") from problem
    if not all(isinstance(part, dict) for part in (settings, scores, cost)):
        raise ValueError(f"{path} is no result of a run; remove it")
    return document


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

    note: what is to be said of the data beside the result. again: not from a checkpoint.
    """
    path = job.file(out)
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        settings = job.settings()
        outcome = train(
            study, job.training, folder, settings, resume=not again, advance=advance, say=say
        )
        document = _document(job, study, outcome, folder, note)
        if _is_main():
            write_whole(path, (json.dumps(document, indent=1) + "\n").encode())
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
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock that the system frees when its process ends, however it does.

    The main process holds it for all of a run's processes, which go on or leave together.
    """
    with (folder / "lock").open("w") if _is_main() else nullcontext() as file:
        if not _agreed(file is None or _locked(file)):
            raise Busy(f"another process is at the run in {folder}")
        yield


def _locked(file: IO[str]) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _agreed(found: Found) -> Found:
    """What the main process found, told to all of a run's processes: they must do the same."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return found
    from accelerate.utils import broadcast_object_list

    processes()
    told: Found = broadcast_object_list([found])[0]
    return told
