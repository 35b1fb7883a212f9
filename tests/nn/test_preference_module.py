"""PreferenceAttention as a module like others: derivatives, copies, state, and what it refuses."""

import copy
import doctest

import pytest
import torch

from fenchel._solution import Status
from fenchel.nn import preference as module
from fenchel.nn.preference import (
    ContentPreference,
    LearnedReliability,
    PositionPreference,
    PreferenceAttention,
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
    by_solution,
    draw,
    hidden_masks,
    make,
    operands,
)

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
