"""`study attack`: the long attack on every kind of bound."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TaskProgressColumn

from benchmarks.console import tell
from benchmarks.tables import Listing
from fenchel.cli.shared import make_folder, progress_bar

ATTACK = "python -m papers study attack --trials 20000 --out build/study"


def attack(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for study_attack.json.")],
    trials: Annotated[int, typer.Option(min=1, help="Against each kind of bound.")] = 1_000_000,
    transport_trials: Annotated[
        int | None,
        typer.Option(min=1, help="Where a trial solves transport problems. (Default: a tenth.)"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of settings and trials.")] = 0,
) -> None:
    """Try to exceed every kind of bound, in settings drawn at random, and count the trials.

    Then the constants that are printed in the paper and false, which the same search must exceed.
    What is done is kept in study_attack.json: the same command continues. A million trials of each
    kind take hours; the default is that.
    """
    make_folder(out)
    from papers.studies import campaign

    path = out / "study_attack.json"
    fewer = max(1, trials // 10) if transport_trials is None else transport_trials
    document = _kept(path, {"trials": trials, "transport_trials": fewer, "seed": seed})
    plan = [(make, trials) for make in campaign.MAPS]
    plan += [(make, fewer) for make in campaign.TRANSPORT]
    with progress_bar(TaskProgressColumn()) as progress:
        task = progress.add_task("", total=sum(count for _, count in plan))
        for make, count in plan:
            name = make.__name__.replace("_", " ")
            progress.update(task, description=name)
            if name in {entry["kind"] for entry in document["bounds"]}:
                progress.advance(task, count)
                continue
            stood = campaign.stand(
                make, count, seed=seed, tell=lambda done: progress.advance(task, done)
            )
            document["bounds"].append(stood.as_json())
            _keep(document, path)
    document["printed"] = document["printed"] or _printed(seed)
    _keep(document, path)
    warning = _warning(document)
    tell({"warning": warning}, _listings(document), None)
    typer.echo(path)
    if warning:
        raise typer.Exit(1)


def _kept(path: Path, settings: dict[str, int]) -> dict[str, Any]:
    """What an earlier run with the same settings left."""
    if path.exists():
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            whole = {"settings", "bounds", "printed"} <= document.keys()
        except (ValueError, AttributeError):  # cut short, or not ours
            whole = False
        if not whole:
            raise typer.BadParameter(
                f"{path} is damaged; move it away, and what it held is run again",
                param_hint="--out",
            )
        if document["settings"] != settings:
            raise typer.BadParameter(
                f"{path} holds a run with other settings, {document['settings']}; give them, or "
                "another folder",
                param_hint="--out",
            )
        return document
    return {"settings": settings, "bounds": [], "printed": []}


def _keep(document: dict[str, Any], path: Path) -> None:
    """Whole or not at all: hours of work are in it."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _printed(seed: int) -> list[dict[str, Any]]:
    import torch

    from papers.claims.theory import printed

    refutations = printed.refute(generator=torch.Generator().manual_seed(seed))
    return [
        {"result": name, "where": words, "ratio": one.ratio, "trials": one.trials}
        for name, (words, one) in refutations.items()
    ]


def _warning(document: dict[str, Any]) -> str:
    broken = [entry["kind"] for entry in document["bounds"] if entry["exceeded"]]
    return f"EXCEEDED: {', '.join(broken)}" if broken else ""


def _listings(document: dict[str, Any]) -> list[Listing]:
    rows = [
        [
            entry["kind"],
            f"{entry['trials']:,}",
            f"{entry['settings']:,}",
            f"{entry['median']:.4f}",
            f"{entry['worst']:.9f}",
            str(entry["exceeded"]),
        ]
        for entry in document["bounds"]
    ]
    header = ["bound", "trials", "settings", "median ratio", "worst ratio", "exceeded"]
    stood = Listing("Observed / certified", header, rows)
    false = [
        [entry["result"], entry["where"], f"{entry['ratio']:.3g}", str(entry["trials"])]
        for entry in document["printed"]
    ]
    head = ["as printed", "where", "observed / printed", "trials"]
    return [stood, Listing("Constants of the paper that are false", head, false)]
