"""The kernels as NEON code: cross-compiled, and their own tests run by an emulator."""

import re
import shutil
import subprocess

import pytest

from tests import needs
from tests.kernels.native import aarch64

COVERS = "the kernels on aarch64"
# Not those of torch's compiler, nor those that start a Python: the emulator runs one program.
TESTS = (
    *(f"test_{name}.py" for name in ("attention", "average", "continuous", "determinism")),
    *(f"test_{name}.py" for name in ("fuzz", "operands", "rows")),
    *(f"test_process.py::test_{name}" for name in ("after_a_fork", "calls_from_several_threads")),
)
ABSENT = [package for program, package in aarch64.PROGRAMS.items() if not shutil.which(program)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("aarch64"),
    needs.unless(not ABSENT, f"Debian's {' and '.join(ABSENT)} not installed", COVERS),
]


@pytest.fixture(scope="module", autouse=True)
def library():
    try:
        aarch64.fetch()
    except (OSError, RuntimeError) as problem:
        why = str(problem).strip().splitlines()[-1]
        needs.skip(f"no Python with torch for aarch64 could be fetched ({why})", COVERS)
    aarch64.build()


def run(*tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [f"tests/kernels/native/{test}" for test in tests]
    pytest_options = ("-p", "no:cacheprovider", "--color=no")
    return aarch64.python("-m", "pytest", *pytest_options, *paths, **environment)


def passed(result: subprocess.CompletedProcess[str]) -> int:
    """How many tests ran; a failure or a skipped test is an error."""
    summary = result.stdout.strip().splitlines()[-1]
    assert result.returncode == 0, result.stdout
    assert "skipped" not in summary, result.stdout
    found = re.search(r"(\d+) passed", summary)
    assert found, result.stdout
    return int(found[1])


def test_products_are_fused():
    """With a whole vector and a number of the other factor, as the register tile has them."""
    command = ["aarch64-linux-gnu-objdump", "--disassemble", "--no-show-raw-insn", aarch64.LIBRARY]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for width in ("4s", "2d"):
        lane = width[-1]
        fused = rf"\tfmla\tv\d+\.{width}, v\d+\.{width}, v\d+\.{lane}\["
        assert len(re.findall(fused, code)) > 100


def test_kernels():
    assert passed(run(*TESTS)) > 400


def test_skipped_tests_are_noticed():
    with pytest.raises(AssertionError, match=r"\d+ skipped"):
        passed(run("test_average.py", FENCHEL_NATIVE="0"))
