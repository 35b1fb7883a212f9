"""One property, two runs: `quick` by default and `slow` with many more examples.

    @invariant(rows=score_rows())
    def test_something(family, rows): ...

Parameters that no strategy fills (`family` above) are pytest's: parametrise them as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

QUICK, SLOW = 6, 100  # for each parameter of a property; see test_runner.py for the total

# The same examples on every run: a failure is then a change of the code, not of the dice.
for name, examples in {"quick": QUICK, "slow": SLOW}.items():
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
    )

PROFILES = [pytest.param("quick"), pytest.param("slow", marks=pytest.mark.slow)]


def invariant(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run the decorated check on examples of the strategies, once in each profile."""

    def decorate(check: Callable[..., None]) -> Any:
        fixed = [name for name in inspect.signature(check).parameters if name not in strategies]

        def test(profile: str, **parameters: Any) -> None:
            examine(check, profile, strategies, parameters)

        names = ["profile", *fixed]
        test.__name__, test.__qualname__, test.__doc__ = (
            check.__name__,
            check.__name__,
            check.__doc__,
        )
        test.__module__ = check.__module__
        test.__signature__ = inspect.Signature([_keyword(name) for name in names])
        return pytest.mark.parametrize("profile", PROFILES)(test)

    return decorate


def examine(
    check: Callable[..., None],
    profile: str,
    strategies: dict[str, st.SearchStrategy[Any]],
    parameters: dict[str, Any],
) -> int:
    """Number of examples the check passed, which is at least what the profile asks for."""
    chosen, passed = settings.get_profile(profile), 0
    bound = partial(check, **parameters)

    @settings(chosen)
    @given(**strategies)
    def run(**drawn: Any) -> None:
        nonlocal passed
        bound(**drawn)
        passed += 1

    run()
    assert passed >= chosen.max_examples, f"only {passed} of {chosen.max_examples} examples ran"
    return passed


def _keyword(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
