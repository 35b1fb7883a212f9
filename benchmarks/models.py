"""Every model family of transformers, converted: equal, refused, not run, or wrong.

The families, their tiny models and their inputs are those of transformers' own model testers, which
come with its repository and not with its package. Every family runs in a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.tables import Listing
from fenchel.lens.files import write_whole

Entry = dict[str, Any]
Advance = Callable[[str, int], object]  # the family that begins, and how many are done

EQUAL, REFUSED, NOT_RUN = "equal", "refused", "not run"
DIFFERENT, CRASHES, STAYS = "different", "crashes", "stays on softmax"
WORST_FIRST = (DIFFERENT, STAYS, CRASHES, REFUSED, EQUAL, NOT_RUN)
SECONDS = 60.0  # for one class
CHECKOUT = "FENCHEL_SWEEP_CHECKOUT"  # in the environment of the server
CLONE = "git clone --depth 1 https://github.com/huggingface/transformers"


@dataclass(frozen=True)
class Sweep:
    """checkout: of transformers' repository. seconds: for one class of models."""

    checkout: Path
    families: tuple[str, ...]
    seconds: float = SECONDS


def find_families(checkout: Path | None) -> tuple[Path, list[str]]:
    """The checkout and its families; what is none is refused with the way to one."""
    families = _families(checkout) if checkout else []
    if checkout is None or not families:
        found = (
            "none was given"
            if checkout is None
            else f"{checkout} has no tests/models/*/test_modeling_*.py"
        )
        raise ValueError(
            f"the model testers are in tests/models of a checkout of transformers, and {found}; "
            f"get one with `{CLONE}`, then pass --transformers transformers"
        )
    return checkout.resolve(), families


def _families(checkout: Path) -> list[str]:
    paths = (checkout / "tests" / "models").glob("*/test_modeling_*.py")
    return sorted({path.parent.name for path in paths})


def read(out: Path | None) -> Entry:
    """The document of an earlier run, to go on with."""
    if out is None or not out.is_file():
        raise ValueError(f"--resume goes on with the file of --out, and {out} is none")
    document: Entry = json.loads(out.read_text(encoding="utf-8"))
    if document.get("bench") != "models":
        raise ValueError(f"{out} is not the document of a sweep over models")
    return document


def choose(known: Sequence[str], wanted: Sequence[str], before: Entry | None) -> tuple[str, ...]:
    """The families that were named; or all, without those that an earlier run has done."""
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(
            f"no tester for {', '.join(unknown)}; a family is a folder of tests/models, such as "
            f"{', '.join(known[:3])}"
        )
    done = before["families"] if before else {}
    return tuple(wanted or [name for name in known if name not in done])


# ---- running


def run(sweep: Sweep, out: Path | None, before: Entry | None, advance: Advance) -> Entry:
    """Run every family and keep each as soon as it is done. before: the document to add to."""
    document = before or _empty(sweep)
    for done, family in enumerate(sweep.families):
        advance(family, done)
        document["families"][family] = run_family(sweep, family)
        document["families"] = dict(sorted(document["families"].items()))
        if out is not None:
            write_whole(out, as_text(document).encode())
    return document


def _empty(sweep: Sweep) -> Entry:
    import transformers

    return {
        "bench": "models",
        "settings": {"threads": 1, "dtype": "float64", "seconds": sweep.seconds},
        "transformers": transformers.__version__,
        "machine": machine.summary(),
        "warning": "",
        "families": {},
    }


def as_text(document: Entry) -> str:
    """One line per class: a change shows which."""
    head = {key: value for key, value in document.items() if key != "families"}
    lines = [
        f"{json.dumps(name)}: {{\n   " + ",\n   ".join(_class_lines(entry)) + "\n  }"
        for name, entry in document["families"].items()
    ]
    start = json.dumps(head, indent=1).rstrip("}\n")
    return f'{start},\n "families": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n"


def _class_lines(entry: Entry) -> list[str]:
    return [f"{json.dumps(name)}: {json.dumps(outcome)}" for name, outcome in entry.items()]


def run_family(sweep: Sweep, family: str) -> Entry:
    """Class or test file -> its outcome. A process that dies or hangs is followed by another, which
    goes on with the next class."""
    outcomes: Entry = {}
    while True:
        ended, current = _run_process(sweep, family, outcomes)
        if ended is None:
            return outcomes or {family: {"status": NOT_RUN, "why": "its tests name no model"}}
        if not current:
            outcomes[family] = {"status": NOT_RUN, "why": f"before its first model, {ended}"}
            return outcomes
        name, stage = current
        dies = stage == "fenchel" and "seconds" not in ended
        outcomes[name] = {"status": CRASHES if dies else NOT_RUN, "why": f"{stage}: {ended}"}


def _run_process(
    sweep: Sweep, family: str, outcomes: Entry
) -> tuple[str | None, tuple[str, str] | None]:
    """Add what it reports to the outcomes. How it ended too early, and at which class and stage;
    None if it did not."""
    context = _context(sweep.checkout)
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, sweep.checkout, family, tuple(outcomes))
    process = context.Process(target=work, args=arguments, daemon=True)
    process.start()
    theirs.close()
    current: tuple[str, str] | None = None
    try:
        deadline = time.monotonic() + sweep.seconds
        while True:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                return f"more than {sweep.seconds:g} seconds", current
            kind, name, content = ours.recv()
            if kind == "end":
                return None, None
            if kind == "done":
                outcomes[name] = content
            if kind == "done" or current is None:
                deadline = time.monotonic() + sweep.seconds
            current = (name, content) if kind == "begin" else None
    except EOFError:
        process.join()
        return f"the process ended with code {process.exitcode}", current
    finally:
        process.kill()
        process.join()
        ours.close()


def _context(checkout: Path) -> Any:
    """A server that has loaded transformers and forks; where there is none, fresh processes."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    os.environ[CHECKOUT] = str(checkout)  # the server reads it once, when it starts
    context.set_forkserver_preload(["benchmarks.models_server", "benchmarks.command"])
    return context


def work(pipe: Connection, checkout: Path, family: str, done: Sequence[str]) -> None:
    """In the process of a family: check every class that is not done, and report."""
    _be_quiet()
    import torch

    from benchmarks import models_checks, models_testers

    torch.set_num_threads(1)
    testers = models_testers.load(checkout, family)
    for name, why in testers.problems.items():
        pipe.send(("done", name, {"status": NOT_RUN, "why": why}))
    for name, tester in testers.by_class.items():
        if name in done:
            continue

        def tell(stage: str, name: str = name) -> None:
            pipe.send(("begin", name, stage))

        pipe.send(("done", name, models_checks.check(tester, tell).as_json()))
    pipe.send(("end", "", None))


def _be_quiet() -> None:
    """Models and testers print and warn; the parent shows a bar."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # models come from configurations
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


# ---- what is shown


def status_of(entry: Entry) -> str:
    """The worst of its classes; a family runs if one of them does."""
    statuses = {outcome["status"] for outcome in entry.values()}
    return next((status for status in WORST_FIRST if status in statuses), NOT_RUN)


def listings(document: Entry) -> list[Listing]:
    """From the JSON of a run: totals, then a row per family."""
    return [_totals(document), _table(document)]


def _totals(document: Entry) -> Listing:
    families = Counter(status_of(entry) for entry in document["families"].values())
    classes = Counter(
        outcome["status"] for entry in document["families"].values() for outcome in entry.values()
    )
    rows = [
        (status, str(families[status]), str(classes[status]))
        for status in sorted(WORST_FIRST, key=lambda status: WORST_FIRST[::-1].index(status))
    ]
    rows.append(("all", str(families.total()), str(classes.total())))
    title = f"Families and classes of transformers {document['transformers']}"
    return Listing(title, ("result", "families", "classes"), rows)


def _table(document: Entry) -> Listing:
    rows = [
        (family, str(len(entry)), str(_count(entry, EQUAL)), "; ".join(_reasons(entry)))
        for family, entry in document["families"].items()
    ]
    return Listing("Every family", ("family", "classes", "equal", "the others"), rows, words=1)


def _count(entry: Entry, status: str) -> int:
    return sum(outcome["status"] == status for outcome in entry.values())


def _reasons(entry: Entry) -> list[str]:
    """One per status: how many classes, and why the first of them."""
    reasons = []
    for status in WORST_FIRST:
        told = [_reason(name, e) for name, e in entry.items() if e["status"] == status]
        whys = dict.fromkeys(why for why in told if why)
        if whys:
            more = f" (and {len(whys) - 1} more reasons)" if len(whys) > 1 else ""
            reasons.append(f"{len(told)} {status}: {next(iter(whys))}{more}")
    return reasons


def _reason(name: str, outcome: Entry) -> str:
    """Without the name of the class, so that classes with the same reason share it."""
    why = re.sub(rf"\b{re.escape(name)}\b", "the model", outcome.get("why", ""))
    sizes = [outcome[key] for key in ("entmax", "softmax") if key in outcome]
    wrong = outcome["status"] in (DIFFERENT, STAYS) and sizes
    return f"{why}, by {sizes[0]:.1e} of its size" if wrong else why
