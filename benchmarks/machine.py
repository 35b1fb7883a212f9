"""What a measurement depends on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fenchel as fl
from benchmarks.attention_rounds import disturbance


@contextmanager
def one_thread() -> Iterator[None]:
    """For small operands, whose threads would only wait, and for the processor time of a call."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summary() -> dict[str, Any]:
    """Versions, threads, devices and the default dtype."""
    return {name: value for name, value in fl.info().items() if name != "fast_paths"}


def circumstances(others: float | None) -> dict[str, Any]:
    """For the JSON of a run: the machine, and the share of it that other processes had."""
    return {"machine": summary(), "warning": disturbance(others), "others": others}


def kernels() -> str:
    """Which kernels of fenchel run here, and why."""
    return str(_fast_path("native kernels")["why"])


def compiles() -> bool:
    """A C++ compiler is here, which torch.compile needs for its fast back end."""
    return bool(_fast_path("torch.compile")["active"])


def _fast_path(name: str) -> dict[str, Any]:
    (path,) = (path for path in fl.info()["fast_paths"] if path["name"] == name)
    return dict(path)
