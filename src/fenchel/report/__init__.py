"""The tour: pictures and one HTML page. Numbers come from the public API and from `bench`."""

from fenchel.report.attention_map import attention_map
from fenchel.report.estimation import estimation_figure

__all__ = ["attention_map", "estimation_figure"]
