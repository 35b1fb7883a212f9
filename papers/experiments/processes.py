"""The processes of a run: how they meet, and that one run at a time works in a folder."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from fenchel.lens.launcher import check_environment, rank, world_size

Value = TypeVar("Value")


class Busy(RuntimeError):
    """Another process is at this run."""


def accelerator(precision: str) -> Any:
    """Of one run, whatever the precision of the run before."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    processes()
    kept = AcceleratorState._shared_state  # of the run before: another precision would be refused
    if kept and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()
    result = Accelerator(mixed_precision=precision)
    if precision == "fp16" and result.scaler is None:  # accelerate would train in float32
        raise ValueError(f"fp16 needs a GPU, here is {result.device}; take bf16 or no")
    return result


def processes() -> Any:
    """Of this run, as accelerate knows them. Without a GPU they meet on the CPU, which it must be
    asked for; otherwise each would train alone, all into one folder."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    check_environment()
    started = world_size()
    without = started > 1 and not torch.accelerator.is_available()
    state = PartialState(cpu=without or parse_flag_from_env("ACCELERATE_USE_CPU"))
    if state.num_processes != started:
        raise ValueError(
            f"{started} processes were started, but accelerate sees {state.num_processes} on "
            f"{state.device}; start one, or set ACCELERATE_USE_CPU=true"
        )
    if started > 1:
        _leave_at_exit()
    return state


@cache
def _leave_at_exit() -> None:
    """Threads of a group that is still there abort the process as it ends, now and then."""
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A lock that the system frees when its process ends, however it does.

    The main process holds it for all of a run's processes, which go on or leave together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") if is_main() else nullcontext() as file:
        if not agreed(file is None or _locked(file)):
            raise Busy(f"another process is at the run in {folder}")
        yield


def _locked(file: IO[str]) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_main() -> bool:
    return rank() == 0


def agreed(value: Value) -> Value:
    """What the main process found, told to all of a run's processes: they must do the same."""
    if world_size() < 2:
        return value
    from accelerate.utils import broadcast_object_list

    processes()
    told: Value = broadcast_object_list([value])[0]
    return told
