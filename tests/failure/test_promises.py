"""The promise of `solve` and `attention`: weights are right, or the status says that they are not.

Scores, masses, biases and temperatures of any size and precision, against sixty digits.
"""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import fenchel as fl
from tests import extended

# Half the digits of the weights; half precision rounds the weights themselves.
ALLOWED = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Case:
    scores: Tensor  # (n,)
    base: object
    log_mass: Tensor  # (n,), float64
    alpha: float
    temperature: float

    @property
    def regularizer(self):
        if self.alpha == 1:
            return fl.Shannon(self.temperature)
        return fl.Tsallis(self.alpha, self.temperature)

    @property
    def allowed(self):
        """For alpha > 2 an ulp of a score moves a weight by a power of it."""
        return ALLOWED[self.scores.dtype] ** (1 / max(1.0, self.alpha - 1))

    def expected(self):
        exact = extended.weights(
            self.scores.tolist(), self.log_mass.tolist(), self.alpha, self.temperature
        )
        return torch.tensor([float(weight) for weight in exact], dtype=torch.float64)


def draw(rng):
    n = rng.randint(1, 6)
    dtype = rng.choice(list(ALLOWED))
    size = rng.choice([1, 10, 1e3] if dtype == torch.float16 else [1, 10, 1e3, 1e4, 1e6, 1e8])
    values = [rng.gauss(0, 1) * (size if rng.random() < 0.4 else 1) for _ in range(n)]
    scores = torch.tensor(values, dtype=torch.float64).to(dtype)
    if rng.random() < 0.2:
        scores[rng.randrange(n)] = -math.inf
    logits = _logits(rng, scores)
    base, log_mass = _base(rng, logits)
    alpha = rng.choice([1, 1.01, 1.1, 1.25, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0])
    temperature = rng.choice([0.5, 1.0, 2.0, 10 ** rng.uniform(-6, 6)])
    return Case(scores, base, log_mass, alpha, temperature)


def _logits(rng, scores):
    """Log masses of any size, or such as cancel the scores."""
    n, dtype = len(scores), torch.promote_types(scores.dtype, torch.float32)
    width = rng.choice([0, 1, 10, 100, 1e3, 1e9])
    logits = torch.tensor([rng.gauss(0, 1) * width for _ in range(n)], dtype=dtype)
    if rng.random() < 0.3:
        noise = torch.tensor([rng.gauss(0, 1) for _ in range(n)])
        logits = (noise - scores.double()).to(dtype).nan_to_num(neginf=0.0, posinf=0.0)
    if rng.random() < 0.2:
        logits[rng.randrange(n)] = -math.inf
    return logits


def _base(rng, logits):
    """A prior, a measure, a mask or nothing, and its log mass."""
    kind = rng.choice(["prior", "measure", "mask", "nothing"])
    measure = logits.double().exp().to(logits.dtype)
    if kind == "prior" or (kind == "measure" and measure.isinf().any()):
        return fl.priors.Preference(logits), logits.double()
    if kind == "measure":
        return measure, measure.double().log()
    if kind == "mask":
        mask = logits > -math.inf
        return mask, torch.where(mask, 0.0, -math.inf).double()
    return None, torch.zeros(len(logits), dtype=torch.float64)


def off_by(weights, case):
    return (weights.double() - case.expected()).abs().max().item()


def through_solve(case):
    solution = fl.solve(case.scores, case.regularizer, base=case.base)
    return solution.weights, int(solution.status)


def through_attention(case):
    """One query of one component, so that the scores are the keys, exactly."""
    n = len(case.scores)
    query = torch.ones(1, 1, 1, 1, dtype=case.scores.dtype)
    bias = torch.where(case.scores > -math.inf, 0.0, -math.inf).to(case.scores.dtype)
    key = case.scores.nan_to_num(neginf=0.0).reshape(1, 1, n, 1)
    value = torch.eye(n, dtype=case.scores.dtype).reshape(1, 1, n, n)
    options = {"base": case.base, "attn_mask": bias.reshape(1, n), "scale": 1.0}
    output = fl.attention(query, key, value, case.regularizer, **options)
    solution = fl.attention_solution(query, key, value, case.regularizer, **options)
    return output.flatten(), int(solution.status)


def check(seed, count, compute):
    """How many rows were OK; every one of them is right."""
    rng, solved = random.Random(seed), 0
    for _ in range(count):
        case = draw(rng)
        weights, status = compute(case)
        if status == fl.Status.OK:
            solved += 1
            assert off_by(weights, case) <= case.allowed, case
    return solved


WAYS = pytest.mark.parametrize("compute", [through_solve, through_attention])


@WAYS
def test_weights_are_right_or_the_status_says_otherwise(compute):
    assert check(0, 150, compute) > 108


@WAYS
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_weights_are_right_or_the_status_says_otherwise_at_length(compute, seed):
    assert check(seed, 2500, compute) > 1800


def test_the_check_notices_a_wrong_answer():
    def wrong(case):
        weights, status = through_solve(case)
        return weights.roll(1) + 0.1, status

    with pytest.raises(AssertionError):
        check(0, 20, wrong)


def test_a_massless_score_of_any_size_decides_nothing():
    scores = torch.tensor([[1e8, 1.0, 2.0, 3.0]])
    prior = fl.priors.Preference(torch.tensor([-1e9, 0.0, 0.0, 0.0]))
    for omega in (fl.Shannon(), fl.Tsallis(1.5), fl.Tsallis(2.0)):
        solution = fl.solve(scores, omega, base=prior)
        alone = fl.solve(scores[:, 1:], omega).weights
        assert (solution.weights[:, 1:] - alone).abs().max() < 1e-6
        assert solution.status.tolist() == [fl.Status.OK]


def test_a_gap_above_its_tolerance_is_not_ok():
    # Score and log mass cancel to a few units, which float64 cannot hold at this size.
    scores = torch.tensor([1e17, 3.0], dtype=torch.float64)
    prior = fl.priors.Preference(torch.tensor([-1e17, 0.0], dtype=torch.float64))
    solution = fl.solve(scores, fl.Shannon(), base=prior)
    assert solution.status == fl.Status.INEXACT
    assert solution.gap > solution.tolerance
    with pytest.raises(fl.SolveError, match="INEXACT"):
        fl.solve(scores, fl.Shannon(), base=prior, throw=True)


def test_tiny_masses_leave_shannon_finite():
    for mass in (1e-40, 1e-320):
        dtype = torch.float32 if mass > 1e-45 else torch.float64
        solution = fl.solve(
            torch.tensor([1.0, 2.0, 3.0], dtype=dtype),
            fl.Shannon(),
            base=torch.full((3,), mass, dtype=dtype),
        )
        expected = torch.tensor([1.0, 2.0, 3.0], dtype=dtype).softmax(-1)
        assert (solution.weights - expected).abs().max() < 1e-6


def test_the_mass_term_of_the_gap_has_the_scale_of_the_base():
    scores = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64)
    small = torch.full((3,), 1e-10, dtype=torch.float64)
    by_base = fl.solve(scores, fl.Tsallis(2.0), base=small)
    by_temperature = fl.solve(scores, fl.Tsallis(2.0, 1e10))
    off = by_base.weights * (1 + 1e-3)
    assert torch.allclose(by_base.gap_of(off), by_temperature.gap_of(off), rtol=1e-6)
