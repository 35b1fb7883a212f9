"""The sizes that roundings are measured by: their formulas, and two calls where all cancels."""

import pytest
import torch

from tests.kernels.native.cases import make, needs_library, run
from tests.kernels.native.sizes import log_slope, respond, sizes
from tests.kernels.native.test_fuzz import assert_agree, assert_native_agrees

CONSTANT = 11735  # 513 equal keys under masses, alpha up to 4: the gradient of queries is zero
SHARED = 11252  # 256 rows of almost equal scores, one alpha: its gradient is 1e-6


def test_the_response_of_equal_scores():
    case = make(CONSTANT)
    total, heaviest = case.base.sum(-1), case.base.amax(-1)
    expected = (total - heaviest) * total ** (case.alpha - 2)
    torch.testing.assert_close(respond(case).to_scores[0, 0], expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("eps", [1e-9, 1e-5, 0.25, 1.0, 3.0])
def test_the_slope_of_log_weights(eps):
    """Of log p = log(y) / eps, y = 1 + eps distance, by differences at the same distance."""
    log_ratio = torch.tensor([-3.0, -0.5, 0.0, 1.0], dtype=torch.float64)
    at = torch.tensor(eps, dtype=torch.float64)
    distance = torch.expm1(eps * log_ratio) / eps

    def log_weight(eps):
        return torch.log1p(eps * distance) / eps

    step = 1e-6
    expected = (log_weight(at + step) - log_weight(at)) / step
    torch.testing.assert_close(log_slope(log_ratio, at), expected, rtol=0.01, atol=1e-5)


@needs_library
@pytest.mark.parametrize("seed", [SHARED, CONSTANT])
def test_calls_where_all_cancels(seed):
    assert_native_agrees(make(seed))


@needs_library
def test_the_kernels_come_near_to_a_gradient_of_zero():
    """In units of the response alone, without what a search for alpha > 2 may be off by."""
    case = make(CONSTANT)
    gradient = run(case)["query"]
    unit = torch.finfo(torch.float64).eps * sizes(case)["query"]
    assert float(gradient.abs().max()) <= unit


@needs_library
@pytest.mark.parametrize(("seed", "name"), [(SHARED, "alpha"), (CONSTANT, "query")])
def test_an_error_above_rounding_is_noticed(seed, name):
    case = make(seed)
    outputs = run(case)
    wrong = outputs[name] + 1e-7 * sizes(case)[name]
    with pytest.raises(AssertionError):
        assert_agree(case, outputs | {name: wrong}, outputs, outputs)
