"""The co-attention network: what its answer depends on, and how it reads the picture."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fenchel.continuous import Gaussian, Mixture, Paraboloid
from papers.experiments.vqa.model import CoAttention, Shapes
from papers.experiments.vqa.reading import Reading, masses, plane
from papers.tests.experiments.tiny import SIZE

DISCRETE = ("softmax", "entmax", "sparsemax")
CONTINUOUS = ("continuous-softmax-9", "continuous-sparsemax-9", "2-mca-9")
EVERY = ("question-only", *DISCRETE, *CONTINUOUS)
PIXELS = Shapes(vocabulary=7, answers=4, grid=(4, 4))
FEATURES = Shapes(vocabulary=7, answers=4, grid=(14, 14), channels=96)
WORDS = torch.tensor([[2, 3, 4, 0], [5, 2, 0, 0], [6, 0, 0, 0]])
WHICH = torch.tensor([1, 0, 1])


def build_model(attention, shapes=PIXELS):
    torch.manual_seed(0)
    return CoAttention(SIZE, shapes, attention).eval()


def pictures(count=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 32, 32), generator=draw).to(torch.uint8)


def features(count=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 14, 14, 96, generator=draw)


@pytest.mark.parametrize("attention", EVERY)
@pytest.mark.parametrize("shapes", [PIXELS, FEATURES], ids=["pixels", "features"])
def test_an_answer_to_every_question(attention, shapes):
    model = build_model(attention, shapes)
    scores, attended = model(WORDS, pictures() if shapes is PIXELS else features(), WHICH)
    assert scores.shape == (3, 4)
    assert bool(scores.isfinite().all())
    cells = math.prod(shapes.grid)
    if attention == "question-only":
        assert attended is None
    elif attention in DISCRETE:
        assert attended.shape == (3, cells)
        torch.testing.assert_close(attended.sum(-1), torch.ones(3))
    else:
        assert attended.batch_shape == (3,)
        assert isinstance(attended, Mixture if attention == "2-mca-9" else Gaussian | Paraboloid)


@pytest.mark.parametrize("attention", EVERY)
def test_every_parameter_is_trained(attention):
    """Two processes would wait for one that is not."""
    model = build_model(attention).train()
    model(WORDS, pictures(), WHICH).scores.square().sum().backward()
    assert [name for name, x in model.named_parameters() if x.grad is None] == []


@pytest.mark.parametrize("attention", EVERY)
def test_half_precision(attention):
    """As the loop runs it with bf16; parameters and their gradients stay in float32."""
    model = build_model(attention)
    wanted = model(WORDS, pictures(), WHICH).scores
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(WORDS, pictures(), WHICH).scores
    scores.float().sum().backward()
    assert (scores - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters())


def test_the_attentions_have_the_same_parameters():
    counts = {name: sum(x.numel() for x in build_model(name).parameters()) for name in EVERY}
    blind = counts.pop("question-only")
    assert len(set(counts.values())) == 1
    assert blind < counts["softmax"]
    states = [build_model(name).state_dict() for name in ("softmax", "continuous-softmax-9")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.parametrize("attention", EVERY)
def test_the_picture_matters_where_it_is_seen(attention):
    model = build_model(attention)
    first, second = (model(WORDS, pictures(seed=seed), WHICH).scores for seed in (0, 1))
    if attention == "question-only":
        assert torch.equal(first, second)
    else:
        assert (first - second).abs().max() > 1e-4


@pytest.mark.parametrize("attention", ["question-only", "softmax", "continuous-softmax-9"])
def test_the_words_matter_and_their_padding_does_not(attention):
    model = build_model(attention)
    scores = model(WORDS, pictures(), WHICH).scores
    longer = torch.nn.functional.pad(WORDS, (0, 3))
    torch.testing.assert_close(model(longer, pictures(), WHICH).scores, scores)
    other = WORDS.clone()
    other[0, 2] = 5
    changed = (model(other, pictures(), WHICH).scores - scores).abs().amax(-1)
    assert changed[0] > 1e-4
    assert changed[1:].max() < 1e-6


def test_a_question_of_no_words_has_an_answer():
    words = torch.cat([WORDS[:2], torch.zeros_like(WORDS[:1])])
    model = build_model("softmax").train()
    scores = model(words, pictures(), WHICH).scores
    scores.sum().backward()
    assert bool(scores.isfinite().all())
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters())


@pytest.mark.parametrize("attention", ["softmax", "continuous-sparsemax-9"])
@pytest.mark.parametrize("shapes", [PIXELS, FEATURES], ids=["pixels", "features"])
def test_each_question_reads_its_own_picture(attention, shapes):
    model = build_model(attention, shapes)
    shown = pictures() if shapes is PIXELS else features()
    together = model(WORDS, shown, WHICH).scores
    for row, picture in enumerate(WHICH):
        arguments = WORDS[row : row + 1], shown[picture : picture + 1], torch.tensor([0])
        torch.testing.assert_close(model(*arguments).scores[0], together[row])
    # a picture twice is as good as once
    again = model(WORDS, shown[WHICH], torch.arange(3)).scores
    torch.testing.assert_close(again, together)


def test_where_a_cell_lies_matters():
    """Pictures of one colour have equal cells but for their place."""
    model = build_model("softmax")
    weights = model(WORDS[:1], torch.full_like(pictures(1), 90), torch.tensor([0])).attention
    assert weights.max() - weights.min() > 1e-4


@pytest.mark.parametrize("name", ["hardmax", "continuous-entmax-9", "mca-9", "softmax-9", ""])
def test_unknown_attentions_are_refused_with_the_known_ones(name):
    message = r"attention must be of question-only, softmax, .*K-mca-N .*got"
    with pytest.raises(ValueError, match=message):
        build_model(name)


def test_what_a_name_says():
    assert plane("softmax") is None
    assert plane("question-only") is None
    settings = plane("4-mca-49")
    assert (settings.modes, settings.functions) == (4, 49)
    assert plane("continuous-sparsemax-100").functions == 100
    with pytest.raises(ValueError, match="square"):
        build_model("continuous-softmax-10")


def test_modes_are_chosen_for_a_density():
    with pytest.raises(ValueError, match="continuous attention"):
        Reading(8, 8, (4, 4), "softmax").selecting(10.0, torch.Generator())


# ---- where it looked


def pixel_shares(mean, deviation, side):
    """Of an upright Gaussian: products of differences of the error function."""

    def along(centre, spread):
        ends = [math.erf((k / side - centre) / (spread * math.sqrt(2))) for k in range(side + 1)]
        return torch.tensor([(b - a) / 2 for a, b in pairwise(ends)])

    shares = along(mean[0], deviation[0])[:, None] * along(mean[1], deviation[1])
    return (shares / shares.sum()).double()


def upright(means, deviations, family=Gaussian):
    mean = torch.tensor(means, dtype=torch.float64)
    return family.from_covariance(mean, torch.tensor(deviations).double().square().diag_embed())


def test_masses_of_a_gaussian():
    means, deviations = [[0.25, 0.7], [0.5, 0.95]], [[0.1, 0.2], [0.15, 0.08]]
    mass_map = masses(upright(means, deviations), (4, 4), 32)
    assert mass_map.shape == (2, 32, 32)
    for row in range(2):
        wanted = pixel_shares(means[row], deviations[row], 32)
        assert (mass_map[row] - wanted).abs().max() < 5e-3 * wanted.max()
    torch.testing.assert_close(mass_map.sum((1, 2)), torch.ones(2, dtype=torch.float64))


def test_masses_of_a_mixture():
    means, deviations = [[0.25, 0.25], [0.75, 0.6]], [[0.1, 0.1], [0.1, 0.2]]
    mixing = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    mixture = Mixture(mixing, upright([means], [deviations]))
    parts = [pixel_shares(m, d, 32) for m, d in zip(means, deviations, strict=True)]
    wanted = 0.7 * parts[0] + 0.3 * parts[1]
    assert (masses(mixture, (4, 4), 32)[0] - wanted).abs().max() < 1e-2 * wanted.max()


@pytest.mark.parametrize("family", [Gaussian, Paraboloid])
@pytest.mark.parametrize("place", [(0.5, 0.25), (0.53, 0.26), (17.5 / 32, 8.5 / 32)])
def test_a_density_narrower_than_a_pixel_is_not_missed(family, place):
    """At a corner of pixels or between, its mass lies in those around it."""
    mass_map = masses(upright([place], [[1e-4, 1e-4]], family), (4, 4), 32)[0]
    assert float(mass_map.sum()) == pytest.approx(1)
    rows, columns = (mass_map > 1e-3).nonzero(as_tuple=True)
    for pixels, centre in ((rows, place[0]), (columns, place[1])):
        assert ((pixels + 0.5) / 32 - centre).abs().max() < 1.6 / 32


@pytest.mark.parametrize("attention", CONTINUOUS)
def test_masses_of_what_the_network_reads(attention):
    attended = build_model(attention)(WORDS, pictures(), WHICH).attention
    mass_map = masses(attended, (4, 4), 16)
    assert mass_map.shape == (3, 16, 16)
    torch.testing.assert_close(mass_map.sum((1, 2)), torch.ones(3))
    assert mass_map.min() >= 0


def test_weights_are_spread_evenly_over_their_cells():
    weights = torch.rand(3, 4 * 4, dtype=torch.float64)
    weights /= weights.sum(-1, keepdim=True)
    mass_map = masses(weights, (4, 4), 12)
    by_cell = mass_map.unfold(1, 3, 3).unfold(2, 3, 3)  # (batch, row, column, 3, 3)
    torch.testing.assert_close(by_cell.sum((-2, -1)).flatten(1), weights)
    torch.testing.assert_close(by_cell.amax((-2, -1)), by_cell.amin((-2, -1)))


# ---- names and sizes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("02-mca-9", "'02-mca-9' is spelt '2-mca-9'"),
        ("1-mca-9", "'1-mca-9' is spelt 'continuous-softmax-9'"),
        ("continuous-sparsemax-009", "is spelt 'continuous-sparsemax-9'"),
        ("2-mca-10", r"N must be 1, 4, 9, 16, …, got 10 in '2-mca-10'"),
        ("continuous-softmax-0", "N must be 1, 4, 9, 16"),
        ("0-mca-9", "modes must be >= 1, got 0"),
        ("continuous-entmax-9", "attention must be of"),
    ],
)
def test_one_name_for_one_attention(name, text):
    with pytest.raises(ValueError, match=text):
        plane(name)


def test_one_function_is_a_square():
    assert plane("continuous-sparsemax-1").functions == 1


@pytest.mark.parametrize("name", ["words", "width", "layers", "heads", "flat", "halvings", "head"])
def test_sizes_are_whole_and_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        replace(SIZE, **{name: 0})
    with pytest.raises(ValueError, match="dropout must lie in"):
        replace(SIZE, dropout=1.0)
