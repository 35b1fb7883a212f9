"""Several modes: the mixture itself, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
import fenchel.continuous as fc
from tests.continuous import reference
from tests.continuous.checks import assert_mean, assert_near, assert_says
from tests.continuous.clumps import MIXING, modes
from tests.continuous.families import DOUBLE

# ---- the mixture


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_integrals(alpha):
    """Farinhas, eqs. 5.1 to 5.3: mass one; mean and covariance by nodes of each mode's support."""
    mixture = fc.Mixture(MIXING, modes(alpha))
    total = 0.0
    for k in range(3):
        mean, scale = mixture.components.mean[k].numpy(), mixture.components.scale[k].numpy()
        if alpha == 1:
            points, weights = reference.whole_rule(mean, scale, 60)
        else:
            points, share = reference.ellipsoid_rule(mean, scale, alpha, 60)
            weights = share / reference.density(points, mean, scale, alpha)
        # The part of p that is this mode's: the parts sum to p, and each lives on its nodes.
        part = MIXING[k].item() * reference.density(points, mean, scale, alpha)
        at = torch.from_numpy(points)
        others = sum(MIXING[j] * mixture.components[j].prob(at) for j in range(3) if j != k)
        others = others.numpy()
        assert_near(mixture.prob(at), part + others, 1e-12)
        assert_near(mixture.log_prob(at).exp(), part + others, 1e-12)
        squares = (points[:, :, None] * points[:, None, :]).reshape(-1, 4)
        one = np.ones((len(points), 1))
        total = total + (weights * part) @ np.concatenate([one, points, squares], -1)
    assert_near(total[0], 1.0, 1e-10)
    assert_near(mixture.mean, total[1:3], 1e-10)
    covariance = total[3:].reshape(2, 2) - np.outer(total[1:3], total[1:3])
    assert_near(mixture.covariance_matrix, covariance, 1e-10)
    assert_near(mixture.variance, np.diag(covariance), 1e-10)


def test_where_no_mode_has_mass():
    scores = torch.tensor([0.3, -0.2, 0.1], dtype=DOUBLE, requires_grad=True)
    mean = torch.tensor([[0.0], [3.0], [3.2]], dtype=DOUBLE, requires_grad=True)
    components = fc.Paraboloid(mean, 0.1 * torch.eye(1, dtype=DOUBLE))
    mixture = fc.Mixture(torch.softmax(scores, 0), components)
    points = torch.tensor([[0.1], [1.5], [3.1], [99.0]], dtype=DOUBLE, requires_grad=True)
    log_p = mixture.log_prob(points)
    inside = torch.tensor([True, False, True, False])
    assert ((log_p > -math.inf) == inside).all()
    assert (mixture.support.check(points) == inside).all()
    assert ((mixture.prob(points) > 0) == inside).all()
    target = torch.where(inside, log_p, torch.zeros_like(log_p)).sum() + mixture.prob(points).sum()
    for gradient in torch.autograd.grad(target, (scores, mean, points), retain_graph=True):
        assert gradient.isfinite().all()
    # Also when every point counts.
    for gradient in torch.autograd.grad(log_p.exp().sum(), (scores, mean, points)):
        assert gradient.isfinite().all()


def test_a_mode_without_weight_is_no_mode():
    scores = torch.tensor([3.0, 0.0, 2.8], dtype=DOUBLE, requires_grad=True)
    mixture = fc.Mixture.from_scores(scores, modes(1.0), fl.Tsallis(2.0))
    assert mixture.modes == 2
    assert mixture.mixing[1] == 0
    point = torch.zeros(2, dtype=DOUBLE)
    two = mixture.components[torch.tensor([0, 2])]
    alone = fc.Mixture(mixture.mixing.detach()[[0, 2]], two)
    assert_near(mixture.log_prob(point), alone.log_prob(point), 1e-13)
    (gradient,) = torch.autograd.grad(mixture.log_prob(point), scores)
    assert gradient.isfinite().all()
    assert gradient[1] == 0
    torch.manual_seed(0)
    far = fc.Gaussian(
        torch.tensor([[0.0], [99.0], [1.0]], dtype=DOUBLE), torch.eye(1, dtype=DOUBLE)
    )
    assert (fc.Mixture(mixture.mixing.detach(), far).sample((500,)) < 50).all()


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_expectations_are_linear(alpha):
    """Farinhas, 2021, eq. 5.4."""
    mixture = fc.Mixture(MIXING, modes(alpha))
    basis = fc.GaussianBasis.grid(3, 0.1, 2).to(DOUBLE)
    each = torch.stack([mixture.components[k].expect(basis) for k in range(3)])
    assert_near(mixture.expect(basis), MIXING @ each, 1e-9)
    assert mixture.expect(basis, 1e-3).shape == (9,)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_samples(alpha):
    torch.manual_seed(1)
    mixture = fc.Mixture(MIXING, modes(alpha))
    samples = mixture.sample((20000,))
    assert samples.shape == (20000, 2)
    assert_mean(samples, mixture.mean)
    apart = samples - mixture.mean
    assert_mean(apart.unsqueeze(-1) * apart.unsqueeze(-2), mixture.covariance_matrix)
    assert mixture.support.check(samples).all()
    assert not mixture.has_rsample
    with pytest.raises(NotImplementedError, match="sample"):
        mixture.rsample()


def test_batches_expand_and_index():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.softmax(torch.randn(4, 1, 3, dtype=DOUBLE, generator=generator), -1)
    mean = torch.randn(2, 3, 2, dtype=DOUBLE, generator=generator)
    mixture = fc.Mixture(mixing, fc.Gaussian(mean, torch.eye(2, dtype=DOUBLE)))
    assert mixture.batch_shape == (4, 2)
    assert mixture.event_shape == (2,)
    assert mixture.modes.shape == (4, 2)
    assert mixture.sample((5,)).shape == (5, 4, 2, 2)
    points = torch.randn(6, 1, 1, 2, dtype=DOUBLE, generator=generator)
    whole = mixture.log_prob(points)
    assert whole.shape == (6, 4, 2)
    alone = fc.Mixture(mixing[3, 0], fc.Gaussian(mean[1], torch.eye(2, dtype=DOUBLE)))
    assert_near(whole[:, 3, 1], alone.log_prob(points[:, 0, 0]), 1e-13)
    assert_near(mixture[3, 1].log_prob(points[:, 0, 0]), whole[:, 3, 1], 1e-13)
    assert_near(mixture[..., 1].covariance_matrix, mixture.covariance_matrix[:, 1], 1e-15)
    wide = mixture.expand((7, 4, 2))
    assert wide.batch_shape == (7, 4, 2)
    assert_near(wide.mean[5], mixture.mean, 0)


@pytest.mark.parametrize("alpha", [1.0, 2.0, torch.tensor([1.0, 1.5, 2.0], dtype=DOUBLE)])
def test_log_likelihood(alpha):
    """Farinhas, 2021, eq. 5.16; weights are divided by their sum, those of zero do not count."""
    mixture = fc.Mixture(MIXING, modes(1.0) if isinstance(alpha, float) and alpha == 1 else
                         fc.TsallisGaussian(modes(1.0).mean, modes(1.0).scale, alpha))  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    positions = mixture.components.mean.mean(0) + 0.1 * torch.randn(
        7, 2, dtype=DOUBLE, generator=generator
    )
    positions = torch.cat([positions, torch.full((1, 2), 1e3, dtype=DOUBLE)])
    weights = torch.rand(2, 8, dtype=DOUBLE, generator=generator)
    weights[:, -1] = 0
    kept = mixture.log_prob(positions[:-1])
    expected = (weights[:, :-1] * kept).sum(-1) / weights.sum(-1)
    assert_near(mixture.log_likelihood(weights, positions), expected, 1e-13)


def test_derivatives_of_the_mixture():
    scores = torch.tensor([0.3, -0.2, 0.1], dtype=DOUBLE, requires_grad=True)
    components = modes(1.0)
    point = torch.tensor([[0.1, 0.2], [-0.3, 0.4]], dtype=DOUBLE, requires_grad=True)

    def log_p(s, t):
        return fc.Mixture(torch.softmax(s, 0), components).log_prob(t)

    assert gradcheck(log_p, (scores, point))
    assert gradgradcheck(log_p, (scores, point))


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"modes": 4}, ValueError, ("modes", "at most", "3", "got 4")),
        ({"modes": 0}, ValueError, ("modes", ">= 1", "0")),
        ({"modes": 2.0}, TypeError, ("modes", "whole", "2.0")),
        ({"iterations": -1}, ValueError, ("iterations", "-1")),
        ({"floor": 0.0}, ValueError, ("floor", "0.0", "> 0")),
        ({"family": fc.TsallisGaussian}, TypeError, ("family", "TsallisGaussian", "Paraboloid")),
        ({"start": fc.Regions}, TypeError, ("start", "Regions()")),
        ({"start": "random"}, TypeError, ("start", "'random'")),
        ({"start": fc.Random(0)}, ValueError, ("restarts", "0")),
        ({"start": fc.Mixture(torch.ones(1), fc.Gaussian(torch.zeros(1, 1), torch.eye(1)))},
         ValueError, ("1 modes", "2")),
        ({"start": fc.Mixture(torch.ones(2) / 2, fc.Gaussian(torch.zeros(2, 2), torch.eye(2)))},
         ValueError, ("d = 2", "d = 1")),
        ({"weights": -torch.ones(3)}, ValueError, ("weights", ">= 0")),
        ({"weights": torch.full((3,), math.nan)}, ValueError, ("weights", "NaN")),
        ({"tolerance": -1.0}, ValueError, ("tolerance", "-1.0")),
        ({"tolerance": math.nan}, ValueError, ("tolerance", "nan")),
    ],
)  # fmt: skip
def test_bad_input_of_fits(change, error, words):
    arguments = {
        "weights": torch.ones(3), "positions": torch.tensor([[0.0], [1.0], [2.0]]), "modes": 2
    } | change  # fmt: skip
    with pytest.raises(error) as caught:
        fc.fit_mixture(**arguments)
    assert_says(caught, *words)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"max_modes": 4}, ValueError, ("modes", "3", "4")),
        ({"penalty": math.nan}, ValueError, ("penalty", "nan")),
        ({"penalty": fc.BIC}, TypeError, ("penalty", "BIC()")),
        ({"penalty": "bic"}, TypeError, ("penalty", "'bic'")),
        ({"start": "random"}, TypeError, ("start", "'random'")),
    ],
)
def test_bad_input_of_the_choice(change, error, words):
    arguments = {
        "weights": torch.ones(3), "positions": torch.tensor([[0.0], [1.0], [2.0]]), "max_modes": 2
    } | change  # fmt: skip
    with pytest.raises(error) as caught:
        fc.select_mixture(**arguments)
    assert_says(caught, *words)


@pytest.mark.parametrize(
    ("mixing", "error", "words"),
    [
        (torch.tensor([0.5, 0.6]), ValueError, ("sum to one", "divide")),
        (torch.tensor([1.5, -0.5]), ValueError, (">= 0",)),
        (torch.tensor([math.nan, 1.0]), ValueError, (">= 0", "sum to one")),
        (torch.ones(3) / 3, ValueError, ("(3,)", "(2,)")),
        (torch.tensor([1, 0]), TypeError, ("floating point", "int64")),
        ([0.5, 0.5], TypeError, ("mixing", "list")),
    ],
)
def test_bad_mixing(mixing, error, words):
    with pytest.raises(error) as caught:
        fc.Mixture(mixing, fc.Gaussian(torch.zeros(2, 1), torch.eye(1)))
    assert_says(caught, *words)


def test_bad_components_and_points():
    with pytest.raises(TypeError, match="components") as caught:
        fc.Mixture(torch.ones(1), torch.distributions.Normal(torch.zeros(1), torch.ones(1)))
    assert_says(caught, "Normal")
    mixture = fc.Mixture(MIXING, modes(1.0))
    with pytest.raises(ValueError, match="value") as caught:
        mixture.log_prob(torch.zeros(3))
    assert_says(caught, "2", "3")
