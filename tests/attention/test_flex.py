"""`flex_attention` inside `replace_sdpa`: any score_mod and mask_mod, with the regulariser."""

import pytest
import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

import fenchel as fl
from tests.attention.cases import draw, largest_difference

pytestmark = pytest.mark.filterwarnings(  # torch's own, of its function
    "ignore:flex_attention called without",
    "ignore:return_lse is deprecated",
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated",
)

OMEGA = fl.Tsallis(1.5)
N = 40
Q, K, V = draw(0, 2, 4, N, 8), draw(1, 2, 2, N, 8), draw(2, 2, 2, N, 8)
BIAS = draw(3, 4, N, N)
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()


def causal(batch, head, query, key):
    return query >= key


def capped(score, batch, head, query, key):
    """A function of the score, and a table that is indexed as only scalars can be."""
    return 2 * torch.tanh(score / 2) + BIAS[head][query, key]


def block_mask():
    return create_block_mask(causal, 2, 4, N, N, device="cpu", BLOCK_SIZE=16)


def reference(omega, scale=8**-0.5, *, mask=CAUSAL):
    """What `capped` says, written out."""
    key, value = (x.repeat_interleave(2, 1) for x in (K, V))
    scores = 2 * torch.tanh(scale * Q @ key.mT / 2) + BIAS
    return fl.solve(scores.masked_fill(~mask, -torch.inf), omega).weights @ value


def test_score_and_mask_functions_are_honoured():
    with fl.replace_sdpa(OMEGA):
        output = flex_attention(Q, K, V, score_mod=capped, block_mask=block_mask(), enable_gqa=True)
    assert largest_difference(output, reference(OMEGA)) <= 1e-13
    plain = flex_attention(Q, K, V, score_mod=capped, block_mask=block_mask(), enable_gqa=True)
    assert largest_difference(plain, reference(fl.Shannon())) <= 1e-13  # after the block: softmax
    assert largest_difference(plain, output) > 1e-3


def test_scale_is_honoured_and_options_of_kernels_change_nothing():
    with fl.replace_sdpa(OMEGA):
        outputs = [
            flex_attention(
                Q,
                K,
                V,
                score_mod=capped,
                scale=0.9,
                enable_gqa=True,
                kernel_options=options,
            )
            for options in (None, {"BLOCK_M": 16, "PRESCALE_QK": True})
        ]
    assert largest_difference(outputs[0], reference(OMEGA, 0.9, mask=CAUSAL | True)) <= 1e-13
    assert torch.equal(*outputs)


def test_without_functions_it_is_the_plain_attention():
    with fl.replace_sdpa(OMEGA):
        output = flex_attention(Q, Q, Q)
    assert largest_difference(output, fl.attention(Q, Q, Q, OMEGA)) <= 1e-13


def test_tiles_know_which_queries_they_hold(tiles):
    torch._dynamo.reset()
    tiles(1)  # sixteen queries each
    with fl.replace_sdpa(OMEGA):
        output = flex_attention(Q, K, V, score_mod=capped, block_mask=block_mask(), enable_gqa=True)
    assert largest_difference(output, reference(OMEGA)) <= 1e-13


def test_rows_that_see_nothing_are_zero():
    mask = create_block_mask(lambda b, h, i, j: i > j, None, None, N, N, device="cpu")
    with fl.replace_sdpa(OMEGA):
        output = flex_attention(Q, Q, Q, block_mask=mask)
    assert (output[:, :, 0] == 0).all()
    assert (output[:, :, 1:] != 0).any(-1).all()


def test_a_learned_regularizer_gets_a_gradient():
    """Torch refuses gradients of query, key and value on the CPU."""
    module = fl.nn.LearnedTsallis(4, dtype=torch.float64)
    with fl.replace_sdpa(module):
        flex_attention(Q, Q, Q).square().sum().backward()
    (expected,) = torch.autograd.grad(fl.attention(Q, Q, Q, module).square().sum(), module.raw)
    assert largest_difference(module.raw.grad, expected) <= 1e-11
    assert (expected.abs() > 1e-3).all()


def test_compiled_calls_use_the_regularizer_too():
    compiled = torch.compile(flex_attention, backend="aot_eager")
    with fl.replace_sdpa(OMEGA):
        output = compiled(Q, K, V, score_mod=capped, block_mask=block_mask(), enable_gqa=True)
    assert largest_difference(output, reference(OMEGA)) <= 1e-13


def test_what_belongs_to_softmax_is_refused():
    for options in ({"return_lse": True}, {"return_aux": AuxRequest(lse=True)}):
        with fl.replace_sdpa(OMEGA), pytest.raises(Exception, match="leave out return_lse"):
            flex_attention(Q, Q, Q, **options)


def test_a_mask_of_blocks_alone_is_refused():
    """Torch's own function reads its blocks when compiled, and not otherwise."""
    made = block_mask()
    bare = BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=16, seq_lengths=(N, N)
    )
    with fl.replace_sdpa(OMEGA), pytest.raises(Exception, match="mask_mod of a BlockMask"):
        flex_attention(Q, Q, Q, block_mask=bare)
