"""The page of the ledger: pictures from numbers, anchors, and nothing from elsewhere."""

import re

import pytest

from papers.claims import Check, Curves, Fields, Record, Verdict
from papers.claims.report.page import anchor, render, told
from papers.claims.report.pictures import drawn

CURVES = Curves(
    "Errors", "α", "error", {"first": ([0.1, 1], [1, 2]), "second": ([0.1, 1], [3, 4])}, "xy"
)
FIELDS = Fields("Maps", {"one": [[0, 1], [2, -3]], "two": [[1, 0], [0, 0]]}, (0, 1, 0, 2))


def record(id, verdict, *checks, pictures=()):
    return Record(id, "s < t", verdict, checks, "mend", "", ("note",), pictures, 0, 0.25)


def test_pictures_hold_their_words():
    svg = drawn(CURVES)
    assert svg.startswith("<svg")
    assert all(word in svg for word in ("Errors", "first", "second"))
    maps = drawn(FIELDS)
    assert all(word in maps for word in ("Maps", "one", "two"))
    assert maps.count("cells-") >= 4  # above and below zero, twice


def test_every_record_stands_on_the_page_once():
    check = Check("gap", 2e-16, float("-inf"), 1e-10)
    printed = Check("printed", 2.0, float("-inf"), 1.0, as_printed=True)
    page = render(
        [
            record("D-E5/E6", Verdict.CORRECTED, check, printed, pictures=(CURVES, FIELDS)),
            record("M-C24+", Verdict.CONTRADICTED, Check("gap", 1.0, 0.0, 0.5)),
        ]
    )
    assert page.count('<article id="') == 2
    assert 'id="D-E5-E6"' in page
    assert "s &lt; t" in page
    assert "2 (printed ≤ 1): does not hold" in page
    assert page.count("<svg") == 2
    assert "✗" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(("first", "second"), [("M-C24", "M-C24+"), ("D-E1", "D-E10")])
def test_anchors_differ(first, second):
    assert anchor(first) != anchor(second)


def test_figures_are_told_with_their_range():
    assert told(Check("x", 2.996, 2.95, 3.05)) == "2.996 (3 ± 0.05)"
    assert told(Check("x", 1e-16, float("-inf"), 1e-10)) == "1e−16 (≤ 1e-10)"
    assert told(Check("x", 5.0, 2.0, float("inf"))) == "5 (≥ 2)"
