"""The examples in the docstrings run."""

import doctest
import importlib

import pytest
import torch

# By name: `fenchel.measures.maximum_entropy` is also the function.
NAMES = [
    "affine",
    "attention",
    "empirical",
    "gaussian",
    "kernels",
    "lookup",
    "maximum_entropy",
    "potentials",
    "projection",
    "softmatch",
    "transformer",
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name):
    torch.manual_seed(0)
    module = importlib.import_module(f"fenchel.measures.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
