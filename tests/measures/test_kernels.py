"""Kernels: stochastic matrices, loops over points, and the laws of composition."""

import pytest
import torch

from fenchel.measures import (
    Deterministic,
    Dirac,
    Dot,
    Empirical,
    FeedForward,
    GaussianPotential,
    Kernel,
    KernelMixture,
    LayerNorm,
    Lookup,
    Residual,
    ScaledDot,
    Softmatch,
    boltzmann_gibbs,
)

from .draws import F64, chain, close, measure, normal, shares


class Split(Kernel):
    """x -> c x or -x, with probabilities that depend on x: nothing shared."""

    def __init__(self, c):
        self.c = c

    def _at(self, x):
        p = x.sum(-1).sigmoid()
        return Empirical(torch.stack([self.c * x, -x], -2), torch.stack([p, 1 - p], -1))


def zoo(d=3):
    """One kernel of every kind of support."""
    return {
        "shared": Softmatch(Dot())(measure(4, d, seed=11)),
        "split": Split(0.5),
        "dirac": Deterministic(normal(d, d, seed=12) / 2),
        "mixed": KernelMixture([Split(0.3), Deterministic(torch.tanh)], [0.4, 0.6]),
        "residual": Residual(Softmatch(GaussianPotential())(measure(2, d, seed=13))),
    }


def test_composition_of_stochastic_matrices_is_their_product():  # definition 2
    points = normal(4, 2)
    a, b, c = (shares(4, 4, seed=s) for s in range(3))
    A, B, C = (Lookup.stochastic(points, m) for m in (a, b, c))
    mu = Empirical(points, shares(4, seed=5))
    assert close((mu @ A).weights, mu.weights @ a, 1e-15)
    assert close((A @ B).at(points).weights, a @ b, 1e-15)
    for law in ((A @ B) @ C, A @ (B @ C)):
        assert close(law.at(points).weights, a @ b @ c, 1e-14)
    assert close(((mu @ A) @ B).weights, (mu @ (A @ B)).weights, 1e-14)
    assert not close((A @ B).at(points).weights, b @ a, 1e-3)  # the order matters


@pytest.mark.parametrize("first", list(zoo()))
@pytest.mark.parametrize("second", list(zoo()))
@pytest.mark.parametrize("third", ["shared", "split"])
def test_kernels_associate(first, second, third):
    K, L, M = (zoo()[name] for name in (first, second, third))
    mu = measure(5, 3, seed=20)

    def function(x):
        return torch.stack([x.sin().sum(-1), x[..., 0] * x[..., 1]], -1)

    values = [
        (((mu @ K) @ L) @ M).expectation(function),
        (mu @ (K @ (L @ M))).expectation(function),
        (mu @ ((K @ L) @ M)).expectation(function),
        (mu @ K).expectation(L @ (M @ function)),
        mu.expectation((K @ L) @ (M @ function)),
        mu.expectation(K @ (L @ (M @ function))),
    ]
    for value in values[1:]:
        assert close(value, values[0], 1e-14)


@pytest.mark.parametrize("name", list(zoo()))
def test_a_kernel_is_the_loop_over_its_points(name):
    K = zoo()[name]
    mu = measure(5, 3, seed=20)
    loop = sum(mu.weights[i] * (Dirac(mu.points[i]) @ K).expectation(torch.sin) for i in range(5))
    assert close((mu @ K).expectation(torch.sin), loop, 1e-14)
    rows = torch.stack([(Dirac(x) @ K).mean for x in mu.points])
    assert close(K.at(mu.points).mean, rows, 1e-14)
    assert close((mu @ K).weights.sum(), torch.tensor(1.0, dtype=F64), 1e-14)


@pytest.mark.parametrize("first", list(zoo()))
@pytest.mark.parametrize("second", list(zoo()))
def test_batches_are_many_at_once(first, second):
    K = zoo()[first] @ zoo()[second]
    mu = measure(5, 3, seed=20, batch=(2, 4))
    expectation = (mu @ K).expectation(torch.sin)
    for i in range(2):
        for j in range(4):
            one = Empirical(mu.points[i, j], mu.weights[i, j]) @ K
            assert close(expectation[i, j], one.expectation(torch.sin), 1e-14)


def test_a_kernel_may_have_batch_axes_of_its_own():
    """As many as the measure has, or more: they never meet the axis of points."""
    nu = measure(5, 3, seed=1, batch=(5,))  # 5 measures, 5 points: a mix-up would go unnoticed
    K = Softmatch(Dot())(nu)
    L = Softmatch(GaussianPotential())(measure(5, 3, seed=2, batch=(5,)))
    mu = measure(5, 3, seed=3)
    mean = (mu @ K @ L).mean
    again = (mu @ (K @ L)).mean
    split = (mu @ (Split(0.5) @ L)).mean
    assert mean.shape == (5, 3)
    for b in range(5):
        k = Softmatch(Dot())(Empirical(nu.points[b], nu.weights[b]))
        one = Softmatch(GaussianPotential())(Empirical(L.nu.points[b], L.nu.weights[b]))
        assert close(mean[b], (mu @ k @ one).mean, 1e-14)
        assert close(again[b], mean[b], 1e-14)
        assert close(split[b], (mu @ Split(0.5) @ one).mean, 1e-14)


def test_a_shared_support_stays_shared():
    nu = measure(7, 2, seed=1)
    x = normal(50, 2)
    at = Softmatch(Dot())(nu).at(x)
    assert at.points.shape == (1, 7, 2)
    assert at.weights.shape == (50, 7)
    composed = (Split(0.5) @ Softmatch(Dot())(nu)).at(x)
    assert composed.points.shape == (1, 7, 2)
    assert (Empirical(x) @ Softmatch(Dot())(nu)).size == 7
    mapped = (Softmatch(Dot())(nu) @ Deterministic(torch.tanh)).at(x)
    assert mapped.points.shape == (1, 7, 2)


def test_points_without_mass_and_of_a_shared_batch():
    points, weights = normal(4, 2), shares(3, 4)
    K = Split(0.5)
    mean = (Empirical(points, weights) @ K).mean  # three measures on the same points
    each = torch.stack([(Empirical(points, w) @ K).mean for w in weights])
    assert close(mean, each, 1e-15)


def test_boltzmann_gibbs_reweights():  # definition 3
    nu = measure(6, 2)
    g1, g2 = normal(6, seed=5), normal(6, seed=6)
    expected = nu.weights * g1.exp() / (nu.weights * g1.exp()).sum()
    assert close(boltzmann_gibbs(g1, nu).weights, expected, 1e-15)
    twice = boltzmann_gibbs(g1, boltzmann_gibbs(g2, nu))
    assert close(twice.weights, boltzmann_gibbs(g1 + g2, nu).weights, 1e-15)
    by_function = boltzmann_gibbs(lambda x: x[..., 0], nu)
    assert close(by_function.weights, boltzmann_gibbs(nu.points[:, 0], nu).weights, 0.0)


def test_boltzmann_gibbs_is_the_rule_of_bayes():  # remark 11
    grid = torch.linspace(-3, 3, 61, dtype=F64)
    prior = torch.softmax(-grid.square(), 0)
    likelihood = -(0.7 - grid).square() / (2 * 0.3**2)
    expected = prior * likelihood.exp() / (prior * likelihood.exp()).sum()
    posterior = boltzmann_gibbs(likelihood, Empirical(grid.unsqueeze(-1), prior))
    assert close(posterior.weights, expected, 1e-15)


def test_large_scores_do_not_overflow():
    nu = measure(4, 1)
    g = torch.tensor([1e4, 1e4 - 1, -1e4, 0.0], dtype=F64)
    weights = boltzmann_gibbs(g, nu).weights
    assert close(weights, torch.softmax(g + nu.weights.log(), 0), 1e-12)  # 1e4 has few digits left


def test_a_point_without_mass_gets_none_and_keeps_its_derivative():
    points, g = normal(3, 1), torch.tensor([0.2, -0.3, 1.1], dtype=F64)

    def psi(masses):
        return boltzmann_gibbs(g, Empirical.of_masses(points, masses)).weights

    masses = torch.tensor([0.5, 0.5, 0.0], dtype=F64)
    assert psi(masses)[2] == 0
    jacobian = torch.autograd.functional.jacobian(psi, masses)
    step = torch.tensor([0.0, 0.0, 1e-7], dtype=F64)
    assert close(jacobian[:, 2], (psi(masses + step) - psi(masses)) / 1e-7, 1e-6)


def test_softmatch_averages_rows():  # definition 4
    q, nu = measure(3, 2, seed=1), measure(5, 2, seed=2)
    rows = torch.softmax(q.points @ nu.points.mT / 2**0.5 + nu.weights.log(), -1)
    K = Softmatch(ScaledDot())(nu)
    assert close(K.at(q.points).weights, rows, 1e-15)
    assert close((q @ K).weights, q.weights @ rows, 1e-15)


def test_residual_is_the_law_of_the_sum():
    K = Split(0.5)
    x = normal(4, 3)
    at, plain = Residual(K).at(x), K.at(x)
    assert close(at.points, x.unsqueeze(-2) + plain.points, 0.0)
    assert close(at.weights, plain.weights, 0.0)


def test_mixture_is_linear():
    a, b = Split(0.5), Softmatch(Dot())(measure(4, 3, seed=3))
    x = normal(5, 3)
    mixed = KernelMixture([a, b], torch.tensor([0.3, 0.7], dtype=F64))
    expected = 0.3 * (a @ torch.sin)(x) + 0.7 * (b @ torch.sin)(x)
    assert close((mixed @ torch.sin)(x), expected, 1e-15)
    assert close(
        (KernelMixture([a, b]) @ torch.sin)(x), ((a @ torch.sin)(x) + (b @ torch.sin)(x)) / 2
    )


def test_modules_of_tokens():
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(3).double()
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    net = net.double()
    mu = measure(5, 3)
    moved = mu @ LayerNorm(norm) @ FeedForward(net)
    assert close(moved.points, net(norm(mu.points)), 1e-15)
    assert close(moved.weights, mu.weights, 0.0)


def test_kernels_of_a_chain_keep_its_law_stationary():
    points = normal(3, 1)
    K = chain(points, seed=4)
    mu = Empirical(points)
    for _ in range(200):
        mu = mu @ K
    assert close((mu @ K).weights, mu.weights, 1e-14)
