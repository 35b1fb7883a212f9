"""Faults that an attack found, each with what is right."""

import pytest
import torch

import fenchel as fl
from fenchel import continuous as fc

DOUBLE = torch.float64
BASIS = fc.GaussianBasis(torch.tensor([[1.0]], dtype=DOUBLE), torch.eye(1, dtype=DOUBLE))
ONE = torch.eye(1, dtype=DOUBLE)


def _slope(density, basis=BASIS):
    mean = torch.zeros(1, dtype=DOUBLE, requires_grad=True)
    return torch.autograd.grad(density(mean).expect(basis).sum(), mean)[0]


@pytest.mark.parametrize("basis", [BASIS, fc.ParaboloidBasis(BASIS.centers, ONE)])
def test_a_tensor_alpha_of_one_is_the_gaussian(basis):
    alpha = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    wanted = _slope(lambda m: fc.Gaussian(m, ONE), basis)
    torch.testing.assert_close(
        _slope(lambda m: fc.TsallisGaussian(m, ONE, alpha), basis), wanted, rtol=1e-8, atol=0
    )
    found = fc.TsallisGaussian(torch.zeros(1, dtype=DOUBLE), ONE, alpha).expect(basis).sum()
    (slope,) = torch.autograd.grad(found, alpha)
    ahead = fc.TsallisGaussian(torch.zeros(1, dtype=DOUBLE), ONE, 1.001).expect(basis).sum()
    assert abs(float((ahead - found.detach()) / 1e-3 / slope) - 1) < 0.01


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.7])
def test_forward_mode_agrees_with_reverse_mode(alpha):
    def expected(mean):
        return fc.TsallisGaussian(mean, ONE, alpha).expect(BASIS)

    mean = torch.tensor([0.3], dtype=DOUBLE)
    forward = torch.func.jvp(expected, (mean,), (torch.ones(1, dtype=DOUBLE),))[1]
    torch.testing.assert_close(forward, torch.func.jacrev(expected)(mean)[:, 0])
    assert torch.func.hessian(lambda m: expected(m).sum())(mean).isfinite().all()


def test_the_floor_is_a_constant_in_forward_mode_too():
    positions = fc.cell_centers(3, 3).double()
    weights = torch.tensor([0.3, 0, 0, 0, 0.4, 0, 0, 0, 0.3], dtype=DOUBLE)

    def covariance(w):
        return fc.match_moments(w, positions, fc.Gaussian).covariance_matrix

    direction = torch.eye(9, dtype=DOUBLE)[1]
    forward = torch.func.jvp(covariance, (weights,), (direction,))[1]
    torch.testing.assert_close(forward, torch.func.jacrev(covariance)(weights)[..., 1])


def test_one_start_serves_a_batch():
    positions = fc.cell_centers(10).double()
    weights = torch.rand(3, 10, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    start = fc.fit_mixture(weights[0], positions, 2)
    made = fc.fit_mixture(weights, positions, 2, start=start, iterations=3)
    assert made.batch_shape == (3,)
    alone = fc.fit_mixture(weights[2], positions, 2, start=start, iterations=3)
    torch.testing.assert_close(made[2].components.mean, alone.components.mean)


@pytest.mark.parametrize("shape", [(1, 20), (20, 1)])
def test_regions_cut_an_axis_that_has_an_extent(shape):
    weights = torch.zeros(20)
    weights[2] = weights[17] = 1
    mixture = fc.fit_mixture(weights, fc.cell_centers(*shape), 2)
    torch.testing.assert_close(mixture.mixing, torch.tensor([0.5, 0.5]))


def test_whole_numbers_are_no_features():
    with pytest.raises(TypeError, match="float"):
        fl.nn.ContinuousAttention1d()(torch.ones(1, 10, 2, dtype=torch.int64), torch.zeros(1, 10))


def test_positions_far_from_zero():
    g = torch.Generator().manual_seed(0)
    positions, weights = torch.rand(50, 1, generator=g) + 1e4, torch.rand(50, generator=g)
    single = fc.match_moments(weights, positions, fc.Gaussian).covariance_matrix
    double = fc.match_moments(weights.double(), positions.double(), fc.Gaussian).covariance_matrix
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)
    pair = [
        fc.fit_mixture(w, p, 2).components.covariance_matrix
        for w, p in ((weights, positions), (weights.double(), positions.double()))
    ]
    torch.testing.assert_close(pair[0].double(), pair[1], rtol=1e-4, atol=0)


def test_weights_whose_sum_overflows():
    found = fc.match_moments(
        torch.full((3,), 3e38), torch.tensor([[5.0], [6.0], [7.0]]), fc.Gaussian
    )
    torch.testing.assert_close(found.mean, torch.tensor([6.0]))


def test_padding_needs_the_unit_cube():
    with pytest.raises(ValueError, match="padding"):
        fc.fit_values(
            torch.ones(5, 1), 2 * fc.cell_centers(5), fc.GaussianBasis.grid(3, 0.1, 1), padding=True
        )


def test_a_thin_ellipse_in_float32():
    turn = torch.tensor([[0.7648, -0.6442], [0.6442, 0.7648]], dtype=DOUBLE)
    turn = torch.linalg.qr(turn).Q
    scale = (turn @ torch.diag(torch.tensor([1.0, 1e-5], dtype=DOUBLE)) @ turn.mT).float()
    scale = (scale + scale.mT) / 2
    basis = fc.GaussianBasis(torch.zeros(1, 2), scale)
    single = fc.Gaussian(torch.zeros(2), scale).expect(basis)
    double = fc.Gaussian(torch.zeros(2, dtype=DOUBLE), scale.double()).expect(basis.to(DOUBLE))
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=0)


def test_the_estimate_of_the_error_covers_paraboloids():
    z = torch.zeros(2, dtype=DOUBLE)
    scale = torch.tensor(
        [[2.291837420447644, -5.244700066769546], [-5.244700066769546, 32.59935576203325]],
        dtype=DOUBLE,
    )
    own = torch.tensor(
        [[71.82235918629387, -61.69832573076481], [-61.69832573076481, 57.94000112062558]],
        dtype=DOUBLE,
    )
    basis = fc.ParaboloidBasis(z.unsqueeze(0), own)
    found = fc.expect_with_error(fc.TsallisGaussian(z, scale, 3.0), basis, 1e-5)
    assert 0 < found.error < 1e-6
    assert abs(found.value - 0.0665812298) < 1e-6


def test_four_dimensions_are_refused_for_sparse_densities():
    basis = fc.GaussianBasis(torch.zeros(1, 4), torch.eye(4))
    assert fc.Gaussian(torch.zeros(4), torch.eye(4)).expect(basis).isfinite().all()
    with pytest.raises(ValueError, match="d <= 3"):
        fc.Paraboloid(torch.zeros(4), torch.eye(4)).expect(basis)


def test_rsample_has_the_derivative_in_alpha_at_one():
    """E[t^2] = the variance, of which the derivative is known; without one it would be -0.93."""
    torch.manual_seed(0)
    alpha = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    density = fc.TsallisGaussian(torch.zeros(1, dtype=DOUBLE), ONE, alpha)
    (wanted,) = torch.autograd.grad(density.variance.sum(), alpha, retain_graph=True)
    slopes = []
    for _ in range(30):
        each = density.rsample((200_000,)).square().mean()
        slopes.append(torch.autograd.grad(each, alpha, retain_graph=True)[0])
    found = torch.stack(slopes)
    error = found.std() / 30**0.5
    assert error < 0.2
    assert (found.mean() - wanted).abs() < 4 * error


def test_autocast_leaves_moments_alone():
    g = torch.Generator().manual_seed(0)
    features, scores = torch.randn(8, 196, 4, generator=g), 3 * torch.randn(8, 196, generator=g)
    layer = fl.nn.ContinuousAttention2d((14, 14))
    wanted = layer(features, scores)
    with torch.autocast("cpu", torch.bfloat16):
        made = layer(features, scores)
    torch.testing.assert_close(made.density.scale, wanted.density.scale)
    torch.testing.assert_close(made.context.float(), wanted.context, rtol=0.02, atol=0.02)


def test_caches_do_not_remember_modes_of_torch():
    features, scores = torch.randn(2, 9, 3), torch.randn(2, 9)
    layer = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    with torch.inference_mode():
        layer(features, scores)
    layer(features.requires_grad_(), scores).context.sum().backward()
    other = fl.nn.ContinuousAttention2d((3, 3), functions=4)
    torch.func.grad(lambda s: other(features.detach(), s).context.sum())(scores)
    torch.save(other, "/dev/null")


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
