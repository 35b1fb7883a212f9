"""Whether the generator or coroutine that entered a block is running, or suspended.

A suspended generator leaves its blocks open while its consumer computes, which they are not for.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType

_SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_ENTERING = {"__enter__", "__aenter__", "enter_context", "enter_async_context"}
# They run a generator up to its yield in order to enter what it holds.
_DRIVERS = {"torch.utils.checkpoint", "_pytest.fixtures"}


def suspendable_owner() -> FrameType | None:
    """The frame whose `with` enters the block now, if it can be suspended.

    What enters on behalf of its caller is passed over: a function of `contextlib.contextmanager`,
    an `ExitStack`, an `__enter__` that enters another block.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_name not in _ENTERING:
            if not frame.f_code.co_flags & _SUSPENDABLE:
                return None
            if caller is None or not _enters(caller):
                return frame
        frame = caller
    return None


def _enters(frame: FrameType) -> bool:
    return frame.f_code.co_name in _ENTERING or frame.f_globals.get("__name__") in _DRIVERS


def is_nearest(owner: FrameType | None, others: Collection[FrameType | None] = ()) -> bool:
    """Whether the owner is running, and none of the others runs inside it; None: always is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is owner or frame in others:
            return frame is owner
        frame = frame.f_back
    return owner is None


# The compiler runs it while it traces: a generator itself is never compiled.
suspendable_owner._dynamo_marked_constant = True  # type: ignore[attr-defined]
