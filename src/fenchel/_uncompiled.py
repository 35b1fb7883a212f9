"""Run compiled models as they were written, for as long as somebody looks at what they call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_LOCK = Lock()
_inside: list[Any] = []  # one stance for all who are inside: torch keeps it for all threads


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, torch compiles nothing and runs nothing compiled. Threads may overlap: the last one
    out puts back what was before the first."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with _LOCK:
        _inside.append(_inside[0] if _inside else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _LOCK:
            stance = _inside.pop()
            if not _inside:
                stance.__exit__(None, None, None)
