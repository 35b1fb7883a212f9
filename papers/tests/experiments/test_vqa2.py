"""VQA-v2 from the official files, features in three layouts, and what is said of wrong files."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from papers.experiments.data.files import DataProblem
from papers.experiments.data.vqa2 import load_vqa2, processed, words_of
from papers.tests.experiments.question_files import (
    GRID,
    VQA2,
    annotated,
    grid_of,
    noise,
    write_hdf5,
    write_vqa2,
    write_vqa2_json,
)

LAYOUTS = ("channels last", "channels first", "flat")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Yes", "yes"),
        ("  on the\ttable.\n", "on table"),
        ("The Two", "2"),
        ("none", "0"),
        ("ten o'clock", "10 o'clock"),
        ("3.5", "3.5"),
        ("1,000", "1000"),
        ("black/white", "black white"),
        ("black / white", "black white"),
        ("t-shirt", "t shirt"),
        ("1,000 t-shirts", "1000 tshirts"),  # the official evaluation's own doing
        ("red, green", "red green"),
        ("maybe?", "maybe"),
        ("an anthem", "anthem"),
    ],
)
def test_answers_are_processed_as_officially(answer, expected):
    assert processed(answer) == expected


def test_words():
    words = words_of("What's on the T-shirt/cap, (if any)?")
    assert " ".join(words) == "whats on the t shirt cap if any"


def test_questions_and_what_answers_are_worth(tmp_path):
    data = load_vqa2(write_vqa2(tmp_path), answers=2)
    assert (data.name, data.answers) == ("vqa-v2", ["yes", "2"])  # as common as zebra, before it
    assert [data.text(data.train, q) for q in range(3)] == [
        "is the t shirt red",
        "how many dogs",
        "is it red",
    ]
    assert len(data.train) == 3  # zebra is not among the answers
    assert data.text(data.test, 0) == "is it <unknown> <unknown>"
    assert data.train.kinds.tolist() == [0, 1, 0]
    assert data.test.kinds.tolist() == [0, 2]
    assert data.train.answers.tolist() == [[0], [1], [0]]
    assert data.train.worth.tolist() == [[1.0], [1.0], [1.0]]
    assert data.test.answers.tolist() == [[0, 1], [-1, -1]]
    torch.testing.assert_close(data.test.worth, torch.tensor([[2 / 3, 1 / 3], [0, 0]]))
    every = load_vqa2(tmp_path, longest=3)
    assert every.answers == ["yes", "2", "zebra"]
    assert every.train.words.shape == (4, 3)


def test_the_note(tmp_path):
    note = load_vqa2(write_vqa2(tmp_path), answers=2).note
    assert "trained on 3 of 4 questions of train2014 (2 images)" in note
    assert "tested on all 2 of val2014 (1), because test-dev needs the evaluation server" in note
    assert "2 answers, one of which 1 test questions have, so that 33.3 % can be reached" in note


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grids_are_read_when_asked_for(tmp_path, layout, monkeypatch):
    data = load_vqa2(write_vqa2(tmp_path, layout))
    opened, load = [], np.load
    monkeypatch.setattr(np, "load", lambda path: opened.append(path) or load(path))
    grids = data.train.pictures.gathered(torch.tensor([1, 0, 1]))
    expected = np.stack([grid_of(image) for image in (25, 9, 25)])
    assert torch.equal(grids, torch.from_numpy(expected))
    assert len(opened) == 2
    about = [data.train.pictures.images[place] for place in data.train.picture.tolist()]
    assert about == [9, 9, 25, 25]
    assert data.train.pictures.shown(0) is None
    (tmp_path / "images" / "train2014").mkdir(parents=True)
    picture = Image.fromarray(noise(6, 5, 0))
    picture.save(tmp_path / "images" / "train2014" / "COCO_train2014_000000000025.jpg")
    again = load_vqa2(tmp_path).train.pictures
    assert again.shown(0) is None
    assert again.shown(1).shape == (6, 5, 3)


def test_half_precision_is_widened(tmp_path):
    folder = write_vqa2(tmp_path)
    path = folder / "features" / "val2014" / "COCO_val2014_000000000042.npz"
    np.savez(path, x=grid_of(42).astype(np.float16))
    grids = load_vqa2(folder).test.pictures.gathered(torch.tensor([0]))
    assert grids.dtype == torch.float32
    torch.testing.assert_close(grids[0], torch.from_numpy(grid_of(42)), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hdf5(tmp_path, layout):
    data = load_vqa2(write_vqa2(tmp_path, layout, hdf5=True))
    grids = data.train.pictures.gathered(torch.tensor([0, 1]))
    assert torch.equal(grids, torch.from_numpy(np.stack([grid_of(9), grid_of(25)])))


def test_hdf5_that_is_not_right(tmp_path, monkeypatch):
    path = write_vqa2(tmp_path, hdf5=True) / "features" / "train2014.h5"
    kept = path.read_bytes()
    for more, message in (
        ({"9": np.full(GRID, np.nan)}, r"dataset 9 in .*train2014\.h5 has features that are not"),
        ({"9": {"x": grid_of(9)}}, r"dataset 9 in .*train2014\.h5 has the shape \(1,\)"),  # a group
        ({"boxes": np.zeros(4)}, r"train2014\.h5 holds boxes: features of boxes"),
    ):
        write_hdf5(path, {"9": grid_of(9), "25": grid_of(25)} | more)
        with pytest.raises(DataProblem, match=message):
            load_vqa2(tmp_path)
    for torn in (b"", kept[: len(kept) // 2], b"PK" + kept[2:]):
        path.write_bytes(torn)
        with pytest.raises(DataProblem, match=rf"2014\.h5 \({len(torn)} bytes\) is not HDF5: "):
            load_vqa2(tmp_path)
    path.write_bytes(kept)
    other = path.with_name("val2014.h5")
    whole = other.read_bytes()
    write_hdf5(other, {"43": grid_of(42)})
    with pytest.raises(DataProblem, match=r"no dataset 42 in .*val2014\.h5: 1 of the 1 images"):
        load_vqa2(tmp_path)
    other.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataProblem, match=r"train2014\.h5 needs h5py: `pip install h5py`"):
        load_vqa2(tmp_path)


def test_features_that_are_not_right(tmp_path):
    folder = write_vqa2(tmp_path)
    path = folder / "features" / "train2014" / "COCO_train2014_000000000025.npz"
    for wrong, message in (
        (np.zeros((4, 5, 7)), r"000025\.npz has the shape \(4, 5, 7\), expected a square grid"),
        (np.zeros((2048, 36)), r"the shape \(2048, 36\), .*boxes are not a grid"),
        (np.zeros((36, 5)), r"the shape \(36, 5\), .*boxes are not a grid"),
        (np.zeros((100, 5)), r"the shape \(100, 5\), .*boxes are not a grid"),
        (np.zeros((7, 7, 0)), r"the shape \(7, 7, 0\)"),
        (np.zeros((3, 3, 7)), r"000025\.npz is a grid of \(3, 3, 7\), but the first"),
        (np.zeros(7), r"the shape \(7,\)"),
        (np.full(GRID, np.nan), r"000025\.npz has features that are not finite"),
        (np.full(GRID, -np.inf), r"000025\.npz has features that are not finite"),
        (np.full(GRID, 1e300), r"000025\.npz has features that are not finite in float32"),
        (np.full(GRID, 1j), r"000025\.npz is of complex128, expected real numbers"),
        (np.full(GRID, "a"), r"000025\.npz is of <U1, expected real numbers"),
    ):
        np.savez(path, x=wrong)
        with pytest.raises(DataProblem, match=message):
            load_vqa2(folder).train.pictures.gathered(torch.tensor([0, 1]))
    for name in ("bbox", "num_bbox", "boxes"):
        np.savez(path, x=grid_of(25), **{name: np.zeros((49, 4))})
        with pytest.raises(DataProblem, match=rf"000025\.npz holds {name}: features of boxes"):
            load_vqa2(folder).train.pictures.gathered(torch.tensor([1]))
    np.savez_compressed(path, x=grid_of(25))
    raw = bytearray(path.read_bytes())
    raw[60:90] = b"\xff" * 30
    path.write_bytes(raw)
    with pytest.raises(DataProblem, match=r"000025\.npz does not give the array x of image 25"):
        load_vqa2(folder).train.pictures.gathered(torch.tensor([1]))
    np.savez(path, y=grid_of(25))
    with pytest.raises(DataProblem, match=r"000025\.npz does not give the array x of image 25"):
        load_vqa2(folder).train.pictures.gathered(torch.tensor([1]))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataProblem, match=r"000025\.npz does not give the array x of image 25"):
        load_vqa2(folder).train.pictures.gathered(torch.tensor([1]))
    path.unlink()
    with pytest.raises(DataProblem, match=r"000025\.npz: 1 of the 2 images .* such as 25"):
        load_vqa2(folder)
    path.with_name("COCO_train2014_000000000009.npz").unlink()
    with pytest.raises(DataProblem, match=r"no features of train2014: looked for"):
        load_vqa2(folder)


def test_parts_have_one_grid(tmp_path):
    folder = write_vqa2(tmp_path)
    path = folder / "features" / "val2014" / "COCO_val2014_000000000042.npz"
    np.savez(path, x=np.zeros((5, 5, GRID[-1])))
    with pytest.raises(DataProblem, match=r"000042\.npz is a grid of \(5, 5, 5\)"):
        load_vqa2(folder)


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(DataProblem, match=r"no folder .*nowhere"):
        load_vqa2(tmp_path / "nowhere")
    folder = write_vqa2(tmp_path)
    for name in ("answers", "longest"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            load_vqa2(folder, **{name: 0})

    def refused(message, pairs=None):
        if pairs is not None:
            write_vqa2_json(folder / "json", "val2014", pairs)
        with pytest.raises(DataProblem, match=message):
            load_vqa2(folder)

    first, second = VQA2["val2014"]
    annotations = r"v2_mscoco_val2014_annotations\.json"
    refused(f"{annotations} answers question 421, which", [first, (None, second[1])])
    refused(f"{annotations} does not answer 1 questions .* 421", [first, (second[0], None)])
    asks = r"val2014_questions\.json"
    refused(f"{asks} has questions with question_id 420 twice", [first, (first[0], second[1])])
    other = (second[0], first[1])
    refused(f"{annotations} has annotations with question_id 420 twice", [first, other])
    odd = annotated(422, 42, "What?", "colour", ("red", 10))
    refused(f"{annotations}: question 422 has the answer_type 'colour'", [first, odd])
    lame = {name: value for name, value in second[1].items() if name != "answers"}
    refused(f"{annotations}: annotations number 1 has no answers", [first, (second[0], lame)])
    refused(r"questions\.json has no question", [])
    path = folder / "json" / "v2_OpenEnded_mscoco_val2014_questions.json"
    path.write_text(json.dumps({"annotations": []}))
    refused(r"val2014_questions\.json has no list 'questions'")
    path.write_text('{"questions": [')
    refused(r"val2014_questions\.json \(15 bytes\) is not JSON.*visualqa\.org")
    path.unlink()
    refused(r"has no v2_OpenEnded_mscoco_val2014_questions\.json.*visualqa\.org")


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        (0, "question", None, r"questions\.json: question of questions number 1 \(question 421\)"),
        (0, "image_id", "abc", r"image_id of questions number 1 .* is a str, expected int"),
        (0, "image_id", 1.7, "is a float, expected int"),
        (0, "image_id", True, "is a bool, expected int"),
        (
            0,
            "question_id",
            [1],
            r"question_id of questions number 1 \(question unknown\) is a list",
        ),
        (1, "answers", None, r"annotations\.json: answers of annotations number 1 .* NoneType"),
        (1, "answers", [], "answers of question 421 must be objects"),
        (1, "answers", ["yes"], "answers of question 421 must be objects"),
        (1, "answers", [{"answer": 1}], "answers of question 421 must be objects"),
        (1, "multiple_choice_answer", 3, r"\(question 421\) is a int, expected str"),
        (1, "answer_type", [1], "is a list, expected str"),
    ],
)
def test_values_of_another_type(tmp_path, place, name, value, message):
    folder = write_vqa2(tmp_path)
    first, second = VQA2["val2014"]
    wrong = [dict(part) for part in second]
    wrong[place][name] = value
    write_vqa2_json(folder / "json", "val2014", [first, wrong])
    with pytest.raises(DataProblem, match=message):
        load_vqa2(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has no list 'questions'"),
        ('{"questions": {}}', "has no list 'questions'"),
        ('{"questions": [1]}', "questions number 0 is no object"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_documents_of_another_form(tmp_path, text, message):
    folder = write_vqa2(tmp_path)
    (folder / "json" / "v2_OpenEnded_mscoco_val2014_questions.json").write_text(text)
    with pytest.raises(DataProblem, match=message):
        load_vqa2(folder)
