"""convert: the same model with another regulariser, in training and in inference."""

import copy
import pickle

import pytest
import torch

import fenchel as fl
import fenchel.nn as fnn
from tests.nn.pairs import assert_equal

WIDTH, HEADS, BATCH, TOKENS = 16, 4, 2, 6
LAYER = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
FUTURE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def encoder_layer(**changes):
    return torch.nn.TransformerEncoderLayer(WIDTH, HEADS, **{**LAYER, **changes})


def encoder(layers=2, **options):
    return torch.nn.TransformerEncoder(encoder_layer(), layers, **options)


def decoder():
    layer = torch.nn.TransformerDecoderLayer(WIDTH, HEADS, **LAYER)
    return torch.nn.TransformerDecoder(layer, 2)


def transformer():
    return torch.nn.Transformer(WIDTH, HEADS, 1, 1, **LAYER)


def tokens(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, generator=generator)


CASES = {
    "layer": (encoder_layer, lambda m, x: m(x)),
    "layer, norm first": (lambda: encoder_layer(norm_first=True), lambda m, x: m(x)),
    "layer, padded": (encoder_layer, lambda m, x: m(x, src_key_padding_mask=PADDING)),
    "layer, tokens first": (lambda: encoder_layer(batch_first=False), lambda m, x: m(x)),
    "layer, unbatched": (encoder_layer, lambda m, x: m(x[0])),
    "encoder": (encoder, lambda m, x: m(x)),
    "encoder, causal": (encoder, lambda m, x: m(x, mask=FUTURE)),
    "encoder, padded": (encoder, lambda m, x: m(x, src_key_padding_mask=PADDING)[~PADDING]),
    "encoder, both": (encoder, lambda m, x: m(x, mask=FUTURE, src_key_padding_mask=PADDING)),
    "decoder": (decoder, lambda m, x: m(x, x.flip(1), tgt_mask=FUTURE)),
    "decoder, padded": (
        decoder,
        lambda m, x: m(x, x.flip(1)[:, :4], memory_key_padding_mask=PADDING[:, 2:]),
    ),
    "transformer": (
        transformer,
        lambda m, x: m(
            x,
            x.flip(1),
            tgt_mask=FUTURE,
            src_key_padding_mask=PADDING,
            memory_key_padding_mask=PADDING,
        ),
    ),
}
ignore_nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def build_sharp(build):
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():  # sharper scores: the regularisers then differ visibly
        for name, parameter in model.named_parameters():
            if "in_proj" in name:
                parameter.mul_(2.0)
    return model


def run(model, call, mode):
    model.train(mode == "train")
    with torch.set_grad_enabled(mode != "no grad"):
        return call(model, tokens())


@ignore_nested
@pytest.mark.parametrize("mode", ["train", "eval", "no grad"])
@pytest.mark.parametrize(("build", "call"), CASES.values(), ids=CASES)
def test_shannon_changes_nothing(build, call, mode):
    model = build_sharp(build)
    expected = run(model, call, mode)
    assert fnn.convert(model, fl.Shannon()) is model
    assert_equal(run(model, call, mode), expected)


@ignore_nested
@pytest.mark.parametrize("mode", ["eval", "no grad"])
@pytest.mark.parametrize(("build", "call"), CASES.values(), ids=CASES)
def test_inference_uses_the_regularizer(build, call, mode):
    """The same numbers as in training, which has no fast path; other numbers than softmax."""
    model = build_sharp(build)
    softmax = run(model, call, mode)
    fnn.convert(model, fl.Tsallis(1.5))
    actual = run(model, call, mode)
    assert_equal(actual, run(model, call, "train"))
    assert (actual - softmax).abs().max() > 1e-3


@ignore_nested
def test_no_fused_operator_runs_after_conversion(monkeypatch):
    calls = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, _f=original, _n=name: calls.append(_n) or _f(*a)
        )
    model = torch.nn.ModuleList(
        [build_sharp(encoder), build_sharp(lambda: encoder_layer(norm_first=True))]
    )
    attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    model.append(attention)

    def everything():
        run(model[0], lambda m, x: m(x, src_key_padding_mask=PADDING), "no grad")
        run(model[1], lambda m, x: m(x), "no grad")
        run(model[2], lambda m, x: m(x, x, x), "no grad")

    everything()
    assert len(calls) == 4  # otherwise this test shows nothing
    calls.clear()
    fnn.convert(model, fl.Shannon())
    everything()
    assert not calls


@pytest.mark.parametrize("build", [encoder_layer, encoder, decoder, transformer])
def test_parameters_stay_the_same_objects_under_the_same_names(build):
    model = build_sharp(build)
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    fnn.convert(model, fl.Tsallis(1.5))
    after = dict(model.named_parameters())
    assert list(model.state_dict()) == keys
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)


def test_an_optimizer_from_before_still_trains():
    model = build_sharp(encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fnn.convert(model, fl.Tsallis(1.5))
    before = [parameter.clone() for parameter in model.parameters()]
    model(tokens()).cos().sum().backward()
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_state_dicts_pass_between_converted_and_not():
    plain, model = build_sharp(encoder), fnn.convert(encoder(), fl.Tsallis(1.5))
    model.load_state_dict(plain.state_dict())
    expected = fnn.convert(copy.deepcopy(plain), fl.Tsallis(1.5))(tokens())
    assert_equal(model(tokens()), expected, 0.0)
    encoder().load_state_dict(model.state_dict())


def test_tied_modules_hooks_and_references_survive():
    model = build_sharp(encoder)
    shared = model.layers[0].self_attn
    model.layers[1].self_attn = shared
    seen = []
    shared.register_forward_hook(lambda *_: seen.append(1))
    fnn.convert(model, fl.Tsallis(1.5))
    assert model.layers[0].self_attn is model.layers[1].self_attn is shared
    assert type(shared) is fnn.MultiheadAttention
    model(tokens())
    assert len(seen) == 2


def test_the_model_may_itself_be_the_attention():
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, kdim=8, vdim=10, dtype=torch.float64)
    key, value = torch.randn(5, 8).double(), torch.randn(5, 10).double()
    expected = layer(tokens()[0], key, value)
    assert fnn.convert(layer, fl.Shannon()) is layer
    for actual, reference in zip(layer(tokens()[0], key, value), expected, strict=True):
        assert_equal(actual, reference)


@ignore_nested
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_converted_model(make_copy):
    model = fnn.convert(build_sharp(encoder), lambda layer: fnn.LearnedTsallis(layer.num_heads))
    other = make_copy(model)
    call = CASES["encoder, padded"][1]
    expected = run(model, call, "no grad")
    assert_equal(run(other, call, "no grad"), expected, 0.0)
    with torch.no_grad():
        other.layers[0].self_attn.regularizer.raw.add_(1.0)
    assert (run(other, call, "no grad") - expected).abs().max() > 1e-4
    assert_equal(run(model, call, "no grad"), expected, 0.0)


def test_converting_again_changes_the_regularizer():
    model = fnn.convert(build_sharp(encoder), fl.Tsallis(1.5))
    first = model(tokens())
    fnn.convert(model, fl.Tsallis(2.0))
    fresh = fnn.convert(build_sharp(encoder), fl.Tsallis(2.0))
    assert_equal(model(tokens()), fresh(tokens()), 0.0)
    assert (model(tokens()) - first).abs().max() > 1e-3


def test_one_object_is_shared_and_a_function_makes_one_for_each():
    model = fnn.convert(build_sharp(encoder), fnn.LearnedTsallis(HEADS))
    assert len([name for name, _ in model.named_parameters() if "regularizer" in name]) == 1
    fnn.convert(model, lambda layer: fnn.LearnedTsallis(layer.num_heads))
    learned = [p for name, p in model.named_parameters() if "regularizer" in name]
    assert [p.shape for p in learned] == [(HEADS, 1), (HEADS, 1)]
    model(tokens()).cos().sum().backward()
    assert all((p.grad.abs() > 0).all() for p in learned)


def test_a_converted_layer_can_be_stacked_anew():
    layer = fnn.convert(build_sharp(encoder_layer), fl.Tsallis(1.5))
    with pytest.warns(UserWarning, match="use_nested_tensor is False"):
        torch.nn.TransformerEncoder(layer, 2)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    call = CASES["encoder, padded"][1]
    assert_equal(run(model, call, "no grad"), run(model, call, "train"))


@ignore_nested
def test_a_layer_swapped_by_hand_says_what_stands_in_its_way():
    model = build_sharp(encoder)
    model.layers[0].self_attn = fnn.MultiheadAttention(
        WIDTH, HEADS, batch_first=True, dtype=torch.float64
    )
    with pytest.raises(TypeError, match=r"or let fenchel\.nn\.convert do it"):
        run(model, CASES["encoder, padded"][1], "no grad")
    fnn.convert(model, fl.Tsallis(1.5))
    run(model, CASES["encoder, padded"][1], "no grad")


@pytest.mark.parametrize("mode", ["train", "no grad"])
def test_the_future_does_not_leak(mode):
    model = fnn.convert(build_sharp(encoder), fl.Tsallis(1.5)).train(mode == "train")
    x = tokens()
    changed = x.clone()
    changed[:, 4] += 3.0
    with torch.set_grad_enabled(mode == "train"):
        before, after = model(x, mask=FUTURE), model(changed, mask=FUTURE)
    assert_equal(before[:, :4], after[:, :4], 1e-14)
    assert ((before - after)[:, 4:].abs().amax((0, 2)) > 1e-3).all()


# Compiled


@pytest.mark.parametrize(
    "regularizer",
    [fl.Shannon(), fl.Tsallis(1.5), lambda layer: fnn.LearnedTsallis(layer.num_heads)],
    ids=["softmax", "fixed", "learned"],
)
def test_a_compiled_layer_equals_eager(regularizer):
    layer = fnn.convert(build_sharp(encoder_layer), regularizer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, y = tokens().requires_grad_(), tokens().requires_grad_()
    expected, actual = layer(x, src_mask=FUTURE), compiled(y, src_mask=FUTURE)
    assert_equal(actual, expected)
    parameters = list(layer.parameters())
    left = torch.autograd.grad(expected.cos().sum(), [*parameters, x])
    right = torch.autograd.grad(actual.cos().sum(), [*parameters, y])
    for one, other in zip(left, right, strict=True):
        assert_equal(other, one)


def test_conversion_reaches_a_model_compiled_before():
    layer = build_sharp(encoder_layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    before = compiled(tokens())
    fnn.convert(compiled, fl.Tsallis(1.5))
    assert_equal(compiled(tokens()), layer(tokens()))
    assert (compiled(tokens()) - before).abs().max() > 1e-3


# What is refused


def test_nothing_to_convert():
    with pytest.raises(
        ValueError, match=r"no torch\.nn\.MultiheadAttention in Linear.*replace_sdpa"
    ):
        fnn.convert(torch.nn.Linear(2, 2), fl.Shannon())
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        fnn.convert(lambda x: x, fl.Shannon())


class Derived(torch.nn.MultiheadAttention):
    """Could do anything in a forward of its own."""


def parametrised():
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS)
    return torch.nn.utils.parametrizations.weight_norm(layer, "in_proj_weight")


@pytest.mark.parametrize("build", [lambda: Derived(WIDTH, HEADS), parametrised])
def test_derived_classes_are_refused_before_anything_changes(build):
    model = torch.nn.ModuleDict({"first": build_sharp(encoder), "second": build()})
    with pytest.raises(TypeError, match=r"second is a .*, derived from"):
        fnn.convert(model, fl.Tsallis(1.5))
    assert type(model["first"].layers[0].self_attn) is torch.nn.MultiheadAttention
    assert model["first"].use_nested_tensor
    fnn.convert(model["first"], fl.Tsallis(1.5))


@pytest.mark.parametrize("wrong", ["entmax", 1.5, fl.Tsallis, fnn.LearnedTsallis, None])
def test_something_else_than_a_regularizer_changes_nothing(wrong):
    model = build_sharp(encoder)
    with pytest.raises(TypeError, match="regularizer must be a Regularizer such as"):
        fnn.convert(model, wrong)
    with pytest.raises(TypeError, match="regularizer must be a Regularizer such as"):
        fnn.convert(model, lambda layer: wrong)
    assert type(model.layers[0].self_attn) is torch.nn.MultiheadAttention
