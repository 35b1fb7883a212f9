"""What every inspection must satisfy, and small torch models to look into."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import fenchel as fl

WIDTH, HEADS, TOKENS = 12, 3, 7


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_consistent(seen, weights=None):
    """The output that the model was given is weights @ values; certified; sizes count masks.

    weights: of the head, (query, key), from elsewhere.
    """
    dense = seen.weights.to_dense()
    assert seen.weights.layout == torch.sparse_csr
    assert dense.shape == seen.support.shape == (seen.queries, seen.keys)
    assert (dense @ seen.value.to(dense.dtype) - seen.output).abs().max() <= 1e-10
    assert torch.equal(seen.support, dense > 0)
    assert torch.equal(seen.support_size, seen.support.sum(-1))
    assert (seen.visible_size >= seen.support_size).all()
    assert (seen.status == fl.Status.OK.value).all()
    assert seen.gap.max() <= 1e-12
    if weights is not None:
        assert dense.shape == weights.shape
        assert (dense - weights).abs().max() <= 1e-10


class Block(torch.nn.Module):
    """Attention by a call of `attend` on heads of 4 components."""

    def __init__(self, attend, key_heads=HEADS):
        super().__init__()
        torch.manual_seed(0)
        sizes = (4 * HEADS, 4 * key_heads, 4 * key_heads)
        self.projections = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, size, dtype=torch.float64) for size in sizes
        )
        self.attend = attend

    def heads(self, x):
        """(batch, head, token, 4) each"""
        return [p(2 * x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in self.projections]

    def forward(self, x):
        return self.attend(*self.heads(x)).transpose(1, 2).flatten(2)


def sdpa(**options):
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def fenchel(regularizer, **options):
    return lambda q, k, v: fl.attention(q, k, v, regularizer, **options)


def stack(*attends):
    """Layers of one model, with a residual stream."""
    return torch.nn.Sequential(*(Block(attend) for attend in attends))
