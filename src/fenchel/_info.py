"""What is installed here, and which fast paths are open."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import torch

from fenchel._kernels.gpu.device import describe_gpu
from fenchel._kernels.route import describe_native
from fenchel._version import __version__

# What each extra adds, by the names that are imported.
_EXTRAS = {
    "report": ("typer", "rich", "matplotlib", "jinja2"),
    "hf": ("transformers", "safetensors"),
    "transport": ("ot", "scipy"),
    "gpu": ("triton",),
}


@dataclass(frozen=True)
class FastPath:
    """Something that makes work faster or possible. `why` explains either answer."""

    name: str
    active: bool
    why: str


def info() -> dict[str, Any]:
    """Versions, devices and fast paths of this installation, as `fenchel info --json` prints them.

    >>> fl.info()["fast_paths"][0]["why"]
    """
    return {**summary(), "fast_paths": [asdict(path) for path in fast_paths()]}


def summary() -> dict[str, str | int | list[str]]:
    """Versions, threads, devices and the default dtype."""
    return {
        "fenchel": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": devices(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def devices() -> list[str]:
    names = ["cpu"]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count)]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def fast_paths() -> list[FastPath]:
    native = FastPath("native kernels", *describe_native())
    gpu = FastPath("GPU kernels", *describe_gpu())
    return [native, gpu, _cuda(), _compile(), *map(_extra, _EXTRAS)]


def cxx_compiler() -> str | None:
    """The name of the C++ compiler that torch.compile would find; None if there is none."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if candidate and shutil.which(candidate):
            return PurePath(candidate).name
    return None


def _cuda() -> FastPath:
    if torch.cuda.is_available():
        return FastPath("CUDA", True, f"{torch.cuda.device_count()} device(s)")
    built = torch.version.cuda is not None
    why = "no CUDA device found" if built else "this torch is built without CUDA; the CPU is used"
    return FastPath("CUDA", False, why)


def _compile() -> FastPath:
    compiler = cxx_compiler()
    if compiler is not None:
        return FastPath("torch.compile", True, f"C++ compiler found: {compiler}")
    why = "no C++ compiler found (tried CXX, g++, c++, clang++); eager mode works without one"
    return FastPath("torch.compile", False, why)


def _extra(extra: str) -> FastPath:
    missing = [name for name in _EXTRAS[extra] if importlib.util.find_spec(name) is None]
    name = f"extra: {extra}"
    if not missing:
        return FastPath(name, True, "installed")
    return FastPath(
        name, False, f'{", ".join(missing)} missing; pip install -c constraints.txt ".[{extra}]"'
    )
