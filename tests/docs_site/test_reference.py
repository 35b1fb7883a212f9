"""The reference: every public name on its page, at the place of its definition."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from docs_site import reference

FOLDER = Path(__file__).parents[2] / "docs" / "api"
MARKER = re.compile(r"^<!-- api: (\S+) -->$", re.MULTILINE)
PAGES = {f"fenchel.{path.stem}" for path in FOLDER.glob("*.md")}
MODULES = sorted({m for path in FOLDER.glob("*.md") for m in MARKER.findall(path.read_text())})
ROOMS = [
    *("bounds", "continuous", "dual", "hf", "lens"),
    *("measures", "nn", "priors", "regularizers", "testing"),
]


def page_of(room):
    """As the build makes it, up to what mkdocstrings adds."""
    text = (FOLDER / f"{room}.md").read_text()
    return MARKER.sub(lambda match: reference.page(match[1], PAGES), text)


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_of_a_room_stands_on_its_page(room):
    module = importlib.import_module(f"fenchel.{room}")
    text = page_of(room)
    for name in module.__all__:
        assert f'"fenchel.{room}.{name}"' in text or f"#fenchel.{room}.{name} " in text, name


def test_every_name_of_the_front_stands_on_its_page():
    import fenchel

    text = page_of("fenchel")
    for name in fenchel.__all__:
        assert f'"fenchel.{name}"' in text or f"[`fenchel.{name}`](" in text, name


def test_every_room_with_public_names_has_a_page():
    source = Path(__file__).parents[2] / "src" / "fenchel"
    with_names = {p.parent.name for p in source.glob("*/__init__.py") if "__all__" in p.read_text()}
    public = {name for name in with_names if not name.startswith("_")}
    assert public == {*ROOMS, "cli"}  # which is for the command line
    assert {f"fenchel.{room}" for room in ROOMS} <= PAGES


@pytest.mark.parametrize("module", MODULES)
def test_every_entry_is_where_it_is_said_to_be(module):
    """What mkdocstrings is asked for is the object that users get."""
    entries = reference.entries(module)
    assert entries
    for entry in entries:
        if entry.module:
            importlib.import_module(entry.defined)
            continue
        home, _, name = entry.defined.rpartition(".")
        public = getattr(importlib.import_module(module), entry.public.rpartition(".")[2])
        assert getattr(importlib.import_module(home), name) is public
        if inspect.isclass(public) or inspect.isfunction(public):
            assert public.__module__ == home, "a name that is only passed on"


def test_names_that_hide_a_module_lead_to_the_function():
    (found,) = (e for e in reference.entries("fenchel.dual") if e.public == "fenchel.dual.estimate")
    assert found.defined == "fenchel.dual.estimate.estimate"
    assert not found.module


def test_nothing_is_shown_twice():
    for path in FOLDER.glob("*.md"):
        asked = re.findall(r"^::: (\S+)$", page_of(path.stem), re.MULTILINE)
        assert len(asked) == len(set(asked)), path.name


def test_a_module_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"no module fenchel\.nothing"):
        reference.page("fenchel.nothing", PAGES)
