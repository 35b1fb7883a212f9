"""Wheel and source distribution: built in a clean environment, installed, used elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from docs_site import house
from fenchel import __version__
from tests import needs

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
SOURCE = ROOT / "src" / "fenchel"
COMPILED = shutil.which("g++") or shutil.which("c++")
NATIVE = "_kernels/_native.so"
MOST_LINES = 47_500  # of Python and C++; 57,455 before papers and benchmarks left


def assert_runs(*words, cwd, **environment):
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What git holds, and nothing that lies about."""
    folder = tmp_path_factory.mktemp("source")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(source, tmp_path_factory) -> Path:
    needs.package("build", "the wheel and the source distribution")
    out = tmp_path_factory.mktemp("dist")
    assert_runs(sys.executable, "-m", "build", "--outdir", out, source, cwd=source)
    return out


def assert_works(
    package: Path, kernels: str, folder: Path, python: str, **environment: str
) -> None:
    """Installed into a fresh environment, used in an empty folder."""
    assert_runs(python, "-m", "venv", folder / "env", cwd=folder)
    inner, empty = folder / "env" / "bin" / "python", folder / "empty"
    pip = (inner, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    wanted = f"{package}[hf,report,transport]"
    assert_runs(*pip, "-c", ROOT / "constraints.txt", wanted, cwd=folder, **environment)
    empty.mkdir()
    assert_runs(inner, SMOKE, kernels, cwd=empty)


def code_lines(archive: zipfile.ZipFile) -> int:
    """Of Python and C++."""
    names = [name for name in archive.namelist() if Path(name).suffix in house.CODE]
    return sum(len(archive.read(name).decode().splitlines()) for name in names)


def test_the_library_is_small():
    assert house.lines(ROOT / "src" / "fenchel", house.CODE) <= MOST_LINES


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    assert re.fullmatch(rf"fenchel-{__version__}-py3-none-(?!any)\w+", wheel.stem)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert code_lines(archive) <= MOST_LINES
    assert {name.split("/")[0] for name in names} == {"fenchel", f"fenchel-{__version__}.dist-info"}
    held = {name.removeprefix("fenchel/") for name in names if name.startswith("fenchel/")}
    assert held - {NATIVE} == {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
    }
    assert (NATIVE in held) == bool(COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_wheel_works_elsewhere(built, tmp_path, version):
    python = needs.python(version, f"the wheel under Python {version}")
    (wheel,) = built.glob("*.whl")
    assert_works(wheel, "native" if COMPILED else "plain", tmp_path, python)


@pytest.mark.slow
def test_the_source_distribution_installs_without_a_compiler(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"constraints.txt", "setup.py", "src/fenchel/_kernels/native/entry.cpp"} <= held
    assert not {name.split("/")[0] for name in held} & {"papers", "benchmarks", "tests"}
    nowhere = dict.fromkeys(("CC", "CXX", "LDSHARED"), "/nonexistent/compiler")
    assert_works(sdist, "plain", tmp_path, sys.executable, **nowhere)


@pytest.mark.slow
def test_every_extra_resolves(tmp_path):
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed")
    assert_runs(*pip, "-c", ROOT / "constraints.txt", f"{ROOT}[all]", cwd=tmp_path)


def test_the_version_is_the_same_everywhere():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in cited
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    date = cited.split('date-released: "')[1].split('"')[0]
    assert f"\n## {__version__} — {date}\n" in log
