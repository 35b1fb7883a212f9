"""A regulariser written from outside passes the suite; wrong ones fail where they should."""

from dataclasses import dataclass

import pytest
import torch

import fenchel as fl
from fenchel.regularizers import Curvature, Dual, Maximum
from fenchel.testing import RegularizerContract


@dataclass(frozen=True)
class Burg(fl.Regularizer):
    """Omega(p) = -strength * sum log p: p_i = strength / (t - s_i), nobody gets nothing."""

    strength: float = 0.5
    full_support = True

    def value(self, weights, base):
        logs = torch.where(base.allowed, weights.clamp(min=1e-300), 1.0).log()
        return -self.strength * logs.sum(-1)

    def maximize(self, scores, base):
        n = base.allowed.sum(-1, keepdim=True).clamp(min=1)
        low = torch.full_like(scores[..., :1], self.strength)  # the largest key alone has all
        high = self.strength * n  # every key has at most 1/n
        with torch.no_grad():
            for _ in range(80):
                middle = (low + high) / 2
                enough = self._weights(scores, base, middle).sum(-1, keepdim=True) >= 1
                low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        t = low.detach()
        for _ in range(2):  # derivatives, as in regularizers/tsallis.py
            p = self._weights(scores, base, t)
            slope = (p**2).sum(-1, keepdim=True) / self.strength
            slope = torch.where(slope > 0, slope, 1.0)
            t = t + (p.sum(-1, keepdim=True) - 1) / slope
        p = self._weights(scores, base, t)
        potential = (scores * p).sum(-1) - self.value(p, base)
        threshold = torch.full_like(potential, -torch.inf)
        return Maximum(p, threshold, potential, Dual(t.squeeze(-1)))

    def _weights(self, scores, base, t):
        distance = torch.where(base.allowed, t - scores, 1.0)
        return torch.where(base.allowed, self.strength / distance, 0.0)

    def curvature(self, weights, base):
        return Curvature.separable(weights**2 / self.strength)


class Rows(RegularizerContract):
    def make_scores(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(3, 6, dtype=torch.float64, generator=generator)


class TestBurg(Rows):
    def make_regularizer(self):
        return Burg()


class WrongValue(Burg):
    def value(self, weights, base):
        return 1.1 * super().value(weights, base)


class WrongMap(Burg):
    """Right at first sight: a distribution that favours high scores, but not the maximiser."""

    def maximize(self, scores, base):
        return super().maximize(1.05 * scores, base)


class WrongCurvature(Burg):
    def curvature(self, weights, base):
        return Curvature.separable(weights / self.strength)


class WrongDerivative(Burg):
    def maximize(self, scores, base):
        right = super().maximize(scores, base)
        halfway = (right.weights + right.weights.detach()) / 2
        return right._replace(weights=halfway)


class WrongMask(Burg):
    def _weights(self, scores, base, t):
        return self.strength / (t - scores).clamp(min=self.strength / 10)


class BlindCertificate(Burg):
    def gap(self, scores, weights, dual, base):
        return torch.zeros(scores.shape[:-1], dtype=torch.float64)


WRONG = {
    WrongValue: ["test_no_other_answer_is_better", "test_gradient_of_potential_is_the_weights"],
    WrongMap: ["test_no_other_answer_is_better", "test_gap_certifies_and_detects"],
    WrongCurvature: ["test_curvature_is_the_derivative"],
    WrongDerivative: ["test_first_and_second_derivative", "test_transforms_agree"],
    WrongMask: ["test_masked_keys_get_nothing"],
    BlindCertificate: ["test_gap_certifies_and_detects"],
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.__name__)
def test_a_wrong_regulariser_fails_the_suite(wrong):
    class Suite(Rows):
        def make_regularizer(self):
            return wrong()

    for name in WRONG[wrong]:
        # gradcheck reports a wrong derivative by its own error, everything else by assertion
        with pytest.raises((AssertionError, RuntimeError)):
            getattr(Suite(), name)()
    with pytest.raises((AssertionError, RuntimeError)):
        Suite().run()


def test_the_factories_are_required():
    with pytest.raises(TypeError, match="make_regularizer"):
        RegularizerContract().make_regularizer()
    with pytest.raises(TypeError, match="make_scores"):
        RegularizerContract().run()


class EntropyByHand(fl.Regularizer):
    """Shannon without its own certificate: Omega has infinite slope at zero."""

    def value(self, weights, base):
        return torch.special.xlogy(weights, weights).sum(-1)

    def maximize(self, scores, base):
        return fl.Shannon().maximize(scores, base)

    def curvature(self, weights, base):
        return fl.Shannon().curvature(weights, base)


def test_the_derived_gap_is_never_negative_nor_nan():
    scores = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    gap = fl.solve(scores, EntropyByHand()).gap
    assert (gap >= 0).all()
    assert gap.max() <= 1e-5  # of first order in float32 weights
    underflown = fl.solve(torch.tensor([0.0, -1.0, -200.0]), EntropyByHand()).gap
    assert underflown == torch.inf
