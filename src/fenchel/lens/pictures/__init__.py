"""Pictures of attention: over an image, of one head, and as an estimation problem in the plane."""

from typing import Any

from fenchel.lens.pictures.attention_map import attention_map

__all__ = ["attention_map", "estimation_figure", "head_figure"]


def __getattr__(name: str) -> Any:
    """Those that need matplotlib wait until they are asked for."""
    if name == "estimation_figure":
        from fenchel.lens.pictures.estimation import estimation_figure

        return estimation_figure
    if name == "head_figure":
        from fenchel.lens.pictures.head import head_figure

        return head_figure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
