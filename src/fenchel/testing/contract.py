"""The contract suite: what every regulariser must satisfy, ours and yours.

    from fenchel.testing import RegularizerContract

    class TestMine(RegularizerContract):
        def make_regularizer(self):
            return Mine(strength=0.3)

        def make_scores(self, seed):
            generator = torch.Generator().manual_seed(seed)
            return torch.randn(3, 6, dtype=torch.float64, generator=generator)

pytest collects the inherited tests; without pytest, `TestMine().run()` runs them all. The scores
should be float64, at most a few dozen keys, and not on the boundary of a support, where a
derivative does not exist.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fenchel._numerics import dot
from fenchel._solution import Solution, Status
from fenchel._solve import solve
from fenchel.priors.measure import Base
from fenchel.regularizers.contract import Regularizer
from fenchel.testing.optimality import assert_optimal, perturbed

# Rounding of a few dozen float64 operations on numbers of order ten.
_ROUNDING = 1e-12
_SEEDS = range(3)


class RegularizerContract:
    """Write the two factories; the tests below do the rest."""

    @abstractmethod
    def make_regularizer(self) -> Regularizer:
        """The regulariser under test."""
        raise TypeError("write make_regularizer() in your subclass")

    @abstractmethod
    def make_scores(self, seed: int) -> Tensor:
        """Scores (rows, keys) in float64, different for each seed."""
        raise TypeError("write make_scores(seed) in your subclass")

    def run(self) -> None:
        """Run every test, in the order of the file."""
        for name in [name for name in dir(self) if name.startswith("test_")]:
            getattr(self, name)()

    # -- helpers

    def _solve(self, scores: Tensor) -> Solution:
        return solve(scores, self.make_regularizer())

    def _weights(self, scores: Tensor) -> Tensor:
        return self._solve(scores).weights

    def _each_scores(self) -> list[Tensor]:
        return [self.make_scores(seed) for seed in _SEEDS]

    def _random_feasible(self, scores: Tensor, seed: int) -> Tensor:
        """Other solutions of the same problem are feasible for it: solve for other scores, far
        away (which a wrong answer may still beat) and very near (which it may not)."""
        generator = torch.Generator().manual_seed(seed)
        other = torch.randn(scores.shape, dtype=scores.dtype, generator=generator)
        return self._weights(scores + 10.0 ** -(seed % 4) * 3 * other).detach()

    # -- the answer

    def test_weights_are_feasible(self) -> None:
        for scores in self._each_scores():
            solution = self._solve(scores)
            assert (solution.status == Status.OK.value).all(), solution.explain()
            total = self.make_regularizer().total(scores)
            assert (solution.weights >= 0).all()
            _close(solution.weights.sum(-1), total.expand(scores.shape[:-1]))

    def test_no_other_answer_is_better(self) -> None:
        omega = self.make_regularizer()
        for scores in self._each_scores():
            best = self._solve(scores).objective
            for seed in range(40):
                other = self._random_feasible(scores, seed)
                value = dot(scores, other) - omega.value(other, _everything(scores))
                assert (value <= best + _ROUNDING).all(), "a feasible answer beats the solution"

    def test_gap_certifies_and_detects(self) -> None:
        for scores in self._each_scores():
            solution = self._solve(scores)
            assert_optimal(solution)
            moved = perturbed(solution, 1e-3)
            assert (moved.gap > 1e-10).all(), "the gap does not see a wrong answer"

    def test_gap_bounds_the_loss_of_objective(self) -> None:
        omega = self.make_regularizer()
        for scores in self._each_scores():
            solution = self._solve(scores)
            problem = solution.problem
            for seed in range(5):
                other = self._random_feasible(scores, seed)
                gap = omega.gap(problem.scores, other, solution.dual, problem.base)
                value = dot(scores, other) - omega.value(other, _everything(scores))
                missed = solution.objective - value
                rounding = _ROUNDING * (1 + scores.abs().max())
                assert (gap >= missed - rounding).all(), "the gap promises more than is true"
                if omega.gap_is_loss:
                    _close(gap, missed, size=1 + scores.abs().max())

    def test_potential_equals_objective(self) -> None:
        for scores in self._each_scores():
            solution = self._solve(scores)
            _close(solution.potential, solution.objective, size=1 + scores.abs().max())

    def test_value_is_convex(self) -> None:
        omega = self.make_regularizer()
        for scores in self._each_scores():
            a, b = (self._random_feasible(scores, seed) for seed in (1, 2))
            everything = _everything(scores)
            middle = omega.value((a + b) / 2, everything)
            ends = (omega.value(a, everything) + omega.value(b, everything)) / 2
            assert (middle <= ends + _ROUNDING).all(), "value is not convex on the segment"

    def test_shift_changes_nothing_but_the_potential(self) -> None:
        for scores in self._each_scores():
            here, there = self._solve(scores), self._solve(scores + 7.0)
            _close(there.weights, here.weights, size=8.0)
            total = self.make_regularizer().total(scores)
            _close(there.potential, here.potential + 7.0 * total, size=8.0 + scores.abs().max())

    # -- masks, empty rows, precision

    def test_masked_keys_get_nothing(self) -> None:
        for scores in self._each_scores():
            keep = torch.ones_like(scores, dtype=torch.bool)
            keep[..., scores.shape[-1] // 2] = False
            by_base = solve(scores, self.make_regularizer(), base=keep)
            by_score = solve(scores.masked_fill(~keep, -torch.inf), self.make_regularizer())
            assert (by_base.weights[~keep] == 0).all()
            _close(by_score.weights, by_base.weights)
            assert_optimal(by_base)

    def test_empty_row_is_zero_with_zero_gradient(self) -> None:
        scores = self.make_scores(0).clone()
        keep = torch.ones_like(scores, dtype=torch.bool)
        keep[0] = False
        scores.requires_grad_()
        solution = solve(scores, self.make_regularizer(), base=keep)
        assert (solution.weights[0] == 0).all()
        assert solution.status[0] == Status.EMPTY.value
        (gradient,) = torch.autograd.grad((solution.weights**2).sum(), scores)
        assert gradient.isfinite().all()
        assert (gradient[0] == 0).all()

    def test_nan_stays_in_its_row(self) -> None:
        scores = self.make_scores(0).clone()
        clean = self._weights(scores)
        scores[0, 0] = torch.nan
        solution = self._solve(scores)
        assert solution.status[0] == Status.NONFINITE.value
        assert solution.weights[0].isnan().all()
        _close(solution.weights[1:], clean[1:])

    def test_half_precision_is_computed_in_float32(self) -> None:
        scores = self.make_scores(0).to(torch.bfloat16)
        weights = self._weights(scores)
        assert weights.dtype == torch.bfloat16
        assert torch.equal(weights, self._weights(scores.float()).to(torch.bfloat16))

    # -- derivatives

    def test_gradient_of_potential_is_the_weights(self) -> None:
        for scores in self._each_scores():
            leaf = scores.clone().requires_grad_()
            solution = self._solve(leaf)
            (gradient,) = torch.autograd.grad(solution.potential.sum(), leaf)
            _close(gradient, solution.weights)

    def test_first_and_second_derivative(self) -> None:
        for scores in self._each_scores():
            leaf = scores.clone().requires_grad_()
            assert gradcheck(self._weights, leaf)
            assert gradgradcheck(self._weights, leaf)

    def test_curvature_is_the_derivative(self) -> None:
        for scores in self._each_scores():
            solution = self._solve(scores)
            hessian = solution.hessian()
            for row in range(len(scores)):
                jacobian = torch.func.jacrev(self._weights)(scores[row : row + 1])[0, :, 0]
                _close(hessian[row], jacobian, size=1 + jacobian.abs().max())
            _close(hessian, hessian.mT)
            assert (torch.linalg.eigvalsh(hessian) >= -1e-10).all(), "curvature is not convex"

    def test_advantage_times_response_is_the_gradient(self) -> None:
        for scores in self._each_scores():
            utility = self.make_scores(99)
            leaf = scores.clone().requires_grad_()
            solution = self._solve(leaf)
            (gradient,) = torch.autograd.grad(dot(solution.weights, utility).sum(), leaf)
            _close(solution.gradient(utility), gradient, size=1 + gradient.abs().max())
            escort = solution.escort()
            moving = escort.sum(-1) != 0  # a row of constants has nothing to average
            _close(escort.sum(-1)[moving], torch.ones_like(escort.sum(-1)[moving]))

    def test_transforms_agree(self) -> None:
        scores, direction = self.make_scores(0), self.make_scores(1)
        hessian = self._solve(scores).hessian()
        forward = torch.func.jvp(self._weights, (scores,), (direction,))[1]
        expected = (hessian * direction.unsqueeze(-2)).sum(-1)
        _close(forward, expected, size=1 + expected.abs().max())
        _close(torch.func.vmap(self._weights)(scores), self._weights(scores))

        def energy(row: Tensor) -> Tensor:
            return (self._weights(row) ** 2).sum()

        both = torch.func.vmap(torch.func.hessian(energy))(scores)
        for row in range(len(scores)):
            reverse = torch.autograd.functional.hessian(energy, scores[row])
            _close(both[row], reverse, size=1 + reverse.abs().max())

    def test_compiles_whole(self) -> None:
        scores = self.make_scores(0).requires_grad_()
        direction = self.make_scores(1)
        torch._dynamo.reset()
        compiled = torch.compile(self._weights, fullgraph=True, backend="aot_eager")
        results = []
        for weights in (compiled(scores), self._weights(scores)):
            (gradient,) = torch.autograd.grad(dot(weights, direction).sum(), scores)
            results.append((weights, gradient))
        (fast, fast_gradient), (plain, plain_gradient) = results
        _close(fast, plain)
        _close(fast_gradient, plain_gradient, size=1 + plain_gradient.abs().max())


def _everything(scores: Tensor) -> Base:
    return Base(torch.ones_like(scores, dtype=torch.bool))


def _close(actual: Tensor, expected: Tensor, size: Tensor | float = 1.0) -> None:
    difference = (actual - expected).abs().max().item() if actual.numel() else 0.0
    assert difference <= _ROUNDING * float(size), f"differ by {difference:.3g}"
