"""Calls whose kind is remembered: the same bits as any other call, the same errors, little memory.

Inside of `fl.use("native")` nothing is recalled: there the same kernels are asked anew.
"""

import pytest
import torch

import fenchel as fl
from fenchel import priors as P
from fenchel._attention import plans
from fenchel._kernels import attention_plan
from tests.kernels.native.cases import needs_library

pytestmark = needs_library

OMEGA = fl.Tsallis(1.5)


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    memory = {}
    monkeypatch.setattr(plans, "_PLANS", memory)
    return memory


def _operands(queries, keys, dtype=torch.float32, heads=4, kv_heads=4, width=8):
    g = torch.Generator().manual_seed(queries + 1000 * keys)
    shapes = ((2, heads, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, width))
    return [torch.randn(shape, generator=g).mul(3).to(dtype).requires_grad_() for shape in shapes]


def _results(operands, regularizer=OMEGA, **options):
    with torch.no_grad():
        alone = fl.attention(*operands, regularizer, **options)
    output = fl.attention(*operands, regularizer, **options)
    return [alone, output, *torch.autograd.grad(output.float().sin().sum(), operands)]


def _assert_as_asked_anew(operands, regularizer=OMEGA, **options):
    results = _results(operands, regularizer, **options)
    with fl.use("native"):
        expected = _results(operands, regularizer, **options)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)
        assert result.stride() == other.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_plan_for_a_cache_that_grows(remembered, dtype):
    for queries, keys in [(1, 1), (1, 2), (1, 40), (60, 100), (3, 700), (1, 5)]:
        base = P.Causal(offset=keys - queries)
        _assert_as_asked_anew(_operands(queries, keys, dtype), base=base)
        _assert_as_asked_anew(_operands(queries, keys, dtype))
    assert len(remembered) == 1


def test_heads_batches_and_strides_share_a_plan(remembered):
    _assert_as_asked_anew(_operands(1, 9))
    _assert_as_asked_anew(_operands(5, 9, heads=4, kv_heads=2, width=16), enable_gqa=True)
    _assert_as_asked_anew(_operands(5, 9, heads=1, kv_heads=1))
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in _operands(7, 9)]
    _assert_as_asked_anew([x.requires_grad_() for x in turned])
    assert len(remembered) == 1


PRIORS = {
    "causal": {"base": P.Causal()},
    "window": {"base": P.SlidingWindow(3)},
    "both": {"base": P.Causal(offset=2) * P.SlidingWindow(3)},
    "mask": {"attn_mask": P.Causal(offset=2)},
    "one each": {"base": P.Causal(offset=2), "attn_mask": P.SlidingWindow(2).shifted(2)},
    "none seen": {"base": P.Causal(offset=-100)},
    "far": {"base": P.Causal(offset=10**30)},
    "is_causal": {"is_causal": True, "base": P.Causal(offset=3)},
}


@pytest.mark.parametrize("name", PRIORS)
def test_masks_are_no_kind_of_their_own(remembered, name):
    _results(_operands(2, 3), is_causal=PRIORS[name].get("is_causal", False))
    for queries, keys in [(3, 5), (1, 6), (60, 70)]:
        operands = _operands(queries, keys)
        if name != "far":
            _assert_as_asked_anew(operands, **PRIORS[name])
        else:
            assert torch.equal(_results(operands, **PRIORS[name])[0], _results(operands)[0])
    assert len(remembered) == 1


@pytest.mark.parametrize("term", ["base", "attn_mask"])
def test_tables_by_position_are_of_one_shape(remembered, term):
    for keys in (5, 6, 5):
        for prior in (P.ALiBi(4), P.ALiBi(4) * P.Causal(offset=keys - 3)):
            _assert_as_asked_anew(_operands(3, keys), **{term: prior})
    assert len(remembered) == 4


def test_numbers_that_are_equal_are_one_kind(remembered):
    operands = _operands(3, 5)
    for regularizer in (fl.Tsallis(2), fl.Tsallis(2.0), fl.Tsallis(2.0, 1)):
        _assert_as_asked_anew(operands, regularizer, scale=1)
    assert len(remembered) == 1
    _assert_as_asked_anew(operands, fl.Tsallis(2), scale=2.0)
    assert len(remembered) == 2


def test_memory_is_bounded(remembered, monkeypatch):
    monkeypatch.setattr(plans, "_MOST", 3)
    operands = _operands(1, 2)
    for scale in range(1, 8):
        fl.attention(*operands, OMEGA, scale=scale)
        assert len(remembered) <= 3


def test_a_plan_with_a_long_table_is_not_kept(remembered):
    keys = plans._LARGEST // 16 + 1  # of four heads in float32
    _assert_as_asked_anew(_operands(1, 50), attn_mask=P.ALiBi(4))
    assert len(remembered) == 1
    with torch.no_grad():
        fl.attention(*_operands(1, keys), OMEGA, attn_mask=P.ALiBi(4))
    assert len(remembered) == 1


WRONG = {
    "batch": ([(2, 4, 3, 16), (3, 4, 5, 16), (3, 4, 5, 8)], {}),
    "heads": ([(2, 4, 3, 16), (2, 2, 5, 16), (2, 2, 5, 8)], {}),
    "groups": ([(2, 4, 3, 16), (2, 3, 5, 16), (2, 3, 5, 8)], {"enable_gqa": True}),
    "components": ([(2, 4, 3, 16), (2, 4, 5, 15), (2, 4, 5, 8)], {}),
    "tokens": ([(2, 4, 3, 16), (2, 4, 5, 16), (2, 4, 6, 8)], {}),
    "flag": ([(2, 4, 3, 16), (2, 4, 5, 16), (2, 4, 5, 8)], {"is_causal": 1}),
    "scale": ([(2, 4, 3, 16), (2, 4, 5, 16), (2, 4, 5, 8)], {"scale": True}),
    "dropout": ([(2, 4, 3, 16), (2, 4, 5, 16), (2, 4, 5, 8)], {"dropout_p": False}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_after_a_call_that_was_right(name):
    _results(_operands(3, 5), is_causal=True)
    _results(_operands(3, 5), scale=1)
    shapes, options = WRONG[name]
    operands = [torch.zeros(shape) for shape in shapes]
    with fl.use("native"), pytest.raises((TypeError, ValueError)) as expected:
        fl.attention(*operands, OMEGA, **options)
    with pytest.raises(expected.type) as raised:
        fl.attention(*operands, OMEGA, **options)
    assert str(raised.value) == str(expected.value)


def test_dtypes_that_differ_are_refused():
    query, key, value = _operands(3, 5)
    fl.attention(query, key, value, OMEGA)
    with pytest.raises(ValueError, match="share dtype"):
        fl.attention(query, key, value.double(), OMEGA)


def test_operands_that_broadcast():
    operands = _operands(3, 5)
    fl.attention(*operands, OMEGA)
    few = [operands[0], *(x[:1] for x in operands[1:])]
    whole = [operands[0], *(x.expand(2, -1, -1, -1) for x in few[1:])]
    assert torch.equal(fl.attention(*few, OMEGA), fl.attention(*whole, OMEGA))


def test_the_environment_is_asked_at_each_call(monkeypatch):
    operands = _operands(3, 5)
    fl.attention(*operands, OMEGA)
    monkeypatch.setattr(plans, "recall", None)  # a call of which would fail
    monkeypatch.setenv("FENCHEL_NATIVE", "0")
    assert fl.explain(*operands, OMEGA).path != "native kernels"
    fl.attention(*operands, OMEGA)


CHANGES = {
    "dtype": lambda x: x.double(),
    "length": lambda x: x[..., :-1],
    "more": lambda x: torch.cat((x, x), -1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("integers", [False, True])
def test_saved_tensors_that_a_hook_changed_are_refused(change, integers):
    def unpack(x):
        return CHANGES[change](x) if x.is_floating_point() != integers else x

    operands = _operands(3, 5)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        output = fl.attention(*operands, OMEGA)
    with pytest.raises((ValueError, RuntimeError)):
        torch.autograd.grad(output.sum(), operands)


def test_saved_tensors_that_a_hook_moved_are_read_where_they_are():
    operands = _operands(3, 5)
    expected = _results(operands)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.repeat_interleave(2, -1), lambda x: x[..., ::2]
    ):
        results = _results(operands)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


def test_fields_in_another_order_are_noticed(monkeypatch):
    attention_plan._check_layout()
    monkeypatch.setattr(attention_plan, "_FILLED_IN", attention_plan._FILLED_IN[::-1])
    with pytest.raises(AssertionError, match=r"problem\.h"):
        attention_plan._check_layout()


def test_a_tensor_that_outlived_its_transform():
    escaped = []

    def keep(x):
        escaped.append(x * 1)
        return (x * x).sum()

    query, key, value = _operands(3, 5)
    torch.func.grad(keep)(query.detach())
    for _ in range(2):  # made, then recalled
        output = fl.attention(escaped[0], key, value, OMEGA)
        assert torch.equal(output, fl.attention(query, key, value, OMEGA))
