"""Which kernels the user asked for by `fenchel.use`. Its own file: devices and routes both ask."""

from __future__ import annotations

from contextvars import ContextVar

NATIVE, TORCH, GPU = "native", "torch", "gpu"
CHOSEN: ContextVar[str | None] = ContextVar("fenchel_kernels", default=None)

Reason = str | None  # why a path cannot run; None: it can


def chosen_kernels() -> str | None:
    """What `use` says here; None outside of its blocks."""
    return CHOSEN.get()


def other_than(kernels: str) -> Reason:
    """That the user asked for something else."""
    chosen = CHOSEN.get()
    return None if chosen in (None, kernels) else f'fenchel.use("{chosen}") is in force'
