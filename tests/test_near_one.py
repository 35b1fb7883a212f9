"""alpha next to one, where the textbook formula is 0/0: against 50-digit references."""

import mpmath
import pytest
import torch

import fenchel as fl

mpmath.mp.dps = 50
SCORES = (0.3, -1.2, 2.0, 0.9, -3.5)
MASSES = (1.0, 0.5, 0.25, 2.0, 1.5)
EPSILONS = (0.0, 1e-12, 1e-8, 1e-4, 1e-2, 0.3)


def reference_weights(eps, tau, masses=None):
    """Solve sum nu exp_{2-alpha}((s - A)/tau) = 1 with 50 digits."""
    eps, tau = mpmath.mpf(eps), mpmath.mpf(tau)
    scores = [mpmath.mpf(s) for s in SCORES]
    masses = [mpmath.mpf(m) for m in masses or [1.0] * len(scores)]

    def weights(offset):
        result = []
        for s, m in zip(scores, masses, strict=True):
            u = (s - offset) / tau
            y = 1 + eps * u
            power = mpmath.exp(u) if eps == 0 else (y ** (1 / eps) if y > 0 else mpmath.mpf(0))
            result.append(m * power)
        return result

    guess = tau * mpmath.log(
        sum(m * mpmath.exp(s / tau) for s, m in zip(scores, masses, strict=True))
    )
    # The starting guess is softmax's; from there the secant method is safe for eps up to 0.3.
    offset = mpmath.findroot(lambda a: sum(weights(a)) - 1, (guess, guess - 0.01))
    return weights(offset)


def reference_slope(eps, tau, masses=None):
    """d weights / d alpha by a right-hand difference of fourth order with 50 digits."""
    h = mpmath.mpf("1e-9")
    values = [reference_weights(mpmath.mpf(eps) + k * h, tau, masses) for k in range(5)]
    coefficients = [mpmath.mpf(c) / 12 for c in (-25, 48, -36, 16, -3)]
    return [
        sum(c * v[i] for c, v in zip(coefficients, values, strict=True)) / h
        for i in range(len(SCORES))
    ]


def relative_error(actual, expected):
    return max(
        abs(mpmath.mpf(a) - e) / (abs(e) + mpmath.mpf("1e-3"))
        for a, e in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("masses", [None, MASSES], ids=["plain", "base"])
@pytest.mark.parametrize("eps", EPSILONS)
def test_values_and_slope_in_alpha(eps, masses):
    scores = torch.tensor(SCORES, dtype=torch.float64)
    base = None if masses is None else torch.tensor(masses, dtype=torch.float64)
    alpha = torch.tensor(1 + eps, dtype=torch.float64)
    exact_eps = mpmath.mpf(alpha.item()) - 1  # what the float really holds
    tau = 0.75
    weights, slope = torch.func.jvp(
        lambda a: fl.solve(scores, fl.Tsallis(a, tau), base=base).weights,
        (alpha,),
        (torch.ones_like(alpha),),
    )
    assert relative_error(weights.tolist(), reference_weights(exact_eps, tau, masses)) < 1e-14
    assert relative_error(slope.tolist(), reference_slope(exact_eps, tau, masses)) < 1e-12


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_number_alpha_next_to_one(eps):
    scores = torch.tensor(SCORES, dtype=torch.float64)
    expected = reference_weights(mpmath.mpf(1 + eps) - 1, 1.0)
    assert relative_error(fl.entmax(scores, 1 + eps).tolist(), expected) < 1e-14


@pytest.mark.parametrize("eps", EPSILONS)
def test_value_of_omega_next_to_one(eps):
    p = torch.tensor([0.1, 0.2, 0.0, 0.7], dtype=torch.float64)
    alpha = torch.tensor(1 + eps, dtype=torch.float64)
    exact_eps = mpmath.mpf(alpha.item()) - 1
    terms = []
    for x in (mpmath.mpf(v) for v in p.tolist()):
        if x == 0:
            continue
        a = exact_eps + 1
        terms.append(x * mpmath.log(x) if exact_eps == 0 else (x**a - x) / (a * exact_eps))
    omega = fl.Tsallis(alpha)
    base = fl.priors.Base(torch.ones(4, dtype=torch.bool))
    assert abs(mpmath.mpf(omega.value(p, base).item()) - sum(terms)) < 1e-15


def test_second_derivative_in_alpha_is_smooth_through_one():
    scores = torch.tensor(SCORES, dtype=torch.float64)

    def curve(a):
        return (fl.entmax(scores, a) * scores).sum()

    second = torch.func.grad(torch.func.grad(curve))
    at = [second(torch.tensor(1 + e, dtype=torch.float64)).item() for e in (0.0, 1e-12, 1e-8, 1e-6)]
    slope = abs(second(torch.tensor(1.01, dtype=torch.float64)).item() - at[0]) / 0.01
    assert all(abs(value - at[0]) <= 2 * slope * 1e-6 + 1e-9 for value in at)
