"""What mkdocs calls while it builds; see `hooks:` in mkdocs.yml."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# mkdocs loads this file by its path; its neighbours are found from the folder above.
sys.path.insert(0, str(Path(__file__).parents[1]))

from docs_site import snippets
from docs_site.formulas import Formulas
from docs_site.snippets import Picture

_Made = tuple[str, list[Picture]]

_STYLE = "site.css"
_NAMES = "bench|ledger|api|house"  # the keys of _KINDS
_MARKER = re.compile(rf"^<!-- (?P<kind>{_NAMES})(?:: (?P<what>\S+))? -->$", re.MULTILINE)
_MEANT = re.compile(rf"<!--\W*(?:{_NAMES})", re.IGNORECASE)
_FORMULAS = Formulas(PluginError)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    torch.set_num_threads(1)  # as in the tests, which compare the outputs
    config.markdown_extensions.append(_FORMULAS)  # markdown takes names and objects
    config.extra_css.append(_STYLE)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    style = Path(__file__).with_name(_STYLE).read_text(encoding="utf-8")
    files.append(File.generated(config, _STYLE, content=style))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Markers last: what they bring is not run."""
    name = page.file.src_uri
    _FORMULAS.page = name  # mkdocs makes the HTML of a page right after this
    try:
        markdown, pictures = snippets.produced(markdown, name)
        markdown, more = _marked(markdown, name, config, files)
    except (snippets.SnippetError, ValueError) as problem:
        raise PluginError(str(problem)) from problem
    folder = name.rpartition("/")[0]
    for picture in pictures + more:
        where = f"{folder}/{picture.name}" if folder else picture.name
        files.append(File.generated(config, where, content=picture.svg))
    return markdown


def _marked(markdown: str, name: str, config: MkDocsConfig, files: Files) -> _Made:
    """Each marker replaced by what it stands for; one that is misspelt is refused."""
    parts: list[str] = []
    pictures: list[Picture] = []
    stem = name.rpartition("/")[2].removesuffix(".md")
    root = Path(config.config_file_path).parent
    end = 0
    for comment in snippets.comments(markdown):
        marker = _MARKER.match(markdown, comment.start())
        if marker is not None:
            text, drawn = _KINDS[marker["kind"]](marker["what"], root, stem, files)
            pictures.extend(drawn)
            parts += [markdown[end : comment.start()], text]
            end = comment.end()
        elif _MEANT.match(comment[0]):
            raise ValueError(
                f"{name}: {comment[0]!r} is no marker: those are <!-- ledger -->, <!-- house -->, "
                "<!-- bench: name --> and <!-- api: module -->, alone on their lines; other "
                f"comments begin with another word: line {snippets.line_of(markdown, comment)}"
            )
    return "".join([*parts, markdown[end:]]), pictures


def _bench(what: str | None, root: Path, stem: str, files: Files) -> _Made:
    from docs_site import benchmarks

    return benchmarks.section(what or "", root, stem)


def _ledger(what: str | None, root: Path, stem: str, files: Files) -> _Made:
    from docs_site import ledger

    _refuse_parts("ledger", what)
    return ledger.section(root / ledger.FILE), []


def _api(what: str | None, root: Path, stem: str, files: Files) -> _Made:
    from docs_site import reference

    api = [file.src_uri for file in files.documentation_pages() if file.src_uri.startswith("api/")]
    pages = {f"fenchel.{uri.removeprefix('api/').removesuffix('.md')}" for uri in api}
    module = what or ""
    return reference.page(module, pages, 2 if module.count(".") < 2 else 3), []


def _house(what: str | None, root: Path, stem: str, files: Files) -> _Made:
    from docs_site import house

    _refuse_parts("house", what)
    return house.section(root), []


def _refuse_parts(name: str, what: str | None) -> None:
    if what is not None:
        raise ValueError(f"the {name} has no parts, got {what!r}; write <!-- {name} -->")


_KINDS: dict[str, Callable[[str | None, Path, str, Files], _Made]] = {
    "bench": _bench,
    "ledger": _ledger,
    "api": _api,
    "house": _house,
}
