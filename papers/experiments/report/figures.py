"""The pictures of the page: curves of learning, and maps where the data is at hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fenchel.lens.files import write_whole
from papers.experiments.data.files import DataProblem
from papers.experiments.data.questions import QuestionData
from papers.experiments.report import learning, maps
from papers.experiments.report.page import PRESETS, SHAPES_PICTURE, page_text, stored
from papers.experiments.report.studies import PARTS, VQA, Part, title
from papers.experiments.tables import Document

Load = Callable[[str], QuestionData]
Say = Callable[[str], object]
_MOST = 300_000  # bytes of the picture that is kept with the documents


def publish(results: Path, page: Path, folder: Path, load: Load, say: Say = print) -> list[Path]:
    """The page, the picture beside it, and into the folder the others; see `save_figures`.

    The picture comes first: where it cannot be drawn, no page is left that points to it.
    """
    presets = {path.parent.parent.name for path in results.glob("*/*/*/*.json")}
    left = sorted(name for name in presets if name.split("-first-")[0] not in PRESETS)
    if left:
        say(f"not on the page, which is of {' and '.join(PRESETS)}: runs of {', '.join(left)}")
    text = page_text(results)
    beside = save_shapes_picture(results, page, load)
    write_whole(page, text.encode())
    pages = [page] if beside is None else [page, beside]
    return [*pages, *save_figures(results, folder, load, say)]


def save_figures(results: Path, folder: Path, load: Load, say: Say = print) -> list[Path]:
    """Into the folder, of all that is published: curves-STUDY-DATA.svg, maps-DATA.png.

    load: the questions of a data set. say: hears which maps cannot be drawn, and why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part in PARTS:
        for preset in PRESETS:
            documents = stored(part, preset, results)
            for data in dict.fromkeys(document["settings"]["data"] for document in documents):
                of_data = [one for one in documents if one["settings"]["data"] == data]
                paths.append(_curves(part, preset, of_data, folder))
                if maps.has_rows(of_data, compact=False):
                    path = folder / f"maps-{_file_name(data)}{_ending(preset)}.png"
                    paths += _maps(of_data, data, path, load, say)
    return paths


def _file_name(data: str) -> str:
    """Inside the folder, whatever a run calls its data."""
    return re.sub(r"[^\w.-]+", "-", data)


def _ending(preset: str) -> str:
    return "" if preset == PRESETS[0] else f"-{preset}"


def _curves(part: Part, preset: str, documents: Sequence[Document], folder: Path) -> Path:
    data = documents[0]["settings"]["data"]
    heading = f"{title(data)}, preset {preset}: mean over seeds"
    path = folder / f"curves-{part.study}-{_file_name(data)}{_ending(preset)}.svg"
    return learning.picture(documents, part.names(documents), part.score, heading, path)


def _maps(documents: Sequence[Document], data: str, path: Path, load: Load, say: Say) -> list[Path]:
    try:
        rows = maps.examples(documents, load(data), compact=False)
    except (DataProblem, ValueError) as problem:
        say(f"no maps of {title(data)}: {problem}")
        return []
    return [maps.save(rows, path)]


def save_shapes_picture(results: Path, page: Path, load: Load) -> Path | None:
    """The picture that stands on the page, beside it; one that is up to date is left alone."""
    documents = shapes_documents(results)
    if not maps.has_rows(documents, compact=True):
        return None
    path = page.with_name(SHAPES_PICTURE)
    mark = maps.mark_of(documents, compact=True)
    if maps.mark_in(path) != mark:
        rows = maps.examples(documents, load("shapes"), compact=True)
        maps.save(rows, path, mark=mark, most=_MOST)
    return path


def shapes_documents(results: Path) -> list[Document]:
    """Of the published runs on Shapes-VQA."""
    documents = stored(VQA, PRESETS[0], results)
    return [document for document in documents if document["settings"]["data"] == "shapes"]
