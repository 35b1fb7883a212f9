"""The derivative checks pass on the library and fail on a wrong derivative."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import fenchel as fl
from fenchel.priors import Base
from fenchel.regularizers import Maximum
from papers.tour import derivative_checks as derivatives


@dataclass(frozen=True)
class Detached(fl.Tsallis):
    """Right weights, half their derivative: the mistake the checks are there to find."""

    def maximize(self, scores: torch.Tensor, base: Base) -> Maximum:
        best = super().maximize(scores, base)
        return best._replace(weights=(best.weights + best.weights.detach()) / 2)


def _scores() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(2, 6, generator=generator, dtype=torch.float64)


def test_right_derivatives_pass() -> None:
    results = derivatives.checks(fl.Tsallis(1.5), _scores())
    assert [check.name for check in results if not check.passed] == []
    assert len(results) == 5


def test_wrong_derivatives_fail() -> None:
    failed = {c.name for c in derivatives.checks(Detached(1.5), _scores()) if not c.passed}
    assert derivatives.FIRST in failed


def test_an_error_is_a_failed_check_with_its_message() -> None:
    results = derivatives.checks(fl.Fused(0.1, grid=(2, 2)), _scores())  # six keys, four cells
    assert not any(check.passed for check in results)
    assert "grid 2 x 2" in results[0].error


def test_nan_does_not_pass() -> None:
    assert not derivatives.Check("x", float("nan"), 1.0).passed


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-8, 1 + 1e-4, 1.5, 2.0])
def test_derivative_in_alpha(alpha: float) -> None:
    check = derivatives.alpha_check(_scores()[0], alpha)
    assert check.passed, check
