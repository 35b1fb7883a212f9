"""The examples in the docstrings of the room give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import fenchel.continuous

MODULES = sorted(m.name for m in pkgutil.iter_modules(fenchel.continuous.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"fenchel.continuous.{name}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    actual = doctest.DocTestFinder().find(fenchel.continuous.Paraboloid)
    assert any(test.examples for test in actual)
