"""The audit of a model as one HTML page and as figures, from the audit's document."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fenchel.lens.page.figures import save_figures
    from fenchel.lens.page.maps import map_figure
    from fenchel.lens.page.page import render, write

__all__ = ["map_figure", "render", "save_figures", "write"]

_HOME = {"map_figure": "maps", "render": "page", "save_figures": "figures", "write": "page"}


def __getattr__(name: str) -> Any:
    """Pages need jinja2 and figures matplotlib; both wait until they are asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"fenchel.lens.page.{_HOME[name]}"), name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f'{name} needs {missing.name}: pip install "fenchel[report]"', name=missing.name
        ) from missing
