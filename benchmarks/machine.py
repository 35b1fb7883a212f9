"""What a measurement depends on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch

import fenchel as fl


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


def kernels() -> str:
    """Which kernels of fenchel run here, and why."""
    paths = {path["name"]: path["why"] for path in fl.info()["fast_paths"]}
    why: str = paths["native kernels"]
    return why


def cxx_compiler() -> str | None:
    """The name of the C++ compiler that torch.compile would find; None if there is none."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if candidate and shutil.which(candidate):
            return PurePath(candidate).name
    return None
