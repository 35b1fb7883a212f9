"""`torch.ops.fenchel` with operands that do not belong together: an error, and no memory read."""

import math

import pytest
import torch

from fenchel._kernels import attention, attention_call, average, continuous, rows
from fenchel._kernels.library import BLOCK
from tests.kernels.native.cases import needs_library

pytestmark = needs_library

F64 = torch.float64


def _normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _attention(keys=7):
    return {
        "query": _normal(2, 4, 5, 16),
        "key": _normal(2, 2, keys, 16),
        "value": _normal(2, 2, keys, 3),
        "eps": torch.full((2, 4, 5), 0.5, dtype=F64),
        "mask": torch.ones(2, 4, 5, keys, dtype=torch.bool),
        "bias": _normal(2, 4, 5, keys),
        "mass": _normal(2, 4, 5, keys).exp(),
        "seed": torch.tensor(3),
        "start": torch.zeros(2, 4, 5, dtype=torch.int64),
        "stop": torch.full((2, 4, 5), keys),
        "relative": _normal(2, 4, keys + 4),
        "relative_log_mass": _normal(2, 4, keys + 4),
        "of_key": _normal(2, 4, keys),
        "of_key_log_mass": _normal(2, 4, keys),
        "sink": _normal(2, 4, dtype=F64),
        "sink_log_mass": _normal(2, 4, dtype=F64),
    }


def _numbers(queries=5, keys=7):
    """All other arguments of the operator."""
    tensors = dict.fromkeys(("query", "key", "value", "eps"))
    numbers = attention_call.Arguments(**tensors, scale=0.25, dropout=0.5, queries=queries)
    numbers = numbers._replace(longest_query=queries, longest_key=keys)._asdict()
    return {name: value for name, value in numbers.items() if name not in _attention()}


def _attention_backward(keys=7):
    operands = _attention(keys)
    outputs = attention.tsallis_attention(**operands, **_numbers(keys=keys), save=True)
    saved = dict(
        zip(("offset", "support_size", "saved_key", "saved_distance"), outputs[1:], strict=True)
    )
    numbers = {**_numbers(keys=keys), "output_mask": [True] * len(attention_call.TRAINED)}
    return {"gradient": torch.ones_like(outputs[0]), **operands, **numbers, **saved}


def _average():
    return {
        "query": _normal(2, 3, 5, 4),
        "key": _normal(2, 7, 4),
        "value": _normal(2, 7, 6),
        "share": _normal(2, 3, 5).softmax(-1),
    }


def _pairs():
    matrices = torch.eye(2, dtype=F64).expand(3, 2, 2)
    vectors = _normal(3, 2, dtype=F64)
    operands = {"mean": vectors, "scale": matrices, "centre": vectors, "covariance": matrices}
    return operands | {"reach": 6.0, "digits": 6.0, "derivatives": True}


def _mixtures():
    return {
        "weights": torch.full((2, 9), 1 / 9, dtype=F64),
        "positions": _normal(9, 2, dtype=F64),
        "least": torch.tensor(0.1, dtype=F64),
        "mixing": torch.full((3, 2, 4), 0.25, dtype=F64),
        "mean": _normal(3, 2, 4, 2, dtype=F64),
        "covariance": torch.eye(2, dtype=F64).expand(3, 2, 4, 2, 2),
        "iterations": 2,
    }


OPERATORS = {
    "attention": (
        attention.tsallis_attention,
        lambda: {**_attention(), **_numbers(), "save": True},
    ),
    "attention backward": (attention.tsallis_attention_backward, _attention_backward),
    "weights": (
        rows.row_weights,
        lambda: {"scores": _normal(3, 5), "family": "tsallis", "parameter": 0.5},
    ),
    "offsets": (
        rows.row_offsets,
        lambda: {"scores": _normal(3, 5), "eps": torch.full((3,), 0.5, dtype=torch.float64)},
    ),
    "weights backward": (
        rows.row_weights_backward,
        lambda: {
            "gradient": _normal(3, 5),
            "weights": _normal(3, 5).softmax(-1),
            "family": "tsallis",
            "parameter": 0.5,
        },
    ),
    "average": (average.average_attention, _average),
    "average backward": (
        average.average_attention_backward,
        lambda: {"slope": _normal(2, 3, 6), **_average()},
    ),
    "paraboloid": (continuous.paraboloid_expectation, _pairs),
    "mixture": (continuous.mixture_iterations, _mixtures),
}
# What may change alone: (operator, operand, axis).
FREE = {
    ("attention", "value", 3),
    ("weights", "scores", 0),
    ("weights", "scores", 1),
    ("offsets", "scores", 1),
    ("average", "value", 2),
    ("mixture", "weights", "fewer"),  # all mixtures are fitted to the same
}
# Of dtypes that somebody might believe to be taken; complex numbers are taken nowhere.
WRONG = {
    **dict.fromkeys(("scores", "gradient", "share", "slope"), torch.bfloat16),
    **dict.fromkeys(("eps", "offset", "scale", "centre", "covariance"), torch.float32),
    "mask": torch.uint8,
    "seed": torch.int32,
    "support_size": torch.int64,
    "saved_key": torch.int64,
    **dict.fromkeys(("query", "key", "value", "bias", "mass", "positions", "least"), torch.int32),
}
TENSORS = [
    (name, operand)
    for name, (_, make) in OPERATORS.items()
    if name != "attention backward"
    for operand, x in make().items()
    if torch.is_tensor(x)
]
TENSORS += [
    ("attention backward", x)
    for x in ("gradient", *_attention(), "offset", "support_size", "saved_key", "saved_distance")
]


def _others(tensor):
    """The tensor with every axis longer and shorter, with one axis more, and one fewer."""
    for axis in range(tensor.ndim):
        yield axis, torch.cat([tensor, tensor], axis)
        yield axis, tensor.narrow(axis, 0, tensor.shape[axis] - 1)
    yield "more", tensor.unsqueeze(0)
    if tensor.ndim:
        yield "fewer", tensor[0]


@pytest.mark.parametrize(("name", "operand"), TENSORS)
def test_shapes(name, operand):
    operator, make = OPERATORS[name]
    arguments = make()
    operator(**arguments)
    for change, other in _others(arguments[operand]):
        if (name, operand, change) in FREE:
            operator(**{**arguments, operand: other})
            continue
        with pytest.raises(ValueError, match=r"must have .*got "):
            operator(**{**arguments, operand: other})


@pytest.mark.parametrize(("name", "operand"), TENSORS)
def test_dtypes(name, operand):
    operator, make = OPERATORS[name]
    arguments = make()
    for dtype in (WRONG.get(operand, torch.complex64), torch.complex64):
        if (name, operand, dtype) == ("attention backward", "gradient", torch.bfloat16):
            continue  # of any precision, as query is
        with pytest.raises(ValueError, match=rf"dtype .*, got \(.*\) of {str(dtype)[6:]}$"):
            operator(**{**arguments, operand: arguments[operand].to(dtype)})


@pytest.mark.parametrize(("name", "operand"), TENSORS)
def test_devices(name, operand):
    operator, make = OPERATORS[name]
    arguments = make()
    if sum(map(torch.is_tensor, arguments.values())) == 1:
        assert operator(**{**arguments, operand: arguments[operand].to("meta")}).is_meta
        return
    with pytest.raises(ValueError, match=r"one device, got cpu, meta"):
        operator(**{**arguments, operand: arguments[operand].to("meta")})


def test_the_message_says_what_was_expected():
    arguments = {**_attention(), **_numbers(), "save": False}
    expected = r"^value must have shape \(2, 2, 7, component\) and dtype float32 or .*bfloat16, "
    with pytest.raises(ValueError, match=expected + r"got \(2, 2, 6, 3\) of float32$"):
        attention.tsallis_attention(**{**arguments, "value": _normal(2, 2, 6, 3)})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("attention", {"dropout": math.nan}, "dropout must be between 0 and 1, got nan"),
        ("attention", {"dropout": 1.5}, "between 0 and 1, got 1.5"),
        ("attention backward", {"dropout": -1.0}, "between 0 and 1, got -1"),
        ("attention backward", {"output_mask": [True]}, r"one entry each .* got \[True\]"),
        ("weights", {"parameter": 1.5}, r"tsallis rows .* in \[0, 1\], got 1.5"),
        ("weights backward", {"parameter": math.nan}, "tsallis rows .* got nan"),
        ("weights", {"family": "softmax"}, "family must be one of .* got 'softmax'"),
        (
            "weights",
            {"scores": torch.zeros(1, 1).expand(1, 2**31)},
            "2147483647 keys at most, got 2147483648",
        ),
        (
            "attention",
            {
                "key": _normal(2, 3, 7, 16),
                "value": _normal(2, 3, 7, 3),
            },
            "multiple of key's 3 heads, got 4",
        ),
        (
            "attention",
            {"key": _normal(2, 0, 7, 16), "value": _normal(2, 0, 7, 3)},
            "multiple of key's 0 heads",
        ),
        ("attention", {"longest_key": 8}, r"relative must have shape \(2, 4, 12\)"),
        ("attention", {"sink": None}, "sink_log_mass needs a sink"),
        ("attention", {"query_start": torch.tensor([0, 5])}, "query_start and key_start"),
        (
            "attention",
            {"query_start": torch.tensor([0, 5]), "key_start": torch.tensor([0, 7])},
            "are one batch",
        ),
        (
            "paraboloid",
            {
                **dict.fromkeys(("mean", "centre"), torch.zeros(3, 4, dtype=F64)),
                **dict.fromkeys(("scale", "covariance"), torch.eye(4, dtype=F64).expand(3, 4, 4)),
            },
            "1 to 3 components, got 4",
        ),
        (
            "mixture",
            {
                "mixing": torch.zeros(2, 0, dtype=F64),
                "mean": torch.zeros(2, 0, 2, dtype=F64),
                "covariance": torch.zeros(2, 0, 2, 2, dtype=F64),
            },
            r"at least one mode, got shape \(2, 0\)",
        ),
        ("mixture", {"positions": _normal(9, 3, dtype=F64)}, "1 to 2 components, got 3"),
    ],
)
def test_numbers_out_of_range(name, changes, message):
    operator, make = OPERATORS[name]
    with pytest.raises(ValueError, match=message):
        operator(**{**make(), **changes})


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 3, 6], "rise from 0 to the 5 tokens"),
        ([1, 3, 5], "rise from 0"),
        ([0, 4, 5], "steps of 3 at most"),
        ([0, 4, 3, 5], "rise from 0"),
        ([], "rise from 0"),
    ],
)
def test_starts_that_lead_outside(starts, message):
    x, eps = _normal(1, 2, 5, 4), torch.full((1, 2, 5), 0.5, dtype=F64)
    starts = torch.tensor(starts, dtype=torch.int64)
    packed = attention_call.Arguments(x, x, x, eps, query_start=starts, key_start=starts)
    packed = packed._replace(longest_query=3, longest_key=3)
    with pytest.raises(ValueError, match=message):
        attention.tsallis_attention(**packed._asdict(), save=False)


def test_saved_by_a_call_with_more_keys():
    """Pools of equal size: a row may save 512 keys on average, and both have more."""
    few, many = _attention_backward(530), _attention_backward(640)
    saved = {name: many[name] for name in ("offset", "support_size", "saved_key", "saved_distance")}
    assert saved["saved_key"].shape == few["saved_key"].shape
    pools = saved["saved_key"].split(BLOCK * attention_call.ROOM)
    used = zip(pools, saved["support_size"].flatten(0, 1).sum(-1).tolist(), strict=True)
    assert max(int(pool[:count].max()) for pool, count in used) >= 530
    with pytest.raises(ValueError, match="of a call with other operands"):
        attention.tsallis_attention_backward(**{**few, **saved})
    negative = {"support_size": torch.full_like(few["support_size"], -3)}
    with pytest.raises(ValueError, match="of a call with other operands"):
        attention.tsallis_attention_backward(**{**few, **negative})


def test_saved_tensors_of_any_layout():
    arguments = _attention_backward()
    expected = attention.tsallis_attention_backward(**arguments)
    for name in ("offset", "support_size"):
        arguments[name] = arguments[name].mT.contiguous().mT
        assert not arguments[name].is_contiguous()
    gradients = attention.tsallis_attention_backward(**arguments)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("sizes", [(0, 4, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)])
def test_nothing_to_attend(sizes):
    batch, heads, queries, keys = sizes
    operands = {
        "query": _normal(batch, heads, queries, 16),
        "key": _normal(batch, 2, keys, 16),
        "value": _normal(batch, 2, keys, 3),
        "eps": torch.ones(sizes[:3], dtype=F64),
    }
    numbers = dict.fromkeys(_attention()) | _numbers(queries, keys)
    output, *saved = attention.tsallis_attention(**{**numbers, **operands}, save=True)
    assert output.shape == (*sizes[:3], 3)
    assert not output.any()
    names = ("offset", "support_size", "saved_key", "saved_distance")
    gradients = attention.tsallis_attention_backward(
        gradient=output,
        **{**numbers, **operands, **dict(zip(names, saved, strict=True))},
        output_mask=[False] * len(attention_call.TRAINED),
    )
    for gradient, name in zip(gradients, ("query", "key", "value"), strict=False):
        assert gradient.shape == operands[name].shape
        assert not gradient.any()
