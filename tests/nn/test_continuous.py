"""Continuous attention as modules: shapes, what they equal, what they refuse."""

import copy
import io
import math

import pytest
import torch

import fenchel as fl
from fenchel import continuous as fc

DOUBLE = torch.float64


def _inputs(cells, batch=3, channels=5, dtype=DOUBLE):
    g = torch.Generator().manual_seed(0)
    features = torch.randn(batch, cells, channels, generator=g, dtype=dtype)
    return features, 2 * torch.randn(batch, cells, generator=g, dtype=dtype)


@pytest.mark.parametrize(
    ("regularizer", "family", "alpha"),
    [
        (fl.Shannon(), fc.Gaussian, None),
        (fl.Tsallis(2.0), fc.Paraboloid, None),
        (fl.Tsallis(1.5), fc.TsallisGaussian, 1.5),
    ],
    ids=str,
)
def test_scores_are_matched_by_their_moments(regularizer, family, alpha):
    features, scores = _inputs(12)
    layer = fl.nn.ContinuousAttention2d((3, 4), regularizer, functions=9).double()
    context, density = layer(features, scores)
    positions = fc.cell_centers(3, 4).double()
    options = {} if alpha is None else {"alpha": alpha}
    wanted = fc.match_moments(scores.softmax(-1), positions, family, **options)
    assert type(density) is family
    torch.testing.assert_close(density.scale, wanted.scale, rtol=1e-12, atol=1e-14)
    values = fc.fit_values(features, positions, layer.basis, padding=True)
    torch.testing.assert_close(context, values.expect(wanted), rtol=1e-10, atol=1e-12)
    again = layer(features, density).context
    torch.testing.assert_close(again, context, rtol=0, atol=0)


@pytest.mark.parametrize("modes", [2, 4, fl.nn.Select(3, 5.0, start=fc.Regions())], ids=str)
@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(2.0), fl.Tsallis(1.5)], ids=str)
def test_many_modes(modes, regularizer):
    features, scores = _inputs(36)
    layer = fl.nn.ContinuousAttention2d((6, 6), regularizer, functions=16, modes=modes).double()
    scores.requires_grad_()
    context, mixture = layer(features, scores)
    assert isinstance(mixture, fc.Mixture)
    assert mixture.components.alpha == getattr(regularizer, "alpha", 1.0)
    single = fl.nn.ContinuousAttention2d((6, 6), functions=16).double()(features, scores).density
    if modes == 2:  # EM keeps the mean of the weights after each of its steps
        torch.testing.assert_close(mixture.mean, single.mean, rtol=1e-8, atol=1e-10)
    (gradient,) = torch.autograd.grad(context.square().sum(), scores)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_a_line_and_its_mask():
    features, scores = _inputs(10)
    layer = fl.nn.ContinuousAttention1d(fl.Tsallis(2.0), functions=6).double()
    mask = torch.arange(10) < torch.tensor([[10], [7], [1]])
    dirty = torch.where(mask.unsqueeze(-1), features, torch.nan)
    context, density = layer(dirty, scores, mask)
    assert context.isfinite().all()
    weights = torch.where(mask, scores, -torch.inf).softmax(-1)
    wanted = fc.match_moments(weights, fc.cell_centers(10).double(), fc.Paraboloid)
    torch.testing.assert_close(density.mean, wanted.mean, rtol=1e-12, atol=1e-14)
    clean = torch.where(mask.unsqueeze(-1), features, 0.0)
    torch.testing.assert_close(layer(clean, density).context, context, rtol=1e-12, atol=1e-12)


def test_first_and_second_derivatives():
    features, scores = _inputs(9, batch=1, channels=2)
    layer = fl.nn.ContinuousAttention2d((3, 3), fl.Tsallis(2.0), functions=4).double()

    def context(x, s):
        return layer(x, s).context

    leaves = (features.requires_grad_(), scores.requires_grad_())
    assert torch.autograd.gradcheck(context, leaves)
    assert torch.autograd.gradgradcheck(context, leaves)


def test_the_basis_moves_with_the_module():
    features, scores = _inputs(9, dtype=torch.float32)
    layer = fl.nn.ContinuousAttention2d((3, 3), fl.Tsallis(2.0), functions=4)
    single = layer(features, scores).context
    assert single.dtype == torch.float32
    double = layer.double()(features.double(), scores.double()).context
    assert double.dtype == DOUBLE
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)
    assert layer.basis.centers.dtype == DOUBLE


def test_copies_and_files():
    features, scores = _inputs(9, dtype=torch.float32)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4, modes=2)
    wanted = layer(features, scores).context
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(features, scores).context, wanted, rtol=0, atol=0)
    assert layer.state_dict() == {}


def test_it_trains():
    """Where the bright cell is, from scores that are linear in the features."""
    g = torch.Generator().manual_seed(1)
    layer, head = fl.nn.ContinuousAttention2d((6, 6), fl.Tsallis(2.0)), torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(head.weight)
    optimizer = torch.optim.Adam(head.parameters(), 0.3)
    positions = fc.cell_centers(6, 6)
    losses = []
    for _ in range(60):
        bright = torch.randint(0, 36, (16,), generator=g)
        features = 0.1 * torch.randn(16, 36, 3, generator=g)
        features[torch.arange(16), bright, 0] += 1.0
        density = layer(features, head(features).squeeze(-1)).density
        loss = (density.mean - positions[bright]).square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.02 * losses[0]


def test_a_transformer_layer_on_coefficients():
    torch.manual_seed(0)
    layer = fl.nn.ContinuousTransformerLayer(16, 2, functions=8).double()
    tokens = torch.randn(2, 40, 16, dtype=DOUBLE, requires_grad=True)
    output = layer(tokens)
    assert output.shape == tokens.shape
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    # A token reaches all others through the coefficients.
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x)[0, 0], tokens.detach())
    assert (jacobian[:, 0].abs().amax((0, 2)) > 0).all()
    assert (jacobian[:, 1] == 0).all()


def test_the_transformer_layer_keeps_smooth_sequences():
    """More functions give smooth tokens back ever better; the border is the last to follow."""
    t = fc.cell_centers(100).double()
    smooth = torch.cat([torch.sin(math.pi * k * t) for k in range(1, 5)], -1)
    errors = []
    for functions in (8, 16, 32):
        layer = fl.nn.ContinuousTransformerLayer(4, 1, functions=functions).double()
        errors.append(float((layer.values._fit((100,))(smooth)(t) - smooth).abs().max()))
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1] < 0.06


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (lambda: fl.nn.ContinuousAttention2d((3,)), ValueError, ("grid", "(3,)")),
        (lambda: fl.nn.ContinuousAttention2d((3, 0)), ValueError, ("grid", "0")),
        (lambda: fl.nn.ContinuousAttention2d((3, 3), functions=10), ValueError, ("square", "10")),
        (lambda: fl.nn.ContinuousAttention2d((3, 3), fl.Norm(2.0)), TypeError, ("Norm", "Tsallis")),
        (
            lambda: fl.nn.ContinuousAttention2d((3, 3), fl.Shannon(2.0)),
            ValueError,
            ("temperature", "divide"),
        ),
        (lambda: fl.nn.ContinuousAttention2d((3, 3), modes=0), ValueError, ("modes", "0")),
        (
            lambda: fl.nn.ContinuousAttention1d(functions=fc.GaussianBasis.grid(2, 0.1, 2)),
            ValueError,
            ("d = 1", "2"),
        ),
        (
            lambda: fl.nn.ContinuousAttention2d((3, 3))(torch.zeros(1, 9, 2), torch.zeros(1, 8)),
            ValueError,
            ("9", "8"),
        ),
        (
            lambda: fl.nn.ContinuousAttention2d((3, 3))(torch.zeros(1, 8, 2), torch.zeros(1, 9)),
            ValueError,
            ("9", "8"),
        ),
        (
            lambda: fl.nn.ContinuousTransformerLayer(4, 1)(torch.zeros(5, 4)),
            ValueError,
            ("batch", "(5, 4)"),
        ),
    ],
)
def test_bad_input(call, error, parts):
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_a_regularizer_set_later_counts():
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    scores, features = torch.randn(2, 9), torch.randn(2, 9, 5)
    assert isinstance(layer(features, scores)[1], fc.Gaussian)
    layer.regularizer = fl.Tsallis(2.0)
    assert isinstance(layer(features, scores)[1], fc.Paraboloid)


@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(2.0)])
@pytest.mark.parametrize("modes", [1, 2])
def test_shapes_on_the_meta_device(regularizer, modes):
    layer = fl.nn.ContinuousAttention2d((3, 3), regularizer, functions=4, modes=modes).to("meta")
    scores, features = torch.randn(2, 9, device="meta"), torch.randn(2, 9, 5, device="meta")
    context = layer(features, scores)[0]
    assert context.is_meta
    assert context.shape == (2, 5)
