"""The house: a room imports only from rooms above it, the core needs torch and numpy alone, and
papers and benchmarks use what every user can."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import Tree

ROOT = Path(__file__).parents[1]
HOUSE = Tree(ROOT / "src", ROOT)

# From the ground up, as in CONTRIBUTING.md. A room imports from rooms before it.
ROOMS = [
    "_version",
    "_numerics",
    "_unchanged",
    "_uncompiled",
    "_implicit",
    "scores",
    "priors",
    "_kernels",
    "regularizers",
    "_solution",
    "_solve",
    "_maps",
    "_losses",
    "_attention",
    "_info",
    "continuous",
    "dual",
    "measures",
    "bounds",
    "nn",
    "hf",
    "lens",
    "testing",
    "cli",
    "__main__",
]
CORE = ROOMS[: ROOMS.index("continuous")]
# What a file or a folder of the core is written for, where it is installed.
ADAPTERS = {"cache_files.py": "safetensors", "gpu": "triton"}


def room_of(module):
    """The part after fenchel; the package itself for names that it defines."""
    return [*module.split("."), ""][1]


def looks_down(tree):
    """Imports of a room further down, as (file, line, room)."""
    wrong = []
    for path in tree.files("fenchel"):
        room = room_of(tree.module_of(path))
        for actual in tree.imports(path):
            if not room or actual.written[0] != "fenchel":
                continue
            other = room_of(actual.module)
            if other and ROOMS.index(other) > ROOMS.index(room):
                wrong.append((path.name, actual.line, other))
    return wrong


def foreign(tree, package, *forbidden):
    """Imports of forbidden packages."""
    return [
        (path.name, actual.line, actual.module)
        for path in tree.files(package)
        for actual in tree.imports(path)
        if actual.written[0] in forbidden
    ]


def private(tree, package, owner):
    """Names of `owner` that begin with an underscore, used in `package`."""
    return [
        (path.name, actual.line, ".".join(actual.written))
        for path in tree.files(package)
        for actual in tree.imports(path)
        if actual.written[0] == owner
        and any(part.startswith("_") and part != "__version__" for part in actual.written)
    ]


def beyond_torch(tree, rooms):
    """Packages other than torch and numpy that a room imports when it is loaded."""
    allowed = {"fenchel", "torch", "numpy", *sys.stdlib_module_names}
    return [
        (path.name, actual.line, actual.module)
        for path in tree.files("fenchel")
        if room_of(tree.module_of(path)) in rooms
        for actual in tree.imports(path)
        if actual.written[0]
        not in allowed | {ADAPTERS.get(path.name), ADAPTERS.get(path.parent.name)}
    ]


def test_every_room_is_in_the_table():
    for path in HOUSE.files("fenchel"):
        room = room_of(HOUSE.module_of(path))
        assert not room or room in ROOMS, f"{path}: add the room to the table"


def test_rooms_look_up_only():
    assert looks_down(HOUSE) == []


def test_the_library_knows_neither_papers_nor_benchmarks():
    assert foreign(HOUSE, "fenchel", "papers", "benchmarks", "tests") == []
    assert foreign(HOUSE, "benchmarks", "papers") == []


def test_papers_and_benchmarks_use_public_names():
    for package in ("papers", "benchmarks"):
        assert private(HOUSE, package, "fenchel") == []
    assert private(HOUSE, "papers", "benchmarks") == []


def test_the_core_imports_torch_and_numpy_alone():
    assert beyond_torch(HOUSE, CORE) == []
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import fenchel; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(m for m in new if m not in sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(out.stdout)) <= {"fenchel", "torch", "numpy"}


def test_the_core_is_small():
    code = "import sys, fenchel; print(sum(m.split('.')[0] == 'fenchel' for m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) <= 44


@pytest.mark.parametrize("package", ["src/fenchel", "papers", "benchmarks"])
def test_files_and_functions_fit(package):
    for path in (ROOT / package).rglob("*.py"):
        if "tests" in path.parts:
            continue
        text = path.read_text()
        assert len(text.splitlines()) <= 450, f"{path.name} is too long: two rooms were joined"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                assert size <= 60, f"{path.name}: {node.name} has {size} lines"


# ---- the fence itself, with planted violations


@pytest.fixture
def house(tmp_path):
    """fenchel with a room priors and a room nn; `plant` puts a line into a file of theirs."""

    def plant(line, where="fenchel/priors.py"):
        files = {
            "fenchel/__init__.py": "from fenchel.nn.layer import Layer\n",
            "fenchel/priors.py": "import torch\n",
            "fenchel/_solve.py": "",
            "fenchel/nn/__init__.py": "from fenchel.nn.layer import Layer\n",
            "fenchel/nn/layer.py": "Layer = 1\n",
            "papers/__init__.py": "",
            "papers/claims.py": "",
        }
        files[where] += line + "\n"
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return Tree(tmp_path)

    return plant


FORMS = [
    "import fenchel.nn",
    "import fenchel.nn.layer as layer",
    "from fenchel import nn",
    "from fenchel import Layer",
    "from fenchel.nn import layer",
    "from fenchel.nn.layer import Layer",
    "from . import nn",
    "from .nn import Layer",
    "def later():\n    from fenchel.nn import layer",
    "import fenchel as fl\nfl.nn",
    "import fenchel\nfenchel.Layer",
    "from importlib import import_module\nimport_module('fenchel.nn')",
    "__import__('fenchel.nn')",
]


@pytest.mark.parametrize("line", FORMS)
def test_the_fence_sees_every_form_of_import(house, line):
    assert looks_down(house(line))


def test_the_fence_lets_rooms_look_up(house):
    assert looks_down(house("from fenchel import priors", "fenchel/nn/layer.py")) == []
    assert looks_down(house("from . import layer", "fenchel/nn/__init__.py")) == []


@pytest.mark.parametrize("line", ["import papers.claims", "from papers import claims"])
def test_the_fence_sees_papers_in_the_library(house, line):
    assert foreign(house(line), "fenchel", "papers")


@pytest.mark.parametrize(
    "line",
    [
        "import fenchel._solve",
        "from fenchel import _solve",
        "from fenchel._solve import solve",
        "from fenchel.nn.layer import _hidden",
        "import fenchel as fl\nfl._solve",
    ],
)
def test_the_fence_sees_private_names(house, line):
    assert private(house(line, "papers/claims.py"), "papers", "fenchel")


def test_the_fence_lets_public_names_through(house):
    lines = "import fenchel as fl\nfrom fenchel.nn import Layer\nfl.Layer"
    assert private(house(lines, "papers/claims.py"), "papers", "fenchel") == []


@pytest.mark.parametrize("line", ["import scipy", "def f():\n    from scipy import linalg"])
def test_the_fence_sees_other_packages_in_the_core(house, line):
    assert beyond_torch(house(line), ["priors"])
