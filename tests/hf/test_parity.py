"""`fenchel:softmax` is the model's own attention; padding and packing change nothing real."""

import pytest
import torch

from tests.hf.models import (
    ATTENTIONS,
    FAMILIES,
    IMPLEMENTATIONS,
    PAD,
    SPARSE,
    calls_of,
    inputs,
    logits,
    softmax_as_given,
    tiny,
    tokens,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_is_eager_in_float64(family, monkeypatch):
    batch = inputs(family)
    with softmax_as_given(monkeypatch):
        expected = logits(tiny(family), **batch)
    ours = logits(tiny(family, "fenchel:softmax"), **batch)
    assert ours.dtype == torch.float64
    assert (ours - expected).abs().max() <= 1e-10
    sparse = logits(tiny(family, "fenchel:entmax15"), **batch)
    assert (sparse - expected).abs().max() > 1e-3, "this comparison could not have failed"


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_is_as_near_as_sdpa_in_float32(family):
    """Both against the same weights in float64."""
    batch = inputs(family, torch.float32)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    expected = logits(tiny(family, "eager", torch.float32).double(), **exact)

    def error(implementation):
        found = logits(tiny(family, implementation, torch.float32), **batch)
        assert found.dtype == torch.float32
        return (found.double() - expected).square().mean().sqrt()

    assert 0 < error("fenchel:softmax") <= 2 * error("sdpa")
    assert error("fenchel:entmax15") > 2 * error("sdpa"), "this comparison could not have failed"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attention_of_the_model_is_ours(family, monkeypatch):
    model = tiny(family, "fenchel:entmax15")
    with calls_of(monkeypatch) as seen:
        logits(model, **inputs(family))
    assert len(seen) == len({id(module) for module in seen}) == ATTENTIONS[family]


def padded(ids, extra, side):
    """(ids with padding, mask, positions as `generate` counts them)"""
    fill = torch.full((ids.shape[0], extra), PAD)
    keep, drop = torch.ones_like(ids), torch.zeros_like(fill)
    left = side == "left"
    ids = torch.cat([fill, ids] if left else [ids, fill], 1)
    mask = torch.cat([drop, keep] if left else [keep, drop], 1)
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_padding_of_encoders(family, implementation):
    model, ids = tiny(family, implementation), tokens()
    longer, mask, _ = padded(ids, 3, "right")
    ours = logits(model, input_ids=longer, attention_mask=mask)
    assert (ours[:, :7] - logits(model, input_ids=ids)).abs().max() <= 1e-12
    assert (ours[:, :7] - logits(model, input_ids=longer)[:, :7]).abs().max() > 1e-6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_of_decoders(family, implementation, side):
    model, ids = tiny(family, implementation), tokens()
    longer, mask, positions = padded(ids, 3, side)
    ours = logits(model, input_ids=longer, attention_mask=mask, position_ids=positions)
    real = ours[:, 3:] if side == "left" else ours[:, :7]
    assert ours.isfinite().all()  # padded queries see no key at all and get zeros
    assert (real - logits(model, input_ids=ids)).abs().max() <= 1e-12


@pytest.mark.parametrize(("family", "side"), [("t5", "left"), ("t5", "right"), ("bart", "right")])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_of_both_sides_of_a_sequence_pair(family, side, implementation):
    """BART counts decoder positions from the left whatever the mask: only its right is padded."""
    model = tiny(family, implementation)
    plain = inputs(family)
    source, source_mask, _ = padded(plain["input_ids"], 2, "right")
    target, target_mask, _ = padded(plain["decoder_input_ids"], 3, side)
    ours = logits(
        model,
        input_ids=source,
        attention_mask=source_mask,
        decoder_input_ids=target,
        decoder_attention_mask=target_mask,
    )
    real = ours[:, 3:] if side == "left" else ours[:, :6]
    assert (real - logits(model, **plain)).abs().max() <= 1e-12


@pytest.mark.parametrize("implementation", SPARSE)
def test_packed_sequences_do_not_meet(implementation):
    """Two texts in one row, told apart by their positions."""
    model, first, second = tiny("llama", implementation), tokens(1, 4), tokens(1, 3, seed=5)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    both = logits(
        model, input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False
    )
    alone = torch.cat([logits(model, input_ids=part) for part in (first, second)], 1)
    assert (both - alone).abs().max() <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_costs_what_it_costs_eager(family):
    eager = _error_of_half(family, "eager")
    assert _error_of_half(family, "fenchel:softmax") <= 2 * eager
    assert _error_of_half(family, "fenchel:entmax15") <= 4 * eager  # another function, same order


def _error_of_half(family, implementation):
    """Mean error of bfloat16 against float32, both of the same implementation."""
    batch = inputs(family, torch.bfloat16)
    half = logits(tiny(family, implementation, torch.bfloat16), **batch)
    assert half.dtype == torch.bfloat16
    whole = logits(tiny(family, implementation, torch.float32), **_float(batch))
    return (half - whole).abs().mean()


def _float(batch):
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
