"""The figures hold the document's numbers, at the right places, for models of any shape."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from fenchel.lens.document import Document
from fenchel.lens.page import map_figure, save_figures
from fenchel.lens.page.figures import figures, what_if_figure, what_if_pairs
from tests.lens.page.document import document, image_document


def meshes(figure: Figure) -> list[Any]:
    """Of the maps; the scale of colours has one too, beside them."""
    return [ax.collections[0] for ax in figure.axes if ax.get_ylabel() == "layer"]


def expected(content: dict[str, Any], kind: str, column: str) -> Any:
    """(layers, heads) with NaN for null; rows come layer by layer."""
    rows = [row for row in content["rows"] if row["kind"] == kind]
    heads = 1 + max(row["head"] for row in rows)
    values = [np.nan if row[column] is None else row[column] for row in rows]
    return np.array(values).reshape(-1, heads)


@pytest.mark.parametrize("column", ["entropy", "tightness", "bound", "tilt"])
def test_a_map_holds_the_numbers(column: str) -> None:
    content = document()
    (mesh,) = meshes(map_figure(Document.from_json(content), column))
    shown = np.ma.filled(mesh.get_array().reshape(3, 4), np.nan)
    np.testing.assert_array_equal(shown, expected(content, "encoder", column))
    assert np.isnan(shown).sum() == (1 if column == "tightness" else 0)


def test_scales_follow_the_column() -> None:
    content = document()
    bound = [row["bound"] for row in content["rows"]]
    norm = meshes(map_figure(Document.from_json(content), "bound"))[0].norm
    assert isinstance(norm, LogNorm)
    assert (norm.vmin, norm.vmax) == (min(bound), max(bound))
    signed = meshes(map_figure(Document.from_json(content), "tilt"))[0]
    assert signed.norm.vmin == -signed.norm.vmax
    assert signed.cmap.name == "RdBu_r"
    assert meshes(map_figure(Document.from_json(content), "entropy"))[0].cmap.name == "viridis"


def test_the_first_layer_is_on_top_and_heads_go_to_the_right() -> None:
    ax = map_figure(Document.from_json(document()), "entropy").axes[0]
    assert ax.get_ylim() == (3, 0)
    assert ax.get_xlim() == (0, 4)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "2"]


def test_patches_are_apart_in_reading_order() -> None:
    (title,) = map_figure(Document.from_json(image_document()), "distance").texts
    assert title.get_text() == "distance (patches, in reading order)"
    (title,) = map_figure(Document.from_json(document()), "distance").texts
    assert title.get_text() == "distance (tokens)"


def test_kinds_share_one_scale() -> None:
    content = document({"encoder": 2, "decoder": 3, "cross": 1}, 2)
    maps = meshes(map_figure(Document.from_json(content), "entropy"))
    assert [mesh.get_array().size for mesh in maps] == [4, 6, 2]
    assert len({(mesh.norm.vmin, mesh.norm.vmax) for mesh in maps}) == 1
    (one,) = meshes(map_figure(Document.from_json(content), "entropy", "decoder"))
    assert one.norm.vmax == maps[0].norm.vmax
    assert (
        meshes(map_figure(Document.from_json(content), "distance", "cross"))[0]
        .get_array()
        .mask.all()
    )


def test_a_choice_of_heads_keeps_their_numbers() -> None:
    content = document()
    content["rows"] = [
        row for row in content["rows"] if row["head"] in (1, 3) and row["layer"] != 1
    ]
    content["rows"].pop()
    figure = map_figure(Document.from_json(content), "entropy")
    ax, (mesh,) = figure.axes[0], meshes(figure)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "3"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "2"]
    assert mesh.get_array().reshape(2, 2).mask.tolist() == [[False, False], [False, True]]


def test_wrong_names_say_the_right_ones() -> None:
    with pytest.raises(ValueError, match="did you mean entropy"):
        map_figure(Document.from_json(document()), "entropi")
    with pytest.raises(ValueError, match="there are: entropy, "):
        map_figure(Document.from_json(document()), "zzz")
    with pytest.raises(ValueError, match="kind must be of encoder, got 'cross'"):
        map_figure(Document.from_json(document()), "entropy", "cross")


@pytest.mark.parametrize(("layers", "heads"), [(30, 9), (1, 1), (2, 40)])
def test_maps_fit_models_of_any_shape(layers: int, heads: int) -> None:
    content = document({"decoder": layers}, heads)
    figure = map_figure(Document.from_json(content), "entropy")
    width, height = figure.get_size_inches()
    assert width < 12
    assert height < 13
    renderer = FigureCanvasAgg(figure).get_renderer()
    for ax in figure.axes:
        box = ax.get_tightbbox(renderer)
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_all_figures_are_written_in_both_forms(tmp_path: Path) -> None:
    content = document({"encoder": 2}, 3)
    kept = ("entropy", "kept_1.5", "moved_1.5", "tightness")
    content["columns"] = [column for column in content["columns"] if column["name"] in kept]
    shares: list[float] = []
    paths = save_figures(Document.from_json(content), tmp_path, shares.append)
    stems = {path.name.removesuffix(".png") for path in paths if path.name.endswith(".png")}
    figure_names = ["agreement", "entropy_histograms", "top_weight_histograms", "spectra", "recipe"]
    figure_names.append("preference")
    assert stems == {"what_if", *(f"map_encoder_{name}" for name in kept)} | {
        f"{name}_encoder" for name in figure_names
    }
    assert sorted(paths) == sorted((tmp_path / "figures").iterdir())
    assert sum(shares) == pytest.approx(1)
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_only_what_there_is_is_drawn() -> None:
    content = document({"encoder": 2}, 1)
    content |= {"spectra": {}, "preference": {}, "recipe": None, "histograms": {}}
    content["columns"] = content["columns"][:1]
    assert [name for name, _ in figures(Document.from_json(content))] == ["map_encoder_entropy"]


def test_the_what_if_shows_every_head_for_every_alpha() -> None:
    content = document()
    assert what_if_pairs(Document.from_json(content)) == [
        ("1.5", "kept_1.5", "moved_1.5"),
        ("2", "kept_2", "moved_2"),
    ]
    content["rows"][0]["moved_2"] = None
    (ax,) = what_if_figure(Document.from_json(content)).axes
    first, second = (points.get_offsets() for points in ax.collections)
    np.testing.assert_array_equal(first, [[r["kept_1.5"], r["moved_1.5"]] for r in content["rows"]])
    assert len(second) == len(content["rows"]) - 1
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("links kept", "output moved")
    named = {"kept_1.5": "entmax-1.5: links kept", "kept_2": "sparsemax: links kept"}
    for column in content["columns"]:
        column["title"] = named.get(column["name"], column["title"])
    (ax,) = what_if_figure(Document.from_json(content)).axes
    assert ax.get_xlabel() == "links kept"


def test_titles_are_not_formulas(tmp_path: Path) -> None:
    """A measure of your own is called as you like."""
    content = document()
    for column in content["columns"]:
        column["title"] = r"costs $\5 or $6"
    assert save_figures(Document.from_json(content), tmp_path)
