"""Library functions, broken on purpose: what each claim must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Mutation:
    """target: a public function, by its dotted path. broken: from the true one to a wrong one."""

    target: str
    broken: Callable[[Callable], Callable]

    def apply(self, monkeypatch) -> None:
        module, name = self.target.rsplit(".", 1)
        monkeypatch.setattr(self.target, self.broken(getattr(import_module(module), name)))


def off_by(factor: float) -> Callable[[Callable], Callable]:
    """Its answer, a tensor, times a factor."""
    return lambda true: lambda *args, **options: factor * true(*args, **options)
