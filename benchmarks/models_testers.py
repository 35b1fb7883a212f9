"""The model testers of a checkout of transformers: its test files, read with what is installed.

They are written for the transformers beside them and import what their authors had. A name that
is absent here is replaced by a stand-in, so that a file whose tests need it still says which models
it tests and with which inputs.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import sys
import unittest
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import transformers
import transformers.utils

_PACKAGE = "tests"  # as the checkout calls it, whose files import each other by it


class Absent:
    """A name that is not installed: it decorates, is inherited from and called, without effect."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<absent: {self._name}>"

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        decorates = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if decorates else self

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: object) -> Absent:
        return self

    def __or__(self, other: object) -> Absent:
        return self

    __ror__ = __or__


class _Partly:
    """What `from module import a, b` reads if the module lacks some of them."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except (AttributeError, ImportError):
            return Absent(f"{self._module.__name__}.{name}")


@contextmanager
def _stand_ins() -> Iterator[None]:
    """While it lasts, files of the checkout may import what is absent."""
    plain = builtins.__import__

    def tolerant(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if level or importer.partition(".")[0] != _PACKAGE:
            return plain(name, globals, locals, fromlist or (), level)
        try:
            module = plain(name, globals, locals, fromlist or (), level)
        except ImportError:
            return Absent(name if fromlist else name.partition(".")[0])
        return _Partly(module) if fromlist and isinstance(module, ModuleType) else module

    with (
        mock.patch.object(builtins, "__import__", tolerant),
        mock.patch.object(transformers.utils, "direct_transformers_import", _installed),
    ):
        yield


def _installed(*place: object, **options: object) -> Any:
    """Testers ask for the transformers of their checkout; two of them in a process would mix."""
    return transformers


class Tester(NamedTuple):
    """A class of models with the test case that knows its configuration and inputs."""

    case: Any
    model_class: Any

    def prepare(self) -> tuple[Any, dict[str, Any]]:
        """Configuration and inputs, as transformers' own tests begin."""
        common = sys.modules.get(f"{_PACKAGE}.test_modeling_common")
        numbers = getattr(common, "global_rng", None)
        if numbers is not None:  # theirs, which begin anywhere
            numbers.seed(0)
        tester = self.case.model_tester
        if hasattr(tester, "prepare_config_and_inputs_for_model_class"):  # Perceiver
            config, inputs = tester.prepare_config_and_inputs_for_model_class(self.model_class)
        else:
            config, inputs = tester.prepare_config_and_inputs_for_common()
        if hasattr(self.case, "_prepare_for_class"):
            inputs = self.case._prepare_for_class(inputs, self.model_class)
        return config, copy.deepcopy(dict(inputs))


class Testers(NamedTuple):
    """What a family tests. problems: name of a class or file -> why it cannot run."""

    by_class: dict[str, Tester]
    problems: dict[str, str]


def share(checkout: Path) -> None:
    """Import what the testers of all families begin with."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    package = sys.modules.get(_PACKAGE)
    if package is not None and str(checkout / _PACKAGE) not in package.__path__:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]  # of another checkout, or our own tests
    for path in sorted((checkout / _PACKAGE).glob("*_tester.py")):
        with _stand_ins():
            importlib.import_module(f"{_PACKAGE}.{path.stem}")


def load(checkout: Path, family: str) -> Testers:
    """Import the family's test files, and make their test cases ready."""
    share(checkout)
    testers = Testers({}, {})
    for path in sorted((checkout / "tests" / "models" / family).glob("test_modeling_*.py")):
        try:
            with _stand_ins():
                module = importlib.import_module(f"{_PACKAGE}.models.{family}.{path.stem}")
        except Exception as problem:  # a file of others, which may do anything
            testers.problems[path.name] = f"import fails: {brief(problem)}"
            continue
        for kind in _test_cases(module):
            _add(kind, testers)
    return testers


def _test_cases(module: ModuleType) -> list[Any]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == module.__name__
        and hasattr(value, "all_model_classes")
    ]


def _add(kind: Any, testers: Testers) -> None:
    if getattr(kind, "__unittest_skip__", False):
        testers.problems[kind.__name__] = f"its tests skip: {kind.__unittest_skip_why__}"
        return
    try:
        case = kind()
        case.setUp()
    except (Exception, unittest.SkipTest) as problem:
        testers.problems[kind.__name__] = f"set-up fails: {brief(problem)}"
        return
    for model_class in case.all_model_classes or ():
        if isinstance(model_class, Absent):
            testers.problems[repr(model_class)] = "not in the installed transformers"
        elif model_class.__name__ not in testers.by_class:
            testers.by_class[model_class.__name__] = Tester(case, model_class)


def brief(problem: BaseException) -> str:
    """Type and first line."""
    return f"{type(problem).__name__}: {first_line(problem)}".rstrip(": ")


def first_line(problem: BaseException, length: int = 200) -> str:
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return lines[0] if len(lines[0]) <= length else f"{lines[0][: length - 1]}…"
