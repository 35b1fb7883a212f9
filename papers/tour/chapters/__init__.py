"""The chapters of the tour, one module each.

To add one, write a module here with `ORDER`, a number that places it among the others, and
`chapter(tour) -> Chapter`. Nothing else needs to know.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from papers.tour.chapter import Chapter, Tour


class ChapterModule(Protocol):
    __name__: str
    ORDER: int

    def chapter(self, tour: Tour) -> Chapter: ...


def discover() -> list[ChapterModule]:
    """Every chapter, in reading order."""
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return sorted((cast(ChapterModule, module) for module in modules), key=lambda m: m.ORDER)
