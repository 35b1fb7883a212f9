"""An audit by one process or by several.

Started by `accelerate launch` or `torchrun`, process r of n makes the units whose number is r
modulo n, all into one folder, which on several machines must lie on a file system they share. Then
the main process adds them in their order: the result is that of one process with as many threads.
If a process stops, the others stop too, as soon as they wait for it; finished units stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

from fenchel.lens.heads.auditing import AuditRun, WorkUnit
from fenchel.lens.heads.store import Store
from fenchel.lens.heads.table import Audit
from fenchel.lens.launcher import check_environment, world_size

_PATIENCE = timedelta(days=30)  # a process that stops is noticed at once; a slow one is waited for


class Abandoned(ConnectionError):
    """Another process of the run has stopped."""


@dataclass(frozen=True)
class Team:
    """Process `number` of `count`; `wait` returns when all have come to it."""

    number: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def is_main(self) -> bool:
        return self.number == 0

    def takes(self, unit: int) -> bool:
        return unit % self.count == self.number


@contextmanager
def join_team() -> Iterator[Team]:
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
        yield Team(state.process_index, state.num_processes, _waiter(state))
    finally:
        state.destroy_process_group()


def _waiter(state: Any) -> Callable[[], None]:
    def wait() -> None:
        try:
            state.wait_for_everyone()
        except RuntimeError as problem:  # the connection to a process that stopped is closed
            raise Abandoned(
                "another process of this run has stopped; its own message says why"
            ) from problem

    return wait


def carry_out(
    run: AuditRun,
    team: Team,
    resume: bool,
    begin: Callable[[Sequence[WorkUnit], set[str]], object],
    advance: Callable[[WorkUnit], object],
) -> Audit | None:
    """All units by all processes; the main one returns the audit, the others None.

    begin: called once with all units and the names of those that are there already; advance: with
    each of the others that this process makes.
    """
    store = run.store
    if store is None:
        raise ValueError("carry_out needs a run with a store")
    units = list(run.units())
    if team.is_main:
        store.open(resume)
        stored = _stored_names(store, units)
    team.wait()
    if not team.is_main:
        store.join()
        stored = _stored_names(store, units)
    begin(units, stored)
    run.work(team.takes, lambda unit: None if unit.name in stored else advance(unit))
    team.wait()
    return run.audit() if team.is_main else None


def _stored_names(store: Store, units: Sequence[WorkUnit]) -> set[str]:
    """Names of units that are whole; a damaged one is set aside."""
    return {unit.name for unit in units if store.load(unit.name) is not None}
