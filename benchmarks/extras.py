"""Packages that a benchmark compares with, loaded when it runs."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = 'pip install -c constraints.txt ".[papers]"'


def load(module: str) -> Any:
    """The module, or an error that names what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(f"{package} is missing; {INSTALL}", name=package) from None
