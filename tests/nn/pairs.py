"""A module of torch's and ours with the same parameters, and how to compare them."""

import torch

import fenchel.nn as fnn

WIDTH, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 5, 7


def pair(**options):
    """Torch's module and ours, from one seed; biases moved away from zero."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = fnn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def operands(layer, *, batched=True, queries=QUERIES, keys=KEYS, seed=1):
    """query, key and value in the layout of the layer, with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens, width):
        shape = (BATCH, tokens) if layer.batch_first else (tokens, BATCH)
        shape = (*shape, width) if batched else (tokens, width)
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        return x.requires_grad_()

    return draw(queries, WIDTH), draw(keys, layer.kdim), draw(keys, layer.vdim)


def gradients(layer, inputs, output):
    """Of a function of the output that treats no two entries alike."""
    weight = torch.arange(output.numel(), dtype=output.dtype).cos().reshape(output.shape)
    expected = [*layer.parameters(), *inputs]
    return torch.autograd.grad((output * weight).sum(), expected, allow_unused=True)


def assert_equal(left, right, tolerance=1e-12):
    assert left.shape == right.shape
    assert (left - right).abs().max() <= tolerance


def assert_equal_gradients(left, right, tolerance=1e-12):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if one is None or other is None:
            present = one if other is None else other
            assert present is None or not present.any()
        else:
            assert_equal(one, other, tolerance)
