"""Dropout: fixed by the seed, the same forward, backward and in tiles, and fair."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import fenchel as fl
from tests.attention.cases import (
    DOUBLE,
    REGULARIZERS,
    assert_agrees,
    dense,
    draw,
    largest_difference,
    make_case,
)

pytestmark = pytest.mark.usefixtures("kernels")


def kept_weights(seed, p, lead, queries, keys):
    """Which weights survive, read off uniform attention to the unit vectors."""
    q, k = torch.zeros(*lead, queries, 1, dtype=DOUBLE), torch.zeros(*lead, keys, 1, dtype=DOUBLE)
    unit = torch.eye(keys, dtype=DOUBLE).expand(*lead, keys, keys)
    torch.manual_seed(seed)
    weights = fl.attention(q, k, unit, fl.Tsallis(1.5), dropout_p=p)
    assert torch.isclose(weights * keys * (1 - p), weights.ne(0).to(DOUBLE)).all()
    return weights != 0


def seeded(seed, p):
    def attend(*args, **options):
        torch.manual_seed(seed)
        return fl.attention(*args, dropout_p=p, **options)

    return attend


def with_kept(kept, p):
    def attend(*args, **options):
        return dense(*args, kept=kept, dropout_p=p, **options)

    return attend


@pytest.mark.parametrize("size", [2**22, 1], ids=["one tile", "tiles"])
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_forward_and_backward_drop_the_same(name, p, size, tiles):
    """The mask depends on the seed and the position alone: every regulariser drops the same."""
    kept = kept_weights(7, p, (2, 2), 35, 9)
    tiles(size)
    case = make_case(REGULARIZERS[name], lead=(2, 2), queries=35)
    assert_agrees(seeded(7, p), case, reference=with_kept(kept, p))
    if size == 1:
        assert_agrees(seeded(7, p), case, torch.float32, reference=with_kept(kept, p))


def test_another_mask_is_refused():
    kept = kept_weights(7, 0.5, (2, 2), 35, 9)
    case = make_case(fl.Tsallis(1.5), lead=(2, 2), queries=35)
    for wrong in (kept_weights(8, 0.5, (2, 2), 35, 9), kept.flip(-2), ~kept):
        with pytest.raises(AssertionError, match="off by"):
            assert_agrees(seeded(7, 0.5), case, reference=with_kept(wrong, 0.5))


def test_grouped_heads_drop_each_their_own():
    kept = kept_weights(3, 0.4, (2, 4), 6, 9)
    case = make_case(fl.Tsallis(1.5), lead=(2, 4), kv_lead=(2, 2), options={"enable_gqa": True})
    assert_agrees(seeded(3, 0.4), case, reference=with_kept(kept, 0.4))


@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(1.5)], ids=str)
def test_the_gradient_with_the_seed_fixed(regularizer):
    leaves = [x.requires_grad_() for x in (draw(0, 2, 3, 2), draw(1, 2, 4, 2), draw(2, 2, 4, 2))]
    attend = seeded(5, 0.4)
    assert gradcheck(lambda *x: attend(*x, regularizer), leaves)


def test_the_seed_of_torch_fixes_it():
    q, k, v = draw(0, 2, 4, 8, 4), draw(1, 2, 4, 8, 4), draw(2, 2, 4, 8, 4)
    for name in ("shannon", "tsallis 1.5"):
        first, again = (seeded(1, 0.3)(q, k, v, REGULARIZERS[name]) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.equal(first, seeded(2, 0.3)(q, k, v, REGULARIZERS[name]))
        torch.manual_seed(1)
        calls = [fl.attention(q, k, v, REGULARIZERS[name], dropout_p=0.3) for _ in range(2)]
        assert torch.equal(calls[0], first)
        assert not torch.equal(*calls)  # the generator moves on


def test_nothing_and_everything():
    q, k, v = (draw(i, 2, 4, 8, 4).requires_grad_() for i in range(3))
    for name in ("shannon", "tsallis 1.5", "norm"):
        regularizer = REGULARIZERS[name]
        state = torch.get_rng_state()
        plain = fl.attention(q, k, v, regularizer)
        assert torch.equal(fl.attention(q, k, v, regularizer, dropout_p=0), plain)
        assert torch.equal(torch.get_rng_state(), state)  # no number was drawn
        gone = fl.attention(q, k, v, regularizer, dropout_p=1.0)
        assert (gone == 0).all()
        gradients = torch.autograd.grad(gone.sum(), (q, k, v))
        assert all((gradient == 0).all() for gradient in gradients)


def standard_errors(samples, mean):
    """How many standard errors the mean of samples (first axis) is from `mean`, at most."""
    error = samples.std(0) / math.sqrt(len(samples))
    return ((samples.mean(0) - mean).abs() / error).max().item()


@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5"])
def test_the_mean_is_the_answer_without_dropout(name):
    q, k, v = draw(0, 2, 5, 3), draw(1, 2, 12, 3), draw(2, 2, 12, 2)
    regularizer = REGULARIZERS[name]
    samples = torch.stack([seeded(i, 0.3)(q, k, v, regularizer) for i in range(600)])
    expected = dense(q, k, v, regularizer)
    assert standard_errors(samples, expected) < 5
    assert standard_errors(samples, 1.2 * expected) > 5  # the judge can say no
    assert standard_errors(samples * 0.7, expected) > 5  # as without the factor 1 / (1 - p)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_the_share_of_dropped_weights(p):
    kept = kept_weights(11, p, (2, 3), 40, 50)
    count = kept.numel()
    deviation = math.sqrt(p * (1 - p) / count)
    assert abs((~kept).double().mean() - p) < 5 * deviation
    # Also row by row, key by key and head by head: largest of n normals, generously.
    for axis in ((0, 1, 2), (0, 1, 3), (2, 3)):
        share = (~kept).double().mean(axis)
        spread = math.sqrt(p * (1 - p) * share.numel() / count)
        assert (share - p).abs().max() < 6 * spread


def correlation(x, y):
    x, y = (z.double().flatten() - z.double().mean() for z in (x, y))
    return abs((x @ y) / (x.norm() * y.norm())).item() * math.sqrt(x.numel())


def test_neighbours_are_independent():
    kept = kept_weights(13, 0.5, (3, 4), 40, 50)
    later = kept_weights(14, 0.5, (3, 4), 40, 50)
    pairs = {
        "keys": (kept[..., 1:], kept[..., :-1]),
        "rows": (kept[..., 1:, :], kept[..., :-1, :]),
        "heads": (kept[:, 1:], kept[:, :-1]),
        "batch": (kept[1:], kept[:-1]),
        "diagonals": (kept[..., 1:, 1:], kept[..., :-1, :-1]),
        "seeds": (kept, later),
    }
    for name, pair in pairs.items():
        assert correlation(*pair) < 5, name
    assert correlation(kept, kept) > 5
    repeated = kept[:, :1].expand_as(kept)  # one mask for all heads
    assert correlation(repeated[:, 1:], repeated[:, :-1]) > 5


def test_dropout_under_vmap_follows_its_randomness_flag():
    q, k, v = draw(0, 2, 5, 3), draw(1, 2, 6, 3), draw(2, 2, 6, 2)

    def attend(factor):
        return factor * fl.attention(q, k, v, fl.Tsallis(1.5), dropout_p=0.5)

    ones = torch.ones(4, dtype=DOUBLE)
    same = torch.func.vmap(attend, randomness="same")(ones)
    assert largest_difference(same[0], same[1]) == 0
    different = torch.func.vmap(attend, randomness="different")(ones)
    assert largest_difference(different[0], different[1]) > 1e-3
