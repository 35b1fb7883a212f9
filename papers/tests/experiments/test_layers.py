"""Dropout from 16 random bits an entry."""

import pytest
import torch

from papers.experiments.layers import Attending, Dropout


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_dropped_and_the_mean_kept(share):
    torch.manual_seed(0)
    count = 200_000
    x = torch.full((count,), 3.0)
    output = Dropout(share)(x)
    lost = float((output == 0).float().mean())
    assert abs(lost - share) < 5 * (share * (1 - share) / count) ** 0.5
    kept = 1 - round(share * 2**16) / 2**16
    torch.testing.assert_close(output[output != 0].unique(), torch.tensor([3 / kept]))
    assert float(output.mean()) == pytest.approx(3, abs=0.1)


def test_entries_are_dropped_independently():
    """Four entries share a draw of 64 bits: neighbours must not share their fate."""
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(40_000)) != 0).double() - 0.5
    for apart in (1, 2, 3, 4):
        assert abs(float((kept[apart:] * kept[:-apart]).mean()) * 4) < 0.03


def test_nothing_is_dropped_when_not_training_or_by_none():
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_the_gradient_has_the_same_mask():
    x = torch.randn(6, 7, requires_grad=True)
    output = Dropout(0.4)(x)
    output.sum().backward()
    torch.testing.assert_close(x.grad, output.detach() / x.detach())
    assert bool((x.grad == 0).any())


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4,), (5, 7), (2, 0, 3), ()])
def test_any_number_of_entries(shape):
    output = Dropout(0.5)(torch.ones(shape))
    assert output.shape == torch.Size(shape)
    assert set(output.flatten().tolist()) <= {0.0, 2.0}


def test_what_is_not_contiguous():
    torch.manual_seed(1)
    x = torch.arange(1.0, 13).reshape(3, 4).T
    output = Dropout(0.5)(x)
    assert set((output / x).flatten().tolist()) == {0.0, 2.0}


def test_half_precision_stays_so():
    output = Dropout(0.25)(torch.ones(64, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert set(output.tolist()) == {0.0, float(torch.tensor(4 / 3).bfloat16())}


def test_a_seed_repeats_it():
    dropout, x = Dropout(0.5), torch.ones(101)
    torch.manual_seed(7)
    first = dropout(x)
    assert not torch.equal(dropout(x), first)
    torch.manual_seed(7)
    assert torch.equal(dropout(x), first)


@pytest.mark.parametrize("share", [0.5 + 2**-17, 1 - 1.4 * 2**-16, 1 - 1e-7])
def test_the_mean_is_kept_where_the_share_is_rounded(share):
    """What is kept is a whole number of 65,536, whose inverse is the scale."""
    torch.manual_seed(0)
    output = Dropout(share)(torch.ones(400_000))
    (scale,) = output[output != 0].unique().tolist()
    lost = min(round(share * 2**16), 2**16 - 1)
    assert scale == pytest.approx(2**16 / (2**16 - lost))


def test_almost_all_dropped():
    output = Dropout(1 - 1e-7)(torch.ones(10_000))
    assert int((output != 0).sum()) < 10


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=rf"dropout must lie in \[0, 1\), got {share}"):
        Dropout(share)


def test_tokens_that_are_none_are_not_attended_to():
    torch.manual_seed(0)
    layer = Attending(8, 2, 0.0)
    x, tokens = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    ignored = torch.tensor([[False, False, True, True]]).expand(2, -1)
    other = tokens.clone()
    other[:, 2:] += 5
    torch.testing.assert_close(layer(x, tokens, ignored), layer(x, other, ignored))
    torch.testing.assert_close(layer(x, tokens, ignored), layer(x, tokens[:, :2], None))
    assert (layer(x, tokens, None) - layer(x, other, None)).abs().max() > 1e-3
