"""What transport takes and refuses: batches, masks, precisions, memory, messages."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fenchel._solution import Status
from fenchel.dual.transport import (
    dot_product_transport,
    transport,
    transport_first_order,
    true_preference,
)
from tests import needs
from tests.dual.problems import space
from tests.dual.test_transport import DOUBLE, MODULES, draw

NUMBERS = ("multiplier", "weights", "mean", "objective", "dual_value", "prior_mean")


def assert_same(one, two, index=()):
    for name in NUMBERS:
        torch.testing.assert_close(
            getattr(one, name)[index], getattr(two, name), rtol=1e-11, atol=1e-11
        )


@pytest.mark.parametrize("dot", [False, True], ids=["cost", "dot product"])
@pytest.mark.parametrize("function", [transport, transport_first_order])
def test_rows_are_independent_whatever_they_share(function, dot):
    g = torch.Generator().manual_seed(5)
    templates = torch.randn(2, 1, 5, 3, generator=g, dtype=DOUBLE)
    preference = torch.rand(3, 5, generator=g, dtype=DOUBLE)
    cost = torch.rand(2, 3, 5, 5, generator=g, dtype=DOUBLE)
    evidence = torch.randn(2, 3, 3, generator=g, dtype=DOUBLE)
    gamma = torch.rand(2, 1, generator=g, dtype=DOUBLE) + 0.3
    reliability = torch.tensor([0.5, 2.0, 200.0])
    mask = torch.rand(2, 3, 5, generator=g) < 0.8
    mask[..., 0] = True
    given = None if dot else cost
    whole = function(templates, preference, given, evidence, reliability, gamma, mask=mask)
    assert (whole.status == Status.OK).all()
    for b in range(2):
        for m in range(3):
            one = None if dot else cost[b, m]
            alone = function(
                templates[b, 0],
                preference[m],
                one,
                evidence[b, m],
                float(reliability[m]),
                float(gamma[b]),
                mask=mask[b, m],
            )
            assert_same(whole, alone, (b, m))
    if dot:
        problem = (templates, preference, evidence, reliability, gamma)
        mean = dot_product_transport(*problem, mask=mask)
        expected = transport_first_order(*problem[:2], None, *problem[2:], mask=mask).mean
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-13)


def test_a_cost_for_all_rows_is_not_copied_for_each(monkeypatch):
    seen, module = [], MODULES["transport"]
    real = module.maximise
    monkeypatch.setattr(
        module, "maximise", lambda rows, *rest: seen.append(rows) or real(rows, *rest)
    )
    templates, preference, cost, _ = draw(5)
    evidence = draw(6, 1, 3)[0]
    transport(templates, preference, cost, evidence, 1.0, 0.5)
    assert seen[0].logits.shape == (1, 1, 5, 5)
    transport(templates, preference, None, evidence, 1.0, 0.5)
    assert seen[1].logits.shape == (1, 1, 1, 5)


@pytest.mark.parametrize("columns", [6, 3])
def test_a_mask_is_as_if_the_templates_were_not_there(columns):
    templates, preference, cost, evidence = draw(6, columns)
    mask = torch.tensor([True, False, True, True, False, True])
    kept = mask if columns == 6 else slice(None)  # then the columns are not the templates
    expected = transport(templates[mask], preference[kept], cost[mask][:, kept], evidence, 3.0, 0.4)
    templates[1], cost[4] = math.nan, math.nan
    if columns == 6:
        cost[:, 1] = math.nan
    e = transport(templates, preference, cost, evidence, 3.0, 0.4, mask=mask)
    assert (e.weights[~mask] == 0).all()
    torch.testing.assert_close(e.weights[mask], expected.weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(e.objective, expected.objective, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dot", [False, True], ids=["cost", "dot product"])
def test_empty_rows(dot):
    templates, preference, cost, evidence = draw(4, 4, 2)
    rows = torch.stack([preference, torch.zeros(4, dtype=DOUBLE), preference])
    mask = torch.tensor([[True] * 4, [True] * 4, [False] * 4])
    leaves = [x.requires_grad_() for x in (templates, rows, evidence)]
    problem = (templates, rows, None if dot else cost, evidence, 1.0, 0.5)
    for function in (transport, transport_first_order):
        e = function(*problem, mask=mask)
        assert e.status.tolist() == [Status.OK, Status.EMPTY, Status.EMPTY]
        for name in (*NUMBERS, "gap"):
            assert (getattr(e, name)[1:] == 0).all()
        gradients = torch.autograd.grad(e.mean[1:].sum() + e.objective[1:].sum(), leaves)
        assert all((x == 0).all() for x in gradients)
    mean = dot_product_transport(*problem[:2], *problem[3:], mask=mask)
    assert (mean[1:] == 0).all()
    assert (mean[0] != 0).all()


def test_a_mask_may_empty_a_row_whose_columns_it_does_not_reach():
    templates, preference, cost, evidence = draw(4, 2)
    mask = torch.tensor([[True] * 4, [False] * 4])
    e = transport(templates, preference, cost, evidence, 1.0, 0.5, mask=mask)
    assert e.status.tolist() == [Status.OK, Status.EMPTY]
    assert (e.weights[1] == 0).all()


def test_no_rows_at_all():
    templates, preference, cost, _ = draw()
    e = transport(templates, preference, cost, torch.zeros(0, 3, dtype=DOUBLE), 1.0, 1.0)
    assert e.weights.shape == (0, 7)
    mean = dot_product_transport(templates, preference, torch.zeros(0, 3, dtype=DOUBLE), 1.0, 1.0)
    assert mean.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_rounded_once(dtype):
    rounded = [x.to(dtype) for x in draw(8, 8, 4)]
    e = transport(*rounded, 50.0, 0.125)
    exact = transport(*(x.double() for x in rounded), 50.0, 0.125)
    for name in ("multiplier", "weights", "mean", "prior_mean"):
        assert torch.equal(getattr(e, name), getattr(exact, name).to(dtype))
    assert e.gap.dtype == DOUBLE


def test_a_dead_column_without_preference_is_no_matter():
    templates, preference, cost, evidence = draw(5)
    keep = [0, 1, 3, 4]
    expected = transport(templates, preference[keep], cost[:, keep], evidence, 2.0, 0.5)
    preference[2], cost[:, 2] = 0, math.inf
    e = transport(templates, preference, cost, evidence, 2.0, 0.5)
    assert_same(e, expected)


@needs.unless(Path("/proc/self/status").exists(), "no /proc/self/status", "the memory of transport")
def test_memory_is_linear_in_the_templates():
    """With 8192 templates a matrix of weights would be 268 MB."""
    code = """if True:
        import re, torch
        from pathlib import Path
        from fenchel.dual.transport import dot_product_transport
        torch.set_num_threads(1)
        status = Path("/proc/self/status")
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
        templates, evidence = torch.randn(8192, 16), torch.randn(2, 16)
        dot_product_transport(templates[:64], None, evidence, 1.0, 4.0)
        before = peak()
        dot_product_transport(templates, None, evidence, 1.0, 4.0)
        print(peak() - before)
        whole = torch.ones(8192, 8192)  # the measurement itself can fail
        print(peak() - before)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours, dense = map(int, run.stdout.split())
    assert ours < 32 * 8192 * 16 * 4  # some tensors of N d numbers
    assert dense > 0.9 * 8192 * 8192 * 4


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": torch.full((3, 2), NAN)}, "cost must not hold NaN"),
        ({"cost": torch.full((3, 2), -INF)}, "cost must be >= 0.*-inf"),
        ({"cost": torch.tensor([[1.0, 1], [1, -0.5], [0, 0]])}, "got -0.5"),
        ({"cost": torch.tensor([[0, INF]] * 3)}, "column 1 is infinite everywhere"),
        ({"cost": torch.zeros(2, 2)}, r"cost must be \(..., 3, n\)"),
        ({"cost": torch.zeros(3, 4)}, r"preference must be \(..., 4\)"),
        ({"cost": None}, r"preference must be \(..., 3\)"),
        ({"preference": torch.tensor([-1.0, 2])}, "preference must be >= 0"),
        ({"preference": torch.tensor([NAN, 2])}, "preference must be finite"),
        ({"evidence": torch.zeros(3)}, r"evidence must be \(..., 2\)"),
        ({"evidence": torch.tensor([INF, 0])}, "evidence must be finite"),
        ({"gamma": 0.0}, "gamma must be finite and > 0, got 0"),
        ({"gamma": torch.tensor([1.0, -1])}, "gamma must be finite and > 0, got -1"),
        ({"reliability": INF}, "reliability must be finite"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"mask must be bool \(..., 3\)"),
        ({"mask": torch.arange(3) > 0, "cost": torch.tensor([[0, 0], [0, INF], [0, INF]])},
         "mask takes out every template that column 1"),
        ({"evidence": torch.zeros(4, 2), "templates": torch.zeros(5, 3, 2)}, "do not broadcast"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [transport, transport_first_order])
def test_wrong_values_are_refused(function, change, message):
    given = {
        "templates": torch.tensor([[0.0, 1], [1, 0], [1, 1]]),
        "preference": torch.ones(2),
        "cost": torch.ones(3, 2),
        "evidence": torch.zeros(2),
        "reliability": 1.0,
        "gamma": 1.0,
    }
    function(**given)
    with pytest.raises(ValueError, match=message):
        function(**(given | change))


def test_values_take_part_in_the_precision():
    templates, evidence = torch.randn(5, 3), torch.randn(3)
    values = torch.randn(5, 2, dtype=DOUBLE)
    mean = dot_product_transport(templates, None, evidence, 1.0, 1.0, values=values)
    wide = (x.double() for x in (templates, evidence))
    expected = dot_product_transport(next(wide), None, next(wide), 1.0, 1.0, values=values)
    torch.testing.assert_close(mean, expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match="values must be a tensor"):
        dot_product_transport(templates, None, evidence, 1.0, 1.0, values=values.tolist())


def test_wrong_types_are_refused():
    templates, preference, cost, evidence = draw(4)
    with pytest.raises(TypeError, match="cost must be a tensor"):
        transport(templates, preference, "dot", evidence, 1.0, 1.0)
    with pytest.raises(TypeError, match="cost must be floating point"):
        true_preference(templates, preference, torch.ones(4, 4, dtype=torch.int64), 1.0)
    with pytest.raises(TypeError, match="gamma must be a number"):
        transport(templates, preference, cost, evidence, 1.0, "small")
    with pytest.raises(ValueError, match="tolerance must be between"):
        transport(templates, preference, cost, evidence, 1.0, 1.0, tolerance=0.0)
    with pytest.raises(ValueError, match="max_steps must be >= 0"):
        transport(templates, preference, cost, evidence, 1.0, 1.0, max_steps=-1)
    with pytest.raises(ValueError, match=r"values must be \(..., 4, e\)"):
        dot_product_transport(templates, None, evidence, 1.0, 1.0, values=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="values must be shared"):
        dot_product_transport(
            templates, None, evidence.expand(2, 3), 1.0, 1.0, values=torch.randn(2, 4, 2)
        )


def test_what_rounding_leaves_below_zero_is_a_cost():
    templates, u, z = space()
    cost = torch.cdist(templates, templates).square()
    expected = transport(templates, u, cost, z, 1.0, 0.5)
    low = cost - 1e-7 * cost.max() * torch.eye(6, dtype=DOUBLE)
    solution = transport(templates, u, low, z, 1.0, 0.5)
    torch.testing.assert_close(solution.weights, expected.weights, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"cost must be >= 0.*subtract the least"):
        transport(templates, u, cost - 1e-3 * cost.max(), z, 1.0, 0.5)
