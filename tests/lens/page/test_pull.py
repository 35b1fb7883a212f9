"""On a head's page: where the gradient of the loss pulls."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fenchel.lens.document import Document
from fenchel.lens.page import write
from tests import needs
from tests.lens.page.browser import Browser
from tests.lens.page.document import document, image_document, long_document, without_pull

pytestmark = needs.browser("the vectors of a head on the audit's page")

PAIRS = {"encoder": 1, "decoder": 1, "cross": 1}
DOCUMENTS = {
    "texts": document(),
    "pairs": document(PAIRS, 2),
    "long": long_document(),
    "image": image_document(),
    "none": without_pull(document()),
    "none of an image": without_pull(image_document()),
    "not everywhere": without_pull(document(), "encoder/1"),
}
CHOICES = "[...document.querySelectorAll('select.shade option')].map(o => o.textContent)"
SAID = "document.querySelector('.example').innerText"
TIP = "(t => t.hidden ? '' : t.textContent)(document.getElementById('tip'))"
NOTHING = "rgba(0, 0, 0, 0)"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        name: write(Document.from_json(content), folder / name)
        for name, content in DOCUMENTS.items()
    }


def gains(name: str, layer: str, head: int) -> NDArray[np.float64]:
    """(n,) in [-1, 1], read from the document."""
    links = DOCUMENTS[name]["examples"][0]["links"][layer]
    whole = np.frombuffer(base64.b64decode(links["gained"]), "<u2").reshape(-1, links["keys"])
    values: NDArray[np.float64] = whole[head] / 65535 * 2 - 1
    return values


def shade_by(page: Browser, name: str) -> None:
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    page.run(
        f"(s => {{ s.value = '{name}'; s.dispatchEvent(new Event('change')); }})"
        "(document.querySelector('select.shade'))"
    )
    page.settle()


def shades(page: Browser, selector: str) -> dict[int, NDArray[np.float64]]:
    """place -> red, green, blue and opacity, each in [0, 1], as the browser draws them."""
    colours = page.run(
        f"[...document.querySelectorAll('{selector}')].map(t =>"
        " [+t.dataset.place, getComputedStyle(t).backgroundColor])"
    )
    return {place: _colour(text) for place, text in colours}


def _colour(text: str) -> NDArray[np.float64]:
    numbers = np.array([float(x) for x in re.findall(r"[\d.]+", text.removeprefix("color(srgb"))])
    if not text.startswith("color("):
        numbers[:3] /= 255
    return numbers if len(numbers) == 4 else np.append(numbers, 1.0)


def assert_orange_gains_and_purple_loses(
    drawn: dict[int, NDArray[np.float64]], expected: dict[int, float]
) -> None:
    """And the opacity is the square root of the share of the largest, up to a step of 16 bits."""
    assert drawn.keys() == expected.keys()
    largest = max(map(abs, expected.values()))
    for place, gain in expected.items():
        red, _, blue, opacity = drawn[place]
        assert opacity == pytest.approx(0.7 * np.sqrt(abs(gain) / largest), abs=4e-3)
        if opacity > 0.1:
            assert np.sign(red - blue) == np.sign(gain), (place, gain, drawn[place])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("name", "layer", "head", "selector"),
    [
        ("texts", "encoder/1", 2, ".token"),
        ("pairs", "decoder/0", 1, ".token"),
        ("pairs", "cross/0", 0, ".token[data-side=key]"),
        ("long", "encoder/0", 1, ".token"),
        ("image", "encoder/1", 2, ".patch"),
    ],
)
def test_the_shade_is_the_documents_pull(
    page: Browser,
    paths: dict[str, Path],
    name: str,
    layer: str,
    head: int,
    selector: str,
    scheme: str,
) -> None:
    page.media(prefers_color_scheme=scheme)
    page.open(paths[name], f"#{layer}/{head}")
    shade_by(page, "pull")
    drawn = shades(page, selector)
    gained = gains(name, layer, head)
    expected = {place: float(gained[place]) for place in drawn}
    assert len(drawn) == len(gained) - (name == "image")  # its class token is no patch
    assert_orange_gains_and_purple_loses(drawn, expected)
    most, least = (max(expected, key=lambda k: sign * expected[k]) for sign in (1, -1))
    assert expected[most] > 0.1
    assert expected[least] < -0.1
    assert drawn[most][0] > drawn[most][2]
    assert drawn[least][0] < drawn[least][2]
    assert "A step down the gradient of the loss would look less more at these." in " ".join(
        page.run(SAID).split()
    )
    assert page.complaints() == []
    page.media()


def test_a_wrong_shade_is_noticed() -> None:
    orange = np.array([0.9, 0.5, 0.1, 0.7])
    assert_orange_gains_and_purple_loses({0: orange}, {0: 1.0})
    for wrong in (-1.0, 0.0):
        with pytest.raises(AssertionError):
            assert_orange_gains_and_purple_loses({0: orange, 1: orange}, {0: 1.0, 1: wrong})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_stay_readable_on_the_deepest_shade(
    page: Browser, paths: dict[str, Path], scheme: str
) -> None:
    page.media(prefers_color_scheme=scheme)
    page.open(paths["texts"], "#encoder/1/2")
    shade_by(page, "pull")
    under, ink = (
        _colour(page.run(f"getComputedStyle(document.querySelector('.sentence')).{name}"))[:3]
        for name in ("backgroundColor", "color")
    )
    for *colour, opacity in shades(page, ".token").values():
        behind = opacity * np.array(colour) + (1 - opacity) * under
        bright, dim = sorted((_luminance(ink), _luminance(behind)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5  # WCAG 2, AA
    page.media()


def _luminance(colour: NDArray[np.float64]) -> float:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize(
    ("name", "address"),
    [("none", "#encoder/0/1"), ("none of an image", "#encoder/0/1")],
)
def test_without_the_pull_there_is_no_choice(
    page: Browser, paths: dict[str, Path], name: str, address: str
) -> None:
    page.open(paths[name], address)
    assert page.run(CHOICES) == []
    assert "gradient" not in page.run(SAID)
    assert page.complaints() == []


def test_the_choice_is_kept_from_head_to_head(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["not everywhere"], "#encoder/0/3")
    assert page.run(CHOICES) == ["weight received", "where the gradient pulls"]
    assert "gradient of the loss" not in page.run(SAID)
    shade_by(page, "pull")
    for address, there in (("encoder/1/0", False), ("encoder/2/0", True), ("encoder/2/1", True)):
        page.run(f"location.hash = '#{address}'")
        title = f"Layer {address[8]} head {address[10]}"
        page.wait(f"document.getElementById('head-title').textContent === '{title}'")
        page.settle()
        assert (page.run(CHOICES) != []) == there
        assert ("gradient of the loss" in page.run(SAID)) == there
        assert (page.run("document.querySelector('.token.more') !== null")) == there
    shade_by(page, "received")
    assert page.run("document.querySelector('.token.more, .token.less')") is None
    assert page.run("document.querySelector('select.shade').value") == "received"


def test_the_choice_and_the_values_can_be_reached_with_the_keyboard(
    page: Browser, paths: dict[str, Path]
) -> None:
    page.open(paths["texts"], "#encoder/1/2")
    page.run("document.querySelector('select.shade').focus()")
    page.press("ArrowDown", 40)
    assert page.run("document.querySelector('select.shade').value") == "pull"
    page.press("Tab", 9)
    gained = gains("texts", "encoder/1", 2)
    for place in range(2):
        told, gain = page.run(TIP), gained[place]
        assert page.run("document.activeElement.dataset.place") == str(place)
        assert _number(told) == pytest.approx(gain, abs=6e-3)
        assert told.endswith(", more" if gain > 0 else ", less")
        assert _number(page.run("document.querySelector('.said').textContent")) == pytest.approx(
            gain, abs=6e-3
        )
        page.press("ArrowRight", 39)


def _number(text: str) -> float:
    match: Any = re.search(r"([+−])(\d\.\d+)", text)
    return float(match[2]) * (1 if match[1] == "+" else -1)


@pytest.mark.parametrize(
    ("name", "layer", "selector"),
    [("pairs", "cross/0", ".token[data-side=key]"), ("image", "encoder/1", ".patch")],
)
def test_pointing_tells_the_value_and_keeps_the_shade(
    page: Browser, paths: dict[str, Path], name: str, layer: str, selector: str
) -> None:
    page.open(paths[name], f"#{layer}/1")
    shade_by(page, "pull")
    before = shades(page, selector)
    gained = gains(name, layer, 1)
    for place in (int(gained[1:].argmax()) + 1, int(gained[1:].argmin()) + 1):
        page.hover(f'{selector}[data-place="{place}"]')
        assert _number(page.run(TIP)) == pytest.approx(gained[place], abs=6e-3)
        after = shades(page, selector)
        assert all(np.array_equal(before[key], after[key]) for key in before)


def test_a_token_that_only_asks_gains_nothing(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["pairs"], "#cross/0/1")
    shade_by(page, "pull")
    page.hover('.token[data-side=query][data-place="3"]')
    assert page.run(TIP) == ""
    colours = "[...document.querySelectorAll('.token[data-side=query]')].map(t =>"
    colours += " getComputedStyle(t).backgroundColor)"
    assert set(page.run(colours)) == {NOTHING}
