"""Our docstrings as Markdown: plain text with examples, arguments as `name: what it is`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import groupby

# `base: ...`, `ridge, padding: ...`, `mask (..., n): ...`
_NAMES = r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*)(?P<shape> \([^)]*\))?: "
_ARGUMENT = re.compile(_NAMES)
_NEXT = re.compile(r"(?<=\.) (?=[a-z_]\w*(?:, [a-z_]\w*)*(?: \([^)]*\))?: )")
_CODE_SPAN = re.compile(r"(`[^`]+`)")
_EMPHASIS = re.compile(r"((?<![\w*])\*(?=\w)[^*]+(?<=\w)\*(?![\w*]))")


def made(text: str) -> str:
    """Paragraphs, code and lists in the order of the docstring."""
    lines = inspect.cleandoc(text).splitlines()
    paragraphs = [
        list(part) for empty, part in groupby(lines, lambda x: not x.strip()) if not empty
    ]
    return "\n\n".join(piece for part in paragraphs for piece in _pieces(part))


def _pieces(lines: list[str]) -> Iterator[str]:
    """A paragraph may end in an example, or turn into a list of arguments."""
    prompt = next((i for i, line in enumerate(lines) if line.startswith(">>> ")), len(lines))
    if lines[:prompt]:
        yield from _before_prompt(lines[:prompt])
    if lines[prompt:]:
        yield _fence("pycon", lines[prompt:])


def _before_prompt(lines: list[str]) -> Iterator[str]:
    if all(line.startswith("    ") for line in lines):
        inner = inspect.cleandoc("\n" + "\n".join(lines)).splitlines()
        yield _fence("python" if _is_python(inner) else "text", inner)
    elif _is_python(lines):
        yield _fence("python", lines)
    else:
        yield from _prose(lines)


def _is_python(lines: list[str]) -> bool:
    """Statements that do something: prose seldom parses, and `name: type` does but is none."""
    try:
        body = ast.parse("\n".join(lines)).body
    except SyntaxError:
        return False
    kinds = (ast.Assign, ast.Import, ast.ImportFrom, ast.With, ast.FunctionDef, ast.ClassDef)
    return all(
        isinstance(each, kinds)
        or (isinstance(each, ast.Expr) and any(isinstance(n, ast.Call) for n in ast.walk(each)))
        for each in body
    )


def _fence(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _prose(lines: list[str]) -> Iterator[str]:
    """An argument ends where the next begins, or where indented lines of it end."""
    groups: list[tuple[str, list[str]]] = []
    held: list[str] = []
    kind, indented = "text", False
    for line in lines:
        argument = _ARGUMENT.match(line)
        if argument or (kind == "item" and indented and not line.startswith(" ")):
            groups.append((kind, held))
            kind, held, indented = ("item" if argument else "text"), [], False
        indented |= line.startswith(" ")
        held.append(line.strip())
    groups.append((kind, held))
    for kind, several in groupby(groups, lambda group: group[0]):
        texts = [" ".join(held) for _, held in several if held]
        if kind == "item":
            yield "\n".join(f"- {item}" for text in texts for item in _items(text))
        else:
            yield from map(escaped, texts)


def _items(text: str) -> Iterator[str]:
    """Short arguments share a line: `norm: of the inputs. around: (d), with radius.`"""
    for part in _NEXT.split(text):
        argument = _ARGUMENT.match(part)
        assert argument is not None
        names = ", ".join(f"`{name}`" for name in argument["names"].split(", "))
        yield f"{names}{escaped(argument['shape'] or '')}: {escaped(part[argument.end() :])}"


def escaped(text: str) -> str:
    """Stars, underscores and angles of formulas are no markup; code and *emphasis* are."""
    parts = (part for piece in _CODE_SPAN.split(text) for part in _split(piece))
    return "".join(part if keep else _plain(part) for part, keep in parts)


def _split(piece: str) -> Iterator[tuple[str, bool]]:
    if _CODE_SPAN.fullmatch(piece):
        yield piece, True
        return
    for part in _EMPHASIS.split(piece):
        yield part, bool(_EMPHASIS.fullmatch(part))


def _plain(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\*_\[\]$#])", r"\\\1", text)
