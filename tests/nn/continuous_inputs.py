"""Features and scores for layers of continuous attention."""

import torch

DOUBLE = torch.float64


def draw_inputs(cells, batch=3, channels=5, dtype=DOUBLE):
    g = torch.Generator().manual_seed(0)
    features = torch.randn(batch, cells, channels, generator=g, dtype=dtype)
    return features, 2 * torch.randn(batch, cells, generator=g, dtype=dtype)
