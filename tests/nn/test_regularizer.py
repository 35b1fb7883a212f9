"""Regularisers inside modules: what they hold trains, is saved, moves, and is refused."""

import copy
import io
import pickle

import pytest
import torch
from torch.nn import Parameter

import fenchel as fl
import fenchel.nn as fnn
from tests.nn.pairs import BATCH, HEADS, KEYS, WIDTH, assert_equal, operands


def layer_with(regularizer, **options):
    torch.manual_seed(0)
    return fnn.MultiheadAttention(
        WIDTH, HEADS, batch_first=True, dtype=torch.float64, regularizer=regularizer, **options
    )


def learned(**options):
    return fnn.LearnedTsallis(HEADS, dtype=torch.float64, **options)


def alphas(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)  # (heads, 1)


@pytest.mark.parametrize(("init", "upper"), [(1.5, 2.0), (1.1, 2.0), (2.5, 4.0)])
def test_learned_alpha_starts_where_told_and_stays_inside(init, upper):
    module = learned(init=init, upper=upper)
    assert_equal(module.alpha, alphas(init).expand(HEADS, 1), 1e-14)
    assert isinstance(module(), fl.Tsallis)
    for extreme in (-1000.0, 1000.0):
        with torch.no_grad():
            module.raw.fill_(extreme)
        assert (module.alpha >= 1).all()
        assert (module.alpha <= upper).all()
        assert layer_with(module)(*operands(layer_with(module)))[0].isfinite().all()


def test_learned_alpha_gives_the_tsallis_of_its_alpha():
    module = learned()
    with torch.no_grad():
        module.raw.copy_(alphas(-2.0, 0.0, 2.0))
    ours, fixed = layer_with(module), layer_with(fl.Tsallis(module.alpha.detach()))
    inputs = operands(ours)
    for need_weights in (True, False):
        expected = fixed(*inputs, need_weights=need_weights)[0]
        assert_equal(ours(*inputs, need_weights=need_weights)[0], expected, 1e-14)


def test_each_head_uses_its_own_alpha():
    together = layer_with(fl.Tsallis(alphas(1.0, 1.5, 2.0)))
    inputs = operands(together)
    weights = together(*inputs, average_attn_weights=False)[1]
    for head, alpha in enumerate((1.0, 1.5, 2.0)):
        alone = layer_with(fl.Tsallis(alpha))(*inputs, average_attn_weights=False)[1]
        assert_equal(weights[:, head], alone[:, head])
    zeros = (weights == 0).double().mean((0, 2, 3))
    assert zeros[0] == 0 < zeros[1] < zeros[2]


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "lean"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_gradient_in_raw_is_the_difference_quotient(need_weights, padded):
    layer = layer_with(learned())
    inputs = operands(layer)
    padding = torch.arange(KEYS).expand(BATCH, KEYS) >= 5 if padded else None

    def loss():
        output = layer(*inputs, key_padding_mask=padding, need_weights=need_weights)[0]
        return output.cos().sum()

    (gradient,) = torch.autograd.grad(loss(), [layer.regularizer.raw])
    assert (gradient.abs() > 1e-4).all()
    raw, step = layer.regularizer.raw, 1e-5
    for head in range(HEADS):
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                raw[head] += sign * step
                sides.append(loss())
                raw[head] -= sign * step
        quotient = (sides[0] - sides[1]) / (2 * step)
        assert abs(quotient - gradient[head, 0]) <= 1e-7 * max(1.0, quotient.abs())


def test_training_moves_alpha_and_lowers_the_loss():
    layer = layer_with(learned())
    inputs = [x.detach() for x in operands(layer)]
    expected = layer_with(fl.Tsallis(2.0))(*inputs)[0].detach()
    optimizer = torch.optim.Adam([layer.regularizer.raw], lr=0.3)
    losses = []
    for _ in range(8):
        loss = (layer(*inputs)[0] - expected).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert (layer.regularizer.alpha > 1.6).all()


def test_learned_alpha_is_saved_and_loaded():
    layer, other = layer_with(learned()), layer_with(learned(init=1.2))
    assert "regularizer.raw" in layer.state_dict()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.regularizer.alpha, layer.regularizer.alpha)
    plain = torch.nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)
    missing = layer.load_state_dict(plain.state_dict(), strict=False)
    assert missing.missing_keys == ["regularizer.raw"]
    assert not missing.unexpected_keys


def test_a_parameter_of_a_regularizer_is_one_of_the_module():
    alpha = Parameter(alphas(1.3, 1.5, 1.7))
    layer = layer_with(fl.Tsallis(alpha))
    assert dict(layer.named_parameters())["regularizer.alpha"] is alpha
    inputs = operands(layer)
    layer(*inputs, need_weights=False)[0].cos().sum().backward()
    assert (alpha.grad.abs() > 1e-5).all()
    before = layer(*inputs)[0]
    with torch.no_grad():
        alpha.add_(0.2)
    assert (layer(*inputs)[0] - before).abs().max() > 1e-4


def test_a_parameter_that_left_its_range_is_named():
    alpha = Parameter(alphas(1.3, 1.5, 1.7))
    layer = layer_with(fl.Tsallis(alpha))
    with torch.no_grad():
        alpha.sub_(0.5)
    with pytest.raises(ValueError, match=r"alpha must be finite and >= 1, got 0.8"):
        layer(*operands(layer))


def test_fixed_tensors_move_but_are_not_saved():
    layer = layer_with(fl.Tsallis(alphas(1.2, 1.5, 2.0), Parameter(torch.tensor(0.7).double())))
    assert [name for name in layer.state_dict() if "regularizer" in name] == [
        "regularizer.temperature"
    ]
    single = copy.deepcopy(layer).float()
    assert single.regularizer().alpha.dtype == torch.float32
    assert single.regularizer().temperature.dtype == torch.float32
    exact = layer(*operands(layer))[0]
    inputs = [x.float() for x in operands(layer)]
    assert (single(*inputs)[0] - exact).abs().max() < 1e-5
    elsewhere = copy.deepcopy(layer).to("meta").regularizer()
    assert elsewhere.alpha.device.type == elsewhere.temperature.device.type == "meta"


@pytest.mark.parametrize(
    "make",
    [fl.Shannon, lambda: fl.Tsallis(Parameter(alphas(1.2, 1.5, 1.8))), learned],
    ids=["number", "parameter", "learned"],
)
def test_copies_and_pickles_are_whole_and_separate(make):
    layer = layer_with(make())
    inputs = operands(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ]
    expected = layer(*inputs)[0]
    for other in copies:
        assert_equal(other(*inputs)[0], expected, 0.0)
        with torch.no_grad():
            for parameter in other.regularizer.parameters():
                parameter.add_(0.1)
    assert_equal(layer(*inputs)[0], expected, 0.0)
    for other in copies:
        changed = (other(*inputs)[0] - expected).abs().max() > 1e-6
        assert changed == bool(list(layer.regularizer.parameters()))


def test_functional_call_reaches_the_regularizer():
    layer = layer_with(fl.Tsallis(Parameter(alphas(1.3, 1.3, 1.3))))
    inputs = operands(layer)
    parameters = {**dict(layer.named_parameters()), "regularizer.alpha": alphas(2.0, 2.0, 2.0)}
    actual = torch.func.functional_call(layer, parameters, inputs)[0]
    assert_equal(actual, layer_with(fl.Tsallis(2.0))(*inputs)[0])


def test_your_own_module_may_make_the_regularizer():
    class LearnedTemperature(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.log = Parameter(torch.zeros(HEADS, 1, dtype=torch.float64))

        def forward(self):
            return fl.Shannon(self.log.exp())

    layer = layer_with(LearnedTemperature())
    inputs = operands(layer)
    output = layer(*inputs)[0]
    assert_equal(output, layer_with(fl.Shannon())(*inputs)[0])
    output.cos().sum().backward()
    assert (layer.regularizer.log.grad.abs() > 1e-5).all()


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "heads must be >= 1, got 0"),
        ((4, 1.0), r"strictly between 1 and upper=2, got 1.0; .* use Shannon\(\)"),
        ((4, 2.0), "strictly between 1 and upper=2, got 2.0"),
        ((4, 1.5, 1.0), "upper must be finite and > 1, got 1.0"),
    ],
)
def test_bad_settings_of_learned_alpha(arguments, message):
    with pytest.raises(ValueError, match=message):
        fnn.LearnedTsallis(*arguments)


def test_a_graph_is_not_kept():
    raw = torch.zeros(HEADS, 1, requires_grad=True)
    with pytest.raises(ValueError, match=r"alpha of Tsallis has a gradient but is no Parameter"):
        fnn.MultiheadAttention(WIDTH, HEADS, regularizer=fl.Tsallis(1.5 + raw))


def test_tensors_outside_of_a_dataclass_are_refused():
    class Odd(fl.Tsallis):
        pass

    class Plain(fl.Regularizer):
        value = maximize = curvature = None

        def __init__(self):
            self.scale = torch.ones(())

    fnn.MultiheadAttention(WIDTH, HEADS, regularizer=Odd(1.5))
    with pytest.raises(TypeError, match="Plain holds the tensor scale but is no dataclass"):
        fnn.MultiheadAttention(WIDTH, HEADS, regularizer=Plain())


def test_a_module_that_makes_something_else_is_refused():
    layer = layer_with(torch.nn.Identity())
    with pytest.raises(TypeError):
        layer(*operands(layer))


def test_wrong_number_of_heads_is_named():
    layer = layer_with(fnn.LearnedTsallis(HEADS + 1))
    with pytest.raises(ValueError, match=r"alpha of shape \(4, 1\).*one per head is shape"):
        layer(*operands(layer))


@pytest.mark.parametrize("raw", [torch.nan, torch.inf])
def test_what_diverged_is_told_from_what_is_out_of_range(raw):
    alpha = torch.tensor([1.5, raw])
    with pytest.raises(fl.NonFiniteError, match="alpha must be finite and >= 1"):
        fl.Tsallis(alpha)
    with pytest.raises(ValueError, match=r"alpha must be finite and >= 1, got 0\.5") as refused:
        fl.Tsallis(torch.tensor([1.5, 0.5]))
    assert not isinstance(refused.value, fl.NonFiniteError)
