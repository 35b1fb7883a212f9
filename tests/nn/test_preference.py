"""PreferenceAttention against torch, `fenchel.dual`, and where it is meant to differ."""

import copy
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import fenchel.nn as fnn
from fenchel import dual
from fenchel._solution import Status
from fenchel.nn import (
    ContentPreference,
    Exact,
    FirstOrder,
    LearnedReliability,
    PositionPreference,
    SecondOrder,
    UniformPreference,
)
from tests.nn.pairs import assert_equal
from tests.nn.preference_layers import (
    BATCH,
    HEADS,
    QUERIES,
    SOLVERS,
    TEMPLATE,
    TEMPLATES,
    WIDTH,
    both,
    by_hand,
    by_solver,
    called,
    draw,
    hidden_masks,
    left,
    make,
    operands,
    projected,
)

DUAL = {
    FirstOrder(): dual.first_order,
    SecondOrder(): dual.second_order,
    Exact(): dual.estimate,
}

# ---- torch


def test_default_is_torchs_scaled_dot_product_attention():
    layer, inputs = make(), operands()
    z, t, v = projected(layer, *inputs)
    expected = left(layer, F.scaled_dot_product_attention(z, t, v))
    assert_equal(layer(*inputs), expected)
    assert (make(scale=1.0)(*inputs) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("estimated", [False, True])
def test_default_is_torchs_multi_head_attention_forward(causal, estimated):
    layer, (query, templates) = make(), operands()
    mask, padding = hidden_masks()
    future = torch.ones(QUERIES, TEMPLATES, dtype=torch.bool).triu(1)
    parts = layer.evidence_proj, layer.template_proj, layer.value_proj
    biases = [torch.zeros(WIDTH, dtype=torch.float64) if p.bias is None else p.bias for p in parts]
    expected, weights = F.multi_head_attention_forward(
        *(query.mT.permute(2, 0, 1), *[templates.transpose(0, 1)] * 2, WIDTH, HEADS),
        *(None, torch.cat(biases), None, None, False, 0.0),
        *(layer.out_proj.weight, layer.out_proj.bias),
        key_padding_mask=padding,
        attn_mask=mask | future if causal else mask,
        use_separate_proj_weight=True,
        q_proj_weight=parts[0].weight,
        k_proj_weight=parts[1].weight,
        v_proj_weight=parts[2].weight,
        average_attn_weights=False,
    )
    masks = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": causal}
    output, actual = called(layer, query, templates, **masks, estimated=estimated)
    assert_equal(output, expected.transpose(0, 1))
    if estimated:
        assert_equal(actual.weights, weights)
        assert (actual.weights == 0).equal(weights == 0)


@pytest.mark.parametrize("estimated", [False, True])
def test_masks_are_those_of_our_own_multihead_attention(estimated):
    """Also float ones, one mask per head, and both at once."""
    other = fnn.MultiheadAttention(
        WIDTH, HEADS, kdim=TEMPLATE, vdim=TEMPLATE, batch_first=True, dtype=torch.float64
    )
    layer, (query, templates) = make(), operands()
    parts = layer.evidence_proj, layer.template_proj, layer.value_proj
    state = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), parts, strict=True))
    state = {name: part.weight for name, part in state.items()}
    biases = parts[0].bias, torch.zeros(WIDTH, dtype=torch.float64), parts[2].bias
    state |= {f"out_proj.{name}": value for name, value in layer.out_proj.named_parameters()}
    other.load_state_dict(state | {"in_proj_bias": torch.cat(biases)})
    mask, padding = hidden_masks()
    each = draw(BATCH * HEADS, QUERIES, TEMPLATES).masked_fill(mask, -math.inf)
    for masks in (
        {"attn_mask": each},
        {"attn_mask": each, "key_padding_mask": padding},
        {"attn_mask": each < 0, "key_padding_mask": draw(BATCH, TEMPLATES, seed=3)},
    ):
        expected, _ = other(query, templates, templates, **masks)
        assert_equal(called(layer, query, templates, **masks, estimated=estimated)[0], expected)


# ---- the estimation problem


@by_solver
@pytest.mark.parametrize("estimated", [False, True])
def test_weights_are_those_of_dual(solver, estimated):
    """Also the preference, the reliability, the scale and the masks reach the problem."""
    layer = make(preference=both(), reliability=LearnedReliability(HEADS), solver=solver, scale=0.7)
    (query, templates), (mask, padding) = operands(), hidden_masks()
    z, t, v = projected(layer, query, templates)
    logs = layer.preference(query, templates)
    function = DUAL[solver]
    seen = ~(mask | padding[:, None, None])
    strength = layer.reliability.raw.exp()
    assert strength.std() > 0.01
    expected = function(0.7 * t.unsqueeze(2), logs.exp(), z, strength, mask=seen)
    masks = {"attn_mask": mask, "key_padding_mask": padding}
    output, actual = called(layer, query, templates, **masks, estimated=estimated)
    assert_equal(output, left(layer, expected.weights @ v))
    assert (actual is not None) == estimated
    if estimated:
        assert actual.mean.shape == (BATCH, HEADS, QUERIES, WIDTH // HEADS)
        for name in ("weights", "mean", "multiplier", "objective", "dual_value", "prior_mean"):
            assert_equal(getattr(actual, name), getattr(expected, name))


def test_exact_estimate_is_optimal_and_first_order_is_not():
    layer, inputs = make(preference=both(), solver=Exact()), operands()
    exact = layer.estimate(*inputs)[1]
    assert (exact.status == int(Status.OK)).all()
    assert exact.gap.max() <= 1e-17
    layer.solver = FirstOrder()
    assert layer.estimate(*inputs)[1].gap.min() > 1e-9


@pytest.mark.parametrize(("solver", "order"), [(FirstOrder(), 2), (SecondOrder(), 3)])
def test_agreement_as_reliability_falls(solver, order):
    """Eqs. 14 and 13: what the output is off by falls with this power of the reliability."""
    errors, sizes = [], (0.02, 0.01, 0.005)
    for reliability in sizes:
        layer = make(preference=both(), reliability=reliability)
        layer.solver = Exact()
        exact = layer(*operands())
        layer.solver = solver
        errors.append(float((layer(*operands()) - exact).detach().norm()))
    for one, half in itertools.pairwise(errors):
        assert abs(math.log2(one / half) - order) < 0.05
    assert errors[-1] > 0


def test_first_order_reads_scale_times_reliability_only_exact_does_not():
    (query, templates), outputs = operands(), {}
    for solver in (FirstOrder(), Exact()):
        pair = (make(scale=s, reliability=r, solver=solver) for s, r in ((0.5, 2.0), (1.0, 1.0)))
        one, other = (layer(query, templates) for layer in pair)
        outputs[solver] = (one - other).abs().max()
    assert outputs[FirstOrder()] <= 1e-14
    assert outputs[Exact()] > 1e-4


def test_log_preferences_are_not_multiplied_by_the_reliability():
    """Deciphering Attention, eq. 18."""
    layer, inputs = make(preference=both(), reliability=0.3), operands()
    logs = layer.preference(*inputs)
    assert_equal(layer(*inputs), by_hand(layer, *inputs, logs, 0.3)[0])
    assert (layer(*inputs) - by_hand(layer, *inputs, 0.3 * logs, 0.3)[0]).abs().max() > 1e-4


# ---- preferences


@by_solver
def test_uniform_preference_is_none_at_all(solver):
    inputs = operands()
    expected = make(solver=solver)(*inputs)
    for even in (UniformPreference(), lambda q, t: q.new_full((1, 1, 1, 1), 3.0)):
        assert_equal(make(preference=even, solver=solver)(*inputs), expected)
    layer = make(preference=UniformPreference() * PositionPreference(HEADS))
    assert_equal(layer.preference(*inputs), layer.preference.second(*inputs))


def test_position_preference_follows_the_distance_only():
    preference = PositionPreference(HEADS, buckets=8, max_distance=20)
    assert not preference.table.any()
    preference.table.data.normal_()
    logs = preference(draw(1, 40, 1), draw(1, 40, 1))
    assert logs.shape == (1, HEADS, 40, 40)
    assert logs[..., 1:, 1:].equal(logs[..., :-1, :-1])
    assert len(logs[0, 0].unique()) == 7  # T5 keeps a bucket for distance 0 to the right
    assert not logs[..., 3, 4].equal(logs[..., 4, 3])


def test_content_preference_sees_templates_and_never_the_query():
    preference, (query, templates) = ContentPreference(TEMPLATE, HEADS).double(), operands()
    logs = preference(query, templates)
    assert logs.shape == (BATCH, HEADS, 1, TEMPLATES)
    assert preference(query + 1, templates).equal(logs)
    moved = templates.clone()
    moved[:, 2] += 1
    changed = (preference(query, moved) != logs).any(0).any(0).flatten()
    assert changed.tolist() == [False, False, True, False, False, False, False]


@by_solver
def test_minus_infinity_hides_like_a_mask(solver):
    mask, _ = hidden_masks()
    logs = torch.zeros(1, 1, QUERIES, TEMPLATES, dtype=torch.float64).masked_fill(mask, -math.inf)
    expected = make(solver=solver)(*operands(), attn_mask=mask)
    assert_equal(make(solver=solver, preference=lambda q, t: logs)(*operands()), expected)
    assert (make(solver=solver)(*operands()) - expected).abs().max() > 1e-3


@by_solver
def test_large_log_preferences_do_not_overflow(solver):
    layer = make(solver=solver, preference=both())
    expected = layer(*operands())
    shifted = make(solver=solver, preference=both() * (lambda q, t: q.new_full((1,) * 4, 2e3)))
    assert_equal(shifted(*operands()), expected, 1e-11)  # 2000 leaves 13 digits of a logarithm


def test_template_bias_would_change_no_weight():
    """Why `template_proj` has none, in any solver."""
    query, templates = operands()
    for solver in SOLVERS:
        layer = make(solver=solver, preference=both())
        expected = layer(query, templates)
        layer.template_proj.bias = torch.nn.Parameter(draw(WIDTH))
        assert_equal(layer(query, templates), expected)


# ---- rows that see nothing, padding, precision


@by_solver
@pytest.mark.parametrize("preferred", [False, True])
def test_a_query_that_sees_nothing_gets_the_projection_of_zero(solver, preferred):
    layer = make(solver=solver, preference=both() if preferred else None)
    mask, padding = hidden_masks()
    mask[1] = True
    query, templates = (x.requires_grad_() for x in operands())
    output, actual = layer.estimate(query, templates, attn_mask=mask, key_padding_mask=padding)
    assert (actual.status == int(Status.EMPTY)).equal(
        torch.tensor([False, True, False, False, False]).expand(BATCH, HEADS, QUERIES)
    )
    assert not actual.weights[:, :, 1].any()
    for each in (output, layer(query, templates, attn_mask=mask, key_padding_mask=padding)):
        assert_equal(each[:, 1], layer.out_proj.bias.expand(BATCH, WIDTH))
        gradients = torch.autograd.grad(each.square().sum(), [query, *layer.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert not gradients[0][:, 1].any()
        assert gradients[0][:, 0].any()


@by_solver
def test_nan_in_padding_does_not_reach_the_output(solver):
    layer, (query, templates) = make(solver=solver, preference=both()), operands()
    padding = torch.zeros(BATCH, TEMPLATES, dtype=torch.bool)
    padding[:, 5:] = True
    expected = layer(query, templates, key_padding_mask=padding)
    strange = templates.clone()
    strange[:, 5:] = math.nan
    output = layer(query, strange, key_padding_mask=padding)
    assert_equal(output, expected)
    for gradient in torch.autograd.grad(output.sin().sum(), list(layer.parameters())):
        assert gradient.isfinite().all()


@by_solver
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_as_good_as_torchs(solver, dtype):
    """At most twice the error of the plain computation of the same projections (STYLE 10)."""
    layer = make(dtype=dtype, preference=both(), solver=solver, reliability=0.5)
    query, templates = operands(dtype)
    output, actual = layer.estimate(query, templates)
    assert output.dtype == dtype
    assert actual.weights.dtype == torch.float64
    truth = copy.deepcopy(layer).double()(query.double(), templates.double())
    plain = make(dtype=dtype, preference=both(), reliability=0.5)
    logs = plain.preference(query, templates)
    written, _ = by_hand(plain, query, templates, logs, 0.5)
    whole = copy.deepcopy(plain).double()
    known, _ = by_hand(
        whole,
        query.double(),
        templates.double(),
        whole.preference(query.double(), templates.double()),
        0.5,
    )
    assert (output - truth).abs().max() <= 2 * (written - known).abs().max()
    assert (layer(query, templates) - truth).abs().max() <= 2 * (written - known).abs().max()


@by_solver
def test_half_precision_is_solved_in_float32(solver):
    layer, inputs = make(torch.bfloat16, solver=solver, scale=0.7), operands(torch.bfloat16)
    z, t, v = (x.float() for x in projected(layer, *inputs))
    function = DUAL[solver]
    expected = function(0.7 * t.unsqueeze(2), None, z, 1.0).weights
    output, actual = layer.estimate(*inputs)
    assert_equal(actual.weights, expected, 1e-6)
    assert output.equal(left(layer, (expected @ v).bfloat16()))


def test_autocast_runs_and_is_close():
    layer, inputs = make(torch.float32, preference=both()), operands(torch.float32)
    expected = layer(*inputs)
    for solver in SOLVERS:
        layer.solver = solver
        exact = layer(*inputs)
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(*inputs)
        assert output.dtype == torch.bfloat16
        assert (output - exact).abs().max() <= 2**-6 * expected.abs().max()
