"""Continuous preferences in closed form, and the readings of the problem."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
import fenchel.continuous as fc
from fenchel import dual
from tests.dual.problems import F64, plane


def test_gaussian_in_closed_form():
    """D-E5/E6: for N(mu, I) lam = a / (1 + a) z, the mean mu + lam."""
    mean, z = torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([0.3, 0.7], dtype=F64)
    e = dual.gaussian(mean, torch.eye(2, dtype=F64), z, 3.0)
    torch.testing.assert_close(e.multiplier, 0.75 * z)
    torch.testing.assert_close(e.mean, mean + 0.75 * z)
    assert e.weights is None
    assert e.gap < 1e-28
    assert e.steps == 1


def test_a_mixture_is_the_limit_of_many_templates():
    """A fine grid of templates with the density as preference gives the same estimate."""
    mixture = fc.Mixture(
        torch.tensor([0.3, 0.7], dtype=F64),
        fc.Gaussian(
            torch.tensor([[-1.0], [2.0]], dtype=F64), torch.tensor([[[0.2]], [[0.5]]], dtype=F64)
        ),
    )
    grid = torch.linspace(-12, 14, 4001, dtype=F64).unsqueeze(-1)
    z = torch.tensor([0.8], dtype=F64)
    for reliability in (0.1, 1.0, 5.0):
        smooth = dual.gaussian_mixture(mixture, z, reliability)
        discrete = dual.estimate(grid, mixture.log_prob(grid).exp(), z, reliability)
        torch.testing.assert_close(smooth.mean, discrete.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(smooth.multiplier, discrete.multiplier, rtol=1e-8, atol=1e-9)
        assert float(smooth.objective - discrete.objective) == pytest.approx(0, abs=1e-9)


def test_mixture_certificates_far_out():
    g = torch.Generator().manual_seed(0)
    means = torch.randn(5, 3, generator=g, dtype=F64)
    root = torch.randn(5, 3, 3, generator=g, dtype=F64)
    mixture = fc.Mixture(
        torch.rand(5, generator=g, dtype=F64).softmax(0),
        fc.Gaussian(means, root @ root.mT + 0.05 * torch.eye(3, dtype=F64)),
    )
    z = torch.randn(20, 3, generator=g, dtype=F64) * torch.logspace(-3, 3, 20, dtype=F64)[:, None]
    e = dual.gaussian_mixture(mixture, z, 10.0)
    assert (e.status == fl.Status.OK).all()
    assert (e.gap <= 1e-12 * (1 + e.objective.abs())).all()


def test_derivatives_of_the_mixture():
    g = torch.Generator().manual_seed(0)
    mixing = torch.rand(2, generator=g, dtype=F64) + 0.2
    means, z = (torch.randn(2, 2, generator=g, dtype=F64) for _ in range(2))
    roots = torch.randn(2, 2, 2, generator=g, dtype=F64)
    strength = torch.tensor(1.2, dtype=F64)

    def made(mixing, means, roots, z, strength):
        covariance = roots @ roots.mT + 0.2 * torch.eye(2, dtype=F64)
        mixture = fc.Mixture(mixing / mixing.sum(), fc.Gaussian(means, covariance))
        e = dual.gaussian_mixture(mixture, z, strength)
        return e.mean, e.multiplier, e.objective

    leaves = [x.clone().requires_grad_() for x in (mixing, means, roots, z, strength)]
    assert gradcheck(made, leaves)
    assert gradgradcheck(made, leaves)


# ---- maximum entropy on the mean


def test_the_radius_is_met_or_does_not_bind():
    templates, u, _ = plane()
    z = 0.4 * torch.randn(9, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    z[:3] /= 10
    found = dual.within_radius(templates, u, z, 0.2)
    distance = (u @ templates + z - found.estimate.mean).norm(dim=-1)
    free = z.norm(dim=-1) <= 0.2
    assert free.any()
    assert not free.all()
    torch.testing.assert_close(distance[~free], torch.full_like(distance[~free], 0.2))
    torch.testing.assert_close(found.estimate.weights[free], u.expand(int(free.sum()), -1))
    assert not found.reliability[free].any()
    p = found.estimate.weights
    torch.testing.assert_close(
        found.divergence, (p * (p / u).log()).sum(-1), atol=1e-14, rtol=1e-10
    )


def test_nothing_within_the_radius_has_less_divergence():
    templates, u, z = plane()
    found = dual.within_radius(templates, u, z, 0.5)
    p, target = found.estimate.weights, u @ templates + z
    g = torch.Generator().manual_seed(2)
    tried = 0
    for size in (1e-4, 1e-3, 1e-2, 1e-1):
        for _ in range(200):
            other = p * (size * torch.randn(len(p), generator=g, dtype=F64)).exp()
            other = other / other.sum()
            if (target - other @ templates).norm() <= 0.5:
                tried += 1
                assert (other * (other / u).log()).sum() >= found.divergence - 1e-15
    assert tried > 50


def test_the_papers_radius_is_another_problem():
    """D-MEM: the estimate at a reliability is not that within 1 / (2 reliability)."""
    templates, u, z = plane()
    e = dual.estimate(templates, u, z, 0.833)
    squared = float((u @ templates + z - e.mean).square().sum())
    assert abs(squared - 1 / (2 * 0.833)) > 0.05
    same = dual.within_radius(templates, u, z, squared**0.5)
    torch.testing.assert_close(same.estimate.weights, e.weights, rtol=1e-9, atol=1e-12)
    assert float(same.reliability) == pytest.approx(0.833, rel=1e-9)


def test_out_of_reach():
    templates = torch.tensor([[0.0], [1.0]], dtype=F64)
    found = dual.within_radius(templates, None, torch.tensor([4.0], dtype=F64), 0.1)
    assert found.estimate.status == fl.Status.INFEASIBLE
    assert float(found.estimate.mean) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="radius must be finite and > 0"):
        dual.within_radius(templates, None, torch.tensor([4.0], dtype=F64), 0.0)


def test_derivatives_within_a_radius():
    templates, u, z = plane(5)
    leaves = [x.clone().requires_grad_() for x in (templates, u, z, torch.tensor(0.3, dtype=F64))]

    def made(*operands):
        found = dual.within_radius(*operands)
        return found.estimate.mean, found.reliability, found.divergence

    assert gradcheck(made, leaves)
    assert gradgradcheck(made, leaves)


def test_penalised_likelihood_and_bayes():
    """D-E27..30: 1 / (2 noise^2) |.|^2 + strength KL has the estimate's minimiser."""
    templates, u, z = plane()
    noise, strength = 0.7, 1.9
    e = dual.estimate(templates, u, z, dual.reliability_of(noise, strength))
    target = u @ templates + z

    def cost(p):
        pull = (target - p @ templates).square().sum() / (2 * noise**2)
        return pull + strength * (p * (p / u).log()).sum()

    g = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 1e-1):
        other = e.weights * (size * torch.randn(len(u), generator=g, dtype=F64)).exp()
        assert cost(other / other.sum()) > cost(e.weights)
    with pytest.raises(ValueError, match="noise must be finite and > 0"):
        dual.reliability_of(0.0)


def test_a_list_is_named_by_within_radius():
    with pytest.raises(TypeError, match="templates must be a tensor"):
        dual.within_radius([[0.0], [1.0]], None, torch.tensor([0.4]), 0.1)
