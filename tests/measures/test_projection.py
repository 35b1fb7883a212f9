"""Moment projections: moments kept, the nearest member of the family, the limit of Gaussians."""

import pytest
import torch

from fenchel._solution import SolveError
from fenchel.measures import (
    Deterministic,
    Diracs,
    Dot,
    Empirical,
    GaussianMeasure,
    Gaussians,
    GridFamily,
    MomentProjection,
    Softmatch,
    maximum_entropy,
)

from .draws import F64, close, measure, normal

GRID = torch.linspace(-4, 4, 41, dtype=F64).unsqueeze(-1)


def powers(x):
    return torch.cat([x, x.square()], -1)


def bumpy(seed=0):
    """A measure on the whole grid that is in no family of two powers."""
    return Empirical(GRID, torch.softmax(-GRID[:, 0].square() / 2 + normal(41, seed=seed), 0))


def test_moments_are_kept_and_projecting_again_changes_nothing():  # definitions 6, 7
    mu = bumpy()
    for pi, moments in (
        (MomentProjection(), lambda m: m.mean),
        (MomentProjection(family=Gaussians()), lambda m: torch.cat([m.mean, m.covariance[0]])),
        (MomentProjection(powers, GridFamily(GRID)), lambda m: m.expectation(powers)),
    ):
        once = pi(mu)
        assert close(moments(once), moments(mu), 1e-12)
        assert close(moments(pi(once)), moments(once), 1e-12)
    assert isinstance(MomentProjection()(mu), Empirical)
    assert MomentProjection()(mu).size == 1
    assert isinstance(MomentProjection(family=Gaussians())(mu), GaussianMeasure)


def minimise(loss, start):
    theta = start.clone().requires_grad_()
    lbfgs = torch.optim.LBFGS(
        [theta], max_iter=2000, tolerance_grad=1e-14, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        lbfgs.zero_grad()
        value = loss(theta)
        value.backward()
        return value

    for _ in range(5):
        lbfgs.step(closure)
    return theta.detach()


@pytest.mark.parametrize("seed", range(3))
def test_the_projection_is_the_nearest_member(seed):  # proposition 16
    mu = bumpy(seed)
    scaled = powers(GRID) / torch.tensor([1.0, 4.0], dtype=F64)

    def member(theta):
        return Empirical._unchecked(GRID, torch.softmax(scaled @ theta, 0))

    theta = minimise(lambda t: mu.kl(member(t)), torch.zeros(2, dtype=F64))
    projection = MomentProjection(powers, GridFamily(GRID))(mu)
    assert close(projection.weights, member(theta).weights, 1e-8)
    away = member(theta + 1e-3)
    assert not close(projection.weights, away.weights, 1e-8)
    assert mu.kl(away) > mu.kl(projection)


@pytest.mark.parametrize("sigma", [1.0, 0.3, 0.1])
def test_narrow_gaussians_lead_to_the_mean(sigma):
    """Proposition 17: argmin of KL(rho * mu | N(x, sigma^2)) is the mean, for every sigma."""
    mu = Empirical(
        torch.tensor([[-1.0], [0.2], [2.0]], dtype=F64), torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    )
    rho = GaussianMeasure(torch.zeros(1, dtype=F64), torch.full((1, 1), sigma**2, dtype=F64))
    smooth = mu.convolve(rho.quadrature(30))  # rho * mu, up to degree 59

    def cross_entropy(x):  # KL up to a term without x
        near = GaussianMeasure(x, rho.covariance).density
        return -smooth.expectation(near.log_prob)

    actual = minimise(cross_entropy, torch.zeros(1, dtype=F64))
    assert close(actual, MomentProjection()(mu).mean, 1e-8)


def test_of_a_kernel_it_takes_every_row():
    K = Softmatch(Dot())(Empirical(GRID))
    x = normal(5, 1)
    for pi in (
        MomentProjection(),
        MomentProjection(family=Gaussians()),
        MomentProjection(powers, GridFamily(GRID)),
    ):
        projected, rows = pi(K).at(x), K.at(x)
        assert projected.batch_shape == (5,)
        assert close(projected.mean, rows.mean, 1e-11)
    assert close(projected.covariance, rows.covariance, 1e-10)  # of the grid
    mu = Empirical(x)
    assert (mu @ MomentProjection(powers, GridFamily(GRID))(K)).size == 41  # a shared support


def test_gaussian_kernels_compose_as_far_as_they_can():
    K = MomentProjection(family=Gaussians())(Softmatch(Dot())(measure(5, 2)))
    x = normal(4, 2, seed=1)
    a = normal(3, 2, seed=2)
    after = (Deterministic(torch.tanh) @ K @ Deterministic(a)).at(x)
    expected = K.at(x.tanh()).push(a)
    assert close(after.mean, expected.mean, 1e-14)
    assert close(after.covariance, expected.covariance, 1e-14)
    value = (K @ (lambda y: y.square().sum(-1)))(x)
    moment = K.at(x).covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + K.at(x).mean.square().sum(-1)
    assert close(value, moment, 1e-12)
    with pytest.raises(TypeError, match=r"mixture of GaussianMeasure.*MomentProjection\(\)"):
        Empirical(x) @ K


def test_moments_out_of_the_grids_reach_are_refused():
    pi = MomentProjection(powers, GridFamily(GRID))
    with pytest.raises(SolveError, match=r"outside .* widen the grid \(INFEASIBLE\)"):
        pi(Empirical(torch.tensor([[5.0]], dtype=F64)))
    with pytest.raises(SolveError, match=r"on the boundary .* \(MAX_STEPS\)"):
        pi(Empirical(GRID[:1]))
    limit = maximum_entropy(Empirical(GRID), powers, powers(GRID[0]))
    assert limit.measure.weights[0] > 0.999


def test_a_base_of_ones_own():
    base = torch.softmax(normal(41), 0)
    pi = MomentProjection(powers, GridFamily(GRID, base))
    member = Empirical(GRID, base)
    assert close(pi(member).weights, base, 1e-13)  # a member: theta = 0


def test_bad_projections():
    with pytest.raises(ValueError, match=r"Diracs has its own features; use GridFamily"):
        MomentProjection(powers)
    with pytest.raises(ValueError, match="Gaussians has its own features"):
        MomentProjection(powers, Gaussians())
    with pytest.raises(ValueError, match="GridFamily needs features"):
        MomentProjection(family=GridFamily(GRID))
    with pytest.raises(TypeError, match=r"family must be .* got str"):
        MomentProjection(family="diracs")
    with pytest.raises(TypeError, match="a measure or a kernel, got Tensor"):
        MomentProjection(family=Diracs())(GRID)
    with pytest.raises(ValueError, match=r"the grid must be points \(n, d\)"):
        GridFamily(normal(2, 3, 1))
