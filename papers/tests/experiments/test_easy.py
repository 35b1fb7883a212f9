"""easy-VQA from its package, and what is said of files that are not right."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch

from papers.experiments.data import easy
from papers.experiments.data.easy import load_easy
from papers.experiments.data.files import DataProblem
from papers.experiments.vqa import presets
from papers.tests.experiments.question_files import EASY, easy_picture, noise, write_easy
from tests import needs

PACKAGES = needs.ROOT / "build" / "packages"


def test_questions_answers_and_pictures(tmp_path):
    data = load_easy(write_easy(tmp_path))
    assert (data.name, data.answers) == ("easy", ["circle", "no", "triangle", "yes"])
    assert data.vocabulary[:2] == ["", "<unknown>"]
    assert data.vocabulary[2:] == ["a", "blue", "is", "red", "shape", "the", "there", "what"]
    assert data.text(data.train, 1) == "is there a red shape"
    assert data.text(data.test, 1) == "what is the <unknown> shape"
    for part, split in (("train", data.train), ("test", data.test)):
        for question, (_, answer, number) in enumerate(EASY[part]):
            picture = split.pictures.gathered(split.picture[question : question + 1])[0]
            assert torch.equal(
                picture.permute(1, 2, 0), torch.from_numpy(easy_picture(part, number))
            )
            place = int(split.answers[question])
            assert place == (data.answers.index(answer) if answer in data.answers else -1)
    assert data.test.kinds.tolist() == [0, 2, 2]
    assert data.train.words.shape == (6, 5)
    assert data.train.worth.tolist() == [[1.0]] * 6


def test_the_note_counts_and_says_what_needs_no_picture(tmp_path):
    note = load_easy(write_easy(tmp_path)).note
    assert "6 training questions (3 yes/no) on 3 pictures" in note
    assert "3 test questions (1 yes/no) on 2, 4 answers" in note
    # by the words: no and triangle are right, square cannot be; always no is right once
    assert "is right on 66.7 % of the test questions" in note


def test_the_package_is_found_and_not_run(tmp_path, monkeypatch):
    write_easy(tmp_path / "easy_vqa" / "data")
    (tmp_path / "easy_vqa" / "__init__.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load_easy().train) == 6
    assert "easy_vqa" not in sys.modules
    assert len(load_easy(tmp_path).train) == 6


@pytest.mark.parametrize("place", [".", "easy_vqa", "easy_vqa/data"])
def test_the_folder_of_all_data_may_hold_it(tmp_path, monkeypatch, place):
    """As --data gives it; the package, whose data are others, is not asked for."""
    monkeypatch.setattr(easy, "find_spec", lambda name: pytest.fail("looked for the package"))
    write_easy(tmp_path / place)
    assert len(presets.load("easy", tmp_path).train) == 6


def test_without_the_package(monkeypatch):
    monkeypatch.setattr("papers.experiments.data.easy.find_spec", lambda name: None)
    with pytest.raises(DataProblem, match="pip install --no-deps easy-vqa"):
        load_easy()


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(DataProblem, match=r"nowhere has no train/; .*pip install"):
        load_easy(tmp_path / "nowhere")
    folder = write_easy(tmp_path)
    (folder / "train" / "images" / "7.png").unlink()
    with pytest.raises(DataProblem, match=r"no picture .*7\.png"):
        load_easy(folder)
    (folder / "train" / "images" / "7.png").write_bytes(b"hello")
    with pytest.raises(DataProblem, match=r"7\.png \(5 bytes\) is not a picture"):
        load_easy(folder)
    path = folder / "test" / "questions.json"
    for content, message in (
        (path.read_text()[:-9], "is not a list of"),
        (json.dumps([["what?", "yes"]]), "is not a list of"),
        (json.dumps([["what?", "yes", 1.7]]), "is not a list of"),
        (json.dumps([["what?", None, 1]]), "is not a list of"),
        ("[" * 100_000, "is not a list of"),
        ("[]", "has no question"),
    ):
        path.write_text(content)
        with pytest.raises(DataProblem, match=rf"test.questions\.json.* {message}"):
            load_easy(folder)
    path.unlink()
    with pytest.raises(DataProblem, match=r"there is no .*test.questions\.json"):
        load_easy(folder)


def test_pictures_are_of_one_size(tmp_path):
    from PIL import Image

    folder = write_easy(tmp_path)
    Image.fromarray(noise(9, 8, 0)).save(folder / "train" / "images" / "10.png")
    with pytest.raises(DataProblem, match=r"10\.png is 9 x 8, but 0\.png is 8 x 8"):
        load_easy(folder)
    write_easy(folder)
    for number in (1, 3):
        Image.fromarray(noise(9, 8, 0)).save(folder / "test" / "images" / f"{number}.png")
    with pytest.raises(DataProblem, match=r"train/ are 8 x 8, those of test/ 9 x 8"):
        load_easy(folder)


def test_sides_of_pictures_are_whole_cells(tmp_path):
    from PIL import Image

    folder = write_easy(tmp_path)
    for path in folder.glob("*/images/*.png"):
        Image.fromarray(noise(12, 12, 0)).save(path)
    with pytest.raises(DataProblem, match=r"pictures are 12 x 12, expected .* multiple of 8"):
        load_easy(folder)


def test_the_real_package():
    folder = None if find_spec("easy_vqa") else PACKAGES
    if folder and not (folder / "easy_vqa").is_dir():
        needs.skip(
            "no easy-vqa (pip install --no-deps --target build/packages easy-vqa)",
            "the real pictures and questions of easy-VQA",
        )
    data = load_easy(folder)
    # as counted in the package's own README
    assert (len(data.train), len(data.test), len(data.answers)) == (38575, 9673, 13)
    assert [int((part.kinds == 0).sum()) for part in (data.train, data.test)] == [28407, 7136]
    assert data.train.pictures.gathered(torch.arange(2)).shape == (2, 3, 64, 64)
    assert (len(data.train.pictures), len(data.test.pictures)) == (4000, 1000)
    assert int(data.test.answers.min()) == 0
    assert not (data.test.words == 1).any()
