"""Every operator passes `torch.library.opcheck`: schema, shapes, derivative, compilation."""

import pytest
import torch

import fenchel.dual  # noqa: F401 - registers two operators
from fenchel._kernels import attention, attention_call, average, continuous, rows
from fenchel._kernels.budget import budget_threshold
from fenchel._kernels.norm import norm_threshold
from fenchel._kernels.total_variation import components, tv_chain, tv_grid
from fenchel._kernels.total_variation.chain import clamped_walk
from fenchel._kernels.tsallis import tsallis_offset
from tests.kernels.native.cases import needs_library

F64 = torch.float64


def normal(*shape, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def column(*values):
    return torch.tensor(values, dtype=F64).unsqueeze(-1)


def attention_arguments():
    g = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 50, 16, generator=g)
    key, value = (torch.randn(2, 2, 50, d, generator=g) for d in (16, 5))
    eps = torch.full((2, 4, 50), 0.5, dtype=F64)
    mask = (torch.rand(50, 50, generator=g) < 0.7).expand(2, 4, 50, 50)
    bias = torch.randn(2, 4, 50, 50, generator=g)
    plain = attention_call.Arguments(query, key, value, eps, mask, bias, scale=0.25, highest=0)
    return plain._replace(queries=50, longest_query=50, longest_key=50)._asdict()


def structured_arguments():
    """A window over ALiBi, masses by key, a sink and a softcap."""
    positions = normal(2, 4, 99, dtype=torch.float32)
    by_key = normal(2, 4, 50, dtype=torch.float32)
    numbers = {"lowest": -20, "highest": 0, "softcap": 5.0, "bias": None, "mask": None}
    tables = {"relative": positions, "of_key_log_mass": by_key, "sink": normal(2, 4)}
    return attention_arguments() | numbers | tables


def packed_arguments():
    arguments = attention_arguments() | {"mask": None, "bias": None}
    one = {name: arguments[name][:1] for name in ("query", "key", "value", "eps")}
    starts = torch.tensor([0, 13, 13, 50])
    lengths = {"longest_query": 37, "longest_key": 37}
    relative = normal(1, 4, 73, dtype=torch.float32)
    return (
        arguments
        | one
        | lengths
        | {
            "query_start": starts,
            "key_start": starts,
            "relative": relative,
        }
    )


def attention_backward(arguments, *wanted):
    """wanted: names of further gradients."""
    output, *saved = attention.tsallis_attention(**arguments, save=True)
    names = ("offset", "support_size", "saved_key", "saved_distance")
    kept = dict(zip(names, saved, strict=True))
    return {
        "gradient": torch.ones_like(output),
        **arguments,
        **kept,
        "output_mask": [x in wanted for x in attention_call.TRAINED],
    }


def averages():
    shapes = {"query": (2, 2, 7, 3), "key": (2, 5, 3), "value": (2, 5, 2)}
    operands = {name: normal(*shape) for name, shape in shapes.items()}
    return {**operands, "share": normal(2, 2, 7).softmax(-1)}


def pairs(derivatives):
    matrix, vector = torch.eye(2, dtype=F64).expand(3, 2, 2), normal(3, 2)
    operands = {"mean": vector, "scale": matrix, "centre": vector + 0.1, "covariance": 2 * matrix}
    return {**operands, "reach": 7.0, "digits": 9.0, "derivatives": derivatives}


def mixtures():
    return {
        "weights": torch.full((2, 9), 1 / 9, dtype=F64),
        "positions": normal(9, 2),
        "least": torch.tensor(0.1, dtype=F64),
        "mixing": torch.full((3, 2, 4), 0.25, dtype=F64),
        "mean": normal(3, 2, 4, 2),
        "covariance": torch.eye(2, dtype=F64).expand(3, 2, 4, 2, 2),
        "iterations": 2,
    }


NATIVE = [
    (attention.tsallis_attention, lambda: {**attention_arguments(), "save": True}),
    (attention.tsallis_attention, lambda: {**structured_arguments(), "save": True}),
    (attention.tsallis_attention, lambda: {**packed_arguments(), "save": True}),
    *(
        (
            attention.tsallis_attention_backward,
            lambda make=make, wanted=wanted: attention_backward(make(), *wanted),
        )
        for make, wanted in (
            (attention_arguments, ()),
            (attention_arguments, ("eps", "bias")),
            (structured_arguments, ("relative", "of_key_log_mass", "sink")),
            (packed_arguments, ("relative",)),
        )
    ),
    *(
        (operator, make)
        for family, parameter in (("tsallis", 0.5), ("norm", 1.0), ("budget", 2.0), ("fused", 0.1))
        for operator, make in (
            (
                rows.row_weights,
                lambda f=family, x=parameter: {
                    "scores": normal(3, 5),
                    "family": f,
                    "parameter": x,
                },
            ),
            (
                rows.row_weights_backward,
                lambda f=family, x=parameter: {
                    "gradient": normal(3, 5),
                    "weights": rows.row_weights(normal(3, 5), f, x),
                    "family": f,
                    "parameter": x,
                },
            ),
        )
    ),
    (rows.row_offsets, lambda: {"scores": normal(3, 5), "eps": column(0.1, 0.5, 1.0).squeeze(-1)}),
    (average.average_attention, averages),
    (average.average_attention_backward, lambda: {"slope": normal(2, 2, 2), **averages()}),
    (continuous.paraboloid_expectation, lambda: pairs(True)),
    (continuous.paraboloid_expectation, lambda: pairs(False)),
    (continuous.mixture_iterations, mixtures),
]


def estimation(n=4, d=2, rows=3):
    preference = normal(1, rows, n).log_softmax(-1)
    return (normal(1, n, d), preference, normal(1, rows, d), torch.ones(1, rows, 1, dtype=F64))


def transportation(n=4, d=2, rows=3):
    templates, log_preference, target, strength = estimation(n, d, rows)
    logits, shifts = -normal(1, 1, n, n).abs(), torch.zeros(1, 1, 1, d, dtype=F64)
    return (templates, log_preference.exp(), logits, shifts, target, strength)


EVERYWHERE = torch.ones(3, 4, 5, dtype=torch.bool)
TORCH = [
    (tsallis_offset, lambda: (normal(3, 5), None, column(0.1, 0.5, 1.0), column(1, 1, 2))),
    (tsallis_offset, lambda: (normal(3, 5), normal(3, 5), column(0.1, 0.5, 3), column(1, 1, 2))),
    (norm_threshold, lambda: (normal(3, 5), column(0.5, 1.0, 2.0))),
    (budget_threshold, lambda: (normal(3, 5), column(1, 2, 3))),
    (tv_chain, lambda: (normal(3, 4, 5), torch.full((1, 1, 1), 0.3, dtype=F64), EVERYWHERE)),
    (
        tv_grid,
        lambda: (normal(3, 4, 5), torch.full((1, 1, 1), 0.3, dtype=F64), EVERYWHERE, 1e-9, 500),
    ),
    (clamped_walk, lambda: (normal(3, 5), normal(3, 5).abs())),
    (clamped_walk, lambda: (normal(5, 3).mT, normal(3, 1).abs().expand(3, 5))),
    (components, lambda: (EVERYWHERE.unsqueeze(-2), False)),
    (components, lambda: (torch.zeros(3, 2, 4, 5, dtype=torch.bool), True)),
    (torch.ops.fenchel.dual_minimise.default, lambda: (*estimation(), 1e-12, 50)),
    (torch.ops.fenchel.transport_maximise.default, lambda: (*transportation(), 1e-12, 50)),
    (torch.ops.fenchel.transport_maximise.default, lambda: (*transportation(2, 5), 1e-12, 50)),
]
TRAINS = ("query", "key", "value", "share", "bias", "scores")  # where the operator differentiates
DIFFERENTIABLE = {"tsallis_attention", "row_weights", "average_attention"}


def name_of(operator):
    return getattr(operator, "_name", str(operator)).removeprefix("fenchel::").split(".")[0]


def test_every_operator_is_here():
    registered = {
        name.removeprefix("fenchel::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fenchel::")
    }
    assert registered == {name_of(operator) for operator, _ in NATIVE + TORCH}


@needs_library
@pytest.mark.parametrize(("operator", "make"), NATIVE, ids=[name_of(x) for x, _ in NATIVE])
def test_native_operators(operator, make, monkeypatch):
    """The pools' unused ends are zeroed here: they hold anything, and no two runs alike."""
    outputs = attention.forward_outputs
    monkeypatch.setattr(
        attention, "forward_outputs", lambda *a: tuple(x.zero_() for x in outputs(*a))
    )
    arguments = make()
    if name_of(operator) in DIFFERENTIABLE:
        for name in TRAINS:
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].clone().requires_grad_()
    verdicts = torch.library.opcheck(operator, (), arguments)
    assert set(verdicts.values()) == {"SUCCESS"}, verdicts


@pytest.mark.parametrize(("operator", "make"), TORCH, ids=[name_of(x) for x, _ in TORCH])
def test_operators_in_torch(operator, make):
    verdicts = torch.library.opcheck(operator, make())
    assert set(verdicts.values()) == {"SUCCESS"}, verdicts
