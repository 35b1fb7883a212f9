"""The page stands alone, says what it shows, and repeats itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fenchel as fl
from papers.tour import chapters, page
from papers.tour.chapter import Chapter, Figure, Mark, Table, Tour
from papers.tour.chapters import bases, certificates, derivatives, regularizers, views
from papers.tour.gallery import bumpy_scores

pytestmark = pytest.mark.xdist_group("tour")  # one worker builds the page once

QUICK = Tour(seed=0, quick=True)
TITLES = (
    "Attention in one screen",
    "The same scores, different regularisers",
    "Base measures",
    "Supports and certificates",
    "Derivatives",
    "Views",
    "Timings",
    "Attention",
    "Continuous attention",
    "Attention as estimation",
    "How far an output can move",
    "Experiments",
    "The papers, checked",
)


class Reader(HTMLParser):
    """Collects what the tests ask about: tags with their attributes, ids, and text by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.captions: list[str] = []
        self._in_caption = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "figcaption":
            self._in_caption = True
            self.captions.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "figcaption":
            self._in_caption = False

    def handle_data(self, data: str) -> None:
        if self._in_caption:
            self.captions[-1] += data

    def values(self, *names: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags for name in names if name in attrs]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture(scope="module")
def written() -> list[Chapter]:
    return [module.chapter(QUICK) for module in chapters.discover()]


@pytest.fixture(scope="module")
def text(written: list[Chapter], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = page.write(tmp_path_factory.mktemp("tour") / "deep" / "tour.html", written, seed=0)
    return path.read_text(encoding="utf-8")


def test_titles_and_order(written: list[Chapter], text: str) -> None:
    assert tuple(chapter.title for chapter in written) == TITLES
    targets = {value for value in read(text).values("href") if value.startswith("#")}
    for title in TITLES:
        assert f"{title}</h2>" in text
        assert f"#{page.slug(title)}" in targets


def test_page_needs_no_network(text: str) -> None:
    reader = read(text)
    within = ("#", "data:image/png;base64,")
    assert [v for v in reader.values("src", "href", "xlink:href") if not v.startswith(within)] == []
    assert reader.count("script") == reader.count("link") == reader.count("iframe") == 0
    assert "http" not in re.sub(r"base64,[\w+/=\s]+", "", text)  # pixels may spell anything
    assert "@import" not in text


def test_every_figure_has_a_caption_and_a_description(text: str) -> None:
    reader = read(text)
    assert reader.count("figure") == len(reader.captions) > 8
    assert all(caption.strip().endswith(".") for caption in reader.captions)
    images = [attrs for _, attrs in reader.tags if attrs.get("role") == "img"]
    assert len(images) == reader.count("figure")
    assert all(image.get("aria-label") for image in images)


def test_ids_are_unique_and_references_resolve(text: str) -> None:
    reader = read(text)
    ids = reader.values("id")
    assert len(ids) == len(set(ids))
    inside = {value[1:] for value in reader.values("href") if value.startswith("#")}
    inside |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert inside - set(ids) == set()


def test_pictures_scale_and_take_the_colours_of_the_page(text: str) -> None:
    pictures = [attrs for tag, attrs in read(text).tags if tag == "svg"]
    assert len(pictures) > 20
    assert all("viewbox" in attrs and "width" not in attrs for attrs in pictures)
    assert "#0a0b0" not in text  # every placeholder colour was replaced
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text


def marks(chapter: Chapter) -> list[Mark]:
    return [
        cell
        for table in chapter.tables
        for row in table.rows
        for cell in row
        if isinstance(cell, Mark)
    ]


def test_derivative_checks_all_passed(written: list[Chapter], text: str) -> None:
    chapter = written[TITLES.index("Derivatives")]
    all_marks = marks(chapter)
    assert len(all_marks) == 5 * len(derivatives.CHECKED) + 4
    assert [mark for mark in all_marks if not mark.passed] == []
    assert 'class="fail"' not in text


def test_checked_weights_can_move() -> None:
    row = derivatives.check_scores(QUICK)[0]
    for name, omega in derivatives.CHECKED:
        assert fl.solve(row, omega).hessian().abs().max() > 0.1, name


def test_certificates_tell_right_from_wrong() -> None:
    scores = bumpy_scores(QUICK)
    for name, omega in certificates.GALLERY:
        solution = fl.solve(scores, omega)
        assert solution.gap < 1e-20, name
        assert certificates.spoiled(solution, 1e-3).gap > 1e-8, name


@pytest.mark.parametrize("module", [regularizers, bases, certificates, views])
def test_same_seed_same_chapter(module: chapters.ChapterModule, written: list[Chapter]) -> None:
    again = module.chapter(QUICK)
    assert again == next(chapter for chapter in written if chapter.title == again.title)
    assert module.chapter(Tour(seed=1, quick=True)) != again


def test_text_is_escaped_and_failures_are_marked(tmp_path: Path) -> None:
    table = Table("a < b", ("name", "x"), (("`<i>`", Mark(False, "raised", 'say "no"')),))
    figure = Figure(("<svg viewBox='0 0 1 1'></svg>",), "See <this>.", 'a "picture"')
    text = page.render([Chapter("T & T", "if a < b: `x<y>`", (figure,), (table,))], seed=0)
    assert "<code>x&lt;y&gt;</code>" in text
    assert "See &lt;this&gt;." in text
    assert "T &amp; T" in text
    assert 'class="fail"' in text
    assert "<i>" not in text
