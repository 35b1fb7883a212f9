"""The comparer of this folder must be able to say no."""

import torch

from .draws import close


def test_close_can_fail():
    x = torch.ones(3, dtype=torch.float64)
    assert close(x, x.clone())
    assert not close(x, x + 1e-11)
    assert not close(x, x.unsqueeze(0))  # would broadcast
    assert not close(x, torch.full_like(x, torch.nan))
