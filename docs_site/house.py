"""The rooms of the library and the buildings around it, with their lines counted at the build."""

from __future__ import annotations

import ast
from pathlib import Path

from docs_site.tables import table

CODE = (".py", ".cpp", ".h")  # what the bar on the size of the library counts
PAGES = (".html", ".css", ".js")
ORDER = "tests/test_architecture.py"  # the test that keeps the order has the list
FRONT = "The public names; rooms beyond the core load when they are first touched."

BUILDINGS = {
    "src/fenchel": "the library: all that pip installs",
    "papers": "claims, experiments, studies and the tour",
    "benchmarks": "what measures",
    "tests": "tests of the library, in its order",
    "papers/tests": "tests of the papers",
    "benchmarks/tests": "tests of the benchmarks",
    "docs_site": "what makes this site",
    "examples": "one idea per file",
}


def section(root: Path) -> str:
    """What stands in place of the marker."""
    return "\n\n".join(["## The buildings", _buildings(root), "## The rooms", _rooms(root)])


def lines(folder: Path, endings: tuple[str, ...]) -> int:
    """Of a file or of all files below a folder."""
    paths = [folder] if folder.is_file() else folder.rglob("*")
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in paths
        if path.suffix in endings
    )


def rooms(root: Path) -> list[str]:
    """From the ground up."""
    for node in ast.parse((root / ORDER).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{ORDER} has no list ROOMS; the page of the house shows the rooms in order")


def _rooms(root: Path) -> str:
    library = root / "src" / "fenchel"
    rows = [("__init__.py", FRONT, *_counts(library / "__init__.py"))]
    rows += [_room(library, name) for name in rooms(root)]
    rows.append(("all", "", *_counts(library)))
    header = ("room", "what lives there", "lines", "of its pages")
    return table(header, rows, numbers_from=2)


def _room(library: Path, name: str) -> tuple[str, ...]:
    """A folder or a file."""
    folder, file = library / name, library / f"{name}.py"
    if folder.is_dir():
        return (f"{name}/", _about(folder / "__init__.py"), *_counts(folder))
    return (file.name, _about(file), *_counts(file))


def _counts(place: Path) -> tuple[str, str]:
    pages = lines(place, PAGES)
    return f"{lines(place, CODE):,}", f"{pages:,}" if pages else ""


def _about(path: Path) -> str:
    """The first paragraph of the docstring, as plain text."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("`", "")


def _buildings(root: Path) -> str:
    rows = [(name, what, f"{_alone(root, name):,}") for name, what in BUILDINGS.items()]
    return table(("folder", "what it is", "lines"), rows, numbers_from=2)


def _alone(root: Path, name: str) -> int:
    """Lines of a building without those inside it that are listed for themselves."""
    inner = [other for other in BUILDINGS if other.startswith(f"{name}/")]
    return lines(root / name, CODE) - sum(lines(root / other, CODE) for other in inner)
