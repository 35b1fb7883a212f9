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
    expected = fc.match_moments(weights, fc.cell_centers(10, dtype=torch.float64), fc.Paraboloid)
    torch.testing.assert_close(density.mean, expected.mean, rtol=1e-12, atol=1e-14)
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
            lambda: fl.nn.ContinuousAttention1d(modes=fl.nn.Modes(2, -1)),
            ValueError,
            ("iterations", "-1"),
        ),
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


# ---- precision and devices


def _halves(kind, reference, *inputs):
    """The largest error in bfloat16 relative to the largest value, and that of rounding alone."""
    half = [x.bfloat16() for x in inputs]
    exact = copy.deepcopy(reference).double()(*(x.double() for x in half))
    actual = kind.bfloat16()(*half)
    exact, actual = (getattr(x, "context", x) for x in (exact, actual))
    assert actual.dtype == torch.bfloat16
    rounded = (exact.bfloat16() - exact).abs().max()
    return (actual - exact).abs().max() / exact.abs().max(), rounded / exact.abs().max()


@pytest.mark.parametrize("modes", [1, 2])
def test_half_precision_is_computed_in_float32(modes):
    """The answer of a layer in bfloat16 is wrong by its own rounding and no more."""
    features, scores = _inputs(196, batch=4, channels=8, dtype=torch.float32)
    layer = fl.nn.ContinuousAttention2d((14, 14), fl.Tsallis(2.0), modes=modes)
    error, rounding = _halves(copy.deepcopy(layer), layer, features, scores)
    assert error <= 1.1 * rounding
    cast = copy.deepcopy(layer).half()
    assert cast.basis.centers.dtype == torch.float32
    assert cast.double().basis.centers.dtype == DOUBLE


def test_values_of_half_precision_positions():
    features, positions = torch.randn(25, 3), fc.cell_centers(5, 5).bfloat16()
    basis = fc.GaussianBasis.grid(3, 0.1, 2)
    half = fc.GaussianBasis(basis.centers.bfloat16(), basis.covariances.bfloat16())
    same = fc.GaussianBasis(half.centers.float(), half.covariances.float())
    fits = [
        fc.fit_values(features, positions, half),
        fc.fit_values(features, positions.float(), same),
    ]
    assert torch.equal(*(values.coefficients for values in fits))


@pytest.mark.parametrize(
    "given", [("float64", "float64"), ("float32", "float64")], ids=["both", "scores"]
)
def test_wider_inputs_than_the_layer_are_refused(given):
    features, scores = _inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    arguments = [
        x.to(getattr(torch, name)) for x, name in zip((features, scores), given, strict=True)
    ]
    with pytest.raises(TypeError, match=r"float64.*float32.*layer\.double\(\)"):
        layer(*arguments)
    density = copy.deepcopy(layer).double()(features, scores).density
    with pytest.raises(TypeError, match=r"density in torch\.float64"):
        layer(features.float(), density)


@pytest.mark.parametrize("start", ["made there", "moved there"])
def test_back_from_the_meta_device(start):
    features, scores = _inputs(9, dtype=torch.float32)
    expected = fl.nn.ContinuousAttention2d((3, 3), fl.Tsallis(2.0), functions=4)
    with torch.device("meta" if start == "made there" else "cpu"):
        layer = fl.nn.ContinuousAttention2d((3, 3), fl.Tsallis(2.0), functions=4)
    layer = layer.to("meta")
    assert layer.basis.centers.is_meta
    layer = layer.to_empty(device="cpu")
    assert torch.equal(layer(features, scores).context, expected(features, scores).context)


def test_a_transformer_layer_back_from_the_meta_device():
    expected = fl.nn.ContinuousTransformerLayer(8, 2, functions=5)
    with torch.device("meta"):
        layer = fl.nn.ContinuousTransformerLayer(8, 2, functions=5)
    assert layer.values.basis.centers.is_meta
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(expected.state_dict())
    tokens = torch.randn(2, 20, 8)
    assert torch.equal(layer(tokens), expected(tokens))


def test_a_basis_without_values_cannot_come_back():
    with torch.device("meta"):
        layer = fl.nn.ContinuousAttention1d(functions=fc.GaussianBasis.grid(4, 0.1, 1))
    with pytest.raises(ValueError, match="has no values; pass a number of functions"):
        layer.to_empty(device="cpu")


# ---- what trains, and what can be set later


def test_a_learned_alpha_is_a_parameter():
    features, scores = _inputs(10, dtype=torch.float32)
    alpha = torch.nn.Parameter(torch.tensor(1.5))
    layer = fl.nn.ContinuousAttention1d(fl.Tsallis(alpha), functions=6)
    assert [name for name, _ in layer.named_parameters()] == ["regularizer.alpha"]
    assert list(layer.state_dict()) == ["regularizer.alpha"]
    layer(features, scores).context.square().sum().backward()
    assert alpha.grad.abs() > 0


@pytest.mark.parametrize("modes", [1, 2])
def test_one_alpha_for_all_or_one_a_head(modes):
    features, scores = _inputs(10, dtype=torch.float32)
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
    features, scores = _inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4).double()
    before = layer(features, scores).context
    setattr(layer, name, value)
    expected = fl.nn.ContinuousAttention2d((3, 3), functions=4, **{name: value}).double()
    assert torch.equal(layer(features, scores).context, expected(features, scores).context)
    assert not torch.equal(layer(features, scores).context, before)


def test_a_basis_set_later_counts():
    features, scores = _inputs(9)
    layer, other = (fl.nn.ContinuousAttention2d((3, 3), functions=n).double() for n in (4, 9))
    before = layer(features, scores).context
    layer.basis = other.basis
    assert torch.equal(layer(features, scores).context, other(features, scores).context)
    assert not torch.equal(layer(features, scores).context, before)
    with pytest.raises(ValueError, match="d = 2, got 1"):
        layer.basis = fc.GaussianBasis.grid(4, 0.1, 1)


# ---- masks


@pytest.mark.parametrize("modes", [1, 2])
def test_scores_of_minus_infinity_are_a_mask(modes):
    features, scores = _inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), fl.Tsallis(2.0), functions=4, modes=modes).double()
    mask = torch.arange(9) < torch.tensor([[9], [5], [0]])
    dirty = torch.where(mask.unsqueeze(-1), features, torch.nan)
    infinite = torch.where(mask, scores, -torch.inf).requires_grad_()
    masked = layer(dirty, scores.requires_grad_(), mask)  # EM is the same code for both
    output = layer(dirty, infinite)
    assert torch.equal(output.context, masked.context)
    assert torch.equal(output.density.mean, masked.density.mean)
    assert torch.equal(output.context[2], torch.zeros(5, dtype=DOUBLE))
    output.context.square().sum().backward()
    assert infinite.grad.isfinite().all()
    every = torch.func.vmap(lambda f, s: layer(f, s).context)(dirty, infinite.detach())
    torch.testing.assert_close(every, masked.context, rtol=1e-8, atol=1e-8)


def test_a_row_that_sees_nothing_claims_no_place():
    """Its density is that of even weights, whatever the hidden scores are."""
    features, scores = _inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4).double()
    mask = torch.tensor([True, False, True])[:, None].expand(3, 9)
    density = layer(features, scores, mask).density
    even = fc.match_moments(torch.ones(9), fc.cell_centers(3, 3, dtype=torch.float64), fc.Gaussian)
    torch.testing.assert_close(density.mean[1], even.mean)
    torch.testing.assert_close(density.covariance_matrix[1], even.covariance_matrix)


def test_several_queries_need_an_axis_of_the_features():
    """(B, B, L) would broadcast with (B, L, channels), queries against examples."""
    features, scores = _inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4).double()
    many = torch.stack([scores, 2 * scores, -scores], 1)
    with pytest.raises(ValueError, match=r"\(3, 9, 5\).*\(3, 3\).*features\[:, None\]"):
        layer(features, many)
    context = layer(features[:, None], many).context
    torch.testing.assert_close(context[:, 0], layer(features, scores).context)
    alone = layer(features[0], scores).context  # one image, many densities
    torch.testing.assert_close(alone[0], context[0, 0])


@pytest.mark.parametrize("garbage", [1e6, torch.nan])
def test_masked_tokens_reach_no_other(garbage):
    torch.manual_seed(0)
    layer = fl.nn.ContinuousTransformerLayer(8, 2, functions=16)
    tokens, mask = torch.randn(2, 100, 8), torch.arange(100).expand(2, 100) < 60
    other = torch.where(mask.unsqueeze(-1), tokens, garbage)
    assert torch.equal(layer(tokens, mask)[:, :60], layer(other, mask)[:, :60])
    layer(other, mask)[mask].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_the_regression_leaves_masked_tokens_out():
    """As if there were no position: not a token that is zero."""
    fit = fl.nn.ContinuousAttention1d(functions=6, padding=False).double()._fit((20,))
    mask = torch.arange(20) % 3 > 0
    alone = fc.ValueFit(fit.positions[mask], fit.basis, fit.ridge).operator
    actual = fit.masked(mask)
    torch.testing.assert_close(actual[mask], alone, rtol=1e-10, atol=1e-12)
    assert (actual[~mask] == 0).all()
    assert (fit.masked(torch.zeros(20, dtype=torch.bool)) == 0).all()
    torch.testing.assert_close(fit.masked(mask | ~mask), fit.operator, rtol=1e-12, atol=1e-14)
    layer = fl.nn.ContinuousTransformerLayer(4, 1, functions=4)
    with pytest.raises(ValueError, match=r"mask must be bool \(2, 5\), True = attend"):
        layer(torch.zeros(2, 5, 4), torch.ones(5, dtype=torch.bool))


def test_positions_of_a_wide_layer_are_exact():
    layer = fl.nn.ContinuousAttention1d(functions=4).double()
    features, scores = (torch.randn(7, k, dtype=torch.float64) for k in (3, 1))
    density = layer(features, scores.squeeze(-1))[1]
    places = (torch.arange(7, dtype=torch.float64) + 0.5) / 7
    assert float(density.mean) == pytest.approx(
        float(scores.squeeze(-1).softmax(0) @ places), abs=1e-15
    )


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


def test_scores_that_are_no_numbers_are_told_as_such():
    """A training that diverged ends here; other refusals are plain ValueErrors."""
    layer = fl.nn.ContinuousAttention1d(functions=4)
    features, scores = torch.randn(2, 6, 3), torch.randn(2, 6)
    scores[1, 2] = math.nan
    with pytest.raises(fl.NonFiniteError, match="weights must be finite; got NaN or infinity in 6"):
        layer(features, scores)
    with pytest.raises(ValueError, match="scores must be") as refused:
        layer(features, scores[:, :5])
    assert not isinstance(refused.value, fl.NonFiniteError)


def test_a_number_of_modes_is_short_for_modes():
    layer = fl.nn.ContinuousAttention1d(functions=4, modes=2)
    assert layer.modes == fl.nn.Modes(2)
    layer.modes = 3
    assert layer.modes == fl.nn.Modes(3, iterations=20)
    with pytest.raises(TypeError, match=r"modes must be a whole number, got 2\.0"):
        layer.modes = 2.0
