"""Several modes: fitting by EM, and how many to take."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch.autograd import gradcheck

import fenchel as fl
import fenchel.continuous as fc
from fenchel.continuous import em
from tests.continuous.checks import assert_near
from tests.continuous.clumps import clumps
from tests.continuous.families import DOUBLE

# ---- fitting


def sklearn_fit(start, positions, iterations):
    model = GaussianMixture(
        n_components=len(start.mixing),
        weights_init=start.mixing.numpy(),
        means_init=start.components.mean.numpy(),
        precisions_init=np.linalg.inv(start.components.covariance_matrix.numpy()),
        reg_covar=0.0,
        tol=0.0,
        max_iter=iterations,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(positions.numpy())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_weights_are_scikit_learn(count):
    """Farinhas, 2021, eqs. 5.6 to 5.11."""
    _, positions = clumps(apart=2.0)
    equal = torch.full((60,), 3.0, dtype=DOUBLE)
    start = fc.fit_mixture(equal, positions, count, iterations=0)
    for iterations in (1, 5, 30):
        ours = fc.fit_mixture(equal, positions, count, iterations=iterations, start=start)
        theirs = sklearn_fit(start, positions, iterations)
        likelihood = ours.log_likelihood(equal, positions)
        assert_near(likelihood, theirs.score(positions.numpy()), 1e-6)
        assert_near(ours.mixing, theirs.weights_, 1e-6)
        assert_near(ours.components.mean, theirs.means_, 1e-6)
        assert_near(ours.components.covariance_matrix, theirs.covariances_, 1e-6)


def test_whole_weights_are_repeated_data():
    """Farinhas, 2021, eqs. 5.12 to 5.15."""
    _, positions = clumps(apart=2.0)
    counts = torch.randint(1, 5, (60,), generator=torch.Generator().manual_seed(0))
    repeated = positions.repeat_interleave(counts, 0)
    start = fc.fit_mixture(torch.ones(60, dtype=DOUBLE), positions, 3, iterations=0)
    options = {"modes": 3, "iterations": 10, "start": start}
    ours = fc.fit_mixture(counts.to(DOUBLE), positions, **options)
    plain = fc.fit_mixture(torch.ones(len(repeated), dtype=DOUBLE), repeated, **options)
    assert_near(ours.mixing, plain.mixing, 1e-12)
    assert_near(ours.components.mean, plain.components.mean, 1e-12)
    assert_near(ours.components.covariance_matrix, plain.components.covariance_matrix, 1e-12)
    other = fc.fit_mixture(torch.ones(60, dtype=DOUBLE), positions, **options)
    assert (other.mixing - plain.mixing).abs().max() > 1e-3


def likelihoods(weights, positions, count, iterations, **options):
    fits = (
        fc.fit_mixture(weights, positions, count, iterations=k, **options)
        for k in range(iterations)
    )
    return torch.stack([x.log_likelihood(weights, positions) for x in fits])


@given(seed=st.integers(0, 999), count=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_the_likelihood_never_falls(seed, count):
    weights, positions = clumps(seed, 30, apart=1.5)
    gains = likelihoods(weights, positions, count, 12).diff()
    assert (gains >= -1e-12).all()


def test_the_likelihood_rises_at_all():
    weights, positions = clumps(apart=2.0)
    assert likelihoods(weights, positions, 3, 10).diff().max() > 1e-3


def test_a_batch_is_each_member_alone():
    weights, positions = clumps()
    many = torch.stack([weights, weights.flip(0), torch.ones_like(weights)]).reshape(3, 1, 60)
    together = fc.fit_mixture(many, positions, 2, iterations=6)
    assert together.batch_shape == (3, 1)
    for k in range(3):
        alone = fc.fit_mixture(many[k, 0], positions, 2, iterations=6)
        assert_near(together.mixing[k, 0], alone.mixing, 1e-13)
        assert_near(together.components.mean[k, 0], alone.components.mean, 1e-13)


def test_a_piece_without_weight_is_an_empty_mode():
    positions = fc.cell_centers(10).to(DOUBLE)
    weights = torch.zeros(10, dtype=DOUBLE)
    weights[:4] = torch.tensor([1.0, 2.0, 2.0, 1.0], dtype=DOUBLE)
    weights.requires_grad_()
    mixture = fc.fit_mixture(weights, positions, 2, iterations=5)
    assert mixture.modes == 1
    assert_near(mixture.mixing, [1.0, 0.0], 1e-15)
    expected = (weights.detach() @ positions) / weights.detach().sum()
    assert_near(mixture.components.mean[0], expected, 1e-12)
    target = mixture.log_prob(positions[:4]).sum() + mixture.mean.sum()
    (gradient,) = torch.autograd.grad(target, weights)
    assert gradient.isfinite().all()


def test_one_position_for_each_mode():
    """The floor: 1e-6 of the positions' variance."""
    positions = torch.tensor([[0.0], [1.0], [3.0], [6.0]], dtype=DOUBLE)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE)
    start = fc.Mixture(
        torch.full((4,), 0.25, dtype=DOUBLE),
        fc.Gaussian(positions, 0.01 * torch.eye(1, dtype=DOUBLE)),
    )
    mixture = fc.fit_mixture(weights, positions, 4, start=start)
    assert_near(mixture.mixing, weights, 1e-12)
    assert_near(mixture.components.mean, positions, 1e-12)
    floor = 1e-6 * positions.var(correction=0).item()
    assert_near(mixture.components.variance / floor, np.ones((4, 1)), 1e-9)
    other = fc.fit_mixture(weights, positions, 4, start=start, floor=1e-3)
    assert_near(other.components.variance / (1e3 * floor), np.ones((4, 1)), 1e-9)


class Several:
    """All the starting points of other starts."""

    def __init__(self, *starts):
        self.starts = starts

    def parameters(self, data, modes):
        actual = [start.parameters(data, modes) for start in self.starts]
        return type(actual[0])(*(torch.cat(x) for x in zip(*actual, strict=True)))


def test_the_best_of_the_restarts_is_kept():
    weights, positions = clumps(apart=1.5)
    weights = torch.stack([weights, weights.flip(0) ** 3])

    def seeded(seed):
        return fc.Random(1, torch.Generator().manual_seed(seed))

    alone = [fc.fit_mixture(weights, positions, 4, start=seeded(k)) for k in range(6)]
    each = torch.stack([x.log_likelihood(weights, positions) for x in alone])
    start = Several(*(seeded(k) for k in range(6)))
    best = fc.fit_mixture(weights, positions, 4, start=start)
    assert_near(best.log_likelihood(weights, positions), each.amax(0), 1e-12)
    assert (each.amax(0) - each.amin(0)).min() > 1e-3
    assert len(set(each.argmax(0).tolist())) == 2  # each member has a best of its own


def test_random_starts_repeat_with_their_generator():
    weights, positions = clumps()
    fits = [
        fc.fit_mixture(weights, positions, 3, start=fc.Random(2, torch.Generator().manual_seed(4)))
        for _ in range(2)
    ]
    assert torch.equal(fits[0].components.mean, fits[1].components.mean)
    # As many means as positions are drawn without any twice.
    data = em._data(torch.ones(5), torch.randn(5, 2), 1, 1e-6, modes=5)
    mean = fc.Random(3).parameters(data, 5).mean
    assert mean.shape == (3, 5, 2)
    assert all(len(one.unique(dim=0)) == 5 for one in mean)


def test_tolerance_stops_early(monkeypatch):
    weights, positions = clumps()
    steps, advance = [], em._advance

    def counted(now, data, count, regularizer):
        steps.append(count)
        return advance(now, data, count, regularizer)

    monkeypatch.setattr(em, "_advance", counted)
    fc.fit_mixture(weights, positions, 2, iterations=200)
    assert sum(steps) == 200
    steps.clear()
    stopped = fc.fit_mixture(weights, positions, 2, iterations=200, tolerance=1e-4)
    taken = sum(steps)
    assert 2 <= taken < 50
    same = fc.fit_mixture(weights, positions, 2, iterations=taken)
    assert_near(stopped.components.mean, same.components.mean, 1e-14)
    gains = likelihoods(weights, positions, 2, taken + 1).diff()
    assert gains[-1] <= 1e-4  # the last one gained less, the one before more
    assert gains[-2] > 1e-4


def test_derivatives_through_the_iterations():
    _, positions = clumps(count=8, apart=2.0)
    weights = torch.linspace(0.5, 1.5, 8, dtype=DOUBLE).requires_grad_()

    def numbers(w, t):
        mixture = fc.fit_mixture(w, t, 2, iterations=5)
        return torch.cat([mixture.mixing, mixture.components.mean.flatten(),
                          mixture.components.scale.flatten()])  # fmt: skip

    assert gradcheck(lambda w: numbers(w, positions), weights)
    assert gradcheck(lambda t: numbers(weights.detach(), t), positions.clone().requires_grad_())


def test_derivatives_of_a_batch_with_restarts():
    _, positions = clumps(count=8, apart=2.0)
    weights = torch.rand(2, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) + 0.5
    weights.requires_grad_()

    def mixing(w):
        start = fc.Random(3, torch.Generator().manual_seed(1))
        return fc.fit_mixture(w, positions, 2, iterations=5, start=start).components.mean

    assert gradcheck(mixing, weights)


def test_sparse_mixing_drops_modes():
    weights, positions = clumps()
    weights = weights.clone()
    weights[30:] *= 0.02
    plain = fc.fit_mixture(weights, positions, 2)
    sparse = fc.fit_mixture(weights, positions, 2, regularizer=fl.Tsallis(2.0))
    assert plain.modes == 2
    assert sparse.modes == 1
    kept = sparse.components[int(sparse.mixing.argmax())]
    whole = fc.match_moments(weights, positions, fc.Gaussian)
    assert_near(kept.mean, whole.mean, 1e-9)  # all the weight is its
    near_one = fc.fit_mixture(weights, positions, 2, regularizer=fl.Tsallis(1.0))
    assert_near(near_one.mixing, plain.mixing, 1e-9)


def test_sparse_modes_have_the_same_moments():
    weights, positions = clumps()
    gaussian = fc.fit_mixture(weights, positions, 2)
    sparse = fc.fit_mixture(weights, positions, 2, family=fc.Paraboloid)
    assert isinstance(sparse.components, fc.Paraboloid)
    assert_near(sparse.mixing, gaussian.mixing, 1e-14)
    expected = gaussian.components.covariance_matrix
    assert_near(sparse.components.covariance_matrix, expected, 1e-12)
    assert_near(sparse.covariance_matrix, gaussian.covariance_matrix, 1e-12)


def test_regions_are_pieces_of_the_box():
    positions = fc.cell_centers(4, 4).to(DOUBLE)
    weights = torch.ones(16, dtype=DOUBLE)
    for count, centres in (
        (1, [[0.5, 0.5]]),
        (2, [[0.25, 0.5], [0.75, 0.5]]),
        (4, [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]),
    ):
        start = fc.fit_mixture(weights, positions, count, iterations=0, start=fc.Regions())
        assert_near(start.components.mean, centres, 1e-12)
        assert_near(start.mixing, np.full(count, 1 / count), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_low_precision_of_fits(dtype):
    weights, positions = (x.to(dtype) for x in clumps())
    ours = fc.fit_mixture(weights, positions, 2)
    exact = fc.fit_mixture(weights.double(), positions.double(), 2)
    assert ours.mixing.dtype == torch.float32
    assert_near(ours.mixing, exact.mixing, 1e-4)
    assert_near(ours.components.mean, exact.components.mean, 1e-4)


def test_two_clumps_with_one_mode_and_with_two():
    """Farinhas, 2021, figure 5.1: a single mode puts its mass where there is none."""
    weights, positions = clumps(apart=8.0)
    middle = (positions[:30].mean(0) + positions[30:].mean(0)) / 2
    one, two = (fc.fit_mixture(weights, positions, k) for k in (1, 2))
    assert one.prob(middle) > 100 * two.prob(middle)
    gap = two.log_likelihood(weights, positions) - one.log_likelihood(weights, positions)
    assert gap > 0.3


# ---- how many modes


def starts(seed=0, restarts=5):
    return fc.Random(restarts, torch.Generator().manual_seed(seed))


def test_more_modes_fit_no_worse():
    """Farinhas, 2021, section 5.3.3: with restarts, K = 1..5."""
    weights, positions = clumps(apart=2.0)
    best = torch.stack([
        fc.fit_mixture(weights, positions, k, iterations=60, start=starts(k, 12))
        .log_likelihood(weights, positions) for k in range(1, 6)
    ])  # fmt: skip
    assert (best.diff() >= 0).all()


def test_two_clumps_are_two_modes():
    weights, positions = clumps(apart=8.0, count=100)
    for penalty in (30.0, 60, fc.PerMode(30.0), fc.BIC(), fc.MDL()):
        chosen = fc.select_mixture(weights, positions, 4, penalty, start=starts())
        assert chosen.modes == 2
        assert chosen.mixing.shape == (4,)
        assert_near(chosen.mixing.sum(), 1.0, 1e-12)
    means = chosen.components.mean[chosen.mixing > 0]
    expected = torch.stack([positions[:50].mean(0), positions[50:].mean(0)])
    assert (torch.cdist(means, expected).amin(0) < 0.3).all()


def test_a_larger_penalty_takes_no_more_modes():
    weights, positions = clumps(apart=3.0)
    counts = [
        int(fc.select_mixture(weights, positions, 5, p, start=starts()).modes)
        for p in (0.0, 1.0, 10.0, 100.0, 1e3, 1e9)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 1


def test_each_member_has_its_own_number():
    line = fc.cell_centers(60).to(DOUBLE)
    x = line[:, 0]
    one = torch.exp(-((x - 0.5) ** 2) / 0.005)
    two = torch.exp(-((x - 0.2) ** 2) / 0.002) + torch.exp(-((x - 0.8) ** 2) / 0.002)
    three = two + torch.exp(-((x - 0.5) ** 2) / 0.002)
    weights = torch.stack([one, two, three]).reshape(3, 1, 60)
    chosen = fc.select_mixture(weights, line, 4, fc.BIC(), iterations=60, start=starts(0, 20))
    assert chosen.batch_shape == (3, 1)
    assert chosen.modes.tolist() == [[1], [2], [3]]
    alone = fc.select_mixture(two, line, 4, fc.BIC(), iterations=60, start=starts(1, 20))
    point = torch.tensor([0.35], dtype=DOUBLE)
    assert_near(chosen.log_prob(point)[1, 0], alone.log_prob(point), 1e-6)


def test_the_choice_minimises_the_criterion():
    """-2 L sum w log p + penalty, evaluated from outside (eqs. 5.17 to 5.20, table 6.4)."""
    weights, positions = clumps(apart=3.0)
    for penalty in (4.0, fc.AIC(), fc.BIC()):
        price = penalty if callable(penalty) else fc.PerMode(penalty)
        criteria = []
        for k in range(1, 5):
            start = fc.Regions() if k == 1 else Several(fc.Regions())
            fit = fc.fit_mixture(weights, positions, k, iterations=30, start=start)
            likelihood = fit.log_likelihood(weights, positions).item()
            criteria.append(-2 * 60 * likelihood + price(k, 2, 60))
        chosen = fc.select_mixture(
            weights, positions, 4, penalty, iterations=30, start=fc.Regions()
        )
        likelihood = chosen.log_likelihood(weights, positions).item()
        actual = -2 * 60 * likelihood + price(int(chosen.modes), 2, 60)
        assert_near(actual, min(criteria), 1e-9)
        assert int(chosen.modes) == 1 + int(np.argmin(criteria))


def test_penalties():
    """6 K - 1 free parameters in the plane; twice Rissanen's code length is BIC."""
    assert em.free_parameters(3, 2) == 17
    assert em.free_parameters(2, 1) == 5
    for k in (1, 4):
        assert fc.AIC()(k, 2, 196) == 2 * (6 * k - 1)
        assert fc.BIC()(k, 2, 196) == math.log(196) * (6 * k - 1)
        assert fc.MDL()(k, 2, 196) == fc.BIC()(k, 2, 196)
        assert fc.PerMode(10.0)(k, 2, 196) == 10.0 * k


def test_a_penalty_may_be_any_function():
    weights, positions = clumps(apart=8.0)
    three = fc.select_mixture(
        weights, positions, 4, lambda k, d, n: 0.0 if k == 3 else 1e9, start=starts()
    )
    assert three.modes == 3


def test_selection_is_differentiable():
    weights, positions = clumps(count=20, apart=6.0)
    weights.requires_grad_()
    chosen = fc.select_mixture(weights, positions, 3, 20.0, start=fc.Regions())
    (gradient,) = torch.autograd.grad(chosen.components.mean.sum(), weights)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 1e-3


# ---- starts


def test_one_start_serves_a_batch():
    positions = fc.cell_centers(10).double()
    weights = torch.rand(3, 10, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    start = fc.fit_mixture(weights[0], positions, 2)
    mixture = fc.fit_mixture(weights, positions, 2, start=start, iterations=3)
    assert mixture.batch_shape == (3,)
    alone = fc.fit_mixture(weights[2], positions, 2, start=start, iterations=3)
    torch.testing.assert_close(mixture[2].components.mean, alone.components.mean)


@pytest.mark.parametrize("shape", [(1, 20), (20, 1)])
def test_regions_cut_an_axis_that_has_an_extent(shape):
    weights = torch.zeros(20)
    weights[2] = weights[17] = 1
    mixture = fc.fit_mixture(weights, fc.cell_centers(*shape), 2)
    torch.testing.assert_close(mixture.mixing, torch.tensor([0.5, 0.5]))
