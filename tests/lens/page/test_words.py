"""What the page says of a head and of an image: only what the numbers bear out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fenchel.lens.document import Document
from fenchel.lens.page import write
from tests import needs
from tests.lens.page.browser import Browser
from tests.lens.page.document import document, image_document

pytestmark = needs.browser("the words of the audit's page, as shown")

Open = Callable[..., Browser]


@pytest.fixture
def opened(page: Browser, tmp_path: Path) -> Open:
    def show(content: dict[str, Any], address: str) -> Browser:
        page.open(write(Document.from_json(content), tmp_path), address)
        page.settle()
        assert page.complaints() == []
        return page

    return show


def text_of(page: Browser, selector: str) -> str:
    text: str = page.run(f"document.querySelector('{selector}')?.textContent ?? ''")
    return text


# ---- images


@pytest.mark.parametrize("width", [1400, 600])
def test_patches_lie_on_the_photograph(opened: Open, page: Browser, width: int) -> None:
    page.resize(width, 900)
    opened(image_document(), "#encoder/1/1")
    page.wait("document.querySelector('.picture img').naturalWidth > 0")
    boxes = page.run(
        "['.picture img', '.patch'].map(s => [...document.querySelectorAll(s)].map(e => {"
        " const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }))"
    )
    beside = page.run("document.querySelector('.picture + div').getBoundingClientRect().height")
    page.send("Emulation.clearDeviceMetricsOverride")
    (image,), patches = boxes
    if width == 1400:  # or else the list could not stretch the picture
        assert beside > image[3] - image[1]
    assert len(patches) == 14**2
    ends = [min(p[i] for p in patches) for i in (0, 1)]
    ends += [max(p[i] for p in patches) for i in (2, 3)]
    assert ends == pytest.approx(image, abs=0.6)
    covered = sum((p[2] - p[0]) * (p[3] - p[1]) for p in patches)
    assert covered == pytest.approx((image[2] - image[0]) * (image[3] - image[1]), rel=0.01)


def test_images_are_told_of_in_patches(opened: Open) -> None:
    content = image_document()
    offsets = {"offsets": [-1, 0, 1], "mass": [[0.2, 0.5, 0.3]] * 3}
    content["offsets"] = {"encoder/0": offsets}
    page = opened(content, "#encoder/0/0")
    assert "Weight by place (reading order)" in text_of(page, "#charts")
    line = text_of(page, '.number[data-column="distance"]')
    assert "patches, in reading order" in line
    assert "tokens" not in line
    how = page.run("document.querySelector('#how-area > p').textContent")
    assert "patch" in how
    assert "curves" not in how
    content = document()
    content["offsets"] = {"encoder/0": {**offsets, "mass": [[0.2, 0.5, 0.3]] * 4}}
    page = opened(content, "#encoder/0/0")
    assert "reading order" not in page.run("document.body.innerText")
    assert "curves" in page.run("document.querySelector('#how-area > p').textContent")


# ---- ranks


def test_equal_values_share_their_places(opened: Open) -> None:
    content = document()
    for place, row in enumerate(content["rows"]):
        row["entropy"] = 1.5
        row["entropy_share"] = 0.5 if place < 3 else 0.1 + 0.01 * place
    page = opened(content, "#encoder/0/0")
    rank = '.number[data-column="{}"] .rank'
    assert text_of(page, rank.format("entropy")) == "the same for all heads"
    assert text_of(page, rank.format("entropy_share")) == "1st to 3rd of 12, tied"
    page.run("location.hash = '#table'")
    page.wait("document.querySelector('#table tbody tr') !== null")
    bars = page.run(
        "[...document.querySelectorAll('#table tbody tr:first-child td:not(.where)')]"
        ".slice(0, 2).map(c => c.style.background)"
    )
    assert bars[0] == ""
    assert "100.0%" in bars[1]


# ---- sentences of a head


def test_the_certificate_begins_with_what_holds_for_all_texts(opened: Open) -> None:
    content = document()
    content["rows"][0] |= {"bound": 2.25, "largest_bound": 7.5, "tightness": 1.001}
    words = text_of(opened(content, "#encoder/0/0"), "#certificate p")
    assert "moves by at most 7.5: certified for every query of each text." in words
    assert "On average over texts the certified bound is 2.25." in words
    assert "An attack reached the bound: it is tight." in words
    content["rows"][0]["tightness"] = 1.3
    words = text_of(opened(content, "#encoder/0/0"), "#certificate p")
    assert "The bound is 1.3 times what an attack reached" in words


def test_one_text_is_not_called_the_probe(opened: Open) -> None:
    page = opened(document(), "#encoder/0/0")
    probe = "Measured on the probe, 32 of the texts."
    assert probe in text_of(page, '.number[data-column="local"]')
    assert "probe" not in text_of(page, '.number[data-column="tightness"]')


def test_which_links_are_in_the_file(opened: Open) -> None:
    page = opened(document(), "#encoder/0/2")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    page.settle()
    words = text_of(page, ".said")
    stored = 8 * document()["examples"][0]["links"]["encoder/0"]["queries"]
    assert words.startswith(f"The 40 strongest of the {stored} links in the file are drawn.")
    assert "Of each token the 8 strongest links are kept, if above 7.6·10⁻⁶." in words


PLAIN = {
    "mass_previous": 0.1,
    "mass_next": 0.1,
    "mass_self": 0.1,
    "mass_first": 0.1,
    "mass_separator": 0.1,
    "distance": 5.0,
    "entropy_share": 0.5,
}


@pytest.mark.parametrize(
    ("numbers", "label"),
    [
        ({}, ""),
        ({"mass_previous": 0.62}, "Previous-token head: 62 % of its weight"),
        ({"mass_next": 0.51, "distance": 1.1}, "Next-token head"),
        ({"mass_self": 0.9}, "Looks at itself"),
        ({"mass_first": 0.7}, "First-token head (a sink)"),
        ({"mass_separator": 0.7}, "Separator head"),
        ({"distance": 1.5}, "Local head: it looks 1.5 tokens away"),
        ({"entropy_share": 0.9}, "Broad head"),
        ({"mass_previous": 0.5, "distance": 2.0, "entropy_share": 0.85}, ""),
    ],
)
def test_a_head_has_a_name_only_if_it_is_clear(
    opened: Open, numbers: dict[str, float], label: str
) -> None:
    content = document({"encoder": 1}, 2)
    extra = {"name": "mass_separator", "title": "weight on separators"}
    content["columns"].append({**content["columns"][0], **extra})
    content["rows"][0] |= PLAIN | numbers
    title = text_of(opened(content, "#encoder/0/0"), ".label")
    assert title.startswith(label)
    assert bool(title) == bool(label)


def test_an_ordinary_head_is_said_to_be_so(opened: Open) -> None:
    content = document()
    for row in content["rows"]:
        for column in content["columns"]:
            row[column["name"]] = float(row["head"])
    words = text_of(opened(content, "#encoder/0/1"), ".head-top .note")
    assert words == "No number of it is extreme among all heads."


def test_groups_of_numbers_stay_as_they_were_left(opened: Open) -> None:
    page = opened(document(), "#encoder/0/0")
    state = "[...document.querySelectorAll('details.group')].filter(d => d.open)"
    state += ".map(d => d.dataset.group)"
    assert page.run(state) == ["weights"]
    page.click('details.group[data-group="stability"] summary')
    page.click('details.group[data-group="weights"] summary')
    assert page.run(state) == ["stability"]
    page.run("location.hash = '#encoder/0/1'")
    page.wait("document.getElementById('head-title').textContent === 'Layer 0 head 1'")
    assert page.run(state) == ["stability"]
