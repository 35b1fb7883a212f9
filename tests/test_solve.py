"""Values: against an independent oracle, and by their own certificate."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import fenchel as fl
from fenchel.testing import assert_optimal, gap_tolerance, perturbed
from tests import oracle

ALPHAS = (1.0, 1.05, 1.1, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 5.0)
LENGTHS = (1, 2, 3, 10, 100, 1000, 4096)


def rows(length, seed=0, count=4, dtype=torch.float64):
    """Spreads from nearly flat to nearly one-hot."""
    generator = torch.Generator().manual_seed(seed * 7919 + length)
    spread = torch.tensor([0.1, 1.0, 3.0, 30.0], dtype=torch.float64)[:count, None]
    noise = torch.randn(count, length, dtype=torch.float64, generator=generator)
    return (spread * noise).to(dtype)


def masses(length, seed=0):
    """Over six orders of magnitude, some of them zero, never all."""
    generator = torch.Generator().manual_seed(seed * 31 + length)
    mass = 10 ** (6 * torch.rand(length, dtype=torch.float64, generator=generator) - 4)
    mass[torch.rand(length, generator=generator) < 0.2] = 0
    mass[0] = 1.0
    return mass


@pytest.mark.parametrize("with_base", [False, True], ids=["plain", "base"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_equal_the_oracle(alpha, with_base):
    for length in LENGTHS:
        scores, base = rows(length), masses(length) if with_base else None
        expected = oracle.tsallis(scores, alpha, base)
        actual = fl.solve(scores, fl.Tsallis(alpha), base=base).weights
        bound = 1e-12
        if alpha > 2:  # an ulp of a score moves a weight by p^(2 - alpha) ulp
            # nu (p / nu)^(2 - alpha) with a base
            nu = torch.ones_like(scores) if base is None else base.expand_as(scores)
            slope = nu * (expected / nu) ** (2 - alpha)
            slope = torch.where(expected > 0, slope, 0.0).amax(-1, keepdim=True)
            bound = 1e-12 * slope.clamp(min=1)
        assert ((actual - expected).abs() <= bound).all(), f"length {length}"


@pytest.mark.parametrize("alpha", ALPHAS)
def test_tensor_alpha_equals_number_alpha(alpha):
    scores = rows(50)
    number = fl.entmax(scores, alpha)
    tensor = fl.entmax(scores, torch.full((4,), alpha, dtype=torch.float64))
    # For alpha > 2 rounding is amplified by p^(2 - alpha), as in the test above.
    smallest = torch.where(number > 0, number, 1.0).min().item()
    assert (number - tensor).abs().max() <= 1e-13 * max(1.0, smallest ** (2 - alpha))


def test_alpha_and_temperature_may_differ_by_row():
    scores = rows(30)
    alpha = torch.tensor([1.0, 1.5, 2.0, 4.0], dtype=torch.float64)
    tau = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)
    together = fl.solve(scores, fl.Tsallis(alpha, tau)).weights
    for i in range(4):
        alone = oracle.tsallis(scores[i : i + 1], alpha[i].item(), temperature=tau[i].item())
        assert (together[i] - alone[0]).abs().max() <= 1e-12


def test_alpha_one_is_softmax_exactly():
    scores = rows(40)
    assert torch.equal(fl.entmax(scores, 1.0), torch.softmax(scores, -1))
    assert torch.equal(fl.softmax(scores), torch.softmax(scores, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_gap_certifies_and_a_wrong_answer_is_seen(alpha, temperature, dtype):
    for length in LENGTHS:
        for base in (None, masses(length).to(dtype)):
            solution = fl.solve(
                rows(length, dtype=dtype), fl.Tsallis(alpha, temperature), base=base
            )
            tolerance = gap_tolerance(dtype) * temperature
            assert (solution.tolerance - tolerance).abs().max() <= 1e-6 * tolerance
            assert solution.gap.max() <= tolerance, f"length {length}"
            assert solution.gap.min() >= 0
            for wrong in wrong_answers(solution, alpha):
                assert (wrong.gap >= 100 * tolerance).all(), f"length {length}"


def wrong_answers(solution, alpha):
    """1e-3 too much in all, 1e-3 too much on the heaviest key, and 1e-3 on the wrong key."""
    p = solution.weights
    yield replace(solution, weights=p * (1 + 1e-3))
    heaviest = p.argmax(-1, keepdim=True)
    yield replace(solution, weights=p + torch.zeros_like(p).scatter(-1, heaviest, 1e-3))
    # Beyond alpha = 2 the objective is flat in small weights, and moving 1e-3 between them
    # changes it by less than a hundred tolerances.
    plain = not solution.problem.base.log_mass and solution.problem.base.mass is None
    if alpha <= 2 and plain:
        yield perturbed(solution, 1e-3)


@pytest.mark.parametrize(
    "omega",
    [fl.Norm(1.5), fl.Norm(3.0), fl.Budget(1), fl.Budget(3.5), fl.Fused(0.0), fl.Fused(0.3)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_other_families_certify_themselves(omega, dtype):
    for length in (4, 10, 100, 1000):
        solution = fl.solve(rows(length, dtype=dtype), omega)
        assert_optimal(solution)
        wrong = replace(solution, weights=solution.weights * (1 + 1e-3))
        with pytest.raises(AssertionError):
            assert_optimal(wrong)


def test_grid_certifies_itself():
    solution = fl.solve(rows(196), fl.Fused(0.2, grid=(14, 14)))
    assert_optimal(solution)
    with pytest.raises(AssertionError):
        assert_optimal(perturbed(solution, 1e-3))


def test_budget_one_is_sparsemax_and_so_is_no_smoothing():
    scores = rows(100)
    expected = oracle.tsallis(scores, 2.0)
    for omega in (fl.Budget(1), fl.Fused(0.0), fl.Fused(0.0, grid=(10, 10))):
        assert (fl.solve(scores, omega).weights - expected).abs().max() <= 1e-12


def test_budget_fills_the_best_keys_first():
    scores = torch.tensor([5.0, 4.0, 0.4, 0.2, -3.0], dtype=torch.float64)
    weights = fl.solve(scores, fl.Budget(3)).weights
    expected = torch.tensor([1.0, 1.0, 0.6, 0.4, 0.0], dtype=torch.float64)
    assert (weights - expected).abs().max() <= 1e-15


def test_normmax_solves_its_own_equation():
    scores = rows(200)
    for alpha in (1.2, 2.0, 4.0):
        solution = fl.solve(scores, fl.Norm(alpha))
        y = (scores - solution.threshold[:, None]).clamp(min=0)
        q = alpha / (alpha - 1)
        assert ((y**q).sum(-1) - 1).abs().max() <= 1e-12
        direct = y ** (q - 1) / (y ** (q - 1)).sum(-1, keepdim=True)
        assert (solution.weights - direct).abs().max() <= 1e-12


def test_threshold_separates_the_support():
    scores = rows(300)
    for omega in (fl.Tsallis(1.5), fl.Tsallis(3.0), fl.Norm(1.5), fl.Budget(5)):
        solution = fl.solve(scores, omega)
        assert torch.equal(solution.support, scores > solution.threshold[:, None])
    assert (fl.solve(scores, fl.Shannon()).threshold == -torch.inf).all()


def test_potential_and_objective_agree_on_far_away_scores():
    scores = rows(20) + 1e3
    for omega in (fl.Shannon(0.3), fl.Tsallis(1.5, 0.3), fl.Norm(2.0), fl.Budget(4), fl.Fused(0.1)):
        solution = fl.solve(scores, omega)
        assert (solution.potential - solution.objective).abs().max() <= 1e-11


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 3.0])
def test_scale_of_a_base_is_a_temperature(scale, alpha):
    """c nu at temperature tau is nu at tau c^(1 - alpha)."""
    scores, base = rows(12), masses(12)
    tau = scale ** (1 - alpha)
    if not 1e-100 < tau < 1e100:
        tau = min(max(tau, 1e-100), 1e100)
    scaled = fl.solve(scores, fl.Tsallis(alpha), base=base * scale)
    expected = fl.solve(scores, fl.Tsallis(alpha, tau), base=base)
    assert_close(scaled.weights, expected.weights, 1e-9)


def assert_close(actual, expected, bound):
    assert (actual - expected).abs().max() <= bound


def test_base_as_tensor_as_bool_and_as_prior_agree():
    scores = rows(6)
    keep = torch.tensor([True, True, False, True, False, True])
    by_bool = fl.solve(scores, fl.Tsallis(1.5), base=keep).weights
    by_number = fl.solve(scores, fl.Tsallis(1.5), base=keep.double()).weights
    by_integer = fl.solve(scores, fl.Tsallis(1.5), base=keep.long()).weights
    by_prior = fl.solve(scores, fl.Tsallis(1.5), base=fl.priors.Preference(keep.double().log()))
    for other in (by_number, by_integer, by_prior.weights):
        assert_close(other, by_bool, 1e-15)


def test_any_axis():
    scores = rows(24).reshape(4, 2, 3, 4)
    base = masses(4)[:, None, None, None]
    for dim in (0, 1, 2, -4, -2):
        mass = base if dim in (0, -4) else None
        last = scores.movedim(dim, -1)
        expected = fl.entmax(last, 1.5, base=None if mass is None else mass.movedim(dim, -1))
        assert torch.equal(fl.entmax(scores, 1.5, base=mass, dim=dim).movedim(dim, -1), expected)
        solution = fl.solve(scores, fl.Tsallis(1.5), base=mass, dim=dim)
        assert solution.gap.shape == last.shape[:-1]
        assert_optimal(solution)
        assert solution.advantage(scores).shape == scores.shape


def test_float32_is_near_float64():
    scores = rows(1000)
    for alpha in (1.0, 1.1, 1.5, 2.0):
        exact = fl.entmax(scores.float().double(), alpha)
        error = (fl.entmax(scores.float(), alpha).double() - exact).abs().max()
        assert error <= 32 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("base", [None, torch.tensor([True, False, True, True]), torch.rand(4)])
def test_copied_and_saved_solutions_keep_their_certificate(base, tmp_path):
    solution = fl.solve(torch.randn(3, 4), fl.Tsallis(1.5), base=base)
    torch.save(solution, tmp_path / "solution.pt")
    loaded = torch.load(tmp_path / "solution.pt", weights_only=False)
    for other in (copy.deepcopy(solution), pickle.loads(pickle.dumps(solution)), loaded):
        assert torch.equal(other.gap, solution.gap)
        assert torch.equal(other.status, solution.status)


@pytest.mark.parametrize("omega", [fl.Tsallis(1.5), fl.Tsallis(1.5, 2.0)], ids=str)
def test_a_certificate_of_changed_scores_is_refused(omega):
    scores = torch.randn(3, 4)
    solution = fl.solve(scores, omega)
    scores.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after `solve`"):
        _ = solution.gap


@pytest.mark.parametrize("omega", [fl.Tsallis(1.5), fl.Tsallis(1.5, 2.0)], ids=str)
def test_who_asks_first_does_not_matter(omega):
    """Logging the gap without gradients leaves the potential its own."""
    scores = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        solution = fl.solve(scores, omega)
        with mode():
            assert (solution.gap >= 0).all()
        (gradient,) = torch.autograd.grad(solution.potential.sum(), scores)
        assert (gradient - solution.weights).abs().max() <= 1e-12


def test_negative_weights_are_not_certified():
    for omega in (fl.Tsallis(2.0), fl.Tsallis(1.5), fl.Shannon()):
        solution = fl.solve(torch.tensor([3.0, 2.9, -5.0, 0.0]), omega)
        moved = solution.weights + torch.tensor([5e-6, 5e-6, -1e-5 - solution.weights[2], 0.0])
        assert solution.gap_of(moved) == torch.inf


class Sharper(fl.Shannon):
    def maximize(self, scores, base):
        return fl.Shannon(0.1).maximize(scores, base)


def test_a_subclass_solves_its_own_problem():
    scores = torch.randn(1, 1, 6, 5)
    expected = torch.softmax(scores / 0.1, -1)
    torch.testing.assert_close(fl.solve(scores, Sharper()).weights, expected)
    key = torch.eye(5).expand(1, 1, 5, 5)
    torch.testing.assert_close(fl.attention(scores, key, key, Sharper(), scale=1.0), expected)
