"""The study of robustness on long texts: in blocks over queries, with the same figures."""

import importlib

import pytest
import torch

from fenchel.lens.head_bounds import HeadInputs

robustness = importlib.import_module("papers.studies.robustness")


@pytest.fixture
def heads():
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 40, 4, generator=generator, dtype=torch.float64)
    return HeadInputs(queries, keys, values, torch.zeros(40, 8, dtype=torch.float64), 2.0)


@pytest.mark.parametrize("room", [1, 3 * 2 * 40 * 40, 2**23])
def test_blocks_change_nothing(heads, room, monkeypatch):
    whole = robustness.log_here(heads), robustness.certified(heads, 10)
    monkeypatch.setattr(robustness, "_ROOM", room)
    parts = robustness.log_here(heads), robustness.certified(heads, 10)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


def test_no_tensor_is_larger_than_a_block(heads, monkeypatch):
    room = 4 * 2 * 40 * 40
    monkeypatch.setattr(robustness, "_ROOM", room, raising=False)
    sizes = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    kept = torch.stack([torch.randperm(40)[:30] for _ in range(20)])
    with Sizes():
        robustness.log_here(heads)
        robustness.certified(heads, 10)
        robustness.moves(heads, kept)
    assert 2 * 40 * 40 < max(sizes) <= room
