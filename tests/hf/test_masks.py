"""Masks stay descriptions: the same keys are seen as in transformers' own, and nothing is written
out that grows with the square of the tokens."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fenchel as fl
from fenchel.hf.masks import StructuredMask, make_mask
from tests.hf.models import hf, inputs, logits, tiny, transformers

masking = transformers.masking_utils
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
FUNCTIONS = {
    "causal": masking.causal_mask_function,
    "all": masking.bidirectional_mask_function,
    "window": masking.sliding_window_causal_mask_function(3),
    "both sides": masking.sliding_window_bidirectional_mask_function(2),
    "chunks": masking.chunked_causal_mask_function(2, torch.tensor([2, 0])),
    "packed": masking.and_masks(
        masking.causal_mask_function, masking.packed_sequence_mask_function(IDS)
    ),
}


def seen_by(mask):
    """(batch, 1, query, key), from the description alone."""
    if mask.visible is None:
        return torch.ones(mask.shape, dtype=torch.bool)
    if isinstance(mask.visible, torch.Tensor):
        return mask.visible
    log_mass = mask.visible.bind(mask.shape).log_mass(*map(torch.arange, mask.shape[2:]))
    return (log_mass == 0).expand(mask.shape)


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("padding", [None, PADDED, HOLES])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_same_keys_are_seen(kind, padding, past):
    queries = 6 - past
    arguments = {
        "mask_function": FUNCTIONS[kind],
        "attention_mask": padding,
        "q_offset": past,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }
    mask = make_mask(2, queries, 6, **arguments)
    expected = masking.sdpa_mask(2, queries, 6, **arguments)
    assert torch.equal(seen_by(mask), expected)
    assert torch.equal(mask & mask, expected), "computing with it writes it out"
    arguments["dtype"] = torch.bfloat16
    mask = make_mask(2, queries, 6, **arguments, config=SimpleNamespace(fenchel_masks="eager"))
    eager = masking.eager_mask(2, queries, 6, **arguments)
    assert torch.equal(mask + 0, eager), "as eager attention reads it"
    written = isinstance(mask.visible, torch.Tensor)
    assert written == (kind == "both sides" and past > 0), "it has no place for an offset"


def test_models_may_cut_it():
    mask = make_mask(2, 6, 6, attention_mask=PADDED)
    assert isinstance(mask[:, :, :, :6], StructuredMask)
    assert isinstance(mask[:, :, :, :9], StructuredMask)
    assert torch.equal(mask[:, :, :, :4], mask.dense()[:, :, :, :4])
    assert torch.equal(mask[:, :, 2:], mask.dense()[:, :, 2:])


def test_other_functions_are_asked_about_every_pair():
    def odd(batch, head, query, key):
        return (query + key) % 2 == 0

    mask = make_mask(1, 4, 4, mask_function=odd, allow_is_causal_skip=False)
    assert torch.equal(mask.visible[0, 0, 0], torch.tensor([True, False, True, False]))


@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(1.5), fl.Norm(2.0)])
def test_attention_is_that_of_the_mask_written_out(regularizer):
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8, generator=g, dtype=torch.float64)
    for function in FUNCTIONS.values():
        for padding in (None, PADDED, HOLES):
            mask = make_mask(
                2,
                6,
                6,
                mask_function=function,
                attention_mask=padding,
                allow_is_causal_skip=False,
            )
            by_prior = fl.attention(q, k, v, regularizer, base=mask.visible)
            by_mask = fl.attention(q, k, v, regularizer, attn_mask=mask.dense())
            assert (by_prior - by_mask).abs().max() <= 1e-12


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that anybody made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) is torch.Tensor:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def test_memory_grows_with_the_tokens(monkeypatch):
    """A padded, windowed decoder that trains: no tensor of queries times keys."""
    config = transformers.MistralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=64,
        attn_implementation="fenchel:entmax15",
    )
    model = transformers.MistralForCausalLM(config)
    monkeypatch.setattr(StructuredMask, "dense", lambda self: pytest.fail("written out"))
    sizes = []
    for tokens in (1024, 2048):
        ids = torch.randint(40, (2, tokens), generator=torch.Generator().manual_seed(0))
        padding = torch.ones_like(ids)
        padding[0, :100] = 0
        with Largest() as largest:
            model(ids, attention_mask=padding, labels=ids).loss.backward()
        sizes.append(largest.bytes)
    assert sizes[1] <= 2.1 * sizes[0]


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_padding_on_either_side(family):
    batch = inputs(family)
    ids = batch["input_ids"]
    for real in (slice(2, None), slice(None, -2)):
        mask = torch.zeros_like(ids)
        mask[0, real] = 1
        mask[1:] = 1
        expected = logits(tiny(family, "sdpa"), input_ids=ids, attention_mask=mask)
        actual = logits(hf.convert(tiny(family), fl.Shannon()), input_ids=ids, attention_mask=mask)
        kept = mask.bool()
        assert (actual - expected)[kept].abs().max() <= 1e-12
