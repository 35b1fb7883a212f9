"""TransportAttention: what it computes in every head, what it shares, what it refuses."""

import doctest
import math

import pytest
import torch
from torch.nn import functional as F

import fenchel.nn.transport as module
from fenchel.dual.transport import transport
from fenchel.nn import Exact, FirstOrder, LearnedReliability, SecondOrder
from fenchel.nn.transport import TransportAttention

DOUBLE = torch.float64
SOLVERS = (FirstOrder(), Exact())
by_solver = pytest.mark.parametrize("solver", SOLVERS)
BATCH, QUERIES, COUNT, WIDTH, HEADS = 2, 3, 5, 8, 2


def layer(**options):
    torch.manual_seed(0)
    actual = TransportAttention(WIDTH, HEADS, **options).double()
    for name, parameter in actual.named_parameters():
        if name.endswith("bias"):  # which are zero at the start
            torch.nn.init.normal_(parameter)
    return actual


def inputs(count=COUNT):
    g = torch.Generator().manual_seed(1)
    shapes = ((BATCH, QUERIES, WIDTH), (BATCH, count, WIDTH), (BATCH, 4, WIDTH))
    return [torch.randn(shape, generator=g, dtype=DOUBLE) for shape in shapes]


def as_written(module, query, templates, preference=None, seen=None):
    """Every head, query and batch entry by the formula, in loops."""
    z, keys, values = (
        f(x).unflatten(-1, (HEADS, -1))
        for f, x in (
            (module.query_proj, query),
            (module.template_proj, templates),
            (module.value_proj, templates),
        )
    )
    heads = torch.zeros_like(z)
    for b in range(BATCH):
        u = torch.ones(templates.shape[1], dtype=DOUBLE) if preference is None else preference[b]
        on = torch.ones(len(u), dtype=torch.bool) if seen is None else seen[b]
        u = u[on] / u[on].sum()
        for h in range(HEADS):
            t = keys[b, on, h]
            for q in range(query.shape[1]):
                p = torch.zeros(len(t), dtype=DOUBLE)
                if isinstance(module.solver, Exact):
                    cost = (t @ t.mT).max() - t @ t.mT
                    e = transport(t, u, cost, z[b, q, h], module.reliability, module.gamma)
                    p = e.weights
                else:
                    for j in range(len(t)):
                        moved = module.reliability * z[b, q, h] + t[j]
                        p = p + u[j] * (t @ moved / module.gamma).softmax(0)
                heads[b, q, h] = p @ values[b, on, h]
    return module.out_proj(heads.flatten(2))


@by_solver
@pytest.mark.parametrize(
    "options", [{}, {"gamma": 0.7, "reliability": 2.0, "bias": False}], ids=str
)
def test_heads_are_the_formula(solver, options):
    attend = layer(solver=solver, **options)
    query, templates, extra = inputs()
    expected = as_written(attend, query, templates)
    torch.testing.assert_close(attend(query, templates), expected, rtol=1e-10, atol=1e-11)
    both = as_written(attend, query, torch.cat([templates, extra], 1))
    output = attend(query, templates, extra=extra)
    torch.testing.assert_close(output, both, rtol=1e-10, atol=1e-11)
    assert (both - expected).abs().max() > 1e-3


@by_solver
@pytest.mark.parametrize("masked", [False, True])
def test_a_partner_is_an_extra_from_the_same_batch(solver, masked):
    attend = layer(solver=solver)
    query, templates, _ = (x.requires_grad_() for x in inputs())
    partner = torch.tensor([1, 0])
    g = torch.Generator().manual_seed(2)
    options = {"preference": torch.rand(BATCH, 2 * COUNT, generator=g, dtype=DOUBLE)}
    if masked:
        options["key_padding_mask"] = torch.rand(BATCH, 2 * COUNT, generator=g) < 0.3
    leaves = (query, templates, *attend.parameters())
    outputs, slopes = [], []
    for other in ({"partner": partner}, {"extra": templates[partner]}):
        outputs.append(attend(query, templates, **other, **options))
        slopes.append(torch.autograd.grad(outputs[-1].square().sum(), leaves))
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-11)
    for one, two in zip(*slopes, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9)
    assert (outputs[0] - attend(query, templates)).abs().max() > 1e-3


def test_partners_that_cannot_be():
    attend, (query, templates, extra) = layer(), inputs()
    with pytest.raises(ValueError, match="extra or partner, not both"):
        attend(query, templates, extra=extra, partner=torch.tensor([1, 0]))
    for partner in (torch.tensor([1, 0, 1]), torch.tensor([1.0, 0.0])):
        with pytest.raises(ValueError, match=r"partner must be int64 \(batch\) = \(2,\)"):
            attend(query, templates, partner=partner)


def test_gamma_defaults_to_the_root_of_the_head_dimension():
    assert layer().gamma == math.sqrt(WIDTH / HEADS)
    assert "gamma=2, reliability=1, solver=FirstOrder()" in repr(layer())


def test_exact_and_first_order_agree_as_the_reliability_falls():
    query, templates, _ = inputs()
    off = []
    for reliability in (1e-1, 1e-2):
        one, two = (layer(solver=solver, reliability=reliability) for solver in SOLVERS)
        off.append(float((one(query, templates) - two(query, templates)).abs().max().detach()))
    assert 0 < off[1] < off[0] / 50  # of second order


def test_a_solver_changed_later_is_checked_and_its_settings_are_used():
    query, templates, _ = inputs()
    attend = layer(solver=Exact(), reliability=3.0)
    exact = attend(query, templates)
    attend.solver = Exact(max_steps=0)
    assert (attend(query, templates) - exact).abs().max() > 1e-3
    attend.solver = "exact"
    with pytest.raises(TypeError, match="got 'exact'"):
        attend(query, templates)


@by_solver
def test_extra_templates_without_preference_still_share(solver):
    attend = layer(solver=solver)
    query, templates, extra = inputs()
    preference = torch.cat([torch.ones(BATCH, COUNT), torch.zeros(BATCH, 4)], 1).double()
    output = attend(query, templates, extra=extra, preference=preference)
    expected = as_written(attend, query, torch.cat([templates, extra], 1), preference)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    assert (output - attend(query, templates)).abs().max() > 1e-3
    extra.requires_grad_()
    attend(query, templates, extra=extra, preference=preference).sum().backward()
    assert (extra.grad.abs().amax((1, 2)) > 0).all()


@by_solver
def test_ignored_templates_are_as_if_not_there(solver):
    attend = layer(solver=solver)
    query, templates, extra = inputs()
    ignored = torch.tensor([[0, 1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1, 1]]).bool()
    output = attend(query, templates, extra=extra, key_padding_mask=ignored)
    both = torch.cat([templates, extra], 1)
    expected = as_written(attend, query, both, seen=~ignored)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)


@by_solver
def test_nothing_to_see_gives_zeros_then_the_projection(solver):
    attend = layer(solver=solver)
    query, templates, _ = inputs()
    ignored = torch.zeros(BATCH, COUNT, dtype=torch.bool)
    ignored[0] = True
    output = attend(query, templates, key_padding_mask=ignored)
    torch.testing.assert_close(output[0], attend.out_proj.bias.expand(QUERIES, WIDTH))
    torch.testing.assert_close(output[1], attend(query, templates)[1])


@by_solver
def test_everything_trains(solver):
    attend = layer(solver=solver)
    query, templates, extra = (x.requires_grad_() for x in inputs())
    attend(query, templates, extra=extra).square().sum().backward()
    for x in (query, templates, extra, *attend.parameters()):
        assert x.grad.isfinite().all()
        assert x.grad.abs().max() > 0


def test_second_derivatives():
    attend = layer()
    query, templates, _ = inputs(3)
    inputs_ = [query[:1, :1].clone().requires_grad_(), templates[:1].clone().requires_grad_()]
    assert torch.autograd.gradgradcheck(attend, inputs_)


def test_one_template_is_a_linear_map():
    attend = layer()
    query, templates, _ = inputs(1)
    expected = attend.out_proj(attend.value_proj(templates)).expand(-1, QUERIES, -1)
    torch.testing.assert_close(attend(query, templates), expected)


def test_large_gamma_is_the_plain_average_and_small_reliability_forgets_the_query():
    query, templates, _ = inputs()
    attend = layer(gamma=1e9)
    mean = attend.out_proj(attend.value_proj(templates).mean(1, keepdim=True))
    torch.testing.assert_close(
        attend(query, templates), mean.expand(-1, QUERIES, -1), atol=1e-7, rtol=0
    )
    attend = layer(reliability=1e-13)
    output = attend(query, templates)
    torch.testing.assert_close(output, output[:, :1].expand(-1, QUERIES, -1), atol=1e-10, rtol=0)


def test_half_precision_and_autocast():
    query, templates, _ = inputs()
    exact = layer()(query, templates)
    low = layer().to(torch.bfloat16)(query.bfloat16(), templates.bfloat16())
    assert low.dtype == torch.bfloat16
    plain = F.mse_loss(low.double(), exact).sqrt() / exact.norm() * math.sqrt(exact.numel())
    assert plain < 0.03
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer().float()(query.float(), templates.float())
    assert (mixed.double() - exact).norm() / exact.norm() < 0.03


def test_compiles_whole():
    attend = layer()
    query, templates, _ = inputs()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, templates), attend(query, templates))


def test_state_is_kept():
    one, two = layer(), TransportAttention(WIDTH, HEADS).double()
    two.load_state_dict(one.state_dict())
    query, templates, _ = inputs()
    assert torch.equal(one(query, templates), two(query, templates))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"embed_dim": 7}, ValueError, "divisible by num_heads, got 7 and 2"),
        ({"num_heads": 0}, ValueError, "num_heads must be >= 1"),
        ({"gamma": 0.0}, ValueError, "gamma must be finite and > 0, got 0.0"),
        ({"gamma": "1"}, TypeError, "gamma must be a number, got str"),
        ({"reliability": math.inf}, ValueError, "reliability must be finite"),
        ({"solver": SecondOrder()}, TypeError, r"or Exact\(\) for transport, got SecondOrder\(\)"),
        ({"solver": True}, TypeError, "solver must be FirstOrder"),
    ],
)
def test_wrong_settings_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        TransportAttention(**({"embed_dim": 8, "num_heads": 2} | options))


@by_solver
def test_a_reliability_for_each_head_is_learned(solver):
    torch.manual_seed(0)
    learned = LearnedReliability(2, init=0.7)
    attend = TransportAttention(8, 2, solver=solver, reliability=learned).double()
    assert learned.raw.dtype == torch.float64
    plain = TransportAttention(8, 2, solver=solver, reliability=0.7).double()
    weights = {k: v for k, v in attend.state_dict().items() if not k.startswith("reliability")}
    plain.load_state_dict(weights)
    query, templates, _ = inputs()
    output = attend(query.double(), templates.double())
    expected = plain(query.double(), templates.double())
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-7)
    output.square().sum().backward()
    assert (learned.raw.grad != 0).all()
    assert "reliability=" not in attend.extra_repr()
    with pytest.raises(ValueError, match=r"reliability must return \(head, 1\) = \(2, 1\)"):
        TransportAttention(8, 2, reliability=LearnedReliability(3))(
            query.float(), templates.float()
        )


def test_device_and_dtype_are_those_asked_for():
    with torch.device("meta"):
        attend = TransportAttention(8, 2, reliability=LearnedReliability(2)).to(torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in attend.parameters()} == {("meta", torch.bfloat16)}


def test_wrong_shapes_are_refused():
    attend = layer()
    query, templates, extra = inputs()
    with pytest.raises(ValueError, match=r"templates must be \(batch, token, 8\).*\(2, 5, 7\)"):
        attend(query, templates[..., :7])
    with pytest.raises(ValueError, match=r"query must be \(batch, token, 8\)"):
        attend(query[0], templates)
    with pytest.raises(ValueError, match="extra must be"):
        attend(query, templates, extra=extra[:1])
    with pytest.raises(ValueError, match="at least one token"):
        attend(query, templates[:, :0])
    mask = torch.zeros(BATCH, COUNT, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"key_padding_mask must be \(batch, N\) = \(2, 9\), extra"
    ):
        attend(query, templates, extra=extra, key_padding_mask=mask)
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        attend(query, templates, key_padding_mask=mask.double())
    with pytest.raises(ValueError, match=r"preference must be \(batch, N\) = \(2, 5\)"):
        attend(query, templates, preference=torch.ones(5))
    with pytest.raises(TypeError, match="query must be a tensor"):
        attend([1.0], templates)


def test_examples_run():
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("solver", [Exact(), FirstOrder()])
def test_padding_of_a_transport_layer_may_hold_anything(solver):
    torch.manual_seed(0)
    attention = TransportAttention(8, 2, solver=solver).double()
    query, templates = torch.randn(2, 3, 8, dtype=DOUBLE), torch.randn(2, 4, 8, dtype=DOUBLE)
    mask = torch.tensor([[False, False, False, True], [True, True, True, True]])
    expected = attention(query, templates, key_padding_mask=mask)
    templates[0, 3] = math.nan
    templates[1] = math.inf
    output = attention(query, templates, key_padding_mask=mask)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())
