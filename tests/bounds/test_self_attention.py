"""Bounds of a whole self-attention: the proof's steps one by one, dense Jacobians, refusals."""

import math

import pytest
import torch

from fenchel.bounds import (
    Head,
    LongestToken,
    attack,
    gaussian_attention_lipschitz,
    gaussian_constant,
    self_attention_lipschitz,
)
from fenchel.bounds.self_attention import lambert, spectral
from tests.bounds.draws import F64, generator, normal, shrunk

NORMS = [2.0, LongestToken()]
ONE = torch.eye(1, dtype=F64)


def worst(bound, inputs):
    """The largest norm of the dense Jacobian; for the longest token in d = 1, its row sums."""
    top = 0.0
    for x in inputs:
        jacobian = torch.func.jacrev(bound.trials.map.function)(x)
        if bound.norm == 2:
            flat = jacobian.reshape(jacobian.shape[:2].numel(), -1)
            top = max(top, float(torch.linalg.matrix_norm(flat, 2)))
        else:
            assert jacobian.shape[1] == jacobian.shape[3] == 1
            top = max(top, float(jacobian.abs().sum((2, 3)).max()))
    return top


def shapes(n, d, unit):
    """Random tokens, two clusters, one token apart, on a line: at several sizes."""
    first = torch.arange(n).unsqueeze(-1)
    for size in (0.1, 0.5, 1.0, 2.0):
        noise = normal(n, d, seed=n)
        yield unit * size * noise
        for some in (1, (n + 1) // 2):
            apart = torch.where(first < some, -0.5, 0.5) * torch.ones(d, dtype=F64)
            yield unit * (size * apart + 0.01 * noise)
        yield unit * size * torch.linspace(-1, 1, n, dtype=F64).unsqueeze(-1) * noise[:1]


def inside(x, radius):
    return x * (radius / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp(max=1.0)


# ---- dot products


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tau", [1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("n", [1, 2, 5, 24])
def test_no_jacobian_exceeds_the_dot_bound(norm, tau, sign, n):
    head = Head(sign * ONE, ONE, ONE, tau, query_bias=torch.tensor([0.3], dtype=F64))
    bound = self_attention_lipschitz(head, n, 1.5, norm=norm)
    tokens = [inside(x, 1.5) for x in shapes(n, 1, 1.5)]
    assert worst(bound, tokens) <= bound.value


@pytest.mark.parametrize("n", [2, 24])
def test_no_jacobian_of_wide_heads_exceeds_the_dot_bound(n):
    for seed in range(4):
        parts = [normal(m, 4, seed=seed + m) for m in (3, 3, 2)]
        head = Head(parts[0], normal(3, 4, seed=9), parts[2], 0.7, query_bias=normal(3, seed=seed))
        bound = self_attention_lipschitz(head, n, 0.8)
        assert worst(bound, [inside(x, 0.8) for x in shapes(n, 4, 0.8)]) <= bound.value


def test_the_formula_of_the_dot_bound():
    """|W_v| [sqrt(N (1 + g^2 R^2)) + |A| R^2 / tau], written out."""
    query, key, value, bias = normal(3, 4), normal(3, 4, seed=1), normal(2, 4, seed=2), normal(3)
    tau, radius, n = 0.9, 0.6, 7
    form = torch.linalg.matrix_norm(key.mT @ query, 2)
    g = (form * radius + (key.mT @ bias).norm()) / tau
    often = n / (1 + (n - 1) * math.exp(-2 * g * radius))
    size = torch.linalg.matrix_norm(value, 2)
    head = Head(query, key, value, tau, query_bias=bias)
    for norm, many in ((2.0, often), (LongestToken(), 1.0)):
        known = size * (math.sqrt(many * (1 + (g * radius) ** 2)) + form * radius**2 / tau)
        bound = self_attention_lipschitz(head, n, radius, norm=norm).value
        assert bound == pytest.approx(float(known), rel=1e-12)


def test_even_weights_make_the_dot_bound_exact():
    head = Head(0 * ONE, ONE, 3 * ONE, 1.0)
    for norm in NORMS:
        bound = self_attention_lipschitz(head, 6, 1.0, norm=norm)
        assert bound.value == pytest.approx(3)
        assert attack(bound, 1000).ratio == pytest.approx(1, rel=1e-9)
        assert not attack(shrunk(bound), 1000).holds


def test_the_attack_comes_near_for_the_longest_token():
    bound = self_attention_lipschitz(Head(ONE, ONE, ONE, 10.0), 2, 1.0, norm=LongestToken())
    assert attack(bound, 1000).ratio > 0.98
    assert not attack(shrunk(bound), 1000).holds


def test_a_mask_may_exceed_the_bound_in_l2_but_not_for_the_longest_token():
    """Row i of a causal mask averages i + 1 tokens: the norm of that matrix is above one."""
    n = 64
    causal = torch.ones(n, n, dtype=F64).tril()
    causal = causal / causal.sum(-1, keepdim=True)
    still = Head(0 * ONE, ONE, ONE, 1.0)
    assert self_attention_lipschitz(still, n, 1.0).value == pytest.approx(1)
    assert float(torch.linalg.matrix_norm(causal, 2)) > 1.5
    assert float(causal.abs().sum(-1).max()) == pytest.approx(1)
    one_key = torch.zeros(n, n, dtype=F64)
    one_key[:, 0] = 1
    assert float(torch.linalg.matrix_norm(one_key, 2)) == pytest.approx(math.sqrt(n))


def test_a_key_bias_changes_nothing():
    query, key, value, x = (normal(4, 4, seed=s) for s in range(4))
    bias = normal(4, seed=5)
    plain = Head(query, key, value, 0.5, query_bias=bias).output(x)
    scores = (x @ query.mT + bias) @ (x @ key.mT + normal(4, seed=6)).mT / 0.5
    torch.testing.assert_close(plain, scores.softmax(-1) @ (x @ value.mT))


@pytest.mark.parametrize("norm", NORMS)
def test_the_reach_is_a_length_that_no_output_exceeds(norm):
    heads = [
        Head(normal(2, 3, seed=s), normal(2, 3, seed=s + 1), normal(2, 3, seed=s + 2), 0.1,
             value_bias=normal(2, seed=s))
        for s in (0, 10)
    ]  # fmt: skip
    bound = self_attention_lipschitz(
        heads, 5, 2.0, output=normal(3, 4), output_bias=normal(3, seed=7), norm=norm
    )
    x = bound.trials.map.domain.sample(2000, torch.Size((5, 3)), 1.0, generator(0))
    assert float(bound.trials.map.function(x).norm(dim=-1).max()) <= bound.trials.map.reach


# ---- heads


def test_heads_are_joined_as_concatenation_and_projection():
    d = 4
    layer = torch.nn.MultiheadAttention(d, 2, batch_first=True, dtype=F64)
    query, key, value = layer.in_proj_weight.detach().split(d)
    heads = [Head(query[s], key[s], value[s], math.sqrt(2)) for s in (slice(0, 2), slice(2, 4))]
    bound = self_attention_lipschitz(heads, 5, 1.0, output=layer.out_proj.weight.detach())
    x = normal(3, 5, d)
    torch.testing.assert_close(bound.trials.map.function(x), layer(x, x, x)[0].detach())
    assert attack(bound, 600).holds


def test_many_heads_cost_the_smaller_of_two_bounds():
    heads = [Head(ONE, ONE, ONE, 1.0)] * 4
    single = heads[0].bound(3, 1.0)
    joined = self_attention_lipschitz(heads, 3, 1.0)
    assert joined.value == pytest.approx(2 * single)
    # outputs that add up: |O| = 2 times 2 single, and the sum of 4: the same
    summed = self_attention_lipschitz(heads, 3, 1.0, output=torch.ones(1, 4))
    assert summed.value == pytest.approx(4 * single)
    # one head alone is used: then the sum is smaller
    first = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert self_attention_lipschitz(heads, 3, 1.0, output=first).value == pytest.approx(single)


def test_a_head_without_values_moves_nothing():
    bound = self_attention_lipschitz(Head(ONE, ONE, 0 * ONE, 1.0), 3, 1.0, output=ONE)
    assert bound.value == 0
    assert attack(bound, 100).ratio == 0


def test_extreme_temperatures_do_not_overflow():
    assert self_attention_lipschitz(Head(ONE, ONE, ONE, 1e-200), 4, 1.0).value > 1e200
    assert self_attention_lipschitz(Head(ONE, ONE, ONE, 1e200), 4, 1.0).value == pytest.approx(1)


# ---- distances


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tau", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("n", [1, 2, 5, 24, 128])
def test_no_jacobian_exceeds_the_gaussian_bound(norm, tau, n):
    bound = gaussian_attention_lipschitz(ONE, ONE, n, temperature=tau, norm=norm)
    tokens = list(shapes(n, 1, math.sqrt(tau)))[: 16 if n < 128 else 6]
    assert worst(bound, tokens) <= bound.value


def test_the_gaussian_bound_does_not_depend_on_the_temperature():
    parts = normal(2, 3), normal(3, 2, seed=1)
    bounds = {
        gaussian_attention_lipschitz(*parts, 9, temperature=t).value for t in (1e-3, 1.0, 1e3)
    }
    assert len(bounds) == 1
    # as it should: scaling tokens by sqrt(tau) is the same map
    maps = [
        gaussian_attention_lipschitz(*parts, 9, temperature=t).trials.map.function for t in (1, 4)
    ]
    x = normal(9, 3, seed=2)
    torch.testing.assert_close(2 * maps[0](x), maps[1](2 * x))


def test_mean_exponents_are_at_most_lamberts():
    """E_i r <= W((n - 1) / e), attained by equal distances 1 + W."""
    for n in (2, 3, 10, 100):
        r = torch.rand(5000, n - 1, generator=generator(n), dtype=F64) * 2 * (1 + math.log(n))
        weights = (-r).exp() / (1 + (-r).exp().sum(-1, keepdim=True))
        most = lambert((n - 1) / math.e)
        assert float((weights * r).sum(-1).max()) <= most
        equal = 1 + most
        attained = (n - 1) * equal * math.exp(-equal) / (1 + (n - 1) * math.exp(-equal))
        assert attained == pytest.approx(most, rel=1e-12)


@pytest.mark.parametrize("x", [0.0, 1e-9, 1 / math.e, 1.0, 1e3, 1e12])
def test_lambert(x):
    w = lambert(x)
    assert w * math.exp(w) == pytest.approx(x, rel=1e-13, abs=1e-300)


def test_column_sums_are_at_most_half_of_n_plus_one():
    for seed in range(20):
        z = normal(8, 2, seed=seed) * 3 * (seed + 1) / 20
        weights = (-torch.cdist(z, z).square()).softmax(-1)
        assert float(weights.sum(0).max()) <= 4.5
    lone = torch.zeros(8, 1, dtype=F64)
    angles = torch.arange(7) * 2 * math.pi / 7  # seven around one, at no distance: even weights
    lone[1:] = 1e-9 * angles.cos().unsqueeze(-1)
    assert float((-torch.cdist(lone, lone).square()).softmax(-1).sum(0).max()) == pytest.approx(1)


def test_known_gaussian_constants():
    assert gaussian_constant(1) == gaussian_constant(1, LongestToken()) == 1
    assert gaussian_constant(2, LongestToken()) == pytest.approx(1 + 4 * 0.2784645427610738)
    grown = [gaussian_constant(n) for n in (1, 2, 3, 10, 100, 1000)]
    assert grown == sorted(grown)


def test_the_attack_refutes_a_gaussian_bound_at_six_tenths():
    """n = 2 reaches .685 of the l2 bound and .758 of the other."""
    for norm, share in ((2.0, 0.68), (LongestToken(), 0.75)):
        bound = gaussian_attention_lipschitz(ONE, ONE, 2, norm=norm)
        assert attack(shrunk(bound, share + 0.02), 1500).holds
        assert not attack(shrunk(bound, share), 1500).holds


def test_projection_and_value_enter_by_their_norms():
    a, b = normal(2, 3), normal(4, 2, seed=1)
    known = gaussian_constant(6) * spectral(a) * spectral(b)
    bound = gaussian_attention_lipschitz(a, b, 6)
    assert bound.value == pytest.approx(known)
    assert attack(bound, 600).holds
    still = gaussian_attention_lipschitz(0 * a, b, 6)
    assert still.value == 0
    assert attack(still, 100).ratio == 0


# ---- refusals


def test_a_missing_radius_is_refused_with_the_remedy():
    head = Head(ONE, ONE, ONE, 1.0)
    for radius in (None, 0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="not Lipschitz on all of") as refused:
            self_attention_lipschitz(head, 3, radius)
        assert "sqrt(d) max|w| + |b|" in str(refused.value)
        assert "gaussian_attention_lipschitz" in str(refused.value)


def test_without_a_ball_dot_products_have_no_constant():
    """The reason for the refusal: slopes grow with the square of the tokens' size."""
    bound = self_attention_lipschitz(Head(ONE, ONE, ONE, 1.0), 3, 100.0)
    steep = [worst(bound, [torch.tensor([[0.0], [r], [-r]], dtype=F64)]) for r in (2, 8, 32)]
    assert steep[1] > 10 * steep[0]
    assert steep[2] > 10 * steep[1]


@pytest.mark.parametrize("norm", [1.0, math.inf, "tokens"])
def test_other_norms_are_refused(norm):
    with pytest.raises(ValueError, match=r"norm must be 2 or LongestToken\(\)"):
        self_attention_lipschitz(Head(ONE, ONE, ONE, 1.0), 3, 1.0, norm=norm)
    with pytest.raises(ValueError, match=r"norm must be 2 or LongestToken\(\)"):
        gaussian_constant(3, norm)


def test_bad_heads():
    eye = torch.eye(2)
    with pytest.raises(TypeError, match="query must be a tensor"):
        Head([[1.0]], eye, eye, 1.0)
    with pytest.raises(ValueError, match="key must be a finite matrix"):
        Head(eye, eye * math.inf, eye, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        Head(eye, torch.ones(3, 2), eye, 1.0)
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got 0"):
        Head(eye, eye, eye, 0.0)
    with pytest.raises(ValueError, match=r"value_bias must be \(2,\) and finite, got \(1,\)"):
        Head(eye, eye, eye, 1.0, value_bias=torch.ones(1))
    with pytest.raises(ValueError, match=r"query_bias must be \(2,\)"):
        Head(eye, eye, eye, 1.0, query_bias=torch.ones(3))


def test_bad_self_attention():
    head = Head(ONE, ONE, ONE, 1.0)
    with pytest.raises(ValueError, match="heads must not be empty"):
        self_attention_lipschitz([], 3, 1.0)
    with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
        self_attention_lipschitz(head, 0, 1.0)
    with pytest.raises(ValueError, match=r"output must be \(e, 1\), for all heads joined"):
        self_attention_lipschitz(head, 3, 1.0, output=torch.eye(2))
    with pytest.raises(ValueError, match=r"output_bias must be \(1,\)"):
        self_attention_lipschitz(head, 3, 1.0, output_bias=torch.ones(2))


def test_bad_gaussian():
    with pytest.raises(ValueError, match=r"value must be \(e, 2\), applied to the projected"):
        gaussian_attention_lipschitz(torch.ones(2, 3), torch.ones(2, 3), 4)
    with pytest.raises(ValueError, match="projection must be a finite matrix"):
        gaussian_attention_lipschitz(torch.ones(3), torch.ones(2, 3), 4)
    with pytest.raises(ValueError, match="temperature must be finite and > 0"):
        gaussian_attention_lipschitz(ONE, ONE, 4, temperature=-1.0)
