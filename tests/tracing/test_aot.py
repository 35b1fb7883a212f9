"""AOT autograd, with lengths that are numbers and lengths that are symbols, equals eager.

This is what torch's own `test_aot_autograd_exhaustive` and `..._symbolic_exhaustive` ask of every
operator of torch's: outputs and gradients, then once more for other numbers in the same graph.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.testing._internal.optests import aot_autograd_check

import fenchel as fl
from tests import needs
from tests.tracing.cases import each

COVERS = "torch's own samples for softmax and attention under AOT autograd"
KINDS = [(True, False), (False, False), (True, True), (False, True)]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def assert_traced(function, operands, dynamic, plain=False, **options):
    """plain: without functionalisation, which custom operators must not depend on."""
    with patch("functorch.compile.config.debug_assert", True):
        aot_autograd_check(
            function,
            operands,
            options,
            dynamic,
            check_gradients=True,
            try_check_data_specialization=True,
            disable_functionalization=plain,
        )


@pytest.mark.parametrize("case", each())
def test_one_sample_with_symbolic_lengths(case):
    sample = case.samples()[0]
    assert_traced(case.function, sample, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "plain"), KINDS)
@pytest.mark.parametrize("case", each(slow=False))
def test_every_sample(case, dynamic, plain):
    for sample in case.samples():
        assert_traced(case.function, sample, dynamic, plain)


def test_the_check_can_fail():
    """A value that Python reads is part of the graph, and wrong for other values."""

    def branch(x):
        return x * float(x.detach().sum().sign())

    with pytest.raises(Exception, match=r"."):
        assert_traced(branch, (torch.randn(3, requires_grad=True),), dynamic=True)


# ---- torch's own samples


def torch_samples(name):
    """From torch's table of operators, which needs the package expecttest."""
    needs.package("expecttest", COVERS)
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == name and not op.variant_test_name)
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    return [sample for sample in samples if sample.input.ndim]  # a row has an axis


def weigh(regularizer, scores, dim):
    return fl.solve(scores, regularizer, dim=dim).weights


def attend(regularizer, query, key, value, **options):
    return fl.attention(query, key, value, regularizer, **options)


THEIRS = [
    *(("softmax", partial(weigh, r)) for r in (fl.Shannon(), fl.Tsallis(1.5), fl.Norm(2.0))),
    *(
        ("nn.functional.scaled_dot_product_attention", partial(attend, r))
        for r in (fl.Shannon(), fl.Tsallis(1.5))
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("name", "function"), THEIRS)
@pytest.mark.filterwarnings("ignore")
def test_the_samples_of_torch(name, function, dynamic):
    for sample in torch_samples(name):
        assert_traced(function, [sample.input, *sample.args], dynamic, **sample.kwargs)
