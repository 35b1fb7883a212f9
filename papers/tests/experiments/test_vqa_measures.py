"""Where a network looked and how many modes it takes, on maps made by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fenchel.nn import Modes
from papers.experiments.loop import Diverged
from papers.experiments.vqa.measures import agreement, examples, looks, packed, selection, unpacked
from papers.experiments.vqa.model import Answered
from papers.experiments.vqa.study import VqaStudy
from papers.tests.experiments.tiny import SIZE, questions


@pytest.fixture(scope="module")
def data():
    return questions()


class Looking(nn.Module):
    """A grid of 4 x 4 cells of 8 pixels; the upper left quarter is what is asked about."""

    blind = False
    shapes = SimpleNamespace(grid=(4, 4))

    def __init__(self, weights):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.weights = torch.tensor(weights).flatten()

    def forward(self, words, pictures, which):
        return Answered(torch.zeros(len(words), 4), self.weights.expand(len(words), -1))


def at(*cells):
    weights = torch.zeros(4, 4)
    for row, column, weight in cells:
        weights[row, column] = weight
    return weights.tolist()


@pytest.mark.parametrize(
    ("weights", "mass", "hit"),
    [
        (at((0, 0, 1.0)), 1.0, 1.0),
        (at((0, 1, 0.4), (1, 1, 0.6)), 1.0, 1.0),
        (at((1, 1, 0.25), (3, 3, 0.75)), 0.25, 0.0),
        (at((1, 1, 0.75), (3, 3, 0.25)), 0.75, 1.0),
        (at((0, 0, 0.5), (3, 3, 0.5)), 0.5, 0.5),  # two largest weights: one of them inside
        (at((0, 2, 1.0)), 0.0, 0.5),  # half of that cell is at most 4 pixels away
        ([[1 / 16] * 4] * 4, 0.25, (20 * 20) / 32**2),
    ],
)
def test_agreement_of_maps_made_by_hand(data, weights, mass, hit):
    measures = agreement(VqaStudy(data, SIZE, "softmax"), Looking(weights))
    assert measures == pytest.approx({"mass": mass, "area": 0.25, "hit": hit}, abs=1e-6)


def test_only_questions_about_something_count(data):
    """Of those about nothing (is there a red circle? no) any place is as good."""
    regions = data.test.regions.clone()
    regions[::2] = False
    regions[1] = True  # the whole picture
    test = replace(data.test, regions=regions)
    measures = agreement(
        VqaStudy(replace(data, test=test), SIZE, "softmax"), Looking(at((3, 3, 1.0)))
    )
    assert measures == pytest.approx({"mass": 1 / 6, "area": (5 * 0.25 + 1) / 6, "hit": 1 / 6})


def test_no_agreement_where_nothing_is_known_or_seen(data):
    blind = VqaStudy(data, SIZE, "question-only")
    assert agreement(blind, blind.build()) is None
    bare = replace(data, test=replace(data.test, regions=None))
    study = VqaStudy(bare, SIZE, "softmax")
    assert agreement(study, study.build()) is None


# ---- modes


def continuous(data, attention="continuous-softmax-9"):
    study = VqaStudy(data, SIZE, attention)
    torch.manual_seed(0)
    model = study.build().eval()
    with torch.no_grad():
        model.read.score[2].weight.mul_(20)  # so that some cells stand out
    return study, model


def test_selection_leaves_the_model_as_it_was(data):
    study, model = continuous(data)
    batch = study.batch(data.test, torch.arange(4))
    inputs = batch["words"], batch["pictures"], batch["which"]
    with torch.no_grad():
        before = model(*inputs).scores
        by_price = selection(study, model, seed=0)
        assert torch.equal(model(*inputs).scores, before)
        assert model.read.density.modes == Modes(1)
        assert selection(study, model, seed=0) == by_price
    assert list(by_price) == ["10", "100", "500"]
    for entry in by_price.values():
        assert len(entry["modes"]) == 5
        assert sum(entry["modes"]) == pytest.approx(1, abs=1e-4)
        assert set(entry["scores"]) == {"accuracy", "yes/no", "number", "other"}
    assert by_price["500"]["modes"][0] >= by_price["10"]["modes"][0]


def test_with_one_mode_the_scores_are_those_of_the_network(data, monkeypatch):
    """A penalty beyond all gains chooses one mode: what the network was trained with."""
    monkeypatch.setattr("papers.experiments.vqa.measures.PENALTIES", (1e9,))
    study, model = continuous(data)
    with torch.no_grad():
        entry = selection(study, model, seed=0)["1e+09"]
        assert entry["modes"] == [1.0, 0.0, 0.0, 0.0, 0.0]
        assert entry["scores"] == study.scores(model)


def test_a_failure_in_between_leaves_the_model_too(data, monkeypatch):
    study, model = continuous(data)
    monkeypatch.setattr(VqaStudy, "by_kind", lambda self, worth: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        selection(study, model, seed=0)
    assert model.read.density.modes == Modes(1)


@pytest.mark.parametrize("attention", ["question-only", "softmax", "2-mca-9"])
def test_modes_are_chosen_only_for_a_gaussian_of_one(data, attention):
    study = VqaStudy(data, SIZE, attention)
    assert selection(study, study.build(), seed=0) is None


# ---- maps


def test_a_map_is_kept_to_a_level():
    shares = torch.rand(16, 16)
    shares /= shares.sum()
    levels = unpacked(packed(shares))
    assert (levels - shares / shares.max()).abs().max() <= 0.5 / 255 + 1e-6
    assert levels.max() == 1
    assert len(packed(shares)) == 4 * ((256 + 2) // 3)
    assert torch.equal(unpacked(packed(torch.zeros(16, 16))), torch.zeros(16, 16))


def test_examples_are_the_first_of_each_kind(data):
    kinds = torch.tensor([2, 2, 0, 1, 2, 2, 2, 2, 2, 0, 2, 2])
    assert examples(replace(data.test, kinds=kinds)) == [2, 9, 3, 0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("attention", ["question-only", "softmax", "continuous-sparsemax-9"])
def test_looks(data, attention):
    study = VqaStudy(data, SIZE, attention, keep_looks=True)
    torch.manual_seed(0)
    model = study.build().eval()
    with torch.no_grad():
        entries = looks(study, model)
        worth = study.worth(model)
    assert [look["question"] for look in entries] == examples(data.test)
    for look in entries:
        assert look["worth"] == float(worth[look["question"]])
        right = data.answers[int(data.test.answers[look["question"], 0])]
        assert (look["answer"] == right) == (look["worth"] == 1)
        assert (look["map"] is None) == (attention == "question-only")


def test_facts(data, tmp_path):
    study, model = continuous(data)
    with torch.no_grad():
        assert set(study.facts(model, tmp_path)) == {"agreement", "selection"}
        blind = VqaStudy(data, SIZE, "question-only", keep_looks=True)
        assert set(blind.facts(blind.build(), tmp_path)) == {"looks"}


def test_no_region_at_all_no_agreement(data):
    nowhere = replace(data.test, regions=torch.zeros_like(data.test.regions))
    study = VqaStudy(replace(data, test=nowhere), SIZE, "softmax")
    assert agreement(study, Looking(at((0, 0, 1.0)))) is None


def test_attention_that_is_no_number_is_refused(data):
    study = VqaStudy(data, SIZE, "softmax")
    for measure in (agreement, looks):
        with pytest.raises(Diverged, match="weights of attention are not finite"):
            measure(study, Looking(at((0, 0, float("nan")))))
