"""The documents: every Python block runs, every local link leads somewhere."""

import json
import re
from pathlib import Path

import pytest

from docs_site import snippets

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
README = (ROOT / "README.md").read_text()
PAGES = [
    *DOCUMENTS,
    *REFERENCE,
    *(ROOT / f"{n}.md" for n in ("CONTRIBUTING", "CHANGELOG", "ROADMAP")),
]

# Pages of tables and of words; every other one shows code.
WITHOUT_CODE = {
    "architecture.md",
    "benchmarks.md",
    "ledger.md",
    "limits.md",
    "models.md",
    "peers.md",
    "bibliography.md",
}


def blocks(path):
    return snippets.blocks(path.read_text(), path.name)


RUNNING = [path for path in DOCUMENTS if blocks(path)]


def test_pages_show_code():
    assert {path.name for path in DOCUMENTS} - {path.name for path in RUNNING} <= WITHOUT_CODE


@pytest.mark.parametrize("path", RUNNING, ids=lambda p: p.name)
def test_snippets_run_and_print_what_is_shown(path):
    """A block of text right after a block of code is its output; one with a picture draws it."""
    with snippets.fresh(path.name) as namespace:
        for block in blocks(path):
            output = snippets.run(block, namespace, path.name)
            assert "Traceback" not in output
            assert block.shown is None or output == block.shown
            if block.caption is not None:
                assert snippets.figure(namespace, block, path.name).startswith("<svg")


def test_some_outputs_are_shown():
    """So that the comparison above compares something."""
    assert any(block.shown for path in RUNNING for block in blocks(path))


def test_the_page_that_registers_names_can_be_run_again(capsys):
    """Names are kept by the process, and a notebook's cells run more than once."""
    for _ in range(2):
        namespace = {}
        for block in blocks(ROOT / "docs" / "huggingface.md"):
            exec(block.code, namespace)
    assert "fenchel:mixed" in capsys.readouterr().out


def test_the_readme_fits_its_first_screens():
    assert len(README.splitlines()) <= 150


def test_the_numbers_of_the_readme_are_the_measured_ones():
    measured = json.loads((ROOT / "results" / "bench_attention.json").read_text())["results"]
    expected = {"method": "fl Tsallis(1.5)", "variant": "plain", "deviation": 1.0, "n": 4096}
    ratios = {
        e["direction"]: e["ratio"] for e in measured if all(e[k] == v for k, v in expected.items())
    }
    text = " ".join(README.split())
    assert f"forward and backward take {ratios['forward+backward']:.3g} of the time" in text
    assert f"forward alone {ratios['forward']:.3g} (" in text


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_local_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    for link in links:
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link


def test_the_site_lists_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"[-:] ([\w/-]+\.md)$", nav, re.MULTILINE)
    folder = ROOT / "docs"
    assert sorted(listed) == sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.md"))
