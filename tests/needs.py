"""What a clone may lack: shared data, a model, a browser, a compiler, a package of an extra.

A test that needs such a thing skips by a function of this file, which asks what the test would
have covered. The last lines of a run repeat both (`conftest.py` at the root).
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

import fenchel as fl

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("FENCHEL_SHARED") or ROOT.parent / "shared")
SEPARATOR = "; not covered: "


def reason(absent: str, covers: str) -> str:
    return f"{absent}{SEPARATOR}{covers}"


def uncovered(reasons: list[str]) -> list[str]:
    """Lines for the end of a run, from reasons as pytest reports them."""
    counts = Counter(each.removeprefix("Skipped: ") for each in reasons)
    lines = []
    for told, count in counts.items():
        absent, _, covers = told.partition(SEPARATOR)
        number = f"{count} test" if count == 1 else f"{count} tests"
        lines.append(f"{covers or 'not said'} [{number}]: {absent}")
    return sorted(lines)


def skip(absent: str, covers: str) -> NoReturn:
    """In a test, a fixture or a module."""
    pytest.skip(reason(absent, covers), allow_module_level=True)


def unless(present: object, absent: str, covers: str) -> pytest.MarkDecorator:
    """A mark for a test or a module."""
    return pytest.mark.skipif(not present, reason=reason(absent, covers))


def package(name: str, covers: str) -> Any:
    """The module."""
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        skip(f"the package {name.partition('.')[0]} is not installed", covers)


def shared(*parts: str, covers: str) -> Path:
    """A file or a folder of the shared data."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        skip(f"no shared/{'/'.join(parts)} (FENCHEL_SHARED names the folder)", covers)
    return path


def model(name: str, covers: str) -> Path:
    """A folder below build/models."""
    folder = ROOT / "build" / "models" / name
    if not (folder / "config.json").is_file():
        script = f"shared/tools/get_{name.replace('-', '_')}.py makes it"
        way_out = {"minilm": "`make demo` fetches it"}.get(name, script)
        skip(f"no build/models/{name} ({way_out})", covers)
    return folder


def kernels(covers: str) -> pytest.MarkDecorator:
    """Compiled and switched on."""
    (path,) = (path for path in fl.info()["fast_paths"] if path["name"] == "native kernels")
    return unless(path["active"], f"no native kernels ({path['why']})", covers)


def compiler(covers: str) -> pytest.MarkDecorator:
    return unless(shutil.which("g++"), "no C++ compiler (g++)", covers)


def python(version: str, covers: str) -> str:
    """The interpreter of a version, as 3.12: this one, or one that is found and starts."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    program = shutil.which(f"python{version}")
    if program is None or subprocess.run([program, "-V"], capture_output=True).returncode:
        skip(f"no Python {version}", covers)
    return program


def browser(covers: str) -> pytest.MarkDecorator:
    return unless(shutil.which("chromium"), "no browser (chromium)", covers)


def transformers_checkout(covers: str) -> Path:
    """A clone of transformers' repository, with its model testers."""
    named = os.environ.get("FENCHEL_TRANSFORMERS", "")
    if not named or not (Path(named) / "tests" / "models").is_dir():
        skip("no clone of transformers (FENCHEL_TRANSFORMERS names its folder)", covers)
    return Path(named).resolve()
