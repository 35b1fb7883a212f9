"""Blocks, and the checkpoints of torch that begin inside them.

`torch.utils.checkpoint` runs a function again in the backward pass, where torch leaves the blocks
of modes out, even when `backward` is called inside one. Torch offers no hook for that; so the stack
is read, and what a checkpoint will run again is wrapped. Where torch's names are no longer the ones
read here, an error says so.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils import checkpoint as library

Block = AbstractContextManager[Any]

_FILE = library.__file__
_REENTRANT = library.CheckpointFunction.forward.__code__
_OTHER = inspect.unwrap(library.checkpoint).__code__


class Blocks(threading.local):
    """The blocks that this thread has entered and not yet left."""

    def __init__(self) -> None:
        self._open: list[tuple[Block, int]] = []  # with the number of checkpoints around each

    def enter(self, block: Block) -> None:
        self._open.append((block, len(list(_checkpoints()))))

    def leave(self, block: Block) -> None:
        if self._open and self._open[-1][0] is block:  # entered here, not in compiled code
            self._open.pop()

    def follow(self, block: Block) -> bool:
        """Checkpoints under way inside the block will enter it again; False where one cannot."""
        around = next((count for known, count in reversed(self._open) if known is block), 0)
        found = list(_checkpoints())
        inside = found[: max(0, len(found) - around)]
        return all(checkpoint.run_again_within(block) for checkpoint in inside)


def called_by_a_checkpoint() -> bool:
    """Whether the caller of our caller is the code of torch's checkpoints."""
    return sys._getframe(2).f_code.co_filename == _FILE


@dataclass(frozen=True)
class _Checkpoint:
    """One in its forward pass."""

    holder: Any  # of the function that will be run again
    attribute: str

    def run_again_within(self, block: Block) -> bool:
        """Wrap the function; False where there is none, or not yet."""
        function = getattr(self.holder, self.attribute, None)
        if function is None:
            return False
        if not isinstance(function, _Within) or function.block is not block:
            setattr(self.holder, self.attribute, _Within(block, function))
        return True


@dataclass(frozen=True)
class _Within:
    block: Block
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        with self.block:
            return self.function(*arguments)


def _checkpoints() -> Iterator[_Checkpoint]:
    """In this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            yield _Checkpoint(frame.f_locals.get("ctx"), "run_function")
        elif frame.f_code is _OTHER and not frame.f_locals.get("use_reentrant"):
            generator = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            kept = generator.f_locals.get("new_frame") if generator else None
            yield _Checkpoint(kept, "recompute_fn")
        frame = frame.f_back
