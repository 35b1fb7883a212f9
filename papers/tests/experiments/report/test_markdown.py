"""Tables in Markdown, whatever signs they hold, and curves of learning."""

from __future__ import annotations

import html
import re

import pytest

from benchmarks.tables import Listing
from papers.experiments.report import learning, markdown
from papers.tests.experiments.report.documents import document
from tests import needs


def test_signs_of_markdown_stay_signs() -> None:
    text = markdown.table(Listing("K* modes", ("a|b", "c"), [("x_y", "1 *")]))
    assert text.splitlines() == [
        "**K\\* modes**",
        "",
        "| a\\|b | c |",
        "| --- | ---: |",
        "| x\\_y | 1 \\* |",
    ]


HOSTILE = (
    "x\n\n# Owned\n\n<img src=x onerror=alert(1)> & &lt; [a](b) ![c](d) `e` **f** _g_ | \\* {h}",
    "# Owned",
    "1. one",
    "- one",
    "+ one",
    "---",
    "> one",
    "!!! note",
    "    code",
    "a &amp; b",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_words_stay_words_to_python_markdown(text: str) -> None:
    markdown_of = needs.package("markdown", "hostile words in the pages of results").markdown
    extensions = ["tables", "fenced_code", "admonition"]
    wanted = " ".join(text.splitlines()).strip()
    page = markdown_of(f"- {markdown.plain(text)}", extensions=extensions)
    tags = set(re.findall(r"<[^>]*>", page))
    assert tags == {"<ul>", "<li>", "</li>", "</ul>"}
    assert html.unescape(re.sub(r"<[^>]*>|\n", "", page)) == wanted
    listing = Listing("t", ("a", "b"), [(text, "1")])
    cells = re.findall(
        r"<td[^>]*>(.*?)</td>", markdown_of(markdown.table(listing), extensions=extensions)
    )
    assert [html.unescape(cell) for cell in cells] == [wanted, "1"]


def test_signs_of_numbers_stay() -> None:
    for text in ("+1.50 ± 0.20", "−1.00", "91.00 ± 12.71", "–", "3e-05", "N = 36"):
        assert markdown.plain(text) == text


def test_a_command_stays_on_its_lines() -> None:
    assert "\n```\n" not in markdown.command("fenchel --sets a\n```\n# Owned")[:-4]


def test_an_empty_column_is_left_out() -> None:
    text = markdown.table(Listing("t", ("a", "b", "c"), [("x", "–", "1"), ("y", "–", "–")]))
    assert text.splitlines()[2:] == ["| a | c |", "| --- | ---: |", "| x | 1 |", "| y | – |"]


def test_a_long_command_is_broken_before_an_option() -> None:
    assert markdown.command("fenchel info --json") == "```console\n$ fenchel info --json\n```"
    long = (
        "python -m papers experiment vit --preset cpu --sets cifar-10 --data data --out somewhere"
    )
    lines = markdown.command(long).splitlines()
    assert lines[1].endswith(" --data data \\")
    assert lines[2] == "    --out somewhere"


def test_a_long_curve_keeps_its_ends() -> None:
    one = document("vit", "cifar-10", "softmax", 0, 0.5)
    one["curve"] = [{"step": s, "test accuracy": s / 1000, "loss": 1.0} for s in range(1, 17)]
    listing = learning.table([one], {"softmax": "ViT"}, "test accuracy")
    assert listing.header == ("", "1", "5", "9", "12", "16")
    assert listing.rows == [("ViT", "0.1", "0.5", "0.9", "1.2", "1.6")]


def test_curves_are_means_over_seeds_where_all_were_evaluated() -> None:
    runs = [document("vit", "cifar-10", "softmax", seed, 0.4 + 0.2 * seed) for seed in (0, 1)]
    runs[1]["curve"] = runs[1]["curve"][1:]
    assert learning.mean_curve(runs, "softmax", "test accuracy") == {100: 0.5}
    del runs[1]["curve"][0]["test accuracy"]
    assert learning.mean_curve(runs, "softmax", "test accuracy") == {}


@pytest.mark.parametrize(("what", "kept"), [("accuracy", [40, 80, 123]), ("loss", [40, 80, 120])])
def test_a_last_evaluation_soon_after_another(what: str, kept: list[int]) -> None:
    assert learning._apart([40, 80, 120, 123], what) == kept
    assert learning._apart([40, 80, 120], what) == [40, 80, 120]
    assert learning._apart([40, 41], what) == [40, 41]
