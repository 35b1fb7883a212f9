"""Continuous attention as a module of torch: autocast, caches, masks, what learns."""

import pytest
import torch

import fenchel as fl
from fenchel import continuous as fc


def test_whole_numbers_are_no_features():
    with pytest.raises(TypeError, match="float"):
        fl.nn.ContinuousAttention1d()(torch.ones(1, 10, 2, dtype=torch.int64), torch.zeros(1, 10))


def test_autocast_leaves_moments_alone():
    g = torch.Generator().manual_seed(0)
    features, scores = torch.randn(8, 196, 4, generator=g), 3 * torch.randn(8, 196, generator=g)
    layer = fl.nn.ContinuousAttention2d((14, 14))
    expected = layer(features, scores)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(features, scores)
    torch.testing.assert_close(output.density.scale, expected.density.scale)
    torch.testing.assert_close(output.context.float(), expected.context, rtol=0.02, atol=0.02)


def test_caches_do_not_remember_modes_of_torch():
    features, scores = torch.randn(2, 9, 3), torch.randn(2, 9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    with torch.inference_mode():
        layer(features, scores)
    layer(features.requires_grad_(), scores).context.sum().backward()
    other = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    gradient = torch.func.grad(lambda s: other(features.detach(), s).context.sum())(scores)
    torch.save(other, "/dev/null")
    assert features.grad is not None
    assert features.grad.isfinite().all()
    assert gradient.isfinite().all()


def test_a_basis_that_is_changed_later_does_not_reach_the_module():
    centers = fc.cell_centers(5)
    layer = fl.nn.ContinuousAttention1d(functions=fc.GaussianBasis(centers, 0.04 * torch.eye(1)))
    features, scores = torch.randn(2, 10, 3), torch.randn(2, 10)
    before = layer(features, scores).context
    centers += 0.1
    torch.testing.assert_close(layer(features, scores).context, before, rtol=0, atol=0)


def test_a_row_that_sees_nothing_gives_zeros():
    features, scores = torch.randn(2, 9, 3), torch.randn(2, 9, requires_grad=True)
    mask = torch.tensor([[True] * 9, [False] * 9])
    context = fl.nn.ContinuousAttention2d((3, 3), functions=4)(features, scores, mask).context
    assert (context[1] == 0).all()
    context.sum().backward()
    assert (scores.grad[1] == 0).all()
    assert scores.grad[0].abs().max() > 0


def test_learned_alpha_reaches_every_mode():
    alpha = torch.nn.Parameter(torch.tensor(2.0))
    layer = fl.nn.ContinuousAttention1d(fl.Tsallis(alpha), functions=6, modes=2)
    layer(torch.randn(2, 10, 3), torch.randn(2, 10)).context.square().sum().backward()
    assert alpha.grad.isfinite()
    assert alpha.grad != 0
