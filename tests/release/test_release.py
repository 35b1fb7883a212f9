"""Wheel and source distribution: built in a clean environment, installed, used elsewhere."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from fenchel import __version__
from tests import needs

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
COMPILED = shutil.which("g++") or shutil.which("c++")


def run(*words, cwd, **environment):
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
    run(sys.executable, "-m", "build", "--outdir", out, source, cwd=source)
    return out


def works(package: Path, kernels: str, folder: Path, **environment: str) -> None:
    """Installed into a fresh environment, used in an empty folder."""
    venv.create(folder / "env", with_pip=True)
    python, empty = folder / "env" / "bin" / "python", folder / "empty"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    wanted = f"{package}[report,transport,experiments]"
    run(*pip, "-c", ROOT / "constraints.txt", wanted, cwd=folder, **environment)
    empty.mkdir()
    run(python, SMOKE, kernels, cwd=empty)


@pytest.mark.slow
def test_the_wheel_works_elsewhere(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    assert f"fenchel-{__version__}-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any("_native" in name for name in names) == bool(COMPILED)
    assert "fenchel/report/ledger/ledger.html" in names
    works(wheel, "native" if COMPILED else "plain", tmp_path)


@pytest.mark.slow
def test_the_source_distribution_installs_without_a_compiler(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"constraints.txt", "setup.py", "src/fenchel/kernels/native/entry.cpp"} <= held
    nowhere = dict.fromkeys(("CC", "CXX", "LDSHARED"), "/nonexistent/compiler")
    works(sdist, "plain", tmp_path, **nowhere)


@pytest.mark.slow
def test_every_extra_resolves(tmp_path):
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed")
    run(*pip, "-c", ROOT / "constraints.txt", f"{ROOT}[all]", cwd=tmp_path)


def test_the_version_is_the_same_everywhere():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in cited
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    date = cited.split('date-released: "')[1].split('"')[0]
    assert f"\n## {__version__} — {date}\n" in log
