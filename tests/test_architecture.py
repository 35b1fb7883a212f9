"""The house: a module imports only from the rooms above it, and the core needs only torch."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fenchel"

# From top to bottom, as in the table of rooms. A room may import from rooms before it.
ROOMS = [
    "_version",
    "_files",
    "_launcher",
    "_numerics",
    "scores",
    "priors",
    "kernels",
    "regularizers",
    "solution",
    "solve",
    "maps",
    "losses",
    "attention",
    "continuous",
    "dual",
    "measures",
    "certificates",
    "nn",
    "hf",
    "lens",
    "testing",
    "bench",
    "experiments",
    "claims",
    "report",
    "cli",
    "__main__",
]


# A result that draws itself asks the room of pictures at the moment it is asked to, not before.
DRAWN = {"lens/heads/table.py": "report"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    tree = ast.parse(path.read_text())
    drawn = DRAWN.get(path.relative_to(SOURCE).as_posix())
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in ("plot", "report")
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if node in inside and (getattr(node, "module", None) or "").split(".")[1:2] == [drawn]:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fenchel."):
            rooms.add(node.module.split(".")[1])
    return rooms


def test_every_room_is_known_and_looks_up_only():
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in ROOMS, f"{path.name}: add the room to the table"
        for other in imported_rooms(path):
            assert ROOMS.index(other) <= ROOMS.index(room), f"{room} imports {other}"


def test_the_core_imports_nothing_but_torch_and_numpy():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import fenchel; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(m for m in new if m not in sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    extra = set(ast.literal_eval(out.stdout)) - {"fenchel", "torch", "numpy"}
    optional = {"typer", "rich", "matplotlib", "jinja2", "scipy", "entmax", "ot", "transformers"}
    assert not extra & optional, extra


def test_files_and_functions_fit():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 450, f"{path.name} is too long: two rooms were joined"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                assert size <= 60, f"{path.name}: {node.name} has {size} lines"
