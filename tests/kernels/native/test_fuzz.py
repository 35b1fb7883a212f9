"""Hundreds of random calls: the native kernels against the tiles, outputs and every gradient."""

import pytest
import torch

from tests.kernels.native.cases import Case, make, native, needs_library, run, sizes

pytestmark = needs_library

GROUPS = 20
QUICK, SLOW = 12, 150  # cases a group


def _deviation(made: torch.Tensor, exact: torch.Tensor, size: float) -> float:
    error = (made.double() - exact.double()).abs()
    return float(error.max()) / (max(size, float(exact.double().abs().max())) or 1.0)


def _agree(case: Case, made: dict, plain: dict, exact: dict, steep: float, smooth: float) -> None:
    """Errors relative to the largest number of each kind; `exact` in float64, by the tiles."""
    size = sizes(case)
    for name, result in made.items():
        assert result.dtype == plain[name].dtype, (case.seed, name)
        assert result.isfinite().all(), (case.seed, name)
        scale = size.get(name, size["other"])
        error = _deviation(result, exact[name], scale)
        usual = _deviation(plain[name], exact[name], scale)
        unit = max(torch.finfo(result.dtype).eps, torch.finfo(case.dtype).eps)
        allowed = 8 * usual + (steep if case.steep else smooth) * unit * (1 + size["scores"])
        assert error <= allowed, (case.seed, name, error, allowed, case.notes)


def _check(case: Case) -> None:
    made = run(case)
    with native(False):
        plain = run(case)
        exact = plain if case.dtype == torch.float64 else run(case, torch.float64)
    if case.dtype != torch.float64 and case.steep:  # ulp^(1/3) moves a weight: outputs only
        made = {"output": made["output"]}
    if not exact.get("alpha", torch.zeros(())).isfinite().all():
        made.pop("alpha", None)  # the tiles' derivative in alpha of a row that sees nothing
    _agree(case, made, plain, exact, 1e9 if case.dtype == torch.float64 else 1e4, 1024)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_calls(group):
    for seed in range(group * QUICK, (group + 1) * QUICK):
        _check(make(seed))


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_many_random_calls(group):
    for seed in range(10_000 + group * SLOW, 10_000 + (group + 1) * SLOW):
        _check(make(seed))


@pytest.mark.parametrize("group", range(4))
def test_plain_instructions_agree(group):
    """Other widths of vectors add in another order: equal up to rounding."""
    for seed in range(1000 + group * 15, 1015 + group * 15):
        case = make(seed)
        if case.steep:
            continue
        made = run(case)
        with native(variant="plain"):
            other = run(case)
        exact = other if case.dtype == torch.float64 else run(case, torch.float64)
        _agree(case, made, other, exact, 0, 256)
