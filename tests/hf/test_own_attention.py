"""Models that attend on their own beside attentions that ask: what counts, and with which masks."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fenchel as fl
from tests.hf.models import hf, inputs, logits, tiny, tokens, transformers

ENTMAX = fl.Tsallis(1.5)


class Outer(nn.Module):
    """A transformers model, and then a part that others wrote."""

    def __init__(self, part):
        super().__init__()
        self.bert, self.part = tiny("bert").bert, part

    def forward(self, ids):
        return self.part(self.bert(ids).last_hidden_state)


class AttentionMap(nn.Module):
    """Hands its weights out, as DETR's segmentation does."""

    def forward(self, x):
        return functional.softmax(x @ x.transpose(-1, -2), dim=-1).tril()


class WeightedSum(nn.Module):
    """An expectation without a matrix product, as in deformable attention; called an attention."""

    def forward(self, x):
        weights = functional.softmax(x, dim=-2)
        return (weights * x).sum(-2)


class DeformableAttention(WeightedSum):
    pass


class Layers(nn.Module):
    """A trained mean of two layers: its scores are weights of the model."""

    def __init__(self):
        super().__init__()
        self.of_layer = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def forward(self, x):
        both = torch.stack((x, x.tanh()), -2)
        return self.of_layer.softmax(0).unsqueeze(0) @ both


class Bins(nn.Module):
    """The mean of fixed bins."""

    def forward(self, x):
        return functional.softmax(x, -1) @ torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)[:, None]


def how(part, path="part"):
    rows = hf.check(Outer(part), inputs=(tokens(),)).rows
    return {row.path: row.how for row in rows}.get(path)


def test_what_counts_as_attention():
    assert how(AttentionMap()) == "takes a softmax itself"
    assert how(DeformableAttention()) == "takes a softmax itself"


@pytest.mark.parametrize("part", [Layers, Bins, WeightedSum])
def test_what_does_not(part):
    assert how(part()) is None


@pytest.mark.parametrize("part", [AttentionMap, DeformableAttention])
def test_it_is_exchanged(part):
    model, ids = Outer(part()), tokens()
    with torch.no_grad():
        hf.convert(model, ENTMAX, inputs=(ids,))
        hidden = model.bert(ids).last_hidden_state
        if part is AttentionMap:
            expected = fl.entmax(hidden @ hidden.mT).tril()
        else:
            expected = (fl.entmax(hidden, dim=-2) * hidden).sum(-2)
        assert (model(ids) - expected).abs().max() <= 1e-12


class Router(nn.Module):
    def forward(self, x):
        return functional.softmax(x, -1)


class RoutedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()

    def forward(self, x):
        return functional.softmax(x @ x.mT, -1) @ (x * self.router(x))


def test_a_softmax_inside_that_is_no_attention_is_not_exchanged_by_the_way():
    with pytest.raises(ValueError, match="Router in it takes a softmax that does not"):
        hf.convert(Outer(RoutedAttention()), ENTMAX, inputs=(tokens(),))


def falcon(name):
    config = transformers.FalconConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.5,
        attn_implementation=name,
    )
    torch.manual_seed(0)
    return transformers.FalconForCausalLM(config).double().eval()


def test_a_module_that_takes_the_one_or_the_other():
    """Falcon calls torch's attention on "sdpa" and takes a softmax itself on any other name."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    sparse = [logits(hf.convert(falcon(name), ENTMAX), **batch) for name in ("sdpa", "eager")]
    assert (sparse[0] - sparse[1])[mask.bool()].abs().max() <= 1e-10
    assert (sparse[0] - logits(falcon("sdpa"), **batch))[mask.bool()].abs().max() > 1e-3


def add_mask_by_hand(module):
    """As models write it that attend on their own, for the masks of eager attention."""

    def forward(hidden_states, attention_mask=None, **others):
        heads = hidden_states.unflatten(-1, (4, -1)).transpose(1, 2)
        scores = heads @ heads.mT
        if attention_mask is not None:
            scores = scores + attention_mask
        return (functional.softmax(scores, -1) @ heads).transpose(1, 2).flatten(2), None

    module.forward = forward


@pytest.mark.parametrize("padded", [False, True])
def test_masks_that_others_read_stay_as_they_are(padded):
    """One layer asks, the other adds the same mask to its scores."""
    batch = inputs("gpt2")
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -2:] = 0 if padded else 1
    batch["attention_mask"] = mask
    model = tiny("gpt2", "eager")
    add_mask_by_hand(model.transformer.h[1].attn)
    before = logits(model, **batch)
    after = logits(hf.convert(model, fl.Shannon()), **batch)
    assert (before - after)[mask.bool()].abs().max() <= 1e-10
    sparse = logits(hf.convert(model, ENTMAX), **batch)
    assert (before - sparse)[mask.bool()].abs().max() > 1e-3


def test_a_causal_flag_that_nobody_reads_is_refused():
    """BERT sees all keys on eager attention, whatever its modules say."""
    model = tiny("bert", "eager")
    for layer in model.bert.encoder.layer:
        layer.attention.self.is_causal = True
    with pytest.raises(ValueError, match="it says is_causal and gets no mask"):
        hf.convert(model, ENTMAX)


def test_a_class_that_was_seen_is_known_elsewhere():
    """MVP without an encoder: its cross-attention does not run, and is of the same class."""
    config = transformers.MvpConfig(
        vocab_size=40,
        d_model=32,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        is_decoder=True,
        is_encoder_decoder=False,
    )
    model = transformers.MvpForCausalLM(config).double().eval()
    hf.convert(model, ENTMAX)
    layer = model.model.decoder.layers[0]
    assert type(layer.encoder_attn.forward) is type(layer.self_attn.forward)
    assert "ExchangedForward" in type(layer.encoder_attn.forward).__name__
