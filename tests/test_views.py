"""What the weights mean: each identity against autograd."""

import pytest
import torch

import fenchel as fl
from tests.families import FAMILIES

DOUBLE = torch.float64
TAU = 0.7


def row(seed=0, length=6):
    return torch.randn(length, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, bound=1e-13):
    assert (a - b).abs().max() <= bound


def test_gradient_of_the_log_sum_exp_potential_is_the_weights():
    scores = row()
    gradient = torch.func.grad(lambda s: fl.solve(s, fl.Shannon(TAU)).potential)(scores)
    assert_close(gradient, torch.softmax(scores / TAU, -1))
    potential = fl.solve(scores, fl.Shannon(TAU)).potential
    assert_close(potential, TAU * torch.logsumexp(scores / TAU, -1))


def test_hessian_of_the_potential_is_temperature_times_fisher():
    scores = row()
    solution = fl.solve(scores, fl.Shannon(TAU))
    hessian = torch.func.hessian(lambda s: fl.solve(s, fl.Shannon(TAU)).potential)(scores)
    p = solution.weights
    assert_close(hessian, (p.diag() - torch.outer(p, p)) / TAU)
    assert_close(solution.hessian(), hessian)
    assert_close(solution.fisher(), hessian / TAU)
    assert_close(solution.fisher(), (p.diag() - torch.outer(p, p)) / TAU**2)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
def test_fisher_is_the_second_moment_of_the_score_function(alpha):
    scores = row() / 2
    solution = fl.solve(scores, fl.Tsallis(alpha, TAU))
    p = solution.weights
    jacobian = torch.func.jacrev(lambda s: fl.solve(s, fl.Tsallis(alpha, TAU)).weights)(scores)
    expected = sum(torch.outer(j, j) / q for j, q in zip(jacobian, p, strict=True) if q > 0)
    assert_close(solution.fisher(), expected, 1e-11 * (1 + expected.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_is_response_times_advantage(name):
    scores, utility = row(1, 4).requires_grad_(), row(2, 4)
    solution = fl.solve(scores, FAMILIES[name]())
    (gradient,) = torch.autograd.grad((solution.weights * utility).sum(), scores)
    assert_close(solution.gradient(utility), gradient, 1e-12)
    escort = solution.escort()
    assert_close(solution.advantage(utility), utility - (escort * utility).sum())
    # A constant utility is no advantage to anyone.
    assert_close(solution.advantage(torch.ones_like(utility)), torch.zeros(4, dtype=DOUBLE))


def test_softmax_gradient_as_utility_minus_mean():
    """L-5: dLoss/ds_j = (p_j / tau)(l_j - E_p l)."""
    scores, loss = row(1).requires_grad_(), row(2)
    p = fl.solve(scores, fl.Shannon(TAU)).weights
    (gradient,) = torch.autograd.grad((p * loss).sum(), scores)
    assert_close(gradient, p / TAU * (loss - (p * loss).sum()))


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_escort_is_the_gradient_of_the_threshold(alpha):
    scores = row() / 2
    solution = fl.solve(scores, fl.Tsallis(alpha))
    gradient = torch.func.grad(lambda s: fl.solve(s, fl.Tsallis(alpha)).threshold)(scores)
    assert_close(solution.escort(), gradient)
    power = torch.where(solution.support, solution.weights ** (2 - alpha), 0.0)
    assert_close(solution.escort(), power / power.sum())


def test_policy_gradient_with_any_baseline():
    """L-5pg: E_{j~p}[(r_j - b) grad log p_j] is the gradient, whatever b."""
    scores, utility = row(3), row(4)
    solution = fl.solve(scores, fl.Tsallis(1.5))
    p = solution.weights
    score = torch.func.jacrev(lambda s: fl.entmax(s, 1.5))(scores)[p > 0] / p[p > 0, None]
    for baseline in (0.0, 1.7):
        expectation = (p[p > 0, None] * (utility[p > 0] - baseline)[:, None] * score).sum(0)
        assert_close(expectation, solution.gradient(utility), 1e-12)


def test_natural_gradient_identity():
    """L-7: F^+ grad = tau (l - mean l); a step on the scores is multiplicative weights."""
    scores, loss = row(5), row(6)
    solution = fl.solve(scores, fl.Shannon(TAU))
    natural = torch.linalg.pinv(solution.fisher(), hermitian=True) @ solution.gradient(loss)
    assert_close(natural, TAU * (loss - loss.mean()), 1e-11)
    step = 0.3
    moved = fl.solve(scores - step * natural, fl.Shannon(TAU)).weights
    multiplied = solution.weights * (-step * loss).exp()
    assert_close(moved, multiplied / multiplied.sum(), 1e-12)


def test_divergence_is_half_the_fisher_form():
    """L-6KL: KL(p(s + d) | p(s)) = d F d / 2 + O(|d|^3)."""
    scores, direction = row(7), row(8)
    solution = fl.solve(scores, fl.Shannon(TAU))
    ratios = []
    for h in (1e-1, 1e-2, 1e-3):
        moved = fl.solve(scores + h * direction, fl.Shannon(TAU)).weights
        divergence = (moved * (moved / solution.weights).log()).sum()
        ratios.append(divergence / (h * h * direction @ solution.fisher() @ direction / 2))
    errors = [abs(r - 1) for r in ratios]
    assert errors[2] < 1e-2
    assert errors[1] < errors[0] / 5
    assert errors[2] < errors[1] / 5


def test_gap_of_shannon_is_the_divergence():
    """L-1: J(p') - J(p) = tau KL(p' | p)."""
    from dataclasses import replace

    solution = fl.solve(row(9), fl.Shannon(TAU))
    other = fl.softmax(row(10))
    expected = TAU * (other * (other / solution.weights).log()).sum()
    assert_close(replace(solution, weights=other).gap, expected)
