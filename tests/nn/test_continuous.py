"""Continuous attention as modules: what they equal, how they train, what can be set later."""

import copy
import io
import math

import pytest
import torch

import fenchel as fl
from fenchel import continuous as fc
from tests.nn.continuous_inputs import DOUBLE, draw_inputs


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
    features, scores = draw_inputs(12)
    layer = fl.nn.ContinuousAttention2d((3, 4), regularizer, functions=9).double()
    context, density = layer(features, scores)
    positions = fc.cell_centers(3, 4, dtype=torch.float64)
    options = {} if alpha is None else {"alpha": alpha}
    expected = fc.match_moments(scores.softmax(-1), positions, family, **options)
    assert type(density) is family
    torch.testing.assert_close(density.scale, expected.scale, rtol=1e-12, atol=1e-14)
    values = fc.fit_values(features, positions, layer.basis, padding=True)
    torch.testing.assert_close(context, values.expect(expected), rtol=1e-10, atol=1e-12)
    again = layer(features, density).context
    torch.testing.assert_close(again, context, rtol=0, atol=0)


@pytest.mark.parametrize("modes", [2, 4, fl.nn.ModeSelection(3, 5.0, start=fc.Regions())], ids=str)
@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(2.0), fl.Tsallis(1.5)], ids=str)
def test_many_modes(modes, regularizer):
    features, scores = draw_inputs(36)
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


def test_as_many_iterations_of_em_as_asked_for():
    torch.manual_seed(0)
    scores = 2 * torch.randn(3, 36, dtype=torch.float64)
    weights, positions = scores.softmax(-1), fl.continuous.cell_centers(6, 6)
    for iterations in (0, 3):
        layer = fl.nn.ContinuousAttention2d((6, 6), functions=4, modes=fl.nn.Modes(2, iterations))
        density = layer.double().density(scores, (6, 6))
        expected = fl.continuous.fit_mixture(weights, positions, 2, iterations=iterations)
        torch.testing.assert_close(density.components.mean, expected.components.mean)
        torch.testing.assert_close(density.mixing, expected.mixing)
    longer = fl.nn.ContinuousAttention2d((6, 6), functions=4, modes=2).double()
    assert not torch.allclose(longer.density(scores, (6, 6)).mixing, density.mixing)


def test_a_number_of_modes_is_short_for_modes():
    layer = fl.nn.ContinuousAttention1d(functions=4, modes=2)
    assert layer.modes == fl.nn.Modes(2)
    layer.modes = 3
    assert layer.modes == fl.nn.Modes(3, iterations=20)
    with pytest.raises(TypeError, match=r"modes must be a whole number, got 2\.0"):
        layer.modes = 2.0


def test_first_and_second_derivatives():
    features, scores = draw_inputs(9, batch=1, channels=2)
    layer = fl.nn.ContinuousAttention2d((3, 3), fl.Tsallis(2.0), functions=4).double()

    def context(x, s):
        return layer(x, s).context

    leaves = (features.requires_grad_(), scores.requires_grad_())
    assert torch.autograd.gradcheck(context, leaves)
    assert torch.autograd.gradgradcheck(context, leaves)


def test_copies_and_files():
    features, scores = draw_inputs(9, dtype=torch.float32)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4, modes=2)
    expected = layer(features, scores).context
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(features, scores).context, expected, rtol=0, atol=0)
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
    t = fc.cell_centers(100, dtype=torch.float64)
    smooth = torch.cat([torch.sin(math.pi * k * t) for k in range(1, 5)], -1)
    errors = []
    for functions in (8, 16, 32):
        layer = fl.nn.ContinuousTransformerLayer(4, 1, functions=functions).double()
        errors.append(float((layer.values._fit((100,))(smooth)(t) - smooth).abs().max()))
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1] < 0.06


# ---- what trains, and what can be set later


def test_a_learned_alpha_is_a_parameter():
    features, scores = draw_inputs(10, dtype=torch.float32)
    alpha = torch.nn.Parameter(torch.tensor(1.5))
    layer = fl.nn.ContinuousAttention1d(fl.Tsallis(alpha), functions=6)
    assert [name for name, _ in layer.named_parameters()] == ["regularizer.alpha"]
    assert list(layer.state_dict()) == ["regularizer.alpha"]
    layer(features, scores).context.square().sum().backward()
    assert alpha.grad.abs() > 0


@pytest.mark.parametrize("modes", [1, 2])
def test_one_alpha_for_all_or_one_a_head(modes):
    features, scores = draw_inputs(10, dtype=torch.float32)
    one = fl.nn.ContinuousAttention1d(fl.nn.LearnedTsallis(1), functions=6, modes=modes)
    fixed = fl.nn.ContinuousAttention1d(fl.Tsallis(1.5), functions=6, modes=modes)
    torch.testing.assert_close(one(features, scores).context, fixed(features, scores).context)
    heads = fl.nn.ContinuousAttention1d(fl.nn.LearnedTsallis(2), functions=6, modes=modes)
    many = torch.stack([scores, -scores], 1).unsqueeze(2)  # (batch, heads, queries, L)
    context = heads(features[:, None, None], many).context
    assert context.shape == (3, 2, 1, 5)
    torch.testing.assert_close(context[:, 0, 0], fixed(features, scores).context)
    with pytest.raises(ValueError, match=r"alpha must broadcast.*\(3,\), got \(2, 1\)"):
        heads(features, scores)


@pytest.mark.parametrize(("name", "value"), [("ridge", 1e3), ("padding", False)])
def test_what_is_set_later_counts(name, value):
    features, scores = draw_inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4).double()
    before = layer(features, scores).context
    setattr(layer, name, value)
    expected = fl.nn.ContinuousAttention2d((3, 3), functions=4, **{name: value}).double()
    assert torch.equal(layer(features, scores).context, expected(features, scores).context)
    assert not torch.equal(layer(features, scores).context, before)


def test_a_basis_set_later_counts():
    features, scores = draw_inputs(9)
    layer, other = (fl.nn.ContinuousAttention2d((3, 3), functions=n).double() for n in (4, 9))
    before = layer(features, scores).context
    layer.basis = other.basis
    assert torch.equal(layer(features, scores).context, other(features, scores).context)
    assert not torch.equal(layer(features, scores).context, before)
    with pytest.raises(ValueError, match="d = 2, got 1"):
        layer.basis = fc.GaussianBasis.grid(4, 0.1, 1)


def test_a_regularizer_set_later_counts():
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    scores, features = torch.randn(2, 9), torch.randn(2, 9, 5)
    assert isinstance(layer(features, scores)[1], fc.Gaussian)
    layer.regularizer = fl.Tsallis(2.0)
    assert isinstance(layer(features, scores)[1], fc.Paraboloid)
