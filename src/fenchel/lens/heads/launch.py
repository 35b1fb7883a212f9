"""An audit by one process or by several, and what its numbers depend on.

Started by `accelerate launch` or `torchrun`, process r of n makes the units whose number is r
modulo n, all into one folder, which on several machines must lie on a file system they share. Then
the main process adds them in their order: the result is that of one process with as many threads.
If a process stops, the others stop too, as soon as they wait for it; what is made is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fenchel._version import __version__
from fenchel.lens.heads.auditing import Run, Unit
from fenchel.lens.heads.datasets import Images, Texts, grid
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.heads.store import Store
from fenchel.lens.heads.table import Audit
from fenchel.lens.launcher import check_environment, world_size
from fenchel.lens.text import limit

_PATIENCE = timedelta(days=30)  # a process that stops is noticed at once; a slow one is waited for
_SAMPLED = 2**30  # bytes of weights above which not all are read
_PIECE = 2**16  # bytes of either end of a tensor that are read then
_IDLE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")


class Abandoned(ConnectionError):
    """Another process of the run has stopped."""


@dataclass(frozen=True)
class Team:
    """Process `number` of `count`; `wait` returns when all have come to it."""

    number: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def main(self) -> bool:
        return self.number == 0

    def mine(self, unit: int) -> bool:
        return unit % self.count == self.number


@contextmanager
def team() -> Iterator[Team]:
    """The processes that a launcher has started, or this one alone."""
    check_environment()
    if world_size() < 2:
        yield Team()
        return
    try:
        accelerate = import_module("accelerate")
    except ImportError as missing:
        raise ImportError(
            "several processes need accelerate: pip install -c constraints.txt accelerate; or "
            "start one process only"
        ) from missing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads, which the caller sets
        state = accelerate.PartialState(cpu=True, timeout=_PATIENCE)
    try:
        yield Team(state.process_index, state.num_processes, _waiting(state))
    finally:
        state.destroy_process_group()


def _waiting(state: Any) -> Callable[[], None]:
    def wait() -> None:
        try:
            state.wait_for_everyone()
        except RuntimeError as problem:  # the connection to a process that stopped is closed
            raise Abandoned(
                "another process of this run has stopped; its own message says why"
            ) from problem

    return wait


def carry_out(
    run: Run,
    members: Team,
    resume: bool,
    begin: Callable[[Sequence[Unit], set[str]], object],
    advance: Callable[[Unit], object],
) -> Audit | None:
    """All units by all processes; the main one returns the audit, the others None.

    begin: called once with all units and the names of those that are there already; advance: with
    each of the others that this process makes.
    """
    store = run.store
    if store is None:
        raise ValueError("carry_out needs a run with a store")
    units = list(run.units())
    if members.main:
        store.open(resume)
        there = _there(store, units)
    members.wait()
    if not members.main:
        store.join()
        there = _there(store, units)
    begin(units, there)
    run.work(members.mine, lambda unit: None if unit.name in there else advance(unit))
    members.wait()
    return run.audit() if members.main else None


def _there(store: Store, units: Sequence[Unit]) -> set[str]:
    """What is whole; what is not is set aside."""
    return {unit.name for unit in units if store.load(unit.name) is not None}


def with_facts(found: Audit, run: Run, more: dict[str, Any]) -> Audit:
    """With the settings that `more` holds, and the counts if no measure saw all texts."""
    facts = {name: dict(value) for name, value in found.facts.items()}
    facts["settings"] |= {name: more[name] for name in ("dtype", "threads", "longest")}
    inputs, model, shown = facts["inputs"], run.model, run.dataset
    if isinstance(shown, Texts):
        inputs["longest"] = limit(model, shown.tokenizer, shown.longest)
    if "tokens" not in found.summary()["inputs"]:
        inputs["truncated"] = shown.cut(model, range(len(shown)))
        if isinstance(shown, Texts):
            rows = shown.tokenizer(list(shown.texts), verbose=False)["input_ids"]
            inputs["tokens"] = sum(min(len(row), inputs["longest"]) for row in rows)
        elif isinstance(shown, Images):
            before, height, width = grid(model, shown.pixels(model, [0]))
            inputs["tokens"] = len(shown) * (before + height * width)
    inputs.setdefault("longest", None)
    return dataclasses.replace(found, facts=facts)


# ---- what numbers depend on


def settings(
    run_of: tuple[Any, Any],
    shown: Sequence[str] | Sequence[Path],
    targets: Sequence[str] | None,
    settings: AuditSettings,
    **more: int | str,
) -> dict[str, Any]:
    """For the store: all that numbers depend on, and not where it lies.

    run_of: the model and its tokenizer or image processor; more: chunk, longest, dtype and such.
    """
    import transformers

    model, reader = run_of
    return {
        **dataclasses.asdict(settings),
        **more,
        "model": type(model).__name__,
        "weights": fingerprint(model),
        "tokenizer": _reader_digest(reader),
        "texts": _items_digest(shown),
        "targets": None if targets is None else _items_digest(targets),
        "fenchel": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def fingerprint(model: Any) -> str:
    """SHA-256 of the configuration, and of the weights with their names, shapes and types.

    Of models above 1 GiB both ends of every tensor are read, and its sum.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _IDLE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    state = model.state_dict()
    whole = sum(x.numel() * x.element_size() for x in state.values()) <= _SAMPLED
    for name, x in sorted(state.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if whole or raw.nbytes <= 2 * _PIECE:
            digest.update(raw)
        else:
            digest.update(raw[:_PIECE])
            digest.update(raw[-_PIECE:])
            digest.update(str(int(raw.sum(dtype="uint64"))).encode())
    return digest.hexdigest()


def _items_digest(items: Sequence[str] | Sequence[Path]) -> str:
    """Of texts, or of what is in the files."""
    digest = hashlib.sha256()
    for item in items:
        raw = item.read_bytes() if isinstance(item, Path) else item.encode("utf-8", "replace")
        digest.update(f"{len(raw)} ".encode() + raw)
    return digest.hexdigest()


def _reader_digest(reader: Any) -> str:
    """Of the tokenizer's vocabulary and rules, or of the image processor's settings."""
    backend = getattr(reader, "backend_tokenizer", None)
    known: dict[str, Any]
    if backend is not None:
        known = json.loads(backend.to_str())
        known |= {"truncation": None, "padding": None}  # set anew in every call
    elif hasattr(reader, "get_vocab"):
        known = reader.get_vocab()
    else:
        known = {k: v for k, v in reader.to_dict().items() if k not in _IDLE}
    longest = str(getattr(reader, "model_max_length", ""))
    special = sorted(getattr(reader, "all_special_tokens", ()))
    text = json.dumps([type(reader).__name__, longest, special, known], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
