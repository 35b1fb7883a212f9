"""From an audit's document to one HTML file that needs nothing else and asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from fenchel.lens.document import Document
from fenchel.lens.files import write_whole
from fenchel.lens.page.sentences import make_sentences

# One script, in this order: what comes later uses what came before.
_SCRIPTS = (
    "data.js",
    "charts.js",
    "map.js",
    "table.js",
    "pull.js",
    "tokens.js",
    "picture.js",
    "head.js",
    "audit.js",
)

# `<`, `>` and `&` occur in strings only, where JSON allows them to be written as numbers: nothing
# in the document can then close the element it stands in, open a comment or name a character.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def render(document: Document) -> str:
    """The page as a string."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["count"] = _count
    style, script = _resource("audit.css"), _script()
    return environment.from_string(_resource("audit.html")).render(
        model=document.model,
        inputs=document.inputs,
        version=document.fenchel,
        sentences=make_sentences(document),
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=Markup(embed(document)),
    )


def write(document: Document, folder: Path) -> Path:
    """The page as folder/report.html, whole or not at all."""
    text = render(document)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    # Half of a surrogate pair, which UTF-8 cannot hold, becomes a character reference.
    write_whole(path, text.encode("utf-8", "xmlcharrefreplace"))
    return path


def embed(document: Document) -> str:
    """The document as JSON in ASCII, safe inside a script element."""
    try:
        text = json.dumps(document.to_json(), allow_nan=False, separators=(",", ":"))
    except ValueError as infinite:
        raise ValueError(
            f"the document must hold finite numbers, with None for what is missing: {infinite}"
        ) from infinite
    return text.translate(_ESCAPES)


def _script() -> str:
    parts = "\n".join(_resource(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def _policy(style: str, script: str) -> str:
    """Only this script and this style, images from the page itself, and nothing from anywhere."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    # The template puts a line break on either side.
    digest = hashlib.sha256(f"\n{text}\n".encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _resource(name: str) -> str:
    text = files("fenchel.lens.page").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n").rstrip("\n")


def _count(number: float) -> str:
    """With thin spaces between thousands."""
    return f"{number:,}".replace(",", "\u202f")
