"""Continuous preferences: a Gaussian in closed form, and mixtures of Gaussians."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
import fenchel.continuous as fc
from fenchel import dual
from tests.dual.problems import F64

# ---- one Gaussian


def test_gaussian_in_closed_form():
    """D-E5/E6: for N(mu, I) lam = a / (1 + a) z, the mean mu + lam."""
    mean, z = torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([0.3, 0.7], dtype=F64)
    e = dual.gaussian(mean, torch.eye(2, dtype=F64), z, 3.0)
    torch.testing.assert_close(e.multiplier, 0.75 * z)
    torch.testing.assert_close(e.mean, mean + 0.75 * z)
    assert e.weights is None
    assert e.gap < 1e-28
    assert e.steps == 1


def test_a_covariance_may_lack_rank():
    root = torch.tensor([[1.0], [2.0], [-1.0]], dtype=F64)
    z = torch.tensor([0.3, -0.2, 0.5], dtype=F64)
    estimate = dual.gaussian(torch.zeros(3, dtype=F64), root @ root.mT, z, 2.0)
    expected = torch.linalg.solve(torch.eye(3, dtype=F64) / 2 + root @ root.mT, z)
    torch.testing.assert_close(estimate.multiplier, expected, rtol=1e-13, atol=1e-15)
    flat = dual.gaussian(torch.zeros(3, dtype=F64), torch.zeros(3, 3, dtype=F64), z, 2.0)
    torch.testing.assert_close(flat.multiplier, 2 * z)
    assert not flat.mean.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gaussian_in_the_precision_of_its_operands(dtype):
    mean, z = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)
    estimate = dual.gaussian(mean, torch.eye(2, dtype=dtype), z, 1.0)
    assert estimate.mean.dtype == estimate.multiplier.dtype == dtype
    assert estimate.objective.dtype == F64


def test_derivatives_in_a_covariance():
    g = torch.Generator().manual_seed(0)
    root = torch.randn(3, 2, generator=g, dtype=F64, requires_grad=True)
    mean, z = (torch.randn(3, generator=g, dtype=F64, requires_grad=True) for _ in range(2))

    def compute(mean, root, z):
        e = dual.gaussian(mean, root @ root.mT, z, 1.5)
        return e.mean, e.multiplier, e.objective

    assert gradcheck(compute, (mean, root, z))
    assert gradgradcheck(compute, (mean, root, z))
    covariance = (root @ root.mT).detach() + torch.eye(3, dtype=F64)
    assert gradcheck(lambda c: dual.gaussian(mean.detach(), c, z.detach(), 1.5).mean,
                     covariance.requires_grad_())  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mean": [0.0, 0.0]}, TypeError, "mean must be a tensor"),
        ({"mean": torch.tensor([0.0, math.nan])}, ValueError, "mean must be finite"),
        ({"mean": torch.tensor([0, 0])}, TypeError, "mean must be floating point"),
        ({"covariance": torch.ones(2)}, ValueError, r"must be \(..., 2, 2\).*diag_embed"),
        ({"covariance": torch.eye(3)}, ValueError, r"covariance must be \(..., 2, 2\)"),
        ({"covariance": torch.tensor([[1.0, 0.5], [0, 1]])}, ValueError,
         r"covariance must be symmetric.*\(C \+ C.mT\) / 2"),
        ({"covariance": -torch.eye(2)}, ValueError,
         "covariance must have no negative eigenvalue, its smallest is -1.*A @ A.mT"),
        ({"evidence": torch.ones(3)}, ValueError, r"evidence must be \(..., 2\)"),
        ({"evidence": torch.full((2,), math.inf)}, ValueError, "evidence must be finite"),
        ({"evidence": torch.ones(2, 2), "mean": torch.ones(3, 2)}, ValueError,
         r"do not broadcast: mean \(3,\).*evidence \(2,\)"),
        ({"reliability": 0.0}, ValueError, "reliability must be finite and > 0"),
    ],
)  # fmt: skip
def test_messages_of_a_gaussian(change, error, message):
    given = {
        "mean": torch.zeros(2),
        "covariance": torch.eye(2),
        "evidence": torch.ones(2),
        "reliability": 1.0,
    }
    dual.gaussian(**given)
    with pytest.raises(error, match=message):
        dual.gaussian(**(given | change))


# ---- mixtures


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

    def compute(mixing, means, roots, z, strength):
        covariance = roots @ roots.mT + 0.2 * torch.eye(2, dtype=F64)
        mixture = fc.Mixture(mixing / mixing.sum(), fc.Gaussian(means, covariance))
        e = dual.gaussian_mixture(mixture, z, strength)
        return e.mean, e.multiplier, e.objective

    leaves = [x.clone().requires_grad_() for x in (mixing, means, roots, z, strength)]
    assert gradcheck(compute, leaves)
    assert gradgradcheck(compute, leaves)


def test_messages_of_a_mixture():
    one = fc.Gaussian(torch.zeros(2), torch.eye(2))
    with pytest.raises(TypeError, match=r"one Gaussian: use dual.gaussian\(preference.mean"):
        dual.gaussian_mixture(one, torch.ones(2), 1.0)
    with pytest.raises(TypeError, match=r"preference must be a mixture of Gaussians.*got Tensor"):
        dual.gaussian_mixture(torch.ones(2), torch.ones(2), 1.0)
    three = fc.Mixture(torch.ones(3, 1), fc.Gaussian(torch.zeros(3, 1, 2), torch.eye(2)))
    with pytest.raises(ValueError, match=r"do not broadcast: mean \(3,\).*evidence \(2,\)"):
        dual.gaussian_mixture(three, torch.ones(2, 2), 1.0)
    with pytest.raises(TypeError, match="evidence must be a tensor"):
        dual.gaussian_mixture(three, [1.0, 2.0], 1.0)


def test_tolerance_of_a_mixture_is_checked():
    preference = fl.continuous.Mixture(
        torch.ones(1), fl.continuous.Gaussian(torch.zeros(1, 2), torch.eye(2).expand(1, 2, 2))
    )
    with pytest.raises(ValueError, match="tolerance must be between"):
        dual.gaussian_mixture(preference, torch.ones(2), 1.0, tolerance=-1.0)
