"""Questions in batches, their loss and their score, against plain loops."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from papers.experiments.data.digest import of_questions
from papers.experiments.data.grids import grid_files
from papers.experiments.data.questions import KINDS
from papers.experiments.data.shapes import load_shapes
from papers.experiments.loop import Diverged
from papers.experiments.runs import shortened
from papers.experiments.vqa import presets
from papers.experiments.vqa.model import Answered
from papers.experiments.vqa.study import VqaStudy
from papers.tests.experiments.tiny import SIZE, questions


@pytest.fixture(scope="module")
def data():
    """24 questions about 6 pictures; the answers of two are not known."""
    plain = questions()
    answers = plain.train.answers.clone()
    answers[[3, 8], 0] = -1
    return replace(plain, train=replace(plain.train, answers=answers))


class Told(nn.Module):
    """Answers as told, by question; its weights are of no use."""

    def __init__(self, answers, count=4):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.answers, self.count, self.asked = answers, count, []

    def forward(self, words, pictures, which):
        self.asked.append((words, pictures, which))
        rows = [self.answers[tuple(row)] for row in words.tolist()]
        return Answered(nn.functional.one_hot(torch.tensor(rows), self.count).float(), None)


# ---- batches


@pytest.mark.parametrize("together", [1, 2, 3])
def test_questions_about_a_picture_stand_together(data, together):
    study = VqaStudy(data, SIZE, "softmax", together=together)
    (flat,) = study.order(0, 22, 0)
    assert sorted(flat) == [number for number in range(24) if number not in (3, 8)]
    pictures = data.train.picture[flat].tolist()
    changes = sum(left != right for left, right in pairwise(pictures))
    groups = sum(math.ceil(count / together) for count in Counter(pictures).values())
    assert changes <= groups - 1  # fewer where two groups of one picture happen to meet
    assert changes >= groups - 1 - (0 if together > 2 else 6)


def test_batches_are_full_and_each_question_comes_once(data):
    study = VqaStudy(data, SIZE, "softmax", together=2)
    batches = study.order(0, 5, 0)
    assert [len(batch) for batch in batches] == [5] * 4  # of 22; two fill no batch
    flat = [question for batch in batches for question in batch]
    assert len(set(flat)) == 20
    assert not {3, 8} & set(flat)  # their answers are not known


def test_the_order_follows_from_seed_and_epoch(data):
    study = VqaStudy(data, SIZE, "softmax", together=2)
    first = study.order(0, 5, 0)
    assert study.order(0, 5, 0) == first
    assert study.order(1, 5, 0) != first
    assert study.order(0, 5, 1) != first


def test_over_epochs_every_question_is_trained(data):
    study = VqaStudy(data, SIZE, "softmax", together=2)
    seen = {q for epoch in range(12) for batch in study.order(epoch, 5, 0) for q in batch}
    assert seen == set(range(24)) - {3, 8}


def test_too_few_questions_are_said(data):
    with pytest.raises(ValueError, match="22 questions fill no batch of 23"):
        VqaStudy(data, SIZE, "softmax").order(0, 23, 0)
    unknown = replace(data.train, answers=torch.full((24, 1), -1))
    with pytest.raises(ValueError, match="tiny: no training question has a known answer"):
        VqaStudy(replace(data, train=unknown), SIZE, "softmax")


def test_a_batch_holds_each_picture_once_and_says_which(data):
    study = VqaStudy(data, SIZE, "softmax")
    batch = study.gathered([0, 6, 13, 1], torch.Generator())  # about pictures 0, 0, 1, 1
    assert len(batch["pictures"]) == 2
    for row, question in enumerate((0, 6, 13, 1)):
        image = data.train.pictures.images[int(data.train.picture[question])]
        assert torch.equal(batch["pictures"][batch["which"][row]], image)
        assert torch.equal(batch["words"][row], data.train.words[question])
        assert torch.equal(batch["answers"][row], data.train.answers[question])


# ---- losses


def test_the_loss_is_that_of_the_right_answers(data):
    study = VqaStudy(data, SIZE, "softmax")
    batch = study.gathered([0, 1, 2], torch.Generator())
    torch.manual_seed(0)
    model = study.build()
    scores = model(batch["words"], batch["pictures"], batch["which"]).scores
    by_hand = sum(
        math.log(sum(math.exp(s) for s in row)) - row[answer]
        for row, (answer,) in zip(scores.tolist(), batch["answers"].tolist(), strict=True)
    )
    assert float(study.loss(model, batch).detach()) == pytest.approx(by_hand / 3, rel=1e-5)


def test_several_answers_are_each_in_part_right(data):
    """Binary cross-entropy with what each answer is worth, summed over answers; what is not among
    the answers counts for nothing, and of an answer twice the better worth."""
    answers = torch.tensor([[0, 2, -1], [3, -1, -1], [1, 1, 0]])
    worth = torch.tensor([[1.0, 0.3, 0.9], [0.6, 0.5, 0.0], [0.3, 0.6, 1.0]])
    wanted = [[1.0, 0.0, 0.3, 0.0], [0.0, 0.0, 0.0, 0.6], [1.0, 0.6, 0.0, 0.0]]
    study = VqaStudy(data, SIZE, "softmax", several=True)
    batch = study.gathered([0, 1, 2], torch.Generator()) | {"answers": answers, "worth": worth}
    torch.manual_seed(0)
    model = study.build()
    scores = model(batch["words"], batch["pictures"], batch["which"]).scores
    by_hand = 0.0
    for row, targets in zip(scores.tolist(), wanted, strict=True):
        for score, target in zip(row, targets, strict=True):
            chance = 1 / (1 + math.exp(-score))
            by_hand -= target * math.log(chance) + (1 - target) * math.log(1 - chance)
    assert float(study.loss(model, batch).detach()) == pytest.approx(by_hand / 3, rel=1e-5)


# ---- scores


def test_accuracy_is_what_the_answers_are_worth(data, monkeypatch):
    """In small batches, by picture, the scores come back to their questions."""
    monkeypatch.setattr("papers.experiments.vqa.study._AT_ONCE", 5)
    count = len(data.test)
    words = torch.arange(2, 2 + count).unsqueeze(-1).expand(-1, 3)
    answers = torch.tensor([[0, 1], [2, -1], [3, 0]]).repeat(4, 1)
    worth = torch.tensor([[1.0, 0.3], [0.6, 0.9], [0.3, 0.0]]).repeat(4, 1)
    told = [0, 1, 3, 1, 2, 2, 0, 2, 3, 2, 2, 3]
    by_hand = [1.0, 0.0, 0.3, 0.3, 0.6, 0.0, 1.0, 0.6, 0.3, 0.0, 0.6, 0.3]
    test = replace(data.test, words=words, answers=answers, worth=worth)
    study = VqaStudy(replace(data, test=test), SIZE, "softmax")
    model = Told({(n + 2,) * 3: answer for n, answer in enumerate(told)})
    torch.testing.assert_close(
        study.worth(model),
        torch.tensor(by_hand, dtype=torch.float64),
        check_dtype=True,
        atol=1e-7,
        rtol=0,
    )
    scores = study.scores(model)
    assert list(scores) == ["accuracy", *KINDS]  # the first is what early stopping watches
    assert scores["accuracy"] == pytest.approx(sum(by_hand) / 12)
    for number, kind in enumerate(KINDS):  # kinds go in turn
        assert scores[kind] == pytest.approx(sum(by_hand[number::3]) / 4)
    assert len(model.asked) == 2 * 3
    sizes = [len(pictures) for _, pictures, _ in model.asked[:3]]
    assert sum(sizes) <= 6 + 2  # a picture is looked at again only where a batch ends


def test_a_kind_without_questions_is_left_out(data):
    test = replace(data.test, kinds=torch.zeros(12, dtype=torch.int64))
    by_kind = VqaStudy(replace(data, test=test), SIZE, "softmax").by_kind(torch.ones(12))
    assert by_kind == {"accuracy": 1.0, "yes/no": 1.0}


# ---- shapes


def test_pixels_have_a_grid_of_eighths_and_features_their_own(data):
    shapes = VqaStudy(data, SIZE, "softmax").shapes()
    assert (shapes.vocabulary, shapes.answers) == (7, 4)
    assert (shapes.grid, shapes.channels) == ((4, 4), None)

    class Features:
        def __len__(self):
            return 6

        def gathered(self, places):
            return torch.zeros(len(places), 14, 10, 96)

    with_features = replace(data, train=replace(data.train, pictures=Features()))
    shapes = VqaStudy(with_features, SIZE, "softmax").shapes()
    assert (shapes.grid, shapes.channels) == ((14, 10), 96)


# ---- what is no number


def test_answers_that_are_no_numbers_score_nothing(data):
    study = VqaStudy(data, SIZE, "softmax")
    torch.manual_seed(0)
    model = study.build().eval()
    with torch.no_grad():
        model.answer.bias[1] = float("nan")
        with pytest.raises(Diverged, match="answers are not finite"):
            study.worth(model)


# ---- which data


def test_other_questions_or_pictures_are_other_settings(data):
    known = of_questions(data)
    assert len(known) == 16
    assert of_questions(replace(data, note="another", name="so")) == known
    for name in ("words", "picture", "answers", "worth", "kinds"):
        changed = getattr(data.test, name).clone()
        changed.view(-1)[-1] = 1 - changed.view(-1)[-1].clamp(0, 1)
        other = replace(data, test=replace(data.test, **{name: changed}))
        assert of_questions(other) != known, name
    pixels = data.train.pictures.images.clone()
    pixels[-1, -1, -1, -1] ^= 1
    pictures = replace(data.train.pictures, images=pixels)
    assert of_questions(replace(data, train=replace(data.train, pictures=pictures))) != known


def test_features_on_the_disk_go_by_names_and_sizes(data, tmp_path):
    def told(folder, cells=4):
        (folder / "val2014").mkdir(parents=True)
        for image in range(6):
            path = folder / "val2014" / f"COCO_val2014_{image:012d}.npz"
            np.savez(path, x=np.zeros((2, 2, cells), np.float32))
        grids = grid_files(folder, "val2014", range(6))
        return of_questions(replace(data, test=replace(data.test, pictures=grids)))

    assert told(tmp_path / "a") == told(tmp_path / "b")  # another folder
    assert told(tmp_path / "c", cells=8) != told(tmp_path / "d")


def test_settings_hold_the_digest_and_modes_have_cells(data, monkeypatch):
    course = replace(presets.PRESETS["smoke"].courses["shapes-tiny"], size=SIZE)
    small = replace(presets.PRESETS["smoke"], courses={"tiny": course})
    monkeypatch.setitem(presets.PRESETS, "smoke", small)
    (one,) = presets.jobs("smoke", data, ["16-mca-4"], 1)  # 4 x 4 cells
    assert one.settings()["data_digest"] == of_questions(data)
    assert one == presets.job("smoke", data, "16-mca-4", 0)
    with pytest.raises(ValueError, match=r"17 modes are more than the 16 cells .*K <= 16"):
        presets.jobs("smoke", data, ["softmax", "17-mca-4"], 1)


def test_the_first_questions_of_a_split():
    data = load_shapes(images=(30, 30))
    part = data.test.first(7)
    assert len(part) == 7
    assert torch.equal(part.words, data.test.words[:7])
    assert torch.equal(part.regions, data.test.regions[:7])
    assert part.pictures is data.test.pictures
    assert data.test.first(None) is data.test
    assert data.train.first(3).regions is None


def test_first_steps_are_tested_on_few():
    data = load_shapes(images=(30, 200))
    job = shortened(presets.job("smoke", replace(data, name="shapes-tiny"), "softmax", 0), 1)
    assert len(data.test) > 500 == len(presets.study(job, data).data.test)
