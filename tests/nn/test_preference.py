"""PreferenceAttention against torch, T5, `fenchel.dual`, and where it is meant to differ."""

import copy
import doctest
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import fenchel.nn as fnn
from fenchel import dual
from fenchel.nn import preference as module
from fenchel.nn.preference import (
    ContentPreference,
    LearnedReliability,
    PositionPreference,
    PreferenceAttention,
    UniformPreference,
)
from fenchel.solution import Status
from tests.nn.pairs import assert_equal

WIDTH, TEMPLATE, HEADS, BATCH, QUERIES, TEMPLATES = 12, 10, 3, 2, 5, 7
SOLUTIONS = ("first_order", "second_order", "exact")
by_solution = pytest.mark.parametrize("solution", SOLUTIONS)
FLAN = Path(__file__).parents[2] / "build" / "models" / "flan-t5-small"


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operands(dtype=torch.float64):
    query = draw(BATCH, QUERIES, WIDTH, seed=1, dtype=dtype)
    return query, draw(BATCH, TEMPLATES, TEMPLATE, seed=2, dtype=dtype)


def make(dtype=torch.float64, **options):
    """A layer in which no parameter is zero."""
    torch.manual_seed(0)
    options = {"template_dim": TEMPLATE, **options}
    layer = PreferenceAttention(WIDTH, HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def both():
    torch.manual_seed(3)
    return PositionPreference(HEADS) * ContentPreference(TEMPLATE, HEADS, hidden=6)


def projected(layer, query, templates):
    """z, t without the scale, v: (batch, head, token, head_dim)"""
    made = layer.evidence_proj(query), layer.template_proj(templates), layer.value_proj(templates)
    return [x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in made]


def left(layer, heads):
    return layer.out_proj(heads.transpose(1, 2).reshape(*heads.shape[::2][:2], -1))


def by_hand(layer, query, templates, logs=0.0, reliability=1.0, scale=None):
    """softmax(reliability scale <K x, Q y> + log u), written out. (output, weights)"""
    z, t, v = projected(layer, query, templates)
    scale = z.shape[-1] ** -0.5 if scale is None else scale
    weights = (reliability * scale * z @ t.mT + logs).softmax(-1)
    return left(layer, weights @ v), weights


def hidden_masks():
    """attn_mask and key_padding_mask with torch's meaning; every query keeps template 0."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(QUERIES, TEMPLATES, generator=generator) < 0.4
    padding = torch.rand(BATCH, TEMPLATES, generator=generator) < 0.4
    mask[:, 0] = padding[:, 0] = False
    return mask, padding


# ---- torch


def test_default_is_torchs_scaled_dot_product_attention():
    layer, inputs = make(), operands()
    z, t, v = projected(layer, *inputs)
    expected = left(layer, F.scaled_dot_product_attention(z, t, v))
    output, nothing = layer(*inputs)
    assert nothing is None
    assert_equal(output, expected)
    assert (make(scale=1.0)(*inputs)[0] - expected).abs().max() > 1e-3


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
    output, found = layer(query, templates, **masks, need_estimate=estimated)
    assert_equal(output, expected.transpose(0, 1))
    if estimated:
        assert_equal(found.weights, weights)
        assert (found.weights == 0).equal(weights == 0)


@pytest.mark.parametrize("estimated", [False, True])
def test_masks_are_those_of_our_own_multihead_attention(estimated):
    """Also float ones, one mask a head, and both at once."""
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
        assert_equal(layer(query, templates, **masks, need_estimate=estimated)[0], expected)


# ---- the estimation problem


@by_solution
@pytest.mark.parametrize("estimated", [False, True])
def test_weights_are_those_of_dual(solution, estimated):
    """Also the preference, the reliability, the scale and the masks reach the problem."""
    layer = make(
        preference=both(), reliability=LearnedReliability(HEADS), solution=solution, scale=0.7
    )
    (query, templates), (mask, padding) = operands(), hidden_masks()
    z, t, v = projected(layer, query, templates)
    logs = layer.preference(query, templates)
    function = {"exact": dual.estimate}.get(solution) or getattr(dual, solution)
    seen = ~(mask | padding[:, None, None])
    strength = layer.reliability.raw.exp()
    assert strength.std() > 0.01
    expected = function(0.7 * t.unsqueeze(2), logs.exp(), z, strength, mask=seen)
    output, found = layer(
        query, templates, attn_mask=mask, key_padding_mask=padding, need_estimate=estimated
    )
    assert_equal(output, left(layer, expected.weights @ v))
    assert (found is not None) == estimated
    if estimated:
        assert found.mean.shape == (BATCH, HEADS, QUERIES, WIDTH // HEADS)
        for name in ("weights", "mean", "multiplier", "objective", "dual_value", "prior_mean"):
            assert_equal(getattr(found, name), getattr(expected, name))


def test_exact_estimate_is_optimal_and_first_order_is_not():
    layer, inputs = make(preference=both(), solution="exact"), operands()
    exact = layer(*inputs, need_estimate=True)[1]
    assert (exact.status == int(Status.OK)).all()
    assert exact.gap.max() <= 1e-17
    layer.solution = "first_order"
    assert layer(*inputs, need_estimate=True)[1].gap.min() > 1e-9


@pytest.mark.parametrize(("solution", "order"), [("first_order", 2), ("second_order", 3)])
def test_agreement_as_reliability_falls(solution, order):
    """D-E14, D-E13: what the output is off by falls with this power of the reliability."""
    errors, sizes = [], (0.02, 0.01, 0.005)
    for reliability in sizes:
        layer = make(preference=both(), reliability=reliability)
        layer.solution = "exact"
        exact = layer(*operands())[0]
        layer.solution = solution
        errors.append(float((layer(*operands())[0] - exact).detach().norm()))
    for one, half in itertools.pairwise(errors):
        assert abs(math.log2(one / half) - order) < 0.05
    assert errors[-1] > 0


def test_first_order_reads_scale_times_reliability_only_exact_does_not():
    (query, templates), outputs = operands(), {}
    for solution in ("first_order", "exact"):
        pair = (
            make(scale=s, reliability=r, solution=solution) for s, r in ((0.5, 2.0), (1.0, 1.0))
        )
        one, other = (layer(query, templates)[0] for layer in pair)
        outputs[solution] = (one - other).abs().max()
    assert outputs["first_order"] <= 1e-14
    assert outputs["exact"] > 1e-4


def test_log_preferences_are_not_multiplied_by_the_reliability():
    """D-E18."""
    layer, inputs = make(preference=both(), reliability=0.3), operands()
    logs = layer.preference(*inputs)
    assert_equal(layer(*inputs)[0], by_hand(layer, *inputs, logs, 0.3)[0])
    assert (layer(*inputs)[0] - by_hand(layer, *inputs, 0.3 * logs, 0.3)[0]).abs().max() > 1e-4


# ---- preferences


@by_solution
def test_uniform_preference_is_none_at_all(solution):
    inputs = operands()
    expected = make(solution=solution)(*inputs)[0]
    for even in (UniformPreference(), lambda q, t: q.new_full((1, 1, 1, 1), 3.0)):
        assert_equal(make(preference=even, solution=solution)(*inputs)[0], expected)
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


@by_solution
def test_minus_infinity_hides_like_a_mask(solution):
    mask, _ = hidden_masks()
    logs = torch.zeros(1, 1, QUERIES, TEMPLATES, dtype=torch.float64).masked_fill(mask, -math.inf)
    expected = make(solution=solution)(*operands(), attn_mask=mask)[0]
    assert_equal(make(solution=solution, preference=lambda q, t: logs)(*operands())[0], expected)
    assert (make(solution=solution)(*operands())[0] - expected).abs().max() > 1e-3


@by_solution
def test_large_log_preferences_do_not_overflow(solution):
    layer = make(solution=solution, preference=both())
    expected = layer(*operands())[0]
    shifted = make(solution=solution, preference=both() * (lambda q, t: q.new_full((1,) * 4, 2e3)))
    assert_equal(shifted(*operands())[0], expected, 1e-11)  # 2000 leaves 13 digits of a logarithm


def test_template_bias_would_change_no_weight():
    """Why `template_proj` has none, in any solution."""
    query, templates = operands()
    for solution in SOLUTIONS:
        layer = make(solution=solution, preference=both())
        expected = layer(query, templates)[0]
        layer.template_proj.bias = torch.nn.Parameter(draw(WIDTH))
        assert_equal(layer(query, templates)[0], expected)


# ---- rows that see nothing, padding, precision


@by_solution
@pytest.mark.parametrize("preferred", [False, True])
def test_a_query_that_sees_nothing_gets_the_projection_of_zero(solution, preferred):
    layer = make(solution=solution, preference=both() if preferred else None)
    mask, padding = hidden_masks()
    mask[1] = True
    query, templates = (x.requires_grad_() for x in operands())
    output, found = layer(
        query, templates, attn_mask=mask, key_padding_mask=padding, need_estimate=True
    )
    assert (found.status == int(Status.EMPTY)).equal(
        torch.tensor([False, True, False, False, False]).expand(BATCH, HEADS, QUERIES)
    )
    assert not found.weights[:, :, 1].any()
    for made in (output, layer(query, templates, attn_mask=mask, key_padding_mask=padding)[0]):
        assert_equal(made[:, 1], layer.out_proj.bias.expand(BATCH, WIDTH))
        gradients = torch.autograd.grad(made.square().sum(), [query, *layer.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert not gradients[0][:, 1].any()
        assert gradients[0][:, 0].any()


@by_solution
def test_nan_in_padding_does_not_reach_the_output(solution):
    layer, (query, templates) = make(solution=solution, preference=both()), operands()
    padding = torch.zeros(BATCH, TEMPLATES, dtype=torch.bool)
    padding[:, 5:] = True
    expected = layer(query, templates, key_padding_mask=padding)[0]
    strange = templates.clone()
    strange[:, 5:] = math.nan
    output = layer(query, strange, key_padding_mask=padding)[0]
    assert_equal(output, expected)
    for gradient in torch.autograd.grad(output.sin().sum(), list(layer.parameters())):
        assert gradient.isfinite().all()


@by_solution
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_as_good_as_torchs(solution, dtype):
    """At most twice the error of the plain computation of the same projections (STYLE 10)."""
    layer = make(dtype=dtype, preference=both(), solution=solution, reliability=0.5)
    query, templates = operands(dtype)
    output, found = layer(query, templates, need_estimate=True)
    assert output.dtype == dtype
    assert found.weights.dtype == torch.float64
    truth = copy.deepcopy(layer).double()(query.double(), templates.double())[0]
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
    assert (layer(query, templates)[0] - truth).abs().max() <= 2 * (written - known).abs().max()


@by_solution
def test_half_precision_is_solved_in_float32(solution):
    layer, inputs = make(torch.bfloat16, solution=solution, scale=0.7), operands(torch.bfloat16)
    z, t, v = (x.float() for x in projected(layer, *inputs))
    function = {"exact": dual.estimate}.get(solution) or getattr(dual, solution)
    expected = function(0.7 * t.unsqueeze(2), None, z, 1.0).weights
    output, found = layer(*inputs, need_estimate=True)
    assert_equal(found.weights, expected, 1e-6)
    assert output.equal(left(layer, (expected @ v).bfloat16()))


def test_autocast_runs_and_is_close():
    layer, inputs = make(torch.float32, preference=both()), operands(torch.float32)
    expected = layer(*inputs)[0]
    for solution in SOLUTIONS:
        layer.solution = solution
        exact = layer(*inputs)[0]
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(*inputs)[0]
        assert output.dtype == torch.bfloat16
        assert (output - exact).abs().max() <= 2**-6 * expected.abs().max()


# ---- derivatives


@by_solution
@pytest.mark.parametrize("estimated", [False, True])
def test_every_parameter_has_a_gradient(solution, estimated):
    layer = make(preference=both(), reliability=LearnedReliability(HEADS), solution=solution)
    output, _ = layer(*operands(), is_causal=True, need_estimate=estimated)
    output.sin().sum().backward()
    names = {name for name, _ in layer.named_parameters()}
    assert {"preference.first.table", "preference.second.outer.weight", "reliability.raw"} <= names
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 1e-6, name


@by_solution
def test_gradcheck(solution):
    torch.manual_seed(0)
    layer = PreferenceAttention(
        2,
        1,
        preference=PositionPreference(1, 4, 4) * ContentPreference(2, 1, 2),
        reliability=LearnedReliability(1, init=1.5),
        solution=solution,
        dtype=torch.float64,
    )
    names = [name for name, _ in layer.named_parameters()]
    mask = torch.tensor([[False, True, False], [False, False, False]])

    def call(query, templates, *values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, state, (query, templates), {"attn_mask": mask})[0]

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    inputs = [draw(1, 2, 2, seed=3).requires_grad_(), draw(1, 3, 2, seed=4).requires_grad_()]
    assert torch.autograd.gradcheck(call, (*inputs, *values))


def test_training_finds_which_templates_matter():
    """The output should be the mean of the templates marked in their first component."""
    torch.manual_seed(0)
    layer = PreferenceAttention(8, 1, preference=ContentPreference(8, 1))
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-2)
    for _ in range(150):
        templates = torch.randn(32, 6, 8)
        marked = torch.rand(32, 6, 1) < 0.5
        marked[:, 0] = True
        templates[..., :1] = torch.where(marked, 2.0, -2.0)
        wanted = (templates * marked).sum(1, keepdim=True) / marked.sum(1, keepdim=True)
        loss = (layer(torch.zeros(32, 1, 8), templates)[0] - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logs = layer.preference(templates, templates)[:, 0, 0]
    assert logs[marked[..., 0]].min() > logs[~marked[..., 0]].max() + 1
    assert loss < 0.05


# ---- a module like others


def test_state_dict_round_trip():
    options = {"preference": both(), "reliability": LearnedReliability(HEADS)}
    layer = make(**options)
    torch.manual_seed(9)
    other = PreferenceAttention(
        WIDTH,
        HEADS,
        template_dim=TEMPLATE,
        preference=both(),
        reliability=LearnedReliability(HEADS),
        dtype=torch.float64,
    )
    assert not other(*operands())[0].equal(layer(*operands())[0])
    other.load_state_dict(layer.state_dict())
    assert other(*operands())[0].equal(layer(*operands())[0])


def test_deepcopy_is_independent():
    layer = make(preference=both(), reliability=LearnedReliability(HEADS))
    expected = layer(*operands())[0]
    twin = copy.deepcopy(layer)
    assert twin(*operands())[0].equal(expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert not twin(*operands())[0].equal(expected)
    assert layer(*operands())[0].equal(expected)


@pytest.mark.parametrize("preferred", [False, True])
def test_compile(preferred):
    layer = make(preference=both() if preferred else None, reliability=LearnedReliability(HEADS))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _, padding = hidden_masks()
    masks = {"key_padding_mask": padding, "is_causal": True}
    outputs = [run(*operands(), **masks)[0] for run in (layer, compiled)]
    assert_equal(*outputs)
    one, other = (torch.autograd.grad(x.sin().sum(), list(layer.parameters())) for x in outputs)
    for left_gradient, right_gradient in zip(one, other, strict=True):
        assert_equal(left_gradient, right_gradient)


@by_solution
def test_dropout_in_training_only(solution):
    layer = make(solution=solution, dropout=0.5, bias=False).eval()
    expected = layer(*operands())[0]
    assert layer(*operands())[0].equal(expected)
    layer.train()
    torch.manual_seed(0)
    drawn = torch.stack([layer(*operands())[0] for _ in range(100)])
    size = expected.abs().mean()
    assert (drawn[0] - expected).abs().mean() > 0.5 * size
    assert (drawn.mean(0) - expected).abs().mean() < 0.3 * size  # weights that are kept grow


def test_repr_names_the_choices():
    text = repr(make(preference=PositionPreference(HEADS), reliability=0.5, solution="exact"))
    assert "reliability=0.5, solution='exact', scale=0.5" in text
    assert "PositionPreference(num_heads=3, buckets=32, bidirectional=True)" in text


@pytest.mark.parametrize("solution", ["first_order", "second_order", "exact"])
def test_no_templates_at_all(solution):
    layer = PreferenceAttention(WIDTH, 2, solution=solution)
    query = torch.randn(2, 3, WIDTH)
    output, found = layer(query, query[:, :0], need_estimate=True)
    assert_equal(output, layer.out_proj.bias.expand_as(output))
    assert found.weights.shape == (2, 2, 3, 0)
    assert (found.status == int(Status.EMPTY)).all()


def test_preference_is_moved_with_the_layer():
    layer = make(preference=both()).to(torch.float32)
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    meta = PreferenceAttention(WIDTH, HEADS, preference=PositionPreference(HEADS), device="meta")
    assert meta.preference.table.is_meta
    shape = torch.empty(2, 3, WIDTH, device="meta")
    assert meta(shape, shape)[0].shape == (2, 3, WIDTH)


def test_examples():
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted >= 5


# ---- refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"embed_dim": 10}, ValueError, "divisible by num_heads, got 10 and 3; or pass head_dim"),
        ({"num_heads": 0}, ValueError, "num_heads must be >= 1, got 0"),
        ({"head_dim": 2.0}, TypeError, "head_dim must be a whole number"),
        ({"scale": 0.0}, ValueError, "scale must be a finite number > 0, got 0.0"),
        ({"dropout": 1.5}, ValueError, "dropout must lie between 0 and 1"),
        ({"solution": "third"}, ValueError, "one of first_order, second_order, exact; got 'third'"),
        ({"reliability": 0}, ValueError, r"reliability must be .* > 0, or a LearnedReliability"),
        ({"reliability": torch.ones(3)}, ValueError, "or a LearnedReliability"),
        ({"preference": PositionPreference}, TypeError, r"such as PositionPreference\(num_heads\)"),
        ({"preference": torch.ones(3)}, TypeError, "must be a callable"),
    ],
)
def test_constructor_refuses(options, error, message):
    with pytest.raises(error, match=message):
        PreferenceAttention(**{"embed_dim": WIDTH, "num_heads": HEADS, **options})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PositionPreference(0), "num_heads must be >= 1"),
        (lambda: PositionPreference(2, buckets=2), "2 buckets do not fit"),
        (lambda: PositionPreference(2, max_distance=8), "do not fit max_distance=8"),
        (lambda: ContentPreference(4, 2, hidden=0), "hidden must be >= 1"),
        (lambda: LearnedReliability(2, init=-1.0), "init must be a finite number > 0"),
    ],
)
def test_parts_refuse(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": draw(QUERIES, WIDTH)}, r"query must be \(batch, token, 12\), got \(5, 12\)"),
        ({"templates": draw(BATCH, TEMPLATES, WIDTH)}, r"templates must be \(batch, token, 10\)"),
        ({"templates": draw(1, TEMPLATES, TEMPLATE)}, "the same batch"),
        ({"attn_mask": torch.zeros(2, 2, dtype=torch.bool)}, "attn_mask must have shape"),
        ({"key_padding_mask": torch.zeros(7, dtype=torch.bool)}, "key_padding_mask must have"),
    ],
)
def test_forward_refuses(change, message):
    query, templates = operands()
    arguments = {"query": query, "templates": templates, **change}
    with pytest.raises(ValueError, match=message):
        make()(**arguments)


@pytest.mark.parametrize(
    "shape", [(TEMPLATES,), (QUERIES, TEMPLATES), (BATCH, 1, 1, 3), (1, 2, 1, 1), (3, 1, 1, 1)]
)
def test_log_preferences_of_another_shape_are_refused(shape):
    layer = make(preference=lambda q, t: torch.zeros(shape))
    with pytest.raises(ValueError, match=r"four axes.*\(2, 3, 5, 7\), each full or 1"):
        layer(*operands())
    layer.preference = lambda q, t: torch.zeros(1, 1, 1, TEMPLATES, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"floating-point.*got torch.bool"):
        layer(*operands())


@by_solution
@pytest.mark.parametrize("shape", [(HEADS,), (QUERIES,), (2, 1), (HEADS, 4)])
def test_reliability_of_another_shape_is_refused(solution, shape):
    class Odd(torch.nn.Module):
        def forward(self):
            return torch.ones(shape)

    with pytest.raises(ValueError, match=r"must return \(head, 1\) = \(3, 1\)"):
        make(reliability=Odd(), solution=solution)(*operands())


def test_choices_changed_later_are_checked_too():
    layer = make()
    layer.solution = "exakt"
    with pytest.raises(ValueError, match="got 'exakt'"):
        layer(*operands())
    layer.solution, layer.reliability = "exact", -1.0
    with pytest.raises(ValueError, match="reliability must be"):
        layer(*operands())


# ---- T5


transformers = pytest.importorskip("transformers")
T5_WIDTH = 16


def t5_model(kind=None, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40,
        d_model=T5_WIDTH,
        d_kv=6,  # heads * d_kv is not d_model
        d_ff=20,
        num_heads=4,
        num_layers=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        pad_token_id=0,
        decoder_start_token_id=0,
        **options,
    )
    model = (kind or transformers.T5Model)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def self_attention(stack, block=0):
    return stack.block[block].layer[0].SelfAttention


class Calls:
    """What every attention of a model was given and gave, in a run of the model."""

    def __init__(self, model):
        self.made = {}
        for name, part in model.named_modules():
            if type(part).__name__ == "T5Attention":
                part.register_forward_hook(self.hook(name), with_kwargs=True)

    def hook(self, name):
        def keep(part, args, kwargs, output):
            (hidden,) = args
            self.made[name] = (part, hidden, kwargs.get("key_value_states"), output[0])

        return keep


def check_whole_model(model, ids, decoder_ids, seen):
    """Each attention of the model again as ours, from the layer norm's output on.

    The largest deviation of each kind, relative to the largest output if that is above one.
    """
    calls = Calls(model)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=seen, decoder_input_ids=decoder_ids)
    first, worst = {}, {"encoder": 0.0, "decoder": 0.0, "cross": 0.0}
    for name, (part, hidden, states, expected) in calls.made.items():
        side = name.split(".")[0]
        kind = side if states is None else "cross"
        given = (
            first.get(side) if kind != "cross" and not part.has_relative_attention_bias else None
        )
        layer = PreferenceAttention.from_t5(part, preference=given)
        if part.has_relative_attention_bias:
            first[side] = layer.preference
        templates = hidden if states is None else states
        padding = None if kind == "decoder" else ~seen.bool()
        with torch.no_grad():
            output, _ = layer(
                hidden, templates, key_padding_mask=padding, is_causal=kind == "decoder"
            )
        rows = seen.bool() if kind == "encoder" else slice(None)  # those of padding are nobody's
        off = (output - expected)[rows].abs().max() / expected.abs().max().clamp(min=1)
        worst[kind] = max(worst[kind], float(off))
    assert len(calls.made) == 3 * model.config.num_layers
    return worst


def test_every_attention_of_a_t5():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (2, 50), generator=generator)
    seen = torch.ones_like(ids)
    seen[1, 37:] = 0
    decoder_ids = torch.randint(1, 40, (2, 45), generator=generator)
    for options in ({}, {"attn_implementation": "eager"}):
        worst = check_whole_model(t5_model(**options), ids, decoder_ids, seen)
        assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("estimated", [False, True])
def test_self_attention_of_t5_called_alone(side, estimated):
    model, x = t5_model(), draw(2, 30, T5_WIDTH)
    causal = side == "decoder"
    future = torch.full((30, 30), -math.inf, dtype=torch.float64).triu(1)
    for block, has_bias in ((0, True), (1, False)):
        theirs = self_attention(getattr(model, side), block)
        assert theirs.has_relative_attention_bias == has_bias
        with torch.no_grad():
            expected = theirs(x, mask=future[None, None] if causal else None)[0]
            layer = PreferenceAttention.from_t5(theirs)
            output, _ = layer(x, x, is_causal=causal, need_estimate=estimated)
        assert_equal(output, expected)
        assert isinstance(layer.preference, PositionPreference if has_bias else UniformPreference)


def test_cross_attention_of_t5_called_alone():
    theirs = t5_model().decoder.block[1].layer[1].EncDecAttention
    query, templates = draw(2, 5, T5_WIDTH, seed=1), draw(2, 30, T5_WIDTH, seed=2)
    layer = PreferenceAttention.from_t5(theirs)
    assert_equal(layer(query, templates)[0], theirs(query, key_value_states=templates)[0])
    assert isinstance(layer.preference, UniformPreference)


def test_gradients_are_those_of_t5():
    theirs, x = self_attention(t5_model().encoder), draw(2, 30, T5_WIDTH)
    layer = PreferenceAttention.from_t5(theirs)
    theirs(x)[0].sin().sum().backward()
    layer(x, x)[0].sin().sum().backward()
    pairs = {
        "q": layer.evidence_proj,
        "k": layer.template_proj,
        "v": layer.value_proj,
        "o": layer.out_proj,
    }
    for name, ours in pairs.items():
        assert_equal(ours.weight.grad, getattr(theirs, name).weight.grad)
    assert_equal(layer.preference.table.grad, theirs.relative_attention_bias.weight.grad)


def test_from_t5_copies_and_keeps_dtype_and_mode():
    theirs = self_attention(t5_model(dtype=torch.bfloat16).encoder).train()
    layer = PreferenceAttention.from_t5(theirs)
    assert layer.training
    assert layer.dropout == theirs.dropout == 0.1
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    before = theirs.q.weight.clone(), theirs.relative_attention_bias.weight.clone()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert theirs.q.weight.equal(before[0])
    assert theirs.relative_attention_bias.weight.equal(before[1])


def test_from_t5_refuses_others():
    model = t5_model()
    first = self_attention(model.encoder)
    with pytest.raises(TypeError, match=r"got T5LayerSelfAttention; .*SelfAttention"):
        PreferenceAttention.from_t5(model.encoder.block[0].layer[0])
    with pytest.raises(ValueError, match="a relative bias of its own"):
        PreferenceAttention.from_t5(first, preference=UniformPreference())


def test_real_t5():
    """flan-t5-small: all 24 attentions, on a text longer than the exact buckets."""
    if not (FLAN / "model.safetensors").is_file():
        pytest.skip(f"{FLAN} is not there; shared/tools/get_flan_t5_small.py makes it")
    model = transformers.T5Model.from_pretrained(FLAN, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FLAN)
    texts = ["summarize: " + "The river rose all night and nobody slept. " * 16, "A short one."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["input_ids"].shape[1] > 128
    decoder_ids = batch["input_ids"][:, :40]
    worst = check_whole_model(model, batch["input_ids"], decoder_ids, batch["attention_mask"])
    assert max(worst.values()) <= 1e-12, worst
