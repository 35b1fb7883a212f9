"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import fenchel as fl
from fenchel import bounds

NAMES = [module.name for module in pkgutil.iter_modules(bounds.__path__)]
WITH_EXAMPLES = {"attack", "local", "perturbation", "query", "self_attention"}


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name):
    # By name: `fenchel.bounds.attack` is also the function.
    module = importlib.import_module(f"fenchel.bounds.{name}")
    globs = {"torch": torch, "fl": fl, "query_lipschitz": bounds.query_lipschitz}
    result = doctest.testmod(module, extraglobs=globs)
    assert result.failed == 0
    assert result.attempted > 0 or name not in WITH_EXAMPLES
