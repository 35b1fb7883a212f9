"""The reference: which names a room offers, and where each is defined.

A name of a room is often that of the file which defines it (`fenchel.dual.estimate` is a function
and a module), so every entry is asked for by the place of its definition. Read from the source:
nothing is imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs_site import docstrings

SOURCE = Path(__file__).parents[1] / "src"


@dataclass(frozen=True)
class Entry:
    """public: as users write it. defined: where it stands in the source. module: it is one."""

    public: str
    defined: str
    module: bool = False

    @property
    def room(self) -> str:
        """Of the definition: the part after fenchel."""
        return self.defined.split(".")[1]


def entries(module: str) -> list[Entry]:
    """The names of `__all__`; without one, those public names that the module defines."""
    return [_entry(module, name) for name in names(module)]


@cache
def names(module: str) -> tuple[str, ...]:
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            return tuple(ast.literal_eval(node.value))
    defined = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node)
    ]
    return tuple(defined)


def _entry(module: str, name: str) -> Entry:
    public = f"{module}.{name}"
    origin = _origin(module, name)
    return Entry(public, origin, module=origin == public and _path(public) is not None)


def _origin(module: str, name: str) -> str:
    """Along the imports, to where the name is made."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fenchel"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if node.module == module:
                        return f"{module}.{name}"
                    return _origin(node.module, alias.name)
    return f"{module}.{name}"


def _targets(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _path(module: str) -> Path | None:
    stem = SOURCE.joinpath(*module.split("."))
    found = (stem / "__init__.py", stem.with_suffix(".py"))
    return next((path for path in found if path.is_file()), None)


@cache
def _tree(module: str) -> ast.Module:
    path = _path(module)
    if path is None:
        raise ValueError(f"there is no module {module} in {SOURCE.name}")
    return ast.parse(path.read_text(encoding="utf-8"))


# ---- pages


def page(module: str, pages: set[str], level: int = 2) -> str:
    """The entries of a module as Markdown. pages: modules with a page of their own, which an entry
    that is defined there is only linked to."""
    parts = [docstrings.made(_about(module))]
    own = entries(module)
    linked = [entry for entry in own if _elsewhere(entry, module, pages)]
    if linked:
        parts.append("\n".join(map(_link, linked)))
    shown = {entry.defined for entry in own}
    for entry in own:
        if entry.module and entry not in linked:
            parts.append(f"{'#' * level} {entry.public} {{ #{entry.public} }}")
            parts.append(docstrings.made(_about(entry.public)))
            # What the room offers itself is not shown twice.
            inner = [e for e in entries(entry.public) if e.defined not in shown]
            parts += [_directive(e, level + 1) for e in inner]
        elif entry not in linked:
            parts.append(_directive(entry, level))
    return "\n\n".join(parts)


def _about(module: str) -> str:
    """Its docstring, without its own name in front, which would be taken for an argument."""
    return (ast.get_docstring(_tree(module)) or "").removeprefix(f"{module}: ")


def _elsewhere(entry: Entry, module: str, pages: set[str]) -> bool:
    home = f"fenchel.{entry.room}"
    return home != module and not module.startswith(f"{home}.") and home in pages


def _link(entry: Entry) -> str:
    room = f"fenchel.{entry.room}"
    target = f"{entry.room}.md" if entry.module else f"{entry.room}.md#{room}.{_last(entry)}"
    return f"- [`{entry.public}`]({target}): {summary(entry)}"


def _last(entry: Entry) -> str:
    return entry.public.rpartition(".")[2]


def summary(entry: Entry) -> str:
    """The first sentence of its docstring, or line."""
    text = _docstring(entry)
    return docstrings.escaped(text.partition("\n\n")[0].replace("\n", " ").rstrip(".:")) + "."


def _docstring(entry: Entry) -> str:
    if entry.module:
        return _about(entry.defined)
    module, _, name = entry.defined.rpartition(".")
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_docstring(node) or ""
    return ""


def _directive(entry: Entry, level: int) -> str:
    """With an anchor of the public name: what mkdocstrings makes is that of the definition."""
    anchor = f'<a id="{entry.public}"></a>\n\n' if entry.public != entry.defined else ""
    return (
        f"{anchor}::: {entry.defined}\n"
        f"    options:\n"
        f"      heading: {_last(entry)}\n"
        f"      toc_label: {_last(entry)}\n"
        f"      heading_level: {level}\n"
    )
