"""Priors: their masses, their tiles, their derivatives, and what they equal elsewhere."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import fenchel as fl
from fenchel.priors import alibi_slopes

DOUBLE = torch.float64


def table(buckets=8, heads=2):
    return torch.randn(buckets, heads, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))


PRIORS = {
    "causal": fl.priors.Causal(),
    "causal with a cache": fl.priors.Causal().shifted(3),
    "window": fl.priors.SlidingWindow(2),
    "padding": fl.priors.KeyPadding(torch.tensor([3, 5])),
    "alibi": fl.priors.ALiBi(2),
    "buckets": fl.priors.RelativeBuckets(table(), max_distance=16),
    "one-sided buckets": fl.priors.RelativeBuckets(table(), 16, bidirectional=False),
    "preference": fl.priors.Preference(table(6, 6)[0]),
    "product": fl.priors.Causal() * fl.priors.ALiBi(2),
}


@pytest.mark.parametrize("name", PRIORS)
def test_any_tile_is_a_part_of_the_whole(name):
    prior = PRIORS[name]
    rows, columns = torch.arange(5), torch.arange(6)
    whole = prior.log_mass(rows, columns)
    tile = prior.log_mass(rows[2:4], columns[[5, 1, 3]])
    assert whole.shape[-2:] == (5, 6)
    assert torch.equal(tile, whole[..., 2:4, :][..., [5, 1, 3]])


def test_masks_say_who_sees_whom():
    ones = torch.ones(4, 4, dtype=torch.bool)
    rows = torch.arange(4)
    causal = fl.priors.Causal().log_mass(rows, rows)
    assert torch.equal(causal == 0, ones.tril())
    assert torch.equal(causal == -math.inf, ~ones.tril())
    window = fl.priors.SlidingWindow(1).log_mass(rows, rows)
    assert torch.equal(window == 0, ones.tril(1) & ones.triu(-1))
    cached = fl.priors.Causal().shifted(2).log_mass(torch.arange(2), rows)
    assert torch.equal(cached == 0, ones.tril()[2:])


def test_padding_follows_the_batch_axis():
    scores = torch.randn(2, 3, 4, 5, dtype=DOUBLE)
    lengths = torch.tensor([2, 5])
    weights = fl.entmax(scores, base=fl.priors.KeyPadding(lengths[:, None]))
    assert (weights[0, :, :, 2:] == 0).all()
    assert (weights[0, :, :, :2] - fl.entmax(scores[0, :, :, :2])).abs().max() <= 1e-15
    assert (weights[1] - fl.entmax(scores[1])).abs().max() <= 1e-15


def test_alibi_is_its_bias_for_softmax():
    scores = torch.randn(2, 6, 6, dtype=DOUBLE)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=DOUBLE)
    expected = torch.softmax(scores - slopes[:, None, None] * distance, -1)
    assert (fl.softmax(scores, base=fl.priors.ALiBi(2)) - expected).abs().max() <= 1e-15


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8)
    assert twelve[8:] == alibi_slopes(16)[::2][:4]
    assert len(alibi_slopes(1)) == 1


def test_prior_equals_its_mass_for_every_map():
    scores = torch.randn(2, 5, 6, dtype=DOUBLE)
    prior = fl.priors.Causal().shifted(1) * fl.priors.ALiBi(2)
    mass = prior.log_mass(torch.arange(5), torch.arange(6)).exp()
    for omega in (fl.Shannon(), fl.Tsallis(1.3), fl.Tsallis(2.0), fl.Tsallis(3.0)):
        by_prior = fl.solve(scores, omega, base=prior)
        by_mass = fl.solve(scores, omega, base=mass)
        assert (by_prior.weights - by_mass.weights).abs().max() <= 1e-13
        assert (by_prior.potential - by_mass.potential).abs().max() <= 1e-13


def test_log_mass_does_not_underflow():
    """exp(-2000) is zero in float64; as a logarithm it still decides between the keys left."""
    logits = torch.tensor([-2000.0, -2001.0], dtype=DOUBLE)
    weights = fl.softmax(torch.zeros(2, dtype=DOUBLE), base=fl.priors.Preference(logits))
    assert (weights - torch.softmax(logits, -1)).abs().max() <= 1e-15
    sparse = fl.entmax(torch.zeros(2, dtype=DOUBLE), 1.05, base=fl.priors.Preference(logits))
    assert (sparse.sum() - 1).abs() <= 1e-12
    assert sparse[0] > sparse[1] > 0


def test_t5_buckets_by_hand():
    prior = fl.priors.RelativeBuckets(torch.zeros(32, 1), max_distance=128)
    distance = torch.tensor([0, -1, -7, -8, -11, -16, -64, -127, -128, -5000, 1, 7, 8, 127, 128])
    # Behind: 0..7 exact, then 8 + floor(8 log(d / 8) / log 16), at most 15. Ahead: 16 more.
    expected = [0, 1, 7, 8, 8, 10, 14, 15, 15, 15, 17, 23, 24, 31, 31]
    assert prior.buckets(distance).tolist() == expected
    causal = fl.priors.RelativeBuckets(torch.zeros(32, 1), 128, bidirectional=False)
    assert causal.buckets(torch.tensor([5, 0, -15, -16, -128])).tolist() == [0, 0, 15, 16, 31]


@pytest.mark.parametrize("omega", [fl.Shannon(), fl.Tsallis(1.5)], ids=str)
def test_parameters_train(omega):
    scores = torch.randn(2, 5, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))

    def by_buckets(t):
        return fl.solve(scores, omega, base=fl.priors.RelativeBuckets(t, 16)).weights

    cached = fl.priors.Causal().shifted(1)

    def by_slopes(s):
        return fl.solve(scores, omega, base=fl.priors.ALiBi(2, s) * cached).weights

    def by_preference(logits):
        return fl.solve(scores, omega, base=fl.priors.Preference(logits)).weights

    assert gradcheck(by_buckets, table().requires_grad_())
    assert gradcheck(by_slopes, torch.tensor([0.5, 0.1], dtype=DOUBLE, requires_grad=True))
    assert gradcheck(by_preference, torch.randn(6, dtype=DOUBLE).requires_grad_())
    parameter = torch.nn.Parameter(table())
    by_buckets(parameter).square().sum().backward()
    assert parameter.grad.abs().max() > 1e-3


def test_one_row_of_scores_takes_a_prior():
    scores = torch.randn(6, dtype=DOUBLE)
    weights = fl.entmax(scores, base=fl.priors.SlidingWindow(1))
    assert (weights[2:] == 0).all()
    assert (weights[:2] - fl.entmax(scores[:2])).abs().max() <= 1e-15


def test_cached_keys_shift_every_prior():
    queries, keys = torch.arange(1), torch.arange(5)
    for prior in (fl.priors.Causal(), fl.priors.ALiBi(2), fl.priors.SlidingWindow(1)):
        late = prior.shifted(4).log_mass(queries, keys)
        assert torch.equal(late, prior.log_mass(torch.tensor([4]), keys))
    nearest = fl.softmax(torch.zeros(2, 1, 5), base=fl.priors.ALiBi(2).shifted(4))
    assert (nearest.argmax(-1) == 4).all()


def test_multiplying_with_something_else_is_refused():
    with pytest.raises(TypeError):
        fl.priors.Causal() * 2.0
