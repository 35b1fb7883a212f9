"""The page in a browser: quiet, offline, and showing the document's numbers."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fenchel.lens.document import Document
from fenchel.lens.page import write
from tests import needs
from tests.lens.page.browser import Browser
from tests.lens.page.document import document, example, image_document, long_document

pytestmark = needs.browser("the audit's page in a real browser")

SCRIPT = "<script>window.hacked=1</script>"
HOSTILE = f"</script>{SCRIPT}<img src=x onerror=window.hacked=1><!-- \u2028"
LAYERS = {"encoder": 2, "decoder": 1, "cross": 2}


def hostile() -> dict[str, Any]:
    content = document({"encoder": 1}, 2, HOSTILE)
    shown = content["examples"][0]
    shown["text"] = HOSTILE
    shown["tokens"]["encoder"] = [HOSTILE, SCRIPT, *shown["tokens"]["encoder"][2:]]
    content["columns"][0] |= {"title": HOSTILE, "explain": HOSTILE, "unit": SCRIPT}
    return content


def large() -> dict[str, Any]:
    content = document({"decoder": 60}, 20)
    content["examples"] = [
        example({"decoder": 1}, 20, content["examples"][0]["tokens"], "one layer")
    ]
    return content


DOCUMENTS = {
    "texts": document(),
    "pairs": document(LAYERS, 3),
    "long": long_document(),
    "image": image_document(),
    "hostile": hostile(),
    "large": large(),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        name: write(Document.from_json(content), folder / name)
        for name, content in DOCUMENTS.items()
    }


def test_the_browser_reports_what_goes_wrong(page: Browser, tmp_path: Path) -> None:
    """Or else the tests below could not fail."""
    path = tmp_path / "bad.html"
    policy = "default-src 'none'; script-src 'unsafe-inline'"
    path.write_text(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<img src="https://example.invalid/x.png"><script>missing()</script>'
    )
    page.open(path)
    complaints = " ".join(page.complaints())
    assert "Content Security Policy" in complaints
    assert "missing is not defined" in complaints
    path.write_text('<img src="http://127.0.0.1:9/x.png">')
    page.open(path)
    assert "http://127.0.0.1:9/x.png" in page.requests()


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("texts", ""),
        ("texts", "#encoder/2/3"),
        ("texts", "#encoder/1/1"),
        ("pairs", ""),
        ("pairs", "#encoder/1/2"),
        ("pairs", "#decoder/0/0"),
        ("pairs", "#cross/1/1"),
        ("long", "#encoder/0/1"),
        ("image", "#encoder/1/0"),
        ("hostile", ""),
        ("hostile", "#encoder/0/1"),
        ("large", ""),
        ("large", "#decoder/59/19"),
        ("texts", "#encoder/9/9"),
        ("texts", "#100%"),
    ],
)
def test_pages_are_quiet_and_offline(
    page: Browser, paths: dict[str, Path], name: str, address: str
) -> None:
    page.open(paths[name], address)
    assert page.complaints() == []
    assert all(url.startswith(("file:", "data:")) for url in page.requests())
    assert page.run("document.getElementById('overview').hidden") == (
        address.count("/") == 2 and address != "#encoder/9/9"
    )
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.run("typeof window.hacked") == "undefined"


def test_markup_in_the_document_is_text(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["hostile"])
    assert page.run("document.querySelector('h1').textContent") == HOSTILE
    assert HOSTILE in page.run("document.getElementById('map-explain').textContent")
    page.run("location.hash = '#encoder/0/0'")
    page.wait("document.querySelector('.token') !== null")
    tokens = page.run("[...document.querySelectorAll('.token')].map(t => t.textContent)")
    assert tokens[:2] == [HOSTILE, SCRIPT]
    assert HOSTILE[:50] in page.run("document.querySelector('#examples option').textContent")
    page.hover(".token:nth-child(2)")
    assert SCRIPT in page.run("document.querySelector('.said').textContent")
    assert page.run("document.querySelectorAll('main script, main img').length") == 0
    assert page.run("typeof window.hacked") == "undefined"
    assert page.complaints() == []


# ---- the map


def test_a_cell_opens_its_head_and_back_returns(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"])
    page.click('a.cell[data-key="encoder/1/2"]')
    page.wait("location.hash === '#encoder/1/2'")
    assert page.run("document.getElementById('head-title').textContent") == "Layer 1 head 2"
    assert page.run("document.getElementById('overview').hidden")
    page.click("a[rel=next]")
    page.wait("document.getElementById('head-title').textContent === 'Layer 1 head 3'")
    page.run("history.back()")
    page.wait("document.getElementById('head-title').textContent === 'Layer 1 head 2'")
    page.run("history.back()")
    page.wait("!document.getElementById('overview').hidden")
    assert page.run("document.getElementById('head').hidden")


def test_cells_say_their_values_and_sort_within_layers(
    page: Browser, paths: dict[str, Path]
) -> None:
    page.open(paths["texts"], "#map/tightness")
    keys = "[...document.querySelectorAll('#map-area a.cell')].map(c => c.dataset.key)"
    rows = DOCUMENTS["texts"]["rows"]
    assert page.run(keys) == [f"encoder/{row['layer']}/{row['head']}" for row in rows]
    label = page.run("document.querySelector('.cell.null').getAttribute('aria-label')")
    assert label == "layer 1 head 1: not measured"
    page.click("#map-controls input[type=checkbox]")
    falling = sorted(rows, key=lambda row: (row["layer"], -(row["tightness"] or -1)))
    assert page.run(keys) == [f"encoder/{row['layer']}/{row['head']}" for row in falling]


def test_the_map_can_be_used_with_the_keyboard(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"])
    assert page.run("document.querySelectorAll('#map-area a.cell[tabindex=\"0\"]').length") == 1
    page.run("document.querySelector('#map-area a.cell').focus()")
    page.press("ArrowDown", 40)
    page.press("ArrowRight", 39)
    assert page.run("document.activeElement.dataset.key") == "encoder/1/1"
    told = page.run("document.getElementById('tip').textContent")
    assert "layer 1 head 1" in told
    assert "Explains entropy." in told


# ---- the table

COLUMN = """
(name => {
  const heads = [...document.querySelectorAll('#table thead th')];
  const at = heads.findIndex(th => th.querySelector('button').dataset.sort === name);
  return {sort: heads[at].getAttribute('aria-sort'),
    keys: [...document.querySelectorAll('#table tbody tr')].map(tr => tr.dataset.key),
    cells: [...document.querySelectorAll('#table tbody tr')].map(tr => tr.cells[at].textContent)};
})
"""


def by_key(name: str) -> dict[str, Any]:
    return {f"{r['kind']}/{r['layer']}/{r['head']}": r for r in DOCUMENTS[name]["rows"]}


def test_columns_sort_both_ways_with_nulls_last(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"], "#table")
    page.click("#table [data-group=stability]")
    rows = by_key("texts")
    for direction, sign in (("descending", -1), ("ascending", 1)):
        page.click('#table [data-sort="tightness"]')
        column = page.run(f"{COLUMN}('tightness')")
        values = [rows[key]["tightness"] for key in column["keys"]]
        assert column["sort"] == direction
        assert values[-1] is None
        assert column["cells"][-1] == "–"
        assert values[:-1] == sorted(values[:-1], key=lambda x: sign * x)
        assert float(column["cells"][0]) == pytest.approx(values[0], rel=5e-3)
        assert len(set(column["keys"])) == len(rows)


def test_sorting_is_stable(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"], "#table")
    page.click('#table [data-sort="entropy"]')
    page.click('#table [data-sort="layer"]')
    keys = page.run(f"{COLUMN}('layer')")["keys"]
    rows = by_key("texts")
    assert keys == sorted(rows, key=lambda key: (rows[key]["layer"], -rows[key]["entropy"]))


def test_filters_and_links_of_the_table(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["pairs"], "#table")
    choose = "(label, value) => { const s = [...document.querySelectorAll('#table label')]"
    choose += ".find(l => l.textContent.startsWith(label)).querySelector('select');"
    choose += "s.value = value; s.dispatchEvent(new Event('change')); }"
    page.run(f"({choose})('kind', 'cross'); ({choose})('layer', '1')")
    assert page.run(f"{COLUMN}('layer')")["keys"] == ["cross/1/0", "cross/1/1", "cross/1/2"]
    page.click("#table tbody tr:nth-child(2) a")
    page.wait("location.hash === '#cross/1/1'")


def test_the_names_of_heads_stay_in_sight(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["pairs"], "#table")
    page.click("#table [data-group=all]")
    lefts = (
        "(box => [...document.querySelectorAll('#table tbody tr:first-child .where')].map(c =>"
        " Math.round(c.getBoundingClientRect().left - box.getBoundingClientRect().left)))"
        "(document.querySelector('#table .tall'))"
    )
    before = page.run(lefts)
    assert len(before) == 3
    assert before[0] <= 1
    assert before == sorted(set(before))
    page.run("document.querySelector('#table .tall').scrollLeft = 700")
    page.settle()
    assert page.run("document.querySelector('#table .tall').scrollLeft") == 700
    assert page.run(lefts) == before


def test_a_large_table_is_built_as_it_is_read(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["large"])
    count = "document.querySelectorAll('#table tbody tr').length"
    assert page.run(count) == 0
    page.run("location.hash = '#table'")
    page.wait(f"{count} === 100")
    page.run("document.querySelector('#table .tall').scrollTop = 1e6")
    page.wait(f"{count} === 200")
    assert page.run("document.querySelectorAll('#map-area a.cell').length") == 1200


# ---- sentences


def stored(name: str, layer: str, head: int, place: int = 0) -> Any:
    """(to, weight, received) of one head, read from the document."""
    links = DOCUMENTS[name]["examples"][place]["links"][layer]
    shape = (-1, links["queries"], links["width"])
    parts = (np.frombuffer(base64.b64decode(links[p]), "<u2") for p in ("to", "weight", "received"))
    to, weight, received = parts
    mass = received.reshape(-1, links["keys"])[head] / 65535
    return to.reshape(shape)[head], weight.reshape(shape)[head] / 65535, mass


PATHS = (
    "[...document.querySelectorAll('.curves .link')].map(p =>"
    " [+p.dataset.from, +p.dataset.to, +p.dataset.weight])"
)


def expected_links(name: str, layer: str, head: int, query: int) -> dict[int, float]:
    to, weight, _ = stored(name, layer, head)
    pairs = zip(to[query].tolist(), weight[query].tolist(), strict=True)
    return {key: share for key, share in pairs if share > 0}


@pytest.mark.parametrize(
    ("name", "layer", "head", "query", "selector"),
    [
        ("texts", "encoder/1", 2, 4, ".token"),
        ("pairs", "decoder/0", 1, 7, ".token"),
        ("pairs", "cross/1", 2, 3, ".token[data-side=query]"),
        ("long", "encoder/0", 1, 300, ".token"),
    ],
)
def test_the_links_of_a_token_are_the_documents(
    page: Browser,
    paths: dict[str, Path],
    name: str,
    layer: str,
    head: int,
    query: int,
    selector: str,
) -> None:
    page.open(paths[name], f"#{layer}/{head}")
    page.hover(f'{selector}[data-place="{query}"]')
    wanted = expected_links(name, layer, head, query)
    shown = page.run(PATHS)
    assert {start for start, _, _ in shown} == {query}
    assert {to: share for _, to, share in shown} == pytest.approx(wanted, abs=1e-5)
    chips = page.run("[...document.querySelectorAll('.said .chip')].map(c => c.textContent)")
    side = "encoder" if layer.startswith(("encoder", "cross")) else "decoder"
    names = DOCUMENTS[name]["examples"][0]["tokens"][side]
    best = max(wanted, key=lambda key: wanted[key])
    assert chips[0].startswith(f"{names[best].lstrip('▁')} {wanted[best]:.2f}"[:-1])


def test_the_strongest_links_of_all(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"], "#encoder/0/2")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    page.settle()
    _, weight, _ = stored("texts", "encoder/0", 2)
    strongest = np.sort(weight, None)[::-1]
    assert [share for _, _, share in page.run(PATHS)] == pytest.approx(strongest[:40], abs=1e-5)
    page.run(
        "(s => { s.value = 7; s.dispatchEvent(new Event('input')); })"
        "(document.querySelector('.links-shown'))"
    )
    assert [share for _, _, share in page.run(PATHS)] == pytest.approx(strongest[:7], abs=1e-5)


def test_who_looks_at_a_token(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["pairs"], "#cross/0/1")
    to, weight, received = stored("pairs", "cross/0", 1)
    key = int(received.argmax())
    page.hover(f'.token[data-side=key][data-place="{key}"]')
    wanted = {int(q): weight[q, r] for q, r in np.argwhere((to == key) & (weight > 0))}
    shown = page.run(PATHS)
    assert {at for _, at, _ in shown} == {key}
    assert {start: share for start, _, share in shown} == pytest.approx(wanted, abs=1e-5)


def test_a_click_holds_a_token_and_another_frees_it(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"], "#encoder/1/1")
    away = {"type": "mouseMoved", "x": 1, "y": 1}
    page.click('.token[data-place="5"]')
    page.send("Input.dispatchMouseEvent", **away)
    page.settle()
    assert {start for start, _, _ in page.run(PATHS)} == {5}
    page.click('.token[data-place="5"]')
    page.send("Input.dispatchMouseEvent", **away)
    page.settle()
    assert len({start for start, _, _ in page.run(PATHS)}) > 1


@pytest.mark.parametrize("width", [1280, 390])
def test_five_hundred_tokens_stay_inside_their_box(
    page: Browser, paths: dict[str, Path], width: int
) -> None:
    page.resize(width, 900)
    page.open(paths["long"], "#encoder/0/1")
    page.settle()
    outside = """
      (() => { const box = document.querySelector('.sentence').getBoundingClientRect();
        const out = e => { const b = e.getBoundingClientRect(); return b.left < box.left - 0.5 ||
          b.right > box.right + 0.5 || b.top < box.top - 0.5 || b.bottom > box.bottom + 0.5; };
        const of = s => [...document.querySelectorAll(s)];
        return [of('.token').length, of('.token').filter(out).length,
          of('.link').length, of('.link').filter(out).length]; })()
    """
    assert page.run(outside) == [512, 0, 40, 0]
    for place in (0, 3, 511):  # on the first line and on the last
        page.hover(f'.token[data-place="{place}"]')
        assert page.run(outside)[1:] == [0, 8, 0]
    page.send("Emulation.clearDeviceMetricsOverride")


# ---- images and the rest of a head's page


def test_a_patch_shows_where_it_looks(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["image"], "#encoder/1/2")
    assert page.run("document.querySelector('.picture img').naturalWidth") == 112
    warm = (
        "[...document.querySelectorAll('.patch')].filter(p => p.style.backgroundColor"
        " !== 'transparent').map(p => +p.dataset.place)"
    )
    to, weight, _ = stored("image", "encoder/1", 2)
    for query in (0, 31):
        if query:
            page.click(f'.patch[data-place="{query}"]')
        keys = to[query][(weight[query] > 0) & (to[query] > 0)]
        assert page.run(warm) == sorted(keys.tolist())
        chosen = page.run("[...document.querySelectorAll('.patch.chosen')].map(p => p.ariaLabel)")
        assert chosen == (["row 2, column 2"] if query else [])
    page.click('[data-place="-1"]')
    received = stored("image", "encoder/1", 2)[2]
    assert page.run(warm) == [k for k in range(1, 197) if received[k] > 0]


def test_all_numbers_of_a_head_with_their_ranks(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"], "#encoder/1/1")
    content = DOCUMENTS["texts"]
    lines = page.run(
        "Object.fromEntries([...document.querySelectorAll('.number')].map(n =>"
        " [n.dataset.column, [n.querySelector('.rank').textContent,"
        " n.querySelector('b').textContent]]))"
    )
    assert list(lines) == [column["name"] for column in content["columns"]]
    assert lines.pop("tightness") == ["", "not measured"]
    row = by_key("texts")["encoder/1/1"]
    for name, (rank, _) in lines.items():
        place = 1 + sum(other[name] > row[name] for other in content["rows"])
        last = sum(other[name] >= row[name] for other in content["rows"])
        ties = "" if last == place else rf" to {last}(st|nd|rd|th)"
        tied = ", tied" if ties else ""
        assert re.fullmatch(rf"{place}(st|nd|rd|th){ties} of {len(content['rows'])}{tied}", rank)


def test_certificate_charts_recipe_and_what_if(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"], "#encoder/0/0")
    row = by_key("texts")["encoder/0/0"]
    words = page.run("document.getElementById('certificate').textContent")
    for name in ("bound", "largest_bound", "local", "tightness"):
        assert f"{float(f'{row[name]:.3g}'):g}" in words
    assert page.run("document.querySelectorAll('#charts figure').length") == 5
    heights = page.run(
        "[...document.querySelectorAll('.agree i')].map(i => parseFloat(i.style.height) / 100)"
    )
    wanted = DOCUMENTS["texts"]["agreement"]["encoder/0"][0]
    assert heights == pytest.approx(wanted, abs=1e-3)
    page.run("location.hash = '#recipe'")
    page.wait("!document.getElementById('overview').hidden")
    recipe = page.run("document.getElementById('recipe').textContent")
    assert 'fenchel.hf.convert(model, "recipe.json")' in recipe
    cells = page.run("[...document.querySelectorAll('#recipe .cell')].map(c => c.ariaLabel)")
    heads = DOCUMENTS["texts"]["recipe"]["heads"]
    assert [float(text.split(": ")[1]) for text in cells] == pytest.approx(
        [head["alpha"] for head in heads], rel=5e-3
    )
    table = page.run("document.querySelector('#everywhere tbody').innerText")
    assert " ".join(table.split()) == "1.5 31 % 37 % 0.93 2 12 % 62 % 0.81"


def test_the_page_follows_the_reader_into_the_dark(page: Browser, paths: dict[str, Path]) -> None:
    page.open(paths["texts"])
    paper = "getComputedStyle(document.body).backgroundColor"
    page.media(prefers_color_scheme="light")
    light = page.run(paper)
    page.media(prefers_color_scheme="dark")
    assert page.run(paper) != light
    page.media()
