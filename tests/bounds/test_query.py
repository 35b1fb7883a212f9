"""Bounds of attention in its query: known values, brute force, every form, refusals."""

import itertools
import math

import pytest
import torch

import fenchel as fl
from fenchel.bounds import LongestToken, attack, query_bound, query_lipschitz
from fenchel.bounds.query import DUAL, _near, _scatter_bound, distances
from tests.bounds.draws import F64, generator, normal, shrunk

NORMS = [1.0, 2.0, math.inf]
ALPHAS = [1.0, 1.0 + 1e-7, 1.25, 1.5, 1.75, 2.0]


def jacobian_norm(jacobian, norm):
    return torch.linalg.matrix_norm(jacobian, 2 if norm == 2 else norm)


def covariance(weights, x, y):
    """(..., n), (n), (n) -> (...)"""
    mean = weights @ x
    return (weights * (x - mean.unsqueeze(-1))) @ y


def simplex(count, n, seed=0):
    """From even to nearly one point."""
    g = generator(seed)
    noise = torch.randn(count, n, generator=g, dtype=F64)
    return (noise * 6 * torch.rand(count, 1, generator=g, dtype=F64)).softmax(-1)


# ---- known values


@pytest.mark.parametrize("norm", NORMS)
def test_two_keys_are_exact(norm):
    """At equal weights the Jacobian is (v1 - v2)(k1 - k2)' / 4 tau."""
    keys, values = normal(2, 3), normal(2, 4, seed=1)
    bound = query_lipschitz(keys, values, fl.Shannon(0.7), norm=norm)
    jacobian = torch.outer(values[0] - values[1], keys[0] - keys[1]) / (4 * 0.7)
    assert bound.value == pytest.approx(float(jacobian_norm(jacobian, norm)), rel=1e-14)
    result = attack(bound, 400)
    assert result.ratio == pytest.approx(1, abs=1e-9)
    assert result.holds


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_two_keys_are_exact_for_tsallis(alpha):
    """r reaches 2^(alpha - 1) at equal weights."""
    keys, values = normal(2, 3), normal(2, 4, seed=1)
    bound = query_lipschitz(keys, values, fl.Tsallis(alpha, 0.7))
    product = float((keys[0] - keys[1]).norm() * (values[0] - values[1]).norm())
    assert bound.value == pytest.approx(2 ** (alpha - 1) * product / 2.8, rel=1e-14)
    assert attack(bound, 600).ratio == pytest.approx(1, abs=1e-8)
    assert not attack(shrunk(bound), 600).holds


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [2, 8])
def test_a_bound_of_nine_tenths_is_refuted(norm, n):
    """Eight keys in R^6: every pair is an edge of the hull, where the bound is attained."""
    bound = query_lipschitz(normal(n, 6), normal(n, 4, seed=1), norm=norm)
    assert attack(bound, 600).holds
    assert not attack(shrunk(bound), 600).holds


@pytest.mark.parametrize("norm", NORMS)
def test_at_most_the_product_of_the_diameters(norm):
    """Sharper than corollary 24 of Vuckovic et al. (2020): long keys need not have long values."""
    for seed in range(20):
        keys, values = normal(7, 3, seed=seed), normal(7, 2, seed=seed + 100)
        wide = distances(values, norm).max() * distances(keys, DUAL[norm]).max() / 4
        assert float(query_bound(keys, values, norm=norm)) <= float(wide) * (1 + 1e-15)
    keys, values = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([[0.0], [5.0], [0.0]])
    assert float(query_bound(keys, values, norm=norm)) == 40 / 4  # and not 45 / 4


def test_the_pair_bound_is_the_largest_covariance():
    """max over all w of Cov_w(x, y) = max_ij (x_i - x_j)(y_i - y_j) / 4, by brute force."""
    for seed in range(10):
        x, y = normal(5, seed=seed), normal(5, seed=seed + 50)
        pairs = (x[:, None] - x) * (y[:, None] - y) / 4
        top = float(pairs.max())
        assert float(covariance(simplex(20_000, 5, seed), x, y).max()) <= top * (1 + 1e-12)
        i, j = divmod(int(pairs.argmax()), 5)
        half = torch.zeros(5, dtype=F64)
        half[i] = half[j] = 0.5
        assert float(covariance(half, x, y)) == pytest.approx(top, rel=1e-12)


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 2.0])
def test_both_tsallis_bounds_exceed_every_response(alpha):
    """|r Cov_w(v, k)| over random p, and p even on every subset, where r is largest."""
    for seed in range(6):
        n = 6
        keys, values = normal(n, 2, seed=seed), normal(n, 3, seed=seed + 50)
        masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n))[1:], dtype=F64)
        p = torch.cat([masks / masks.sum(-1, keepdim=True), simplex(3000, n, seed)])
        s = torch.where(p > 0, p ** (2 - alpha), 0.0)
        mean = (s / s.sum(-1, keepdim=True)) @ keys
        actual = torch.einsum("bn,ne,bnd->bed", s, values, keys - mean.unsqueeze(1))
        top = float(torch.linalg.matrix_norm(actual, 2).max())
        pairs = n ** (alpha - 1) * (distances(values) * distances(keys)).max() / 4
        scatter = float(_scatter_bound(keys, values, alpha, 1.0))
        assert top <= float(pairs) * (1 + 1e-12)
        assert top <= scatter * (1 + 1e-12)
        assert float(query_bound(keys, values, fl.Tsallis(alpha))) == pytest.approx(
            min(float(pairs), scatter), rel=1e-12
        )


def test_scatter_is_exact_for_sparsemax_on_its_full_support():
    """alpha = 2: r Cov is the scatter itself, for values equal to the keys."""
    keys = 0.01 * normal(9, 3)
    about = keys - keys.mean(0)
    assert float(query_bound(keys, keys, fl.Tsallis(2.0))) == pytest.approx(
        float(torch.linalg.matrix_norm(about, 2) ** 2), rel=1e-12
    )
    bound = query_lipschitz(keys, keys, fl.Tsallis(2.0))
    # the query zero leaves all keys in the support
    assert bound.check(torch.zeros(3), normal(3)).holds
    assert attack(bound, 600).ratio == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("tau", [0.05, 1.0, 20.0])
def test_the_jacobian_is_a_covariance(alpha, tau):
    """J = r / tau Cov_w(v, k), w_i in proportion to p_i^(2 - alpha), against autodiff."""
    keys, values, q = normal(6, 3), normal(6, 2, seed=1), 0.1 * tau * normal(3, seed=2)
    regularizer = fl.Tsallis(alpha, tau)
    p = fl.solve(q @ keys.mT, regularizer).weights
    s = torch.where(p > 0, p ** (2 - alpha), 0.0)
    mean = (s / s.sum()) @ keys
    formula = (values * s.unsqueeze(-1)).mT @ (keys - mean) / tau
    jacobian = torch.func.jacrev(lambda q: fl.solve(q @ keys.mT, regularizer).weights @ values)(q)
    torch.testing.assert_close(jacobian, formula, rtol=1e-9, atol=1e-11 / tau)


def test_alpha_near_one_is_softmax():
    keys, values = normal(9, 3), normal(9, 2, seed=1)
    softmax = float(query_bound(keys, values, fl.Shannon(0.3)))
    assert float(query_bound(keys, values, fl.Tsallis(1.0, 0.3))) == softmax
    near = float(query_bound(keys, values, fl.Tsallis(1 + 1e-9, 0.3)))
    assert near == pytest.approx(softmax, rel=1e-7)


# ---- adversarial settings


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("tau", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("n", [1, 2, 5, 128])
@pytest.mark.parametrize("kind", ["random", "line", "clusters", "outlier", "aligned"])
def test_no_jacobian_exceeds_the_bound(alpha, tau, n, kind):
    keys, values = normal(n, 2, seed=n), normal(n, 3, seed=n + 1)
    first = torch.arange(n).unsqueeze(-1) < n / 2
    if kind == "line":
        keys = torch.linspace(-1, 1, n, dtype=F64).unsqueeze(-1) * keys[:1]
    if kind == "clusters":
        keys, values = torch.where(first, keys[:1], -keys[:1]), torch.where(first, values[:1], 0.0)
    if kind == "outlier":
        keys = torch.cat([100 * keys[:1], keys[1:]])
    if kind == "aligned":
        values = keys @ normal(2, 3, seed=3)
    regularizer = fl.Tsallis(alpha, tau)
    wide = float(distances(keys).max()) or 1.0
    q = normal(64, 2, seed=7) * (tau / wide) * 10 ** normal(64, 1, seed=8)
    p = fl.solve(q @ keys.mT, regularizer).weights
    s = torch.where(p > 0, p ** (2 - alpha), 0.0)
    mean = (s / s.sum(-1, keepdim=True)) @ keys
    actual = torch.einsum("bn,ne,bnd->bed", s, values, keys - mean.unsqueeze(1)) / tau
    bound = float(query_bound(keys, values, regularizer))
    rounding = 1e-12 * float(values.norm() * keys.norm()) / tau
    assert float(torch.linalg.matrix_norm(actual, 2).max()) <= bound * (1 + 1e-9) + rounding


def test_shannon_with_masks_and_position_biases():
    """What is added to the scores only moves p."""
    keys, values = normal(6, 3), normal(6, 2, seed=1)
    bound = float(query_bound(keys, values))
    for seed in range(20):
        bias = 5 * normal(6, seed=seed)
        bias[torch.rand(6, generator=generator(seed)) < 0.3] = -math.inf
        bias[0] = 0.0
        q = normal(3, seed=seed + 30)
        jacobian = torch.func.jacrev(lambda q, b=bias: (q @ keys.mT + b).softmax(-1) @ values)(q)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound


@pytest.mark.parametrize("regularizer", [fl.Shannon(10.0), fl.Tsallis(1.5, 10.0), fl.Tsallis(2.0)])
def test_equal_keys_equal_values_and_one_key(regularizer):
    """The map is constant, and rounding is not reported as movement."""
    same = torch.full((5, 2), 3.7)
    for keys, values in (
        (same, normal(5, 3)),
        (normal(5, 2), same),
        (normal(1, 2), normal(1, 3)),
    ):
        bound = query_lipschitz(keys, values, regularizer)
        assert bound.value == 0
        assert attack(bound, 200).ratio == 0


@pytest.mark.parametrize("keys_too", [False, True])
def test_a_common_offset_changes_nothing(keys_too):
    keys, values = normal(2, 2), normal(2, 2, seed=1)
    moved = (keys + 2.0**33 if keys_too else keys), values + 2.0**33
    result = attack(query_lipschitz(*moved), 1500)
    assert result.holds
    assert result.ratio == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_squares_that_leave_the_range_of_floats(scale):
    keys, values = normal(4, 2), normal(4, 2, seed=1)
    known = float(query_bound(keys, values))
    actual = float(query_bound(scale * keys, values, fl.Shannon(scale)))
    assert actual == pytest.approx(known, rel=1e-12)


# ---- a ball of queries


@pytest.mark.parametrize("radius", [1e-3, 0.1, 1.0, 10.0])
def test_a_ball_is_at_most_the_whole_space(radius):
    keys, values, around = normal(12, 3), normal(12, 4, seed=1), normal(3, seed=2)
    whole = query_lipschitz(keys, values)
    ball = query_lipschitz(keys, values, around=around, radius=radius)
    assert ball.value <= whole.value
    assert attack(ball, 600).holds


def test_a_small_ball_is_the_norm_at_its_centre():
    keys, values, around = normal(12, 3), normal(12, 4, seed=1), normal(3, seed=2)
    jacobian = torch.func.jacrev(lambda q: (q @ keys.mT / 2).softmax(-1) @ values)(around)
    here = float(torch.linalg.matrix_norm(jacobian, 2))
    small = query_lipschitz(keys, values, fl.Shannon(2.0), around=around, radius=1e-9)
    assert small.value == pytest.approx(here, rel=1e-6)
    assert small.value >= here
    assert not attack(shrunk(small), 300).holds


def test_the_third_cumulant_is_bounded():
    """|J(q) - J(q0)| <= |q - q0| diam(V) diam(K)^2 / (2 sqrt(12)), for what (3) adds."""
    for seed in range(30):
        keys, values = normal(4, 2, seed=seed), normal(4, 2, seed=seed + 50)

        def jacobian(q, keys=keys, values=values):
            return torch.func.jacrev(lambda q: (q @ keys.mT).softmax(-1) @ values)(q)

        q, step = 2 * normal(2, seed=seed + 100), 0.3 * normal(2, seed=seed + 150)
        moved = torch.linalg.matrix_norm(jacobian(q + step) - jacobian(q), 2)
        rate = distances(values).max() * distances(keys).max() ** 2 / (2 * math.sqrt(12))
        assert float(moved) <= float(step.norm() * rate)


def test_what_a_ball_adds_is_needed():
    """A sigmoid where it bends most: its second derivative reaches two thirds of what (3) adds."""
    keys = torch.tensor([[0.0], [1.0]], dtype=F64)
    around, radius = torch.tensor([math.log(2 + math.sqrt(3))], dtype=F64), 0.01
    ball = query_lipschitz(keys, keys, around=around, radius=radius)
    share = around.sigmoid()
    here = float(share * (1 - share))
    added = ball.value - here
    assert added == pytest.approx(radius / (2 * math.sqrt(12)))
    most = 1 + 0.6 * added / here  # of the norm at the centre
    assert not attack(shrunk(ball, most * here / ball.value), 1000).holds
    assert attack(ball, 1000).holds


def test_a_fourth_central_moment_is_at_most_a_twelfth():
    p = torch.linspace(0, 1, 100_001, dtype=F64)
    moment = p * (1 - p) ** 4 + (1 - p) * p**4
    assert float(moment.max()) == pytest.approx(1 / 12, rel=1e-8)
    x = torch.linspace(0, 1, 6, dtype=F64)
    w = simplex(20_000, 6)
    about = x - (w @ x).unsqueeze(-1)
    assert float((w * about**4).sum(-1).max()) <= 1 / 12


def test_a_ball_far_away_needs_no_more_than_its_own_form():
    keys = torch.tensor([[0.0], [8.0]], dtype=F64)
    ball = query_lipschitz(keys, keys, around=torch.tensor([5.0]), radius=1e-3)
    assert ball.value == pytest.approx(_near(keys, keys, fl.Shannon(), ball.trials.map.domain))
    assert ball.value < 0.05 * query_lipschitz(keys, keys).value


# ---- many sets at once


@pytest.mark.parametrize("regularizer", [fl.Shannon(0.3), fl.Tsallis(1.4, 2.0), fl.Tsallis(2.0)])
@pytest.mark.parametrize("norm", NORMS)
def test_batched_bounds_equal_single_ones(regularizer, norm):
    keys, values = normal(2, 3, 5, 4), normal(2, 3, 5, 2, seed=1)
    many = query_bound(keys, values, regularizer, norm)
    assert many.shape == (2, 3)
    for i, j in itertools.product(range(2), range(3)):
        one = query_lipschitz(keys[i, j], values[i, j], regularizer, norm=norm).value
        assert float(many[i, j]) == pytest.approx(one, rel=1e-12)


def test_float32_is_bounded_in_float64():
    keys, values = normal(5, 4).float(), normal(5, 2, seed=1).float()
    assert query_bound(keys, values).dtype == F64
    assert float(query_bound(keys, values)) == float(query_bound(keys.double(), values.double()))


# ---- refusals


def test_alpha_above_two_has_no_bound():
    with pytest.raises(ValueError, match=r"at most 2, got 2\.5: beyond it the map is not Lipsch"):
        query_lipschitz(normal(3, 2), normal(3, 2), fl.Tsallis(2.5))


def test_why_alpha_above_two_is_refused():
    """Slopes p^(2 - alpha) grow without end as two of three weights leave the support together."""
    steep = []
    for small in (1e-2, 1e-4, 1e-6):
        s = torch.tensor([1 - 2 * small, small, small], dtype=F64) ** (2 - 2.5)
        response = torch.diag(s) - torch.outer(s, s) / s.sum()
        steep.append(float(torch.linalg.matrix_norm(response, 2)))
    assert steep == pytest.approx([10, 100, 1000], rel=1e-6)


@pytest.mark.parametrize(
    "regularizer", [fl.Norm(2.0), fl.Budget(0.5), fl.Fused(0.1)], ids=lambda r: type(r).__name__
)
def test_other_regularizers_are_refused(regularizer):
    kind = type(regularizer).__name__
    with pytest.raises(TypeError, match=f"for Shannon and Tsallis, got {kind}"):
        query_lipschitz(normal(3, 2), normal(3, 2), regularizer)


def test_a_module_that_makes_a_regularizer_is_taken():
    """One head has one alpha; several are bounded one by one."""
    keys, values = normal(5, 3), normal(5, 2, seed=1)
    learned = fl.nn.LearnedTsallis(1, init=1.25)
    expected = query_lipschitz(keys, values, fl.Tsallis(learned.alpha.item()))
    bound = query_lipschitz(keys, values, learned)
    assert bound.value == expected.value
    alone = query_bound(keys, values, learned), query_bound(keys, values, learned())
    assert torch.equal(*alone)
    assert attack(bound, 600).ratio == attack(expected, 600).ratio
    with pytest.raises(TypeError, match="head by head"):
        query_lipschitz(keys, values, fl.nn.LearnedTsallis(2))


def test_a_temperature_for_each_head_is_refused():
    with pytest.raises(TypeError, match="must be numbers here, not tensors"):
        query_lipschitz(normal(3, 2), normal(3, 2), fl.Shannon(torch.ones(4, 1)))


@pytest.mark.parametrize("norm", [3.0, LongestToken(), 0])
def test_other_norms_are_refused(norm):
    with pytest.raises(ValueError, match="norm must be 1, 2 or inf"):
        query_lipschitz(normal(3, 2), normal(3, 2), norm=norm)


def test_bad_input():
    good = normal(3, 2)
    with pytest.raises(TypeError, match="keys must be a tensor, got list"):
        query_lipschitz([[1.0]], good)
    with pytest.raises(ValueError, match=r"values must be \(n, d\), floating point"):
        query_lipschitz(good, torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="not empty"):
        query_lipschitz(good[:0], good[:0])
    with pytest.raises(ValueError, match="keys must be finite"):
        query_lipschitz(good * math.nan, good)
    with pytest.raises(ValueError, match="one value per key is needed, got 3 keys, 2 values"):
        query_lipschitz(good, good[:2])
    with pytest.raises(ValueError, match="do not fit"):
        query_bound(good, good[:1])  # would broadcast, and give zero


def test_bad_balls():
    keys = normal(3, 2)
    with pytest.raises(ValueError, match="around and radius go together"):
        query_lipschitz(keys, keys, radius=1.0)
    with pytest.raises(ValueError, match="around and radius go together"):
        query_lipschitz(keys, keys, around=torch.zeros(2))
    for settings in ({"norm": 1.0}, {"regularizer": fl.Tsallis(1.5)}):
        with pytest.raises(ValueError, match="leave out around and radius"):
            query_lipschitz(keys, keys, around=torch.zeros(2), radius=1.0, **settings)
    with pytest.raises(ValueError, match=r"around must be one query, \(2,\), got \(3,\)"):
        query_lipschitz(keys, keys, around=torch.zeros(3), radius=1.0)
