"""Times of several calls taken in turn, so that a slow moment of the machine falls on all alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Thunk = Callable[[], object]
Clock = Callable[[], float]  # seconds
# (what is being measured, share of the whole that was just done): for a progress bar.
Advance = Callable[[str, float], object]

_SAMPLE = 5e-3  # seconds: shorter calls are repeated until the clock can see them
_LONG = 2.0  # seconds: a call this long needs no warm-up, its first time counts
_BUSY = 0.1  # a larger share of the processors for others makes the ratios doubtful
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Rounds:
    """How often a group is repeated: between `least` and `most`, for about `seconds`."""

    least: int = 3
    most: int = 9
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"rounds must be 1 <= least <= most, got {self.least}, {self.most}")

    def count(self, one: float) -> int:
        """one: seconds that a round takes."""
        wanted = self.most if one <= 0 else int(min(self.most, self.seconds / one))
        return max(self.least, wanted)


@dataclass(frozen=True)
class Samples:
    """Seconds a call, one a round; or why there are none."""

    seconds: tuple[float, ...] = ()
    error: str = ""


@dataclass
class _Runner:
    thunk: Thunk | None = None
    calls: int = 1
    pace: float = 0.0  # seconds that one sample takes
    seconds: list[float] = field(default_factory=list)
    error: str = ""


def interleave(
    makers: Sequence[Callable[[], Thunk]],
    rounds: Rounds,
    advance: Callable[[float], object] = lambda share: None,
    clock: Clock = time.perf_counter,
) -> list[Samples]:
    """Warm every call up, then time all of them once a round.

    makers: each returns the call to be timed; an error in making or warming up is a result.
    advance: called with the share of the work that was just done; the shares add up to one.
    clock: time.process_time does not count what others take, but adds up all threads.
    """
    warm_up = 1 / (rounds.least + 1)
    runners = []
    for make in makers:
        runners.append(_start(make, clock))
        advance(warm_up / len(makers))
    count = rounds.count(sum(runner.pace for runner in runners))
    for _ in range(count):
        for runner in runners:
            if runner.thunk is not None and len(runner.seconds) < count:
                runner.seconds.append(_time(runner.thunk, runner.calls, clock))
            advance((1 - warm_up) / (count * len(makers)))
    return [Samples(tuple(runner.seconds), runner.error) for runner in runners]


def _start(make: Callable[[], Thunk], clock: Clock) -> _Runner:
    try:
        thunk = make()
        first = _time(thunk, 1, clock)
    except Exception as failure:  # what a peer cannot do here is a result, and the others go on
        return _Runner(error=_first_line(failure))
    if first >= _LONG:
        return _Runner(thunk, 1, first, [first])
    # The best of three is not a stall; a call that is long enough anyway need not be asked again.
    once = first if first > 20 * _SAMPLE else min(_time(thunk, 1, clock) for _ in range(3))
    calls = max(1, round(_SAMPLE / max(once, 1e-9)))
    return _Runner(thunk, calls, once * calls)


def _first_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:200]}".rstrip(": ")


def _time(thunk: Thunk, calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        thunk()
    return (clock() - start) / calls


class Neighbours:
    """How much of the processors went to other processes since this object was made.

    With several threads a call that waits may spin, so that the processor time of this process
    alone does not show the wait; the machine's own count does (on Linux).
    """

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float | None:
        """Between 0 and 1; None where the machine keeps no such count."""
        if self._start is None or (now := self._now()) is None:
            return None
        total, busy, ours = (after - before for after, before in zip(now, self._start, strict=True))
        return min(1.0, max(0.0, (busy - ours) / total)) if total > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of all processors, those they worked, and those they worked for us."""
        try:
            line = _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:9]
        except OSError:
            return None
        ticks = [int(value) / os.sysconf("SC_CLK_TCK") for value in line]
        idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
        return sum(ticks), sum(ticks) - idle, sum(os.times()[:4])


def disturbance(others: float | None) -> str:
    """What to tell the reader where others had that share; empty if there is nothing to tell."""
    if others is None or others <= _BUSY:
        return ""
    return (
        f"Do not trust these ratios: other processes had {others:.0%} of the processors. "
        "Run again when the machine is idle."
    )


def part(advance: Advance, what: str, size: float) -> Callable[[float], object]:
    """Progress within one part of the whole: from shares of it to shares of all."""
    advance(what, 0.0)
    return lambda share: advance(what, size * share)
