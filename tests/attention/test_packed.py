"""Packed sequences: what they compute, for every regulariser, and what they refuse."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl

P = fl.priors
pytestmark = pytest.mark.usefixtures("kernels")
DOUBLE = torch.float64
LENGTHS = (3, 0, 1, 5)
STARTS = torch.tensor([0, 3, 3, 4, 9])
EVERY = [fl.Tsallis(1.5), fl.Tsallis(1.3, temperature=0.7), fl.Shannon(), fl.Norm(2.0)]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def operands(heads=4, kv_heads=2):
    return draw(0, 9, heads, 3), draw(1, 9, kv_heads, 3), draw(2, 9, kv_heads, 3)


def loop(q, k, v, omega, **options):
    """`attention` for each sequence."""
    parts = []
    for first, last in zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True):
        own = (x[first:last].transpose(0, 1) for x in (q, k, v))
        parts.append(fl.attention(*own, omega, enable_gqa=True, **options).transpose(0, 1))
    return torch.cat(parts)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window and sink": {"attn_mask": P.SlidingWindow(1) * P.Sink(torch.zeros(4, dtype=DOUBLE))},
    "softcap": {"softcap": 1.0},
    "scale": {"scale": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("omega", EVERY, ids=str)
def test_each_sequence_attends_to_itself(omega, name):
    found = fl.varlen_attention(*operands(), STARTS, None, omega, enable_gqa=True, **OPTIONS[name])
    assert (found - loop(*operands(), omega, **OPTIONS[name])).abs().max() <= 1e-12


def test_what_belongs_to_a_token_is_cut_with_the_tokens():
    logits = draw(5, 4, 9).requires_grad_()
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    q, k, v = operands()
    prior = P.Preference(logits) * P.Documents(ids)
    found = fl.varlen_attention(q, k, v, STARTS, None, fl.Tsallis(1.5), base=prior, enable_gqa=True)
    parts = []
    for first, last in zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True):
        own = (x[first:last].transpose(0, 1) for x in (q, k, v))
        one = P.Preference(logits[:, first:last]) * P.Documents(ids[first:last])
        parts.append(fl.attention(*own, fl.Tsallis(1.5), base=one, enable_gqa=True).transpose(0, 1))
    wanted = torch.cat(parts)
    assert (found - wanted).abs().max() <= 1e-12
    gradients = [torch.autograd.grad(x.sin().sum(), logits)[0] for x in (found, wanted)]
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-12


@pytest.mark.parametrize("omega", [fl.Tsallis(1.5), fl.Shannon()], ids=str)
def test_derivatives_twice(omega):
    table = draw(4, 8, 2).requires_grad_()
    tensors = [x.requires_grad_() for x in operands(2, 1)]

    def attend(q, k, v, t):
        prior = P.RelativeBuckets(t, max_distance=8)
        return fl.varlen_attention(q, k, v, STARTS, STARTS, omega, attn_mask=prior, enable_gqa=True)

    assert gradcheck(attend, (*tensors, table))
    assert gradgradcheck(attend, (*tensors, table))


def test_other_lengths_of_keys():
    q, k = draw(0, 4, 2, 3), draw(1, 7, 2, 3)
    found = fl.varlen_attention(
        q, k, k, torch.tensor([0, 3, 4]), torch.tensor([0, 2, 7]), fl.Tsallis(1.5)
    )
    first = fl.attention(*(x.transpose(0, 1) for x in (q[:3], k[:2], k[:2])), fl.Tsallis(1.5))
    second = fl.attention(*(x.transpose(0, 1) for x in (q[3:], k[2:], k[2:])), fl.Tsallis(1.5))
    wanted = torch.cat([first, second], 1).transpose(0, 1)
    assert (found - wanted).abs().max() <= 1e-13


@pytest.mark.parametrize("omega", EVERY, ids=str)
def test_queries_of_a_sequence_without_keys_get_zeros(omega):
    q, k = draw(0, 4, 2, 3), draw(1, 2, 2, 3)
    found = fl.varlen_attention(q, k, k, torch.tensor([0, 3, 4]), torch.tensor([0, 0, 2]), omega)
    assert not found[:3].any()
    assert found[3].abs().min() > 0


@pytest.mark.parametrize("starts", [[0], [0, 0], [0, 0, 0]])
def test_no_token_at_all(starts):
    q = torch.zeros(0, 2, 3, requires_grad=True)
    output = fl.varlen_attention(q, q, q, torch.tensor(starts), None, fl.Tsallis(1.5))
    assert output.shape == (0, 2, 3)
    output.sum().backward()
    assert q.grad.shape == q.shape


def test_jagged_tensors_take_the_same_path():
    rows = [torch.nested.nested_tensor_from_jagged(x.detach(), STARTS) for x in operands(2, 2)]
    nested = [x.transpose(1, 2) for x in rows]
    found = fl.attention(*nested, fl.Tsallis(1.5), is_causal=True)
    wanted = fl.varlen_attention(*operands(2, 2), STARTS, None, fl.Tsallis(1.5), is_causal=True)
    assert torch.equal(found.transpose(1, 2).values(), wanted)
    with pytest.raises(TypeError, match="must all be jagged"):
        fl.attention(nested[0], torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3))


BAD = {
    "start": ([1, 9], ValueError, "start at 0 and end at the number of tokens, 9; got 1 and 9"),
    "end": ([0, 8], ValueError, "end at the number of tokens, 9; got 0 and 8"),
    "order": ([0, 5, 3, 9], ValueError, "must not decrease"),
    "real": ([0.0, 9.0], TypeError, "must be whole numbers"),
    "none": ([], TypeError, "must be whole numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_starts_that_make_no_sense(name):
    starts, error, message = BAD[name]
    with pytest.raises(error, match=message):
        fl.varlen_attention(*operands(2, 2), torch.tensor(starts), None, fl.Tsallis(1.5))


def test_other_refusals():
    q, k, v = operands(2, 2)
    with pytest.raises(ValueError, match="equally many sequences, got 4 and 1"):
        fl.varlen_attention(q, k, v, STARTS, torch.tensor([0, 9]), fl.Tsallis(1.5))
    with pytest.raises(TypeError, match="must be a fenchel prior, got Tensor"):
        fl.varlen_attention(q, k, v, STARTS, None, fl.Tsallis(1.5), attn_mask=torch.zeros(9, 9))
    with pytest.raises(ValueError, match="that numbers describe"):
        fl.varlen_attention(
            q, k, v, STARTS, None, fl.Tsallis(1.5), base=P.Custom(lambda b, h, i, j: i - j + 0.0)
        )
    with pytest.raises(ValueError, match=r"\(tokens, head, component\)"):
        fl.varlen_attention(q[None], k, v, STARTS, None, fl.Tsallis(1.5))
