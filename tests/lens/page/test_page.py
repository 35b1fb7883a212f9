"""The page without a browser: what it embeds, what it refuses, and what its sentences say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import statistics
from html.parser import HTMLParser
from typing import Any

import pytest

from fenchel.lens.document import Document
from fenchel.lens.page import render, write
from fenchel.lens.page.sentences import make_sentences, number, percent
from tests.lens.page.document import document, image_document

HOSTILE = "</script><script>window.hacked=1</script><!-- &lt; \u2028\u2029 \" ' ]]> \0 é 𝛼 <b>"


class Reader(HTMLParser):
    """Elements in order, and the text inside each script, style and title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._open: str | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open in self.inside:
            self.inside[self._open][-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def hostile() -> dict[str, Any]:
    content = document(name=HOSTILE)
    shown = content["examples"][0]
    shown["text"] = HOSTILE
    shown["tokens"]["encoder"] = [HOSTILE, *shown["tokens"]["encoder"][1:]]
    content["columns"][0] |= {"title": HOSTILE, "explain": HOSTILE, "unit": HOSTILE}
    return content


@pytest.mark.parametrize("content", [document(), hostile(), image_document()])
def test_the_document_comes_back_out_of_the_page(content: dict[str, Any]) -> None:
    page = Reader(render(Document.from_json(content)))
    assert [a.get("type") for a in page.named("script")] == ["application/json", None]
    assert json.loads(page.inside["script"][0]) == content


def test_nothing_in_the_document_ends_its_element() -> None:
    data = Reader(render(Document.from_json(hostile()))).inside["script"][0]
    assert not set("<>&\u2028\u2029") & set(data)
    assert data.isascii()


def test_the_title_holds_the_name_as_text() -> None:
    page = Reader(render(Document.from_json(document(name="<b>&amp;"))))
    assert page.inside["title"] == ["<b>&amp;: audit of attention"]
    assert not page.named("b")


def test_the_policy_names_this_script_and_this_style_and_nothing_else() -> None:
    page = Reader(render(Document.from_json(document())))
    metas = page.named("meta")
    policy = next(m["content"] for m in metas if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for rule, text in (
        ("script-src", page.inside["script"][1]),
        ("style-src", *page.inside["style"]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_the_page_points_nowhere_else_and_writes_no_markup() -> None:
    page = render(Document.from_json(document()))
    addresses = set(re.findall(r"\b(?:https?:|//)[\w./]+\.\w[\w./]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    script = Reader(page).inside["script"][1]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
    ):
        assert word not in script


def test_what_is_no_number_is_refused() -> None:
    content = document()
    content["rows"][0]["entropy"] = float("nan")
    with pytest.raises(ValueError, match="finite numbers, with None"):
        render(Document.from_json(content))


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_other_formats_are_refused(version: Any) -> None:
    with pytest.raises(ValueError, match="must have format 1"):
        Document.from_json({**document(), "format": version})


def test_a_page_is_replaced_whole_or_not_at_all(tmp_path: Any) -> None:
    content = document()
    path = write(Document.from_json(content), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "report.html"
    before = path.read_text(encoding="utf-8")
    assert before == render(Document.from_json(content))
    content["everywhere"][0]["moved"] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        write(Document.from_json(content), path.parent)
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_half_a_surrogate_pair_can_be_written(tmp_path: Any) -> None:
    content = document(name="half \ud83d")
    content["examples"][0]["text"] = "\ud83d"
    page = write(Document.from_json(content), tmp_path).read_text(encoding="utf-8")
    assert json.loads(Reader(page).inside["script"][0]) == content


# ---- sentences


def said(content: dict[str, Any]) -> list[str]:
    return [
        "".join(piece.text for piece in fact)
        for fact in make_sentences(Document.from_json(content))
    ]


def test_the_sentences_hold_the_rows_numbers() -> None:
    content = document()
    rows = content["rows"]
    many = sum(row["mass_special"] > 0.5 for row in rows)
    assert 1 < many < len(rows)
    middle = statistics.median(row["effective_support"] for row in rows)
    near = min(rows, key=lambda row: row["distance"])
    top = max(rows, key=lambda row: row["largest_bound"])
    least = min(row["largest_bound"] for row in rows)
    text = said(content)
    assert text[0].startswith(f"{many} of {len(rows)} heads put more than half")
    assert f"looks at {middle:.3g} tokens" in text[1]
    assert f"Most local: layer {near['layer']} head {near['head']} " in text[2]
    assert (
        text[3]
        == "At alpha 1.5 everywhere 31 % of the links are kept and the output moves by 37 %."
    )
    assert f"at most {least:.3g} to {top['largest_bound']:.3g} times" in text[4]
    assert text[4].endswith(f"(on average over texts {top['bound']:.3g}).")
    assert len(text) == 6


def test_every_link_of_a_sentence_leads_somewhere() -> None:
    content = document({"encoder": 2, "decoder": 2, "cross": 2})
    heads = {f"{row['kind']}/{row['layer']}/{row['head']}" for row in content["rows"]}
    maps = {f"map/{column['name']}" for column in content["columns"]}
    links = {
        piece.link
        for fact in make_sentences(Document.from_json(content))
        for piece in fact
        if piece.link
    }
    assert links <= heads | maps | {"everywhere", "recipe"}
    assert links & heads
    assert links & maps


def test_what_was_not_measured_is_not_said() -> None:
    content = document()
    content |= {"everywhere": [], "recipe": None, "agreement": {}}
    for row in content["rows"]:
        for name in ("mass_special", "distance", "bound", "largest_bound"):
            row[name] = None
    text = said(content)
    assert [line.split()[0] for line in text] == ["The", "Most"]
    content["rows"] = [
        {key: row[key] for key in ("kind", "layer", "head")} for row in content["rows"]
    ]
    assert said(content) == []
    render(Document.from_json(content))


def test_a_recipe_measured_on_several_sets_says_the_unseen_one() -> None:
    content = document()
    sets = {
        name: {"texts": 8, "root_mean_square": x, "largest": 2 * x}
        for name, x in (("probe", 0.004), ("unseen", 0.006))
    }
    content["recipe"] |= {"moved": sets}
    assert said(content)[5] == "The recipe keeps 87 % of the links and moves the output by 0.6 %."


@pytest.mark.parametrize(
    ("kept", "leaving", "words"),
    [
        (0.987, 1, "can save only 1.3 % of the links: 1 of 12 heads leaves softmax."),
        (1.0, 0, "can save only 0 % of the links: 0 of 12 heads leave softmax."),
        (0.96, 3, "can save only 4 % of the links: 3 of 12 heads leave softmax."),
    ],
)
def test_a_recipe_that_saves_little_says_so(kept: float, leaving: int, words: str) -> None:
    content = document()
    content["recipe"]["kept"] = kept
    for place, head in enumerate(content["recipe"]["heads"]):
        head["alpha"] = 1.5 if place < leaving else 1.0
    assert said(content)[5] == f"Within 1 % the recipe {words}"


def test_patches_are_apart_in_reading_order() -> None:
    text = " ".join(said(image_document()))
    assert "patches away, in reading order, on average" in text
    assert "tokens away" not in text


def test_the_limit_of_a_text_is_no_count() -> None:
    page = " ".join(render(Document.from_json(document())).split("</header>")[0].split())
    assert "310 tokens (limit 64 a text), <strong>3 cut off" in page


def test_numbers_in_words() -> None:
    assert [number(x) for x in (0, 0.5, 12.34, -3.0, 12345.6)] == [
        "0",
        "0.5",
        "12.3",
        "-3",
        "12\u202f346",
    ]
    assert number(4.88e12) == "4.9·10¹²"
    assert number(-2e-5) == "-2.0·10⁻⁵"
    shares = (0, 0.0004, 0.008, 0.31, 0.999, 1.4)
    words = ["0 %", "less than 0.1 %", "0.8 %", "31 %", "100 %", "140 %"]
    assert [percent(x) for x in shares] == words
