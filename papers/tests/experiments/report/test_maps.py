"""Which examples are shown follows a rule, and the picture shows what is stored."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from fenchel.lens.pictures import draw
from papers.experiments.data.questions import InMemory, QuestionData, QuestionSplit
from papers.experiments.report import figures, maps
from papers.tests.experiments.report.documents import Document, document, look, stored

NOTE = "made by hand"
SOFTMAX, CONTINUOUS, MODES = "softmax", "continuous-softmax-36", "2-mca-36"


def data(note: str = NOTE) -> QuestionData:
    """Six questions, two of each kind; the region of the first is its upper half."""
    images = torch.full((6, 3, 64, 64), 200, dtype=torch.uint8)
    regions = torch.zeros(6, 64, 64, dtype=torch.bool)
    regions[0, :32] = True
    split = QuestionSplit(
        InMemory(images),
        torch.arange(6),
        torch.tensor([[2, 3]] * 6),
        torch.tensor([[1]] * 5 + [[-1]]),
        torch.ones(6, 1),
        torch.tensor([0, 0, 1, 1, 2, 2]),
        regions,
    )
    words = ["", "?", "is", "it"]
    return QuestionData("shapes", split, split, words, ["no", "yes"], note)


def run(attention: str, worth: list[float], seed: int = 0, peak: int = 0) -> Document:
    looks = [look(question, value, peak) for question, value in enumerate(worth)]
    facts: dict[str, Any] = {"looks": looks}
    return document("vqa", "shapes", attention, seed, 0.5, note=NOTE, facts=facts)


def three() -> list[Document]:
    return [
        run(MODES, [1, 1, 0, 0, 0, 0]),
        run(CONTINUOUS, [1, 0, 0, 1, 0, 1]),
        run(SOFTMAX, [1, 1, 0, 0, 0, 0]),
        run(SOFTMAX, [0] * 6, seed=1),
    ]


def test_the_rule() -> None:
    looks = maps.seen(three())
    kinds = dict(enumerate([0, 0, 1, 1, 2, 2]))
    assert list(looks) == [SOFTMAX, CONTINUOUS, MODES]
    assert maps.chosen(looks, kinds) == {
        0: "all right",
        1: "some right, softmax right, continuous wrong",
        3: "some right",
        5: "some right",
    }


def test_rows_say_question_answer_and_who_was_right() -> None:
    rows = maps.examples(three(), data(), compact=False)
    assert [row.question for row in rows] == ["is it?"] * 4
    assert [row.answer for row in rows] == ["yes"] * 3 + ["none of those it can give"]
    names = ["discrete softmax", "2D continuous softmax, N = 36", "2-MCA, N = 36"]
    assert list(rows[1].looks) == names
    assert [entry.right for entry in rows[1].looks.values()] == [True, False, True]
    density = rows[0].looks["discrete softmax"].density
    assert density.mean() == pytest.approx(1)  # even attention is 1
    assert density[0, 0] == pytest.approx(256)
    assert rows[0].region is not None
    assert rows[0].region[:32].all()


def test_the_compact_picture_leaves_some_attentions_out() -> None:
    more = [run("continuous-softmax-16", [1] * 6), run("entmax", [1] * 6), *three()]
    assert list(maps.seen(more, compact=True)) == [SOFTMAX, CONTINUOUS, MODES]
    assert len(maps.seen(more)) == 5


def test_a_network_that_does_not_look_is_not_shown() -> None:
    blind = run("question-only", [1] * 6)
    for entry in blind["facts"]["looks"]:
        entry["map"] = None
    assert list(maps.seen([blind, *three()])) == [SOFTMAX, CONTINUOUS, MODES]


def test_attention_beside_the_picture_is_an_empty_map() -> None:
    runs = three()
    empty = base64.b64encode(bytes(256)).decode()
    for entry in runs[2]["facts"]["looks"]:
        entry["map"] = empty
    row = maps.examples(runs, data(), compact=False)[0]
    assert (row.looks["discrete softmax"].density == 0).all()
    maps.paint(Figure(figsize=maps.size([row])), [row], draw.LIGHT)


def test_pictures_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="of other data"):
        maps.examples(three(), data("another version"), compact=False)


def test_frames_tell_right_from_wrong() -> None:
    rows = maps.examples(three(), data(), compact=False)[:2]
    canvas = Figure(figsize=maps.size(rows))
    maps.paint(canvas, rows, draw.LIGHT)
    assert len(canvas.axes) == 2 * 4
    said = [ax.texts[0].get_text() if ax.texts else "" for ax in canvas.axes]
    assert said == ["", "✓ yes", "✓ yes", "✓ yes", "", "✓ yes", "✗ yes", "✓ yes"]
    frames = [ax.spines["left"].get_edgecolor()[:3] for ax in canvas.axes]
    assert len({tuple(np.round(frame, 3)) for frame in frames}) == 3  # picture, right, wrong
    assert frames[5] != frames[6]
    for ax in canvas.axes:
        box = ax.get_position()
        assert min(box.x0, box.y0) >= 0
        assert max(box.x1, box.y1) <= 1


def test_a_file_knows_what_it_was_drawn_from(tmp_path: Path) -> None:
    results = stored(tmp_path / "results", *three())
    path = figures.save_shapes_picture(results, tmp_path / "results.md", lambda name: data())
    assert path == tmp_path / "results_shapes.png"
    assert path.stat().st_size < 300_000
    documents = figures.shapes_documents(results)
    assert maps.mark_in(path) == maps.mark_of(documents, compact=True)
    assert maps.mark_of([*three()[:2], run(SOFTMAX, [1] * 6)], compact=True) != maps.mark_in(path)

    def never(name: str) -> QuestionData:
        raise AssertionError("what is up to date needs no data")

    assert figures.save_shapes_picture(results, tmp_path / "results.md", never) == path


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_picture_is_drawn_again(tmp_path: Path, damage: str) -> None:
    results = stored(tmp_path / "results", *three())
    path = figures.save_shapes_picture(results, tmp_path / "results.md", lambda name: data())
    assert path is not None
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "other": b"notpng", "empty": b""}[damage])
    assert maps.mark_in(path) is None
    figures.save_shapes_picture(results, tmp_path / "results.md", lambda name: data())
    assert path.read_bytes() == whole


def test_questions_that_not_every_attention_has_are_left_out() -> None:
    runs = [run(SOFTMAX, [1] * 6), run(CONTINUOUS, [1] * 2)]
    assert [row.why for row in maps.examples(runs, data(), compact=False)] == ["all right"]


def test_no_look_no_picture(tmp_path: Path) -> None:
    one = document("vqa", "shapes", SOFTMAX, 0, 0.5)
    results = stored(tmp_path / "results", one)
    assert figures.save_shapes_picture(results, tmp_path / "results.md", lambda n: data()) is None
    with pytest.raises(ValueError, match="no run of seed 0"):
        maps.save([], tmp_path / "maps.png")


def test_a_picture_that_cannot_be_small_enough_is_refused(tmp_path: Path) -> None:
    rows = maps.examples(three(), data(), compact=False)[:1]
    with pytest.raises(ValueError, match="more than 100 bytes"):
        maps.save(rows, tmp_path / "maps.png", most=100)
    assert not (tmp_path / "maps.png").exists()


def test_questions_and_answers_are_not_formulas(tmp_path: Path) -> None:
    picture = np.zeros((8, 8, 3))
    looks = {"softmax": maps.Look(np.ones((8, 8)), r"$\5 or $6", right=True)}
    row = maps.Example(picture, r"is it $\5 or $6?", "yes", "all were right", looks, None)
    assert maps.save([row], tmp_path / "maps.png").exists()
