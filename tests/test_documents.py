"""The documents: every Python block runs, every local link leads somewhere."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
PAGES = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "ROADMAP.md"]


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_snippets_run(path, capsys, monkeypatch):
    code = blocks(path)
    assert code, "a page of the documents shows code"
    torch.manual_seed(0)
    page = types.ModuleType(f"page_{path.stem}")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # torch.compile looks classes up by name
    for number, block in enumerate(code):
        exec(compile(block, f"{path.name}, block {number}", "exec"), page.__dict__)
    assert "Traceback" not in capsys.readouterr().out


SHOWING = [path for path in DOCUMENTS if "\n```text\n" in path.read_text()]


@pytest.mark.parametrize("path", SHOWING, ids=lambda p: p.name)
def test_shown_outputs_are_what_is_printed(path, capsys):
    """A block of text right after a block of code is its output."""
    pattern = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?"
    pairs = re.findall(pattern, path.read_text(), re.DOTALL | re.MULTILINE)
    assert any(shown for _, shown in pairs)
    torch.manual_seed(0)
    namespace = {}
    for code, shown in pairs:
        exec(code, namespace)
        printed = capsys.readouterr().out
        assert not shown or printed == shown


def test_the_page_that_registers_names_can_be_run_again(capsys):
    """Names are kept by the process, and a notebook's cells run more than once."""
    for _ in range(2):
        namespace = {}
        for block in blocks(ROOT / "docs" / "huggingface.md"):
            exec(block, namespace)
    assert "fenchel:mixed" in capsys.readouterr().out


def test_the_first_snippet_of_the_readme_says_what_it_claims():
    namespace = {}
    exec(blocks(ROOT / "README.md")[0], namespace)
    assert 0 <= namespace["loss"] < 1e-12
    assert namespace["sol"].gap.max() < 1e-9


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_local_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    for link in links:
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link


def test_the_site_lists_every_page():
    listed = set(re.findall(r": ([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_table_of_times_is_the_measured_one():
    measured = json.loads((ROOT / "results" / "bench_maps.json").read_text())
    shown = re.findall(r"^\| `([\w. ]+(?:\(\S+\))?)[^|]*\| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    ratios = {(r["name"], r["direction"]): r["ratio"] for r in measured["results"]}
    assert len(shown) == len({name for name, _ in ratios}) - 1  # all but the baseline
    for name, forward, both in shown:
        assert float(forward) == float(f"{ratios[name.strip(), 'forward']:.3g}")
        assert float(both) == float(f"{ratios[name.strip(), 'forward+backward']:.3g}")
