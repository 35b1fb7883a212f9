"""What more score, more temperature and more alpha do to the weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import fenchel as fl

from .checks import assert_near, assert_not_above, rounding, spread, weight_error
from .families import ALL, SYMMETRIC, TSALLIS, WITH_BASE, Family, each
from .runner import invariant
from .strategies import gentle_rows, lattice_rows, problems, score_rows

AT_ONE = [family for family in WITH_BASE if family.temperature == 1]
SPARSE_ALPHAS = pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])


@each(ALL)
@invariant(
    problem=problems(),
    key=st.integers(0, 39),
    rise=st.sampled_from([1e-9, 1e-3, 0.25, 1.0, 100.0]),
)
def test_raising_a_score_never_lowers_its_weight(
    family: Family, problem: tuple[Tensor, Tensor], key: int, rise: float
) -> None:
    """The gradient of a convex potential is monotone."""
    scores, mass = problem
    key %= scores.shape[-1]
    raised = scores.clone()
    raised[..., key] += rise
    before, after = family.solve(scores, mass).weights, family.solve(raised, mass).weights
    assert_not_above(before[..., key], after[..., key], 2 * weight_error(family, raised))


@each(SYMMETRIC)
@invariant(scores=score_rows(2))
def test_weights_are_in_the_order_of_scores(family: Family, scores: Tensor) -> None:
    """Each weight is one increasing function of its score, so only that function's rounding
    (some ulps of a weight, none of the row's sum) may disturb the order."""
    weights = family.solve(scores).weights
    ordered = weights.gather(-1, scores.argsort(-1))
    assert_not_above(ordered[..., :-1], ordered[..., 1:], 16 * torch.finfo(scores.dtype).eps)


@each(AT_ONE)
@invariant(problem=problems(), hot=st.sampled_from([1e12, 1e20]))
def test_hot_weights_are_the_base(
    family: Family, problem: tuple[Tensor, Tensor], hot: float
) -> None:
    """Without scores the minimum of sum nu omega(p / nu) is p = nu / sum nu. On the way there the
    slope nu (p / nu)^(2 - alpha) stays below 1e3 for alpha <= 3 and masses that sum to 120."""
    scores, mass = problem
    temperature = hot * max(1.0, spread(scores))
    weights = fl.solve(scores, _at(family, temperature), base=mass).weights
    error = 1e3 * spread(scores) / temperature + rounding(scores)
    assert_near(weights, (mass / mass.sum()).expand_as(scores), error)


@each(AT_ONE)
@invariant(scores=score_rows(), cold=st.sampled_from([1e-3, 1e-30]))
def test_cold_weights_are_the_argmax(family: Family, scores: Tensor, cold: float) -> None:
    """A lead of one is a thousand temperatures: exp(-1000) is zero in float64."""
    best = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    weights = fl.solve(scores + best, _at(family, cold)).weights
    assert_near(weights, best, rounding(scores))
    assert bool(((weights > 0) == (best > 0)).all())


def _at(family: Family, temperature: float) -> fl.Regularizer:
    regularizer = family.make(1, 1)
    if isinstance(regularizer, fl.Tsallis):
        return fl.Tsallis(regularizer.alpha, temperature)
    return fl.Shannon(temperature)


@SPARSE_ALPHAS
@invariant(rest=lattice_rows(), temperature=st.sampled_from([0.1, 1.0, 7.0]), lead=st.booleans())
def test_one_key_takes_all_from_a_known_lead(
    alpha: float, rest: Tensor, temperature: float, lead: bool
) -> None:
    """The support is one key exactly if it leads by temperature / (alpha - 1)."""
    edge = temperature / (alpha - 1)
    second = -edge * (1.01 if lead else 0.99)
    top = torch.tensor([0.0, second], dtype=rest.dtype).expand(rest.shape[0], 2)
    scores = torch.cat([top, second - rest.abs()], -1)
    support = fl.solve(scores, fl.Tsallis(alpha, temperature)).support
    assert bool(support[..., 0].all())
    assert bool((support[..., 1] != lead).all())
    assert not (lead and bool(support[..., 1:].any()))


@invariant(scores=gentle_rows(), alphas=st.tuples(st.floats(1, 4), st.floats(1, 4)).map(sorted))
def test_the_largest_weight_grows_with_alpha(scores: Tensor, alphas: list[float]) -> None:
    """On the support, the integral of x^(alpha-2) from p_j to p_1 is s_1 - s_j. A larger alpha
    lowers the integrand on [0, 1]; with p_1 no larger every p_j would be smaller: the sum < 1."""
    low, high = (fl.entmax(scores, alpha).amax(-1) for alpha in alphas)
    assert_not_above(low, high, rounding(scores, 8.0))


@invariant(
    scores=lattice_rows(2, 2), alphas=st.tuples(st.floats(1, 4), st.floats(1, 4)).map(sorted)
)
def test_two_keys_lose_support_with_alpha(scores: Tensor, alphas: list[float]) -> None:
    """With two keys the edge is at a lead of 1 / (alpha - 1), which falls with alpha. With more
    keys the edge is p_1^(alpha-1) / (alpha - 1) and p_1 grows: nothing is claimed."""
    low, high = (fl.solve(scores, fl.Tsallis(alpha)).support_size for alpha in alphas)
    assert bool((high <= low).all())


STEPS = [2.0**-52, 1e-12, 1e-9, 1e-6]


@pytest.mark.parametrize("form", ["number", "tensor"])
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])
@invariant(scores=gentle_rows(), step=st.sampled_from(STEPS))
def test_continuity_in_alpha(
    alpha: float, side: int, form: str, scores: Tensor, step: float
) -> None:
    """Lipschitz for alpha <= 2, Hoelder with exponent 1 / (alpha - 1) beyond. The constant at
    alpha = 1 is sum p u^2 / 2 with u = log p: u^2 exp(u) < 0.55 for each of 40 keys."""
    other = max(1.0, alpha + side * step)
    here, there = (_entmax(scores, value, form) for value in (alpha, other))
    exponent = 1 / max(1.0, max(alpha, other) - 1)
    assert_near(there, here, 100 * step**exponent + rounding(scores, 8.0))


@pytest.mark.parametrize("form", ["number", "tensor"])
@invariant(scores=gentle_rows(), step=st.sampled_from([*STEPS, 1e-4]))
def test_continuity_at_softmax_in_float32(form: str, scores: Tensor, step: float) -> None:
    """float32 cannot tell alpha = 1 + 1e-9 from 1; the weights must still be a distribution."""
    scores = scores.float()
    near = _entmax(scores, 1 + step, form)
    assert_near(near.sum(-1), torch.ones_like(near.sum(-1)), rounding(scores))
    assert_near(near, scores.softmax(-1), 100 * step + rounding(scores, 8.0))


def _entmax(scores: Tensor, alpha: float, form: str) -> Tensor:
    if form == "tensor":
        return fl.entmax(scores, torch.tensor(alpha, dtype=torch.float64))
    return fl.entmax(scores, alpha)


@each(TSALLIS)
@invariant(problem=problems())
def test_the_threshold_separates(family: Family, problem: tuple[Tensor, Tensor]) -> None:
    """Keys above the threshold carry weight, keys below it none; between lies rounding."""
    scores, mass = problem
    solution = family.solve(scores, mass)
    edge = solution.threshold.unsqueeze(-1)
    size = scores.abs().amax(-1, keepdim=True) + edge.abs().clamp(max=1e6)
    slack = 64 * torch.finfo(scores.dtype).eps * size
    live = (mass > 0).expand_as(scores)
    if not math.isinf(float(edge.min())):
        assert bool(solution.support[live & (scores > edge + slack)].all())
    assert not bool(solution.support[live & (scores < edge - slack)].any())
