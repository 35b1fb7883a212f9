"""Continuous attention as modules: what they refuse, precision, devices and masks."""

import copy
import math

import pytest
import torch

import fenchel as fl
from fenchel import continuous as fc
from tests.nn.continuous_inputs import DOUBLE, draw_inputs


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
    features, scores = draw_inputs(196, batch=4, channels=8, dtype=torch.float32)
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
    features, scores = draw_inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    arguments = [
        x.to(getattr(torch, name)) for x, name in zip((features, scores), given, strict=True)
    ]
    with pytest.raises(TypeError, match=r"float64.*float32.*layer\.double\(\)"):
        layer(*arguments)
    density = copy.deepcopy(layer).double()(features, scores).density
    with pytest.raises(TypeError, match=r"density in torch\.float64"):
        layer(features.float(), density)


def test_positions_of_a_wide_layer_are_exact():
    layer = fl.nn.ContinuousAttention1d(functions=4).double()
    features, scores = (torch.randn(7, k, dtype=torch.float64) for k in (3, 1))
    density = layer(features, scores.squeeze(-1))[1]
    places = (torch.arange(7, dtype=torch.float64) + 0.5) / 7
    assert float(density.mean) == pytest.approx(
        float(scores.squeeze(-1).softmax(0) @ places), abs=1e-15
    )


def test_the_basis_moves_with_the_module():
    features, scores = draw_inputs(9, dtype=torch.float32)
    layer = fl.nn.ContinuousAttention2d((3, 3), fl.Tsallis(2.0), functions=4)
    single = layer(features, scores).context
    assert single.dtype == torch.float32
    double = layer.double()(features.double(), scores.double()).context
    assert double.dtype == DOUBLE
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)
    assert layer.basis.centers.dtype == DOUBLE


@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(2.0)])
@pytest.mark.parametrize("modes", [1, 2])
def test_shapes_on_the_meta_device(regularizer, modes):
    layer = fl.nn.ContinuousAttention2d((3, 3), regularizer, functions=4, modes=modes).to("meta")
    scores, features = torch.randn(2, 9, device="meta"), torch.randn(2, 9, 5, device="meta")
    context = layer(features, scores)[0]
    assert context.is_meta
    assert context.shape == (2, 5)


@pytest.mark.parametrize("start", ["made there", "moved there"])
def test_back_from_the_meta_device(start):
    features, scores = draw_inputs(9, dtype=torch.float32)
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


# ---- masks


def test_a_line_and_its_mask():
    features, scores = draw_inputs(10)
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


@pytest.mark.parametrize("modes", [1, 2])
def test_scores_of_minus_infinity_are_a_mask(modes):
    features, scores = draw_inputs(9)
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
    features, scores = draw_inputs(9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4).double()
    mask = torch.tensor([True, False, True])[:, None].expand(3, 9)
    density = layer(features, scores, mask).density
    even = fc.match_moments(torch.ones(9), fc.cell_centers(3, 3, dtype=torch.float64), fc.Gaussian)
    torch.testing.assert_close(density.mean[1], even.mean)
    torch.testing.assert_close(density.covariance_matrix[1], even.covariance_matrix)


def test_several_queries_need_an_axis_of_the_features():
    """(B, B, L) would broadcast with (B, L, channels), queries against examples."""
    features, scores = draw_inputs(9)
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
