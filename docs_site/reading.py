"""For griffe, which reads the source for mkdocstrings: docstrings as Markdown."""

from __future__ import annotations

from typing import Any

import griffe

from docs_site import docstrings


class Docstrings(griffe.Extension):
    """Every docstring that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = docstrings.made(obj.docstring.value)
