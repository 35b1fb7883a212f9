"""Nothing skips silently: what is absent is told at the end, with what it leaves uncovered."""

import re
import sys

import pytest

from tests import needs

BUILDINGS = ("tests", "papers/tests", "benchmarks/tests")
SKIPS = re.compile(r"pytest\.skip\b|importorskip|skipif|mark\.skip\b|unittest\.skip|SkipTest")

ABSENT = """
import pytest
from tests import needs

@needs.unless(False, "no browser (chromium)", "the page")
@pytest.mark.parametrize("n", [1, 2])
def test_page(n): ...

def test_shared():
    needs.shared("data", "nothing", covers="real sentences")

def test_package():
    needs.package("no_such_package", "a peer")

def test_present(): ...
"""


def test_every_skip_goes_through_one_place():
    for folder in BUILDINGS:
        for path in (needs.ROOT / folder).rglob("*.py"):
            if path.name not in ("needs.py", "test_needs.py"):
                assert not SKIPS.search(path.read_text(encoding="utf-8")), path


def test_the_end_of_a_run_tells_what_was_not_covered(pytester):
    pytester.makepyfile(ABSENT)
    pytester.makeconftest((needs.ROOT / "conftest.py").read_text(encoding="utf-8"))
    done = pytester.runpytest_inprocess("-p", "no:xdist")
    done.assert_outcomes(passed=1, skipped=4)
    done.stdout.fnmatch_lines(
        [
            "*- not covered -*",
            "a peer [[]1 test[]]: the package no_such_package is not installed",
            "real sentences [[]1 test[]]: no shared/data/nothing (FENCHEL_SHARED names the folder)",
            "the page [[]2 tests[]]: no browser (chromium)",
        ]
    )


def test_a_run_that_covers_everything_says_nothing(pytester):
    pytester.makepyfile("def test_present(): ...")
    pytester.makeconftest((needs.ROOT / "conftest.py").read_text(encoding="utf-8"))
    done = pytester.runpytest_inprocess("-p", "no:xdist")
    done.assert_outcomes(passed=1)
    assert "not covered" not in done.stdout.str()


def test_reasons_that_say_nothing_are_shown_as_such():
    assert needs.uncovered(["Skipped: for fun"]) == ["not said [1 test]: for fun"]


def test_what_is_there_is_given():
    assert needs.package("torch", "nothing") is sys.modules["torch"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert needs.python(version, "nothing") == sys.executable


def test_a_package_that_is_broken_inside_is_no_absent_one(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        needs.package("half_there", "nothing")
