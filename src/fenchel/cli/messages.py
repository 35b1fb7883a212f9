"""What a long command says on standard error while it works."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_EARLY = 10  # per cent done before which nothing is foretold in a log


class Messages:
    """Lines, and a bar where there is a terminal; a process that is not the main one is silent."""

    def __init__(self, is_main: bool) -> None:
        self._console = Console(stderr=True, soft_wrap=True, quiet=not is_main)

    def say(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def status(self, text: str) -> AbstractContextManager[object]:
        return self._console.status(text)

    @contextmanager
    def bar(self, name: str, total: float | None = None) -> Iterator[Bar]:
        """With an estimate over the last ten minutes, as a unit may take one."""
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            speed_estimate_period=600,
        ) as progress:
            progress.add_task(name, total=total)
            yield Bar(progress, self)


class Bar:
    """The progress of one task."""

    def __init__(self, progress: Progress, messages: Messages) -> None:
        self._progress, self._messages = progress, messages
        self._minutes = 0  # the last that was logged

    def begin(self, total: float, done: float) -> None:
        self._progress.update(self._progress.task_ids[0], total=total, completed=done)

    def advance(self, amount: float) -> None:
        self._progress.advance(self._progress.task_ids[0], amount)

    def finish_unit(self, name: str, cost: float) -> None:
        """On the bar; in a log one line per minute."""
        task = self._progress.tasks[0]
        self._progress.update(task.id, advance=cost, description=f"after {name}")
        minutes = int(task.elapsed or 0) // 60
        if self._progress.disable and minutes > self._minutes:
            self._minutes = minutes
            left = task.time_remaining
            early = left is None or task.percentage < _EARLY
            guess = "" if early else f", about {math.ceil((left or 0) / 60)} min left"
            self._messages.say(f"{task.percentage:.0f} % after {minutes} min ({name}){guess}")
