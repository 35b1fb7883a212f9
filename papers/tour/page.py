"""From chapters to one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
import torch
from markupsafe import Markup, escape

from fenchel import __version__
from fenchel.lens.pictures import draw
from papers.tour.chapter import Chapter, Mark


def render(chapters: Sequence[Chapter], *, seed: int) -> str:
    """The page as a string."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(prose=_prose, inline=_inline, slug=slug, own_ids=_own_ids)
    environment.tests["mark"] = lambda cell: isinstance(cell, Mark)
    template = environment.from_string(_resource("tour.html"))
    return template.render(
        chapters=chapters,
        seed=seed,
        style=Markup(_resource("tour.css")),
        version=__version__,
        torch_version=torch.__version__,
    )


def write(path: Path, chapters: Sequence[Chapter], *, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(chapters, seed=seed), encoding="utf-8")
    return path


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _prose(text: str) -> Markup:
    """Paragraphs; see `Chapter.intro`."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return Markup("\n").join(_block(block) for block in blocks)


def _block(block: str) -> Markup:
    if block.startswith("    "):
        lines = "\n".join(line.removeprefix("    ") for line in block.splitlines())
        return Markup("<pre>{}</pre>").format(lines)
    return Markup("<p>{}</p>").format(_inline(block.strip()))


def _inline(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _own_ids(svg: str, prefix: str) -> Markup:
    return Markup(draw.unique_ids(svg, prefix))  # our own drawing, not a reader's text
