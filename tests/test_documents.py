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
WITHOUT_CODE = {"architecture.md", "benchmarks.md", "ledger.md", "limits.md"}


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


def test_the_first_snippet_of_the_readme_says_what_it_claims():
    namespace = {}
    exec(blocks(ROOT / "README.md")[0].code, namespace)
    assert 0 <= namespace["loss"] < 1e-12
    assert namespace["sol"].gap.max() < 1e-9


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


def test_the_table_of_times_is_the_measured_one():
    measured = json.loads((ROOT / "results" / "bench_maps.json").read_text())
    shown = re.findall(r"^\| `([\w. ]+(?:\(\S+\))?)[^|]*\| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    ratios = {(r["name"], r["direction"]): r["ratio"] for r in measured["results"]}
    assert len(shown) == len({name for name, _ in ratios}) - 1  # all but the baseline
    for name, forward, both in shown:
        assert float(forward) == float(f"{ratios[name.strip(), 'forward']:.3g}")
        assert float(both) == float(f"{ratios[name.strip(), 'forward+backward']:.3g}")
