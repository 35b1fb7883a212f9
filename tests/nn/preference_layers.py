"""Layers of PreferenceAttention, their operands, and the same written out."""

from dataclasses import fields

import pytest
import torch

from fenchel.nn import (
    ContentPreference,
    Exact,
    FirstOrder,
    HeadForm,
    PositionPreference,
    PreferenceAttention,
    SecondOrder,
)

WIDTH, TEMPLATE, HEADS, BATCH, QUERIES, TEMPLATES = 12, 10, 3, 2, 5, 7
SOLVERS = (FirstOrder(), SecondOrder(), Exact())
FORM = frozenset(field.name for field in fields(HeadForm))
by_solver = pytest.mark.parametrize("solver", SOLVERS)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operands(dtype=torch.float64):
    query = draw(BATCH, QUERIES, WIDTH, seed=1, dtype=dtype)
    return query, draw(BATCH, TEMPLATES, TEMPLATE, seed=2, dtype=dtype)


def make(dtype=torch.float64, **options):
    """A layer in which no parameter is zero."""
    torch.manual_seed(0)
    form = {name: options.pop(name) for name in FORM & options.keys()}
    form = HeadForm(**{"template_dim": TEMPLATE, **form})
    layer = PreferenceAttention(WIDTH, HEADS, form=form, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def called(layer, *operands, estimated, **masks):
    """(output, the estimates behind it or None)"""
    if estimated:
        return layer.estimate(*operands, **masks)
    return layer(*operands, **masks), None


def both():
    torch.manual_seed(3)
    return PositionPreference(HEADS) * ContentPreference(TEMPLATE, HEADS, hidden=6)


def projected(layer, query, templates):
    """z, t without the scale, v: (batch, head, token, head_dim)"""
    actual = layer.evidence_proj(query), layer.template_proj(templates), layer.value_proj(templates)
    return [x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in actual]


def left(layer, heads):
    return layer.out_proj(heads.transpose(1, 2).reshape(*heads.shape[::2][:2], -1))


def by_hand(layer, query, templates, logs=0.0, reliability=1.0, scale=None):
    """softmax(reliability scale <K x, Q y> + log u), written out. (output, weights)"""
    z, t, v = projected(layer, query, templates)
    scale = z.shape[-1] ** -0.5 if scale is None else scale
    weights = (reliability * scale * z @ t.mT + logs).softmax(-1)
    return left(layer, weights @ v), weights


def hidden_masks():
    """attn_mask and key_padding_mask with torch's meaning; every query keeps template 0."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(QUERIES, TEMPLATES, generator=generator) < 0.4
    padding = torch.rand(BATCH, TEMPLATES, generator=generator) < 0.4
    mask[:, 0] = padding[:, 0] = False
    return mask, padding
