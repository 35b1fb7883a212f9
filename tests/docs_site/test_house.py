"""The page of the house: every room in order, with the lines that are there."""

import re
from html import unescape
from pathlib import Path

import pytest

from docs_site import house
from tests import test_architecture

ROOT = Path(__file__).parents[2]


def rows(html):
    return [
        [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", html)
    ]


def test_rooms_stand_in_the_order_that_is_tested():
    assert house.rooms(ROOT) == test_architecture.ROOMS
    shown = [row[0].rstrip("/").removesuffix(".py") for row in rows(house.section(ROOT)) if row]
    first = shown.index("__init__")
    assert shown[first + 1 : first + 1 + len(test_architecture.ROOMS)] == test_architecture.ROOMS


def test_every_room_and_building_says_what_it_is():
    for name, what, *_ in filter(None, rows(house.section(ROOT))):
        assert what or name == "all", name


def test_the_rooms_add_up_to_the_library():
    counts = {row[0]: int(row[2].replace(",", "")) for row in rows(house.section(ROOT)) if row}
    whole = counts.pop("all")
    assert whole == counts["src/fenchel"] == house.lines(ROOT / "src" / "fenchel", house.CODE)
    assert sum(count for name, count in counts.items() if name not in house.BUILDINGS) == whole


def test_lines_are_counted_once(tmp_path):
    (tmp_path / "papers" / "tests").mkdir(parents=True)
    (tmp_path / "papers" / "a.py").write_text("1\n\n3\n")
    (tmp_path / "papers" / "b.h").write_text("1\n")
    (tmp_path / "papers" / "c.css").write_text("1\n2\n")
    (tmp_path / "papers" / "tests" / "d.py").write_text("1\n2")
    assert house.lines(tmp_path, house.CODE) == 6
    assert house.lines(tmp_path, house.PAGES) == 2
    assert house._alone(tmp_path, "papers") == 4
    assert house._alone(tmp_path, "papers/tests") == 2


def test_an_order_that_is_not_there_is_missed(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / house.ORDER).write_text("CORE = []\n")
    with pytest.raises(ValueError, match="has no list ROOMS"):
        house.rooms(tmp_path)


def test_contributors_are_told_the_rooms_in_order():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    told = text.partition("every form of import):")[2].partition(". Those before")[0]
    assert re.findall(r"`(\w+)`", told) == test_architecture.ROOMS
    core = told.partition("→")[0]
    assert re.findall(r"`(\w+)`", core) == test_architecture.CORE
