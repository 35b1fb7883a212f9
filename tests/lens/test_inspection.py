"""fl.inspect on torch models: whatever calls attention, the head that is asked for."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import fenchel as fl
from tests.lens.inspections import (
    HEADS,
    TOKENS,
    WIDTH,
    Block,
    assert_consistent,
    fenchel,
    random,
    sdpa,
    stack,
)

X = random(2, TOKENS, WIDTH)
BIAS = random(HEADS, TOKENS, TOKENS, seed=1)
PADDING = torch.arange(TOKENS) < torch.tensor([[TOKENS], [4]])  # True: a token
ALPHA = torch.tensor([[1.2], [1.5], [2.0]], dtype=torch.float64)


def softmax(block, head, example, mask=None, bias=0.0):
    """The weights of a head from the formula."""
    q, k, _ = (x[example, head] for x in block.heads(X))
    scores = q @ k.mT / 2 + bias
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)


@pytest.mark.parametrize("example", [0, 1])
@pytest.mark.parametrize("head", range(HEADS))
def test_a_call_of_sdpa(head, example):
    block, past = Block(sdpa(is_causal=True)), torch.ones(TOKENS, TOKENS).tril().bool()
    seen = fl.inspect(block, X, 0, head, example=example)
    assert_consistent(seen, softmax(block, head, example, past))
    assert seen.regularizer == fl.Shannon()
    assert seen.visible_size.tolist() == list(range(1, TOKENS + 1))
    padded = Block(sdpa(attn_mask=PADDING[:, None, None]))
    seen = fl.inspect(padded, X, 0, head, example=example)
    assert_consistent(seen, softmax(padded, head, example, PADDING[example]))
    biased = Block(sdpa(attn_mask=BIAS))
    seen = fl.inspect(biased, X, 0, head, example=example)
    assert_consistent(seen, softmax(biased, head, example, bias=BIAS[head]))


def test_the_check_of_this_file_can_fail():
    block = Block(sdpa())
    seen = fl.inspect(block, X, 0, 1)
    with pytest.raises(AssertionError):
        assert_consistent(seen, softmax(block, 0, 0))
    with pytest.raises(AssertionError):
        assert_consistent(fl.Inspection(**{**vars(seen), "output": seen.output + 1e-9}))


def test_the_smallest_number_in_a_mask_hides_a_key():
    smallest = torch.finfo(torch.float64).min
    mask = torch.zeros(2, 1, 1, TOKENS, dtype=torch.float64)
    block = Block(sdpa(attn_mask=mask.masked_fill(~PADDING[:, None, None], smallest)))
    seen = fl.inspect(block, X, 0, 0, example=1)
    assert_consistent(seen, softmax(block, 0, 1, PADDING[1]))
    assert (seen.visible_size == 4).all()


def test_grouped_heads():
    for attend in (sdpa(enable_gqa=True), fenchel(fl.Tsallis(1.5), enable_gqa=True)):
        block = Block(attend, key_heads=1)
        for head in range(HEADS):
            seen = fl.inspect(block, X, 0, head)
            assert_consistent(seen)
            assert torch.equal(seen.value, block.heads(X)[2][0, 0])


CALLS = {
    "entmax": fenchel(fl.Tsallis(1.5), is_causal=True),
    "alpha of each head": fenchel(fl.Tsallis(ALPHA)),
    "alpha of each query": fenchel(fl.Tsallis(1 + random(TOKENS, seed=3).abs())),
    "window": fenchel(fl.Tsallis(1.5), attn_mask=fl.priors.SlidingWindow(3)),
    "alibi as a base": fenchel(fl.Tsallis(1.3), base=fl.priors.ALiBi(HEADS)),
    "padding and bias": fenchel(fl.Tsallis(2.0), base=PADDING[:, None, None], attn_mask=BIAS),
    "sink": fenchel(fl.Tsallis(1.5), attn_mask=fl.priors.Sink(random(HEADS, seed=2))),
    "sink as a base": fenchel(fl.Shannon(), base=fl.priors.Sink(random(HEADS, seed=2))),
    "softcap": fenchel(fl.Tsallis(1.5), softcap=2.0),
    "budget": fenchel(fl.Budget(2), base=fl.priors.Documents(torch.arange(TOKENS) // 4)),
    "lower right": sdpa(attn_mask=causal_lower_right(TOKENS, TOKENS)),
    "three axes": lambda q, k, v: fl.attention(q[0], k[0], v[0], fl.Tsallis(1.5))[None],
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_of_attention(name):
    block = Block(CALLS[name])
    output = block(X).unflatten(-1, (HEADS, 4))  # (batch, query, head, 4)
    for head in range(HEADS):
        seen = fl.inspect(block, X, 0, head)
        assert_consistent(seen)
        assert (seen.output - output[0, :, head]).abs().max() <= 1e-12


def test_a_parameter_of_the_head_is_shown_as_its_number():
    block = Block(fenchel(fl.Tsallis(ALPHA)))
    for head, alpha in enumerate((1.2, 1.5, 2.0)):
        seen = fl.inspect(block, X, 0, head)
        assert float(seen.regularizer.alpha) == alpha
        assert f"Tsallis(alpha={alpha}, " in repr(seen)


def test_layers_count_in_the_order_of_calls_and_have_paths():
    model = stack(sdpa(), fenchel(fl.Tsallis(2.0)), sdpa(is_causal=True))
    for layer, regularizer in enumerate((fl.Shannon(), fl.Tsallis(2.0), fl.Shannon())):
        by_number = fl.inspect(model, X, layer, 1)
        by_path = fl.inspect(model, X, str(layer), 1)
        for seen in (by_number, by_path):
            assert_consistent(seen)
            assert (seen.layer, seen.path, seen.head) == (layer, str(layer), 1)
            assert seen.regularizer == regularizer
        assert torch.equal(by_number.output, by_path.output)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("regularizer", [None, fl.Shannon(), fl.Tsallis(1.5), "learned"], ids=str)
def test_multihead_attention(regularizer, need_weights):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64).eval()
    if regularizer == "learned":
        regularizer = fl.nn.LearnedTsallis(HEADS, dtype=torch.float64)
        torch.nn.init.normal_(regularizer.raw)
    if regularizer is not None:
        fl.nn.convert(layer, regularizer)
    future = torch.ones(TOKENS, TOKENS).triu(1).bool()
    masks = {"attn_mask": future, "key_padding_mask": ~PADDING, "need_weights": need_weights}
    inputs = {"query": 3 * X, "key": X, "value": X, **masks}
    _, weights = layer(**{**inputs, "need_weights": True}, average_attn_weights=False)
    for head in range(HEADS):
        seen = fl.inspect(layer, inputs, 0, head, example=1)
        assert_consistent(seen, weights[1, head])
        assert seen.visible_size.tolist() == [1, 2, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("regularizer", [None, fl.Tsallis(1.5)], ids=str)
def test_transformer_of_torch(regularizer):
    """In inference its layers would leave their attention out and call a fused softmax, on nested
    tensors where there is padding."""
    torch.manual_seed(0)
    sizes = {"dim_feedforward": 24, "batch_first": True, "dtype": torch.float64}
    model = torch.nn.Transformer(WIDTH, 2, 1, 2, **sizes).eval()
    if regularizer is not None:
        fl.nn.convert(model, regularizer)
    inputs = {"src": X, "tgt": X[:, :5], "src_key_padding_mask": ~PADDING}
    decoder = [f"decoder.layers.{i}.{x}_attn" for i in (0, 1) for x in ("self", "multihead")]
    for number, path in enumerate(["encoder.layers.0.self_attn", *decoder]):
        seen = fl.inspect(model, inputs, number, 1, example=1)
        assert_consistent(seen)
        assert seen.path == path
        assert seen.queries == (5 if "decoder" in path else TOKENS)
        assert seen.keys == (5 if path in decoder[::2] else TOKENS)
        assert (seen.visible_size == 4).all() == (number == 0)
    with pytest.raises(ValueError, match=r"2 times .* 1 \(decoder.layers.0.self_attn\), 2 \(dec"):
        fl.inspect(model, inputs, "decoder.layers.0", 0)


def test_replace_sdpa_inside_and_around():
    def inside(q, k, v):
        with fl.replace_sdpa(fl.Tsallis(2.0)):
            return sdpa()(q, k, v)

    with fl.replace_sdpa(fl.Tsallis(1.5)):
        around = fl.inspect(Block(sdpa()), X, 0, 0)
        again = fl.inspect(Block(sdpa()), X, 0, 0)  # the call is known by now
    seen = fl.inspect(Block(inside), X, 0, 0)
    for one, alpha in ((around, 1.5), (again, 1.5), (seen, 2.0)):
        assert_consistent(one)
        assert one.regularizer == fl.Tsallis(alpha)


def test_compiled_models_are_seen():
    model = stack(sdpa(), fenchel(fl.Tsallis(1.5)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(X)
    for layer in (0, 1):
        seen = fl.inspect(compiled, X, layer, 0)
        assert_consistent(seen)
        assert torch.equal(seen.output, fl.inspect(model, X, layer, 0).output)


def test_what_the_model_writes_over_later_is_kept():
    def overwrite(q, k, v):
        output = fl.attention(q, k, v, fl.Tsallis(1.5))
        for x in (q, k, v):
            x.zero_()
        return output.clone().add_(output.fill_(1.0))

    assert_consistent(fl.inspect(Block(overwrite), X, 0, 0))


def hooks_of(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_the_model_stays_as_it_is():
    model = torch.nn.Sequential(stack(sdpa(), sdpa()), torch.nn.Dropout(0.5)).train()
    model[0][1].eval()
    before = [module.training for module in model.modules()]
    fl.inspect(model, X, 0, 0)
    for wrong in ((5, 0), (0, 5)):
        with pytest.raises(IndexError):
            fl.inspect(model, X, *wrong)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fl.inspect(model, X[..., 1:], 0, 0)
    assert [module.training for module in model.modules()] == before
    assert sum(hooks_of(model)) == 0
    assert torch.is_grad_enabled()
    assert model(X).requires_grad


def test_errors_say_what_there_is():
    model = stack(sdpa(), sdpa())
    inspect = partial(fl.inspect, model, X)
    with pytest.raises(
        IndexError, match=r"layer must be from 0 to 1 .* got 2; .* 0 \(0\), 1 \(1\)"
    ):
        inspect(2, 0)
    with pytest.raises(IndexError, match=r"head must be from 0 to 2 in layer 1 \(1\), got 3"):
        inspect(1, 3)
    with pytest.raises(IndexError, match=r"example must be from 0 to 1 in layer 1 \(1\), got 2"):
        inspect(1, 0, example=2)
    with pytest.raises(ValueError, match=r"no module '7'; its attention layers are 0 \(0\), 1 "):
        inspect("7", 0)
    with pytest.raises(ValueError, match=r"no attention can be seen in 0\.projections\. What can"):
        inspect("0.projections", 0)
    for wrong in ((-1, 0), (0, -1), (0, 1.5), (True, 0)):
        with pytest.raises((TypeError, ValueError), match=r"(layer|head) must be"):
            inspect(*wrong)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        fl.inspect(sdpa(), X, 0, 0)


def test_attention_by_hand_is_not_seen_and_named():
    block = Block(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    with pytest.raises(ValueError, match=r"seen in Sequential\. It computes a softmax .* in 1\. "):
        fl.inspect(torch.nn.Sequential(torch.nn.Identity(), block), X, 0, 0)


def test_one_module_that_attends_twice():
    block = Block(sdpa())
    model = torch.nn.Sequential(block, block)
    first, second = (fl.inspect(model, X, layer, 0) for layer in (0, 1))
    assert first.path == second.path == "0"
    assert (first.output - second.output).abs().max() > 0.01
    with pytest.raises(ValueError, match=r"0 attends 2 times in a pass; .* 0 \(0\), 1 \(0\)"):
        fl.inspect(model, X, "0", 0)


def test_it_explains_itself():
    model = stack(fenchel(fl.Tsallis(1.5), is_causal=True))
    seen = fl.inspect(model, X, 0, 2)
    sentences = seen.explain().split("\n")
    assert sentences[0] == (
        f"Head 2 of layer 0 (0) solves {fl.Tsallis(1.5)} for {TOKENS} queries over {TOKENS} keys."
    )
    mean = seen.support_size.double().mean()
    assert f"uses {mean:.3g} of the 4 keys that it may see" in sentences[1]
    by_key = seen.weights.to_dense().sum(0)
    share = 100 * by_key.max() / TOKENS
    assert sentences[2] == f"Key {by_key.argmax()} gets the most: {share:.3g} % of all weight."
    assert sentences[3].startswith("Every row is certified: no weights are better by more than ")
    assert repr(seen).startswith(
        f"Inspection(layer 0 (0), head 2, {fl.Tsallis(1.5)}, {TOKENS} queries x {TOKENS} keys, "
        f"support {100 * seen.support.double().mean():.3g}%, gap <= "
    )


def test_rows_without_an_answer_are_explained():
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    mask[2] = False
    seen = fl.inspect(Block(fenchel(fl.Tsallis(1.5), attn_mask=mask)), X, 0, 0)
    assert seen.status.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert f"EMPTY: 1 of {TOKENS} rows; no key carries mass" in seen.explain()
    infeasible = fl.inspect(Block(fenchel(fl.Budget(9))), X, 0, 0)
    assert not infeasible.support.any()
    assert "INFEASIBLE: 7 of 7 rows; the budget k exceeds" in infeasible.explain()
    assert infeasible.plot() is not None


def test_the_picture_has_a_cell_for_each_weight():
    seen = fl.inspect(Block(fenchel(fl.Tsallis(1.5))), X, 0, 0)
    tokens = [f"t{i}$" for i in range(TOKENS)]
    (ax,) = seen.plot(tokens).axes
    cells = ax.collections[0].get_array()
    assert torch.equal(torch.tensor(cells.mask.tolist()), ~seen.support)
    assert [label.get_text() for label in ax.get_xticklabels()] == tokens
    assert [label.get_text() for label in ax.get_yticklabels()] == tokens
    with pytest.raises(ValueError, match=r"tokens must name the 7 keys, got 2 names"):
        seen.plot(tokens[:2])


def test_torch_models_need_neither_transformers_nor_matplotlib():
    code = (
        "import sys, torch, fenchel as fl; layer = torch.nn.MultiheadAttention(8, 2); "
        "assert not any(m.startswith('fenchel.lens') for m in sys.modules); "
        "x = torch.randn(3, 1, 8); fl.inspect(layer, (x, x, x), 0, 1).explain(); "
        "print({'transformers', 'matplotlib', 'torch._dynamo'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
