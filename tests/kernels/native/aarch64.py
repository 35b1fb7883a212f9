"""An aarch64 Python with torch and our kernels, for an emulator: `make test-aarch64`.

Debian's Python is unpacked below build/aarch64, wheels are put beside it, and the kernels are
cross-compiled by setup.py. Nothing is installed, and nothing needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.needs import ROOT

FOLDER = ROOT / "build" / "aarch64"
PACKAGE, SITE, SYSTEM = (FOLDER / name for name in ("package", "site", "system"))
LIBRARY = PACKAGE / "fenchel" / "_kernels" / "_native.so"
PROGRAMS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
TORCH = "torch==2.10.0"  # later wheels for aarch64 need CUDA's libraries
OTHERS = (
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "sympy"),
    *("typing_extensions", "hypothesis", "sortedcontainers"),
    *("iniconfig", "packaging", "pluggy", "pygments", "pytest"),
)


def _run(*command: object, **environment: str) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stdout}{done.stderr}")


def fetch() -> None:
    """Python, its libraries and the wheels, once."""
    if (FOLDER / "fetched").exists():
        return
    packages = FOLDER / "apt"
    for part in ("lists", "archives"):
        (packages / part / "partial").mkdir(parents=True, exist_ok=True)
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": packages,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": packages,
    }
    apt = ("apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items()))
    _run(*apt, "update")
    wanted = ("python3", "libstdc++6", "libgomp1")
    _run(*apt, "install", "--download-only", "--no-install-recommends", "--yes", *wanted)
    for package in (packages / "archives").glob("*.deb"):
        _run("dpkg", "-x", package, SYSTEM)
    version = (SYSTEM / "usr/bin/python3").readlink().name.removeprefix("python")
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
    kind = (*platforms, f"--python-version={version}", "--only-binary=:all:", "--no-deps")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", *kind, f"--target={SITE}")
    _run(*pip, TORCH)
    _run(*pip, "-c", "constraints.txt", *OTHERS)
    (FOLDER / "fetched").touch()


def build() -> None:
    """The package with its kernels."""
    compilers = {"CC": "aarch64-linux-gnu-gcc", "CXX": "aarch64-linux-gnu-g++"}
    LIBRARY.unlink(missing_ok=True)
    options = (f"--build-lib={PACKAGE}", f"--build-temp={FOLDER / 'objects'}")
    setup = (sys.executable, "setup.py", "--quiet", "build", *options)
    _run(*setup, **compilers, _PYTHON_HOST_PLATFORM="linux-aarch64")
    if not LIBRARY.exists():  # setup.py takes the failure of a compiler for its absence
        raise RuntimeError("the kernels were not compiled")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python in a clone's root; output and errors together."""
    paths = {
        "PYTHONPATH": f"{PACKAGE}:{SITE}",
        "PYTHONPYCACHEPREFIX": str(FOLDER / "bytecode"),
    }
    return subprocess.run(
        ["qemu-aarch64", "-L", str(SYSTEM), str(SYSTEM / "usr/bin/python3"), *arguments],
        cwd=ROOT,
        env={**os.environ, **paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
