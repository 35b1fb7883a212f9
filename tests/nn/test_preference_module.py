"""PreferenceAttention as a module like others: derivatives, copies, state, and what it refuses."""

import copy
import doctest
import math

import pytest
import torch

from fenchel._solution import Status
from fenchel.nn import (
    ContentPreference,
    Exact,
    HeadForm,
    LearnedReliability,
    PositionPreference,
    PreferenceAttention,
    preference_attention,
    preferences,
)
from tests.nn.pairs import assert_equal
from tests.nn.preference_layers import (
    BATCH,
    HEADS,
    QUERIES,
    TEMPLATE,
    TEMPLATES,
    WIDTH,
    both,
    by_solver,
    called,
    draw,
    hidden_masks,
    make,
    operands,
)

# ---- derivatives


@by_solver
@pytest.mark.parametrize("estimated", [False, True])
def test_every_parameter_has_a_gradient(solver, estimated):
    layer = make(preference=both(), reliability=LearnedReliability(HEADS), solver=solver)
    output, _ = called(layer, *operands(), is_causal=True, estimated=estimated)
    output.sin().sum().backward()
    names = {name for name, _ in layer.named_parameters()}
    assert {"preference.first.table", "preference.second.outer.weight", "reliability.raw"} <= names
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 1e-6, name


@by_solver
def test_gradcheck(solver):
    torch.manual_seed(0)
    layer = PreferenceAttention(
        2,
        1,
        preference=PositionPreference(1, 4, 4) * ContentPreference(2, 1, 2),
        reliability=LearnedReliability(1, init=1.5),
        solver=solver,
    ).double()
    names = [name for name, _ in layer.named_parameters()]
    mask = torch.tensor([[False, True, False], [False, False, False]])

    def call(query, templates, *values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, state, (query, templates), {"attn_mask": mask})

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
        expected = (templates * marked).sum(1, keepdim=True) / marked.sum(1, keepdim=True)
        loss = (layer(torch.zeros(32, 1, 8), templates) - expected).square().mean()
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
        preference=both(),
        reliability=LearnedReliability(HEADS),
        form=HeadForm(template_dim=TEMPLATE),
    ).double()
    assert not other(*operands()).equal(layer(*operands()))
    other.load_state_dict(layer.state_dict())
    assert other(*operands()).equal(layer(*operands()))


def test_deepcopy_is_independent():
    layer = make(preference=both(), reliability=LearnedReliability(HEADS))
    expected = layer(*operands())
    twin = copy.deepcopy(layer)
    assert twin(*operands()).equal(expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert not twin(*operands()).equal(expected)
    assert layer(*operands()).equal(expected)


@pytest.mark.parametrize("preferred", [False, True])
def test_compile(preferred):
    layer = make(preference=both() if preferred else None, reliability=LearnedReliability(HEADS))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _, padding = hidden_masks()
    masks = {"key_padding_mask": padding, "is_causal": True}
    outputs = [run(*operands(), **masks) for run in (layer, compiled)]
    assert_equal(*outputs)
    one, other = (torch.autograd.grad(x.sin().sum(), list(layer.parameters())) for x in outputs)
    for left_gradient, right_gradient in zip(one, other, strict=True):
        assert_equal(left_gradient, right_gradient)


@by_solver
def test_dropout_in_training_only(solver):
    layer = make(solver=solver, dropout=0.5, bias=False).eval()
    expected = layer(*operands())
    assert layer(*operands()).equal(expected)
    layer.train()
    torch.manual_seed(0)
    drawn = torch.stack([layer(*operands()) for _ in range(100)])
    size = expected.abs().mean()
    assert (drawn[0] - expected).abs().mean() > 0.5 * size
    assert (drawn.mean(0) - expected).abs().mean() < 0.3 * size  # weights that are kept grow


def test_repr_names_the_choices():
    text = repr(make(preference=PositionPreference(HEADS), reliability=0.5, solver=Exact()))
    assert "reliability=0.5, solver=Exact(tolerance=None, max_steps=200), scale=0.5" in text
    assert "PositionPreference(num_heads=3, buckets=32, bidirectional=True)" in text


@by_solver
def test_no_templates_at_all(solver):
    layer = PreferenceAttention(WIDTH, 2, solver=solver)
    query = torch.randn(2, 3, WIDTH)
    output, actual = layer.estimate(query, query[:, :0])
    assert_equal(output, layer.out_proj.bias.expand_as(output))
    assert actual.weights.shape == (2, 2, 3, 0)
    assert (actual.status == int(Status.EMPTY)).all()


def test_preference_is_moved_with_the_layer():
    layer = make(preference=both()).to(torch.float32)
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    meta = PreferenceAttention(WIDTH, HEADS, preference=PositionPreference(HEADS)).to("meta")
    assert meta.preference.table.is_meta
    shape = torch.empty(2, 3, WIDTH, device="meta")
    assert meta(shape, shape).shape == (2, 3, WIDTH)


def test_examples():
    names = {"PreferenceAttention": PreferenceAttention}
    modules = (preference_attention, preferences)
    results = [doctest.testmod(module, extraglobs=names) for module in modules]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 5


# ---- refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"embed_dim": 10},
            ValueError,
            "got 10 and 3; or pass form=HeadForm",
        ),
        ({"num_heads": 0}, ValueError, "num_heads must be >= 1, got 0"),
        ({"form": {"head_dim": 2.0}}, TypeError, "head_dim must be a whole number"),
        ({"form": {"scale": 0.0}}, ValueError, "scale must be a finite number > 0, got 0.0"),
        ({"form": {"dropout": 1.5}}, ValueError, "dropout must lie between 0 and 1"),
        ({"solver": "exact"}, TypeError, r"FirstOrder\(\), SecondOrder\(\) or .*, got 'exact'"),
        ({"solver": Exact}, TypeError, "solver must be FirstOrder"),
        ({"reliability": 0}, ValueError, r"reliability must be .* > 0, or a LearnedReliability"),
        ({"reliability": torch.ones(3)}, ValueError, "or a LearnedReliability"),
        ({"preference": PositionPreference}, TypeError, r"such as PositionPreference\(num_heads\)"),
        ({"preference": torch.ones(3)}, TypeError, "must be a callable"),
    ],
)
def test_constructor_refuses(options, error, message):
    given = {"embed_dim": WIDTH, "num_heads": HEADS, **options}
    with pytest.raises(error, match=message):
        PreferenceAttention(**given | {"form": HeadForm(**options.get("form", {}))})


def test_widths_without_their_form_are_refused():
    with pytest.raises(TypeError, match=r"form must be a HeadForm, got \{'head_dim': 2\}"):
        PreferenceAttention(WIDTH, HEADS, form={"head_dim": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be between 0 and 1, got 0.0"),
        ({"tolerance": math.nan}, "tolerance must be between 0 and 1, got nan"),
        ({"max_steps": -1}, "max_steps must be >= 0"),
    ],
)
def test_an_exact_solver_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        Exact(**settings)


def test_the_settings_of_a_solver_are_used():
    layer = make(preference=both(), solver=Exact())
    exact = layer.estimate(*operands()).estimate
    layer.solver = Exact(max_steps=1)
    short = layer.estimate(*operands()).estimate
    assert short.steps.max() <= 1 < exact.steps.max()
    layer.solver = Exact(tolerance=1e-2)
    loose = layer.estimate(*operands()).estimate
    assert loose.steps.sum() < exact.steps.sum()
    assert loose.gap.max() > 1e6 * exact.gap.max()


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


@by_solver
@pytest.mark.parametrize("shape", [(HEADS,), (QUERIES,), (2, 1), (HEADS, 4)])
def test_reliability_of_another_shape_is_refused(solver, shape):
    class Odd(torch.nn.Module):
        def forward(self):
            return torch.ones(shape)

    with pytest.raises(ValueError, match=r"must return \(head, 1\) = \(3, 1\)"):
        make(reliability=Odd(), solver=solver)(*operands())


def test_choices_changed_later_are_checked_too():
    layer = make()
    layer.solver = "exact"
    with pytest.raises(TypeError, match="got 'exact'"):
        layer(*operands())
    layer.solver, layer.reliability = Exact(), -1.0
    with pytest.raises(ValueError, match="reliability must be"):
        layer(*operands())
