"""The study of robustness: bounds that hold, that are not idle, and that could fail."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from fenchel import lens
from fenchel.lens.head_bounds import HeadInputs, capture_head_inputs
from papers import studies
from papers.studies import hidden
from papers.studies.robustness import certified, hull, log_here, log_on_ball, moves
from papers.tests.studies.tiny_bert import save_tiny_bert
from tests import needs
from tests.lens.models import model_of


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return lens.load(save_tiny_bert(tmp_path_factory.mktemp("models")))


def heads_at_random(n=7, heads=3, size=4, sharp=2.0):
    generator = torch.Generator().manual_seed(3)
    draws = torch.randn(3, heads, n, size, generator=generator, dtype=torch.float64)
    return HeadInputs(
        sharp * draws[0], draws[1], draws[2], tokens=draws[0, 0], temperature=size**0.5
    )


def all_choices(n, m):
    every = [c for c in permutations(range(n), m) if list(c) == sorted(c)]
    return torch.tensor(every)


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_the_bound_holds_for_every_choice_and_is_not_idle(kept):
    heads = heads_at_random()
    truth, coupled = moves(heads, all_choices(7, kept))
    bound = certified(heads, 7 - kept)
    assert (truth <= coupled * (1 + 1e-12)).all()
    assert (coupled <= bound * (1 + 1e-12)).all()
    assert (bound <= hull(heads) * (1 + 1e-12)).all()
    assert (truth.amax(0) > 0.01 * bound).all()  # a hundredth of it would be refuted
    assert (truth.amax(0) > 0.2 * bound).all()


def test_moves_by_hand():
    """Two keys of equal score: without one of them, the output is the other's value."""
    zero = torch.zeros(1, 2, 1, dtype=torch.float64)
    values = torch.tensor([[[1.0], [-3.0]]], dtype=torch.float64)
    heads = HeadInputs(zero, zero, values, tokens=zero[0], temperature=1.0)
    truth, coupled = moves(heads, torch.tensor([[0], [1], [0]]))
    assert torch.equal(truth, torch.full((3, 1), 2.0, dtype=torch.float64))
    assert torch.equal(coupled, truth)
    assert float(certified(heads, 1)) == pytest.approx(2.0)
    assert float(hull(heads)) == pytest.approx(2.0)


def test_proposition_25_holds_on_either_set():
    heads = heads_at_random(sharp=1.0)
    scores = heads.queries @ heads.keys.mT / heads.temperature
    before = scores.softmax(-1) @ heads.values
    ball, here = log_on_ball(heads), log_here(heads)
    assert (here < ball).all()
    for kept in all_choices(7, 3):
        after = scores[..., kept].softmax(-1) @ heads.values[:, kept]
        moved = (after - before).abs().sum(-1).amax(-1)  # l1, the query that moves most
        some = hidden.Empirical(heads.keys[:, kept])
        between = hidden.wasserstein1(hidden.Empirical(heads.keys), some)
        assert (moved.log() <= here + between.log()).all()
    equal = replace(heads, keys=torch.ones_like(heads.keys))
    assert log_here(equal).isinf().all()  # one key with many values has no constant


def test_study_of_a_layer(loaded):
    model, tokenizer = loaded
    texts = ["a man is the guitar", "the man is rome . a guitar"]
    report = studies.robustness(model, tokenizer, texts, layer=1, draws=4)
    assert report.truth.shape == (4, 2, 4)
    assert report.exceeded == 0
    assert (report.truth <= report.truth_max).all()
    assert report.queries == 7 + 9
    again = studies.robustness(model, tokenizer, texts, layer=1, draws=4)
    assert torch.equal(report.truth, again.truth)
    document = report.as_json()
    ratio = (report.bound / report.truth)[2].quantile(0.5)
    assert document["shares"][2]["ratio"]["median"] == pytest.approx(float(ratio), rel=1e-4)
    # a bound that is too small is caught
    wrong = 0.01 * report.bound
    assert (report.truth_max > wrong).any()


def test_heads_are_the_models_own(loaded):
    model, tokenizer = loaded
    model.set_attn_implementation("eager")
    try:
        inputs = lens.encode(tokenizer, ["a man is the guitar"])
        heads = capture_head_inputs(model, inputs)[1]
        with torch.no_grad():
            expected = model(**inputs, output_attentions=True).attentions[1][0]
    finally:
        model.set_attn_implementation("sdpa")
    weights = (heads.queries @ heads.keys.mT / heads.temperature).softmax(-1)
    assert (weights - expected).abs().max() < 1e-5


def test_robustness_refuses(loaded):
    with pytest.raises(ValueError, match="below the 2 layers there are, from 0, got 2"):
        studies.robustness(*loaded, ["a man"], layer=2)
    with pytest.raises(ValueError, match="position bias"):
        studies.robustness(model_of("t5"), loaded[1], ["a man"])


def test_real_model_on_real_sentences():
    covers = "the study of robustness on a real model"
    model = needs.model("minilm", covers)
    text = needs.shared("data", "text", "sst2.dev.tsv", covers=covers)
    report = studies.robustness(*lens.load(model), lens.sentences(text, 2), draws=3)
    assert report.exceeded == 0
    assert (report.ball > 6).all()  # of powers of ten: of no use
    assert (report.bound[-1] < 20 * report.truth_max[-1]).all()  # with a quarter of the keys
