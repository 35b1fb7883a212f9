"""The whole site, as `make docs` builds it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_site import reference
from tests import needs

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings", "griffe", "latex2mathml"):
        needs.package(package, "the whole site, as `make docs` builds it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_fetched_by_a_page(site):
    """Links that a reader follows are another thing."""
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(?:https?:)?//", text)
        for tag in re.findall(r"<link[^>]+>", text):
            assert not re.search(r"href=\"?(?:https?:)?//", tag), (path.name, tag)
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", path.read_text()), path.name


def test_every_picture_is_there(site):
    for path in site.rglob("*.html"):
        for source in re.findall(r"<img[^>]*\ssrc=\"([^\"]+)\"", path.read_text()):
            assert source.startswith("data:") or (path.parent / source).exists(), source


def test_no_marker_is_left(site):
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not re.search(r"<!-- (?:bench|ledger|api|house)\b|^:::", text, re.M), path.name


def test_no_two_things_have_one_anchor(site):
    for path in site.rglob("*.html"):
        found = re.findall(r"<[^>]*\sid=\"([^\"]+)\"", path.read_text())
        twice = {anchor for anchor in found if found.count(anchor) > 1}
        assert not twice, (path.name, twice)


@pytest.mark.parametrize("room", ["dual", "continuous", "measures", "bounds", "nn", "lens"])
def test_every_name_is_documented(site, room):
    text = (site / "api" / f"{room}.html").read_text()
    module = importlib.import_module(f"fenchel.{room}")
    for entry in reference.entries(f"fenchel.{room}"):
        assert f'id="{entry.public}"' in text, entry.public
        assert f'id="{entry.defined}"' in text, entry.defined
    assert len(reference.entries(f"fenchel.{room}")) == len(module.__all__)
