"""Hundreds of random calls: the native kernels against the tiles, outputs and every gradient."""

import pytest
import torch

from tests.kernels.native.cases import Case, make, native, needs_library, run
from tests.kernels.native.sizes import sizes

pytestmark = needs_library

GROUPS = 20
QUICK, SLOW = 12, 150  # cases a group


def _deviation(actual: torch.Tensor, exact: torch.Tensor, size: float) -> float:
    if exact.numel() == 0:
        return 0.0
    error = (actual.double() - exact.double()).abs()
    return float(error.max()) / (max(size, float(exact.double().abs().max())) or 1.0)


def assert_agree(case: Case, actual: dict, plain: dict, exact: dict) -> None:
    """Errors relative to the largest number of each kind; `exact` in float64, by the tiles.

    At most twice the error of the tiles in the same precision, and a few units of rounding, which
    is what is left to compare where the tiles are the reference themselves.
    """
    size = sizes(case)
    for name, result in actual.items():
        assert result.dtype == plain[name].dtype, (case.seed, name)
        fits = exact[name].abs() < torch.finfo(result.dtype).max / 2  # float16 gradients may not
        assert result[fits].isfinite().all(), (case.seed, name)
        scale = size.get(name, size["other"])
        error = _deviation(result[fits], exact[name][fits], scale)
        usual = _deviation(plain[name][fits], exact[name][fits], scale)
        unit = max(torch.finfo(result.dtype).eps, torch.finfo(case.dtype).eps)
        inner = min(unit, torch.finfo(torch.float32).eps)  # scores are never in half precision
        allowed = 2 * usual + _units(case, name) * (unit + inner * size["scores"])
        assert error <= allowed, (case.seed, name, error, allowed, case.notes)


def assert_native_agrees(case: Case) -> None:
    outputs = run(case)
    with native(False):
        plain = run(case)
        exact = plain if case.dtype == torch.float64 else run(case, torch.float64)
    assert_agree(case, outputs, plain, exact)


def _units(case: Case, name: str) -> float:
    """Units of rounding. Derivatives in slopes are sums over every query and key.

    For alpha > 2 an ulp of a score may move a weight by ulp^(1 / (alpha - 1)), up to 2^34 ulps in
    float64; in float32 the tiles feel the same, and their own error says how much.
    """
    if case.steep:
        return 2**16 if case.dtype == torch.float64 else 64
    return 1024 if name == "slopes" else 16


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_calls(group):
    for seed in range(group * QUICK, (group + 1) * QUICK):
        assert_native_agrees(make(seed))


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_many_random_calls(group):
    for seed in range(10_000 + group * SLOW, 10_000 + (group + 1) * SLOW):
        assert_native_agrees(make(seed))


@pytest.mark.parametrize("group", range(4))
def test_plain_instructions_agree(group):
    """Other widths of vectors add in another order: equal up to rounding."""
    for seed in range(1000 + group * 15, 1015 + group * 15):
        case = make(seed)
        if case.steep:
            continue
        outputs = run(case)
        with native(variant="plain"):
            other = run(case)
        exact = other if case.dtype == torch.float64 else run(case, torch.float64)
        assert_agree(case, outputs, other, exact)


@pytest.mark.parametrize("seed", range(6))
def test_a_wrong_answer_is_noticed(seed):
    case = make(seed)
    outputs, size = run(case), sizes(case)
    exact = run(case, torch.float64)
    assert_agree(case, outputs, outputs, exact)
    for name in ("output", "query", "key", "value"):
        wrong = outputs[name] + 0.1 * max(size[name], float(exact[name].abs().max()))
        with pytest.raises(AssertionError):
            assert_agree(case, outputs | {name: wrong}, outputs, exact)
