"""Keys that no query of a region attends to: by proof, so that no attack finds one that does."""

import pytest
import torch

import fenchel as fl
from tests.attention.decoding import draw, filled

DOUBLE = torch.float64


def cache_of(key, dtype=torch.float32):
    key = key.to(dtype).reshape(1, 1, *key.shape[-2:])
    return filled(key, torch.zeros_like(key))


def queries_of(region, count=4000):
    """Inside, many of them at the border."""
    d = region.centre.shape[-1]
    if isinstance(region, fl.QueryBox):
        share = (draw(5, count, d) * 3).clamp(-1, 1)
        return region.centre + share * (region.high - region.low) / 2
    step = draw(5, count, d)
    return region.centre + region.radius * step / step.norm(dim=-1, keepdim=True)


REGIONS = {
    "ball": lambda centre: fl.QueryBall(centre, 1.0),
    "box": lambda centre: fl.QueryBox(centre - 0.4, centre + 0.4),
}


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("kind", REGIONS)
def test_no_query_attends_to_them(kind, alpha):
    key, centre = draw(1, 300, 8) * 2, draw(2, 8) * 3
    region, regularizer = REGIONS[kind](centre), fl.Tsallis(alpha)
    [never] = cache_of(key).evictable(region, regularizer)
    assert never.shape == (1, 300)
    assert 50 < never.sum() < 300
    scores = queries_of(region).to(DOUBLE) @ key.to(DOUBLE).T / 8**0.5
    weights = fl.solve(scores, regularizer).weights
    assert not weights[:, never[0]].any()
    assert weights[:, ~never[0]].any(0).sum() > 3


def test_dropping_them_changes_nothing():
    key, centre, value = draw(1, 1, 1, 700, 8) * 2, draw(2, 8) * 3, draw(3, 1, 1, 700, 4)
    cache, region = filled(key, value), fl.QueryBall(centre, 1.0)
    query = queries_of(region, 16).reshape(1, 16, 1, 8)
    before = fl.decode(query, cache, fl.Tsallis(1.5))
    [never] = cache.evictable(region, fl.Tsallis(1.5))
    cache.keep([~never.all(0)])
    assert len(cache) == 700 - int(never.sum()) < 500
    torch.testing.assert_close(fl.decode(query, cache, fl.Tsallis(1.5)), before)


def test_a_ball_around_zero_proves_nothing():
    [never] = cache_of(draw(1, 300, 8) * 5).evictable(
        fl.QueryBall(torch.zeros(8), 2.0), fl.Tsallis(1.5)
    )
    assert not never.any()


def test_heads_that_share_keys_must_all_agree():
    key, centre = draw(1, 300, 8) * 2, draw(2, 2, 8) * 3
    cache = cache_of(key)
    both, first, second = (
        cache.evictable(fl.QueryBall(c, 1.0), fl.Tsallis(1.5))[0]
        for c in (centre, centre[0], centre[1])
    )
    assert torch.equal(both, first & second)
    assert both.sum() < first.sum()


def test_what_is_refused():
    cache = cache_of(draw(1, 20, 8))
    ball = fl.QueryBall(torch.zeros(8), 1.0)
    with pytest.raises(ValueError, match="alpha > 1"):
        cache.evictable(ball, fl.Tsallis(1.0))
    with pytest.raises(TypeError, match="Tsallis"):
        cache.evictable(ball, fl.Shannon())
    with pytest.raises(ValueError, match="8 components"):
        cache.evictable(fl.QueryBall(torch.zeros(5), 1.0), fl.Tsallis(1.5))
    with pytest.raises(ValueError, match="bool"):
        cache.keep([torch.ones(3)])
    with pytest.raises(ValueError, match="one mask per sequence"):
        cache.keep([])


def test_a_scale_of_zero_evicts_nothing():
    cache = fl.KeyValueCache(1, 1, 4)
    key = torch.eye(4).expand(1, 1, 4, 4)
    cache.append(key, key)
    [mask] = cache.evictable(fl.QueryBall(100 * torch.ones(4), 0.1), fl.Tsallis(1.5), 0.0)
    assert not mask.any()


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_regions_that_are_none(wrong):
    with pytest.raises(ValueError, match="radius"):
        fl.QueryBall(torch.zeros(8), wrong)
    with pytest.raises(ValueError, match=r"NaN or infinity|at most high"):
        fl.QueryBox(torch.zeros(8), torch.full((8,), wrong))
