"""Layers with a Lipschitz bound: they survive training and an attack, and an attack finds a
normalisation that is wrong."""

import copy
import doctest
import math

import pytest
import torch

import fenchel.nn as fnn
from fenchel import bounds
from fenchel.bounds import modules as formulas
from fenchel.bounds.self_attention import (
    Head,
    gaussian_attention_lipschitz,
    gaussian_constant,
    self_attention_lipschitz,
)
from fenchel.nn import lipschitz as module
from fenchel.nn.lipschitz import DotForm, GaussianForm, LipschitzAttention, LipschitzFeedForward

WIDTH, HEADS, BATCH, TOKENS = 8, 2, 3, 6
FORMS = [GaussianForm(), DotForm(2.0)]
by_form = pytest.mark.parametrize("form", FORMS, ids=["gaussian", "dot"])


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(form=FORMS[0], constant=1.0, dtype=torch.float64, width=WIDTH, heads=HEADS, **options):
    """A layer in which no parameter is zero."""
    torch.manual_seed(0)
    layer = LipschitzAttention(width, heads, constant, form=form, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def weights_bound(layer, tokens):
    """Of the weights as they are, before anything is divided."""
    return float(layer.heads.bound(layer.output.detach(), [tokens]).detach())


def trained(layer, steps, tokens=TOKENS, rate=1e-2):
    """Regression on targets that change 20 times as fast as the layer may."""
    x = draw(32, tokens, WIDTH, seed=1, dtype=torch.float32)
    target = 20 * x.flip(-1) + 5 * x.mean(1, keepdim=True).sign()
    optimizer = torch.optim.Adam(layer.parameters(), rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return layer


# ---- the constant


@by_form
def test_the_constant_holds_after_training(form):
    layer = trained(make(form, 0.8, torch.float32), steps=500)
    assert weights_bound(layer, TOKENS) > 0.8  # the weights ask for more
    bound = layer.bound(TOKENS)
    assert bound.value == 0.8
    result = bounds.attack(bound, budget=5000)
    assert result.holds
    assert result.ratio <= 1
    assert result.ratio > 0.25, "the bound says little"


@by_form
def test_the_constant_holds_after_every_step_even_of_a_wild_optimizer(form):
    layer = make(form, 0.5, torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), 30.0)
    x = draw(4, TOKENS, WIDTH, dtype=torch.float32)
    for _ in range(5):
        optimizer.zero_grad()
        layer(x).square().sum().neg().backward()
        optimizer.step()
        result = bounds.attack(layer.bound(TOKENS), budget=1500)
        assert result.observed <= 0.5


@by_form
def test_an_attack_finds_a_wrong_normalisation(form, monkeypatch):
    """The largest entry of a matrix in place of its norm."""
    layer = make(form)
    assert bounds.attack(layer.bound(TOKENS), budget=3000).holds
    monkeypatch.setattr(formulas, "_spectral", lambda m: m.abs().amax((-2, -1)) / WIDTH)
    assert not bounds.attack(layer.bound(TOKENS), budget=3000).holds


def test_an_attack_finds_that_the_number_of_tokens_was_forgotten(monkeypatch):
    layer = make()
    monkeypatch.setattr(formulas, "gaussian_constant", lambda n: 1.0)
    assert not bounds.attack(layer.bound(TOKENS), budget=3000).holds


def test_an_attack_finds_that_the_output_was_not_divided(monkeypatch):
    for form in FORMS:
        layer = make(form)
        layer.constant = weights_bound(layer, TOKENS) / 20
        assert bounds.attack(layer.bound(TOKENS), budget=3000).holds
        monkeypatch.setattr(module, "shrinking", lambda bounds, constant: torch.ones_like(bounds))
        assert not bounds.attack(layer.bound(TOKENS), budget=3000).holds
        monkeypatch.undo()


@by_form
def test_weights_that_need_less_are_left_as_they_are(form):
    layer = make(form, constant=1e6)
    bound = layer.bound(TOKENS)
    assert bound.value < 1e3
    frozen = torch.ones(1, 1, 1, dtype=torch.float64)
    x = draw(BATCH, TOKENS, WIDTH)
    torch.testing.assert_close(layer(x), layer._map(x, None, frozen))
    assert bounds.attack(bound, budget=2000).holds


@by_form
def test_the_function_that_is_attacked_is_the_layer(form):
    for dtype in (torch.float64, torch.float32):
        layer = make(form, dtype=dtype)
        x = draw(BATCH, TOKENS, WIDTH)
        actual = layer.bound(TOKENS).trials.map.function(x)
        torch.testing.assert_close(actual.to(dtype), layer(x.to(dtype)))


def test_constants_are_those_of_the_bounds():
    gaussian = make(heads=1)
    norm = weights_bound(gaussian, TOKENS)
    expected = gaussian_attention_lipschitz(gaussian.heads.projection, gaussian.output, TOKENS)
    assert norm == pytest.approx(expected.value, rel=1e-12)
    layer = make(FORMS[1])
    parts = (
        m.unflatten(0, (HEADS, -1)).detach()
        for m in (layer.heads.query, layer.heads.key, layer.heads.value)
    )
    heads = [Head(*three, layer.heads.temperature) for three in zip(*parts, strict=True)]
    for tokens in (1, 2, 50):
        dot = self_attention_lipschitz(heads, tokens, 2.0, output=layer.output.detach())
        assert weights_bound(layer, tokens) == pytest.approx(dot.value)


def test_heads_that_look_at_orthogonal_parts_cost_no_more_than_one():
    eye = torch.eye(WIDTH, dtype=torch.float64)
    assert float(formulas.gaussian_bound(eye, eye, [TOKENS])) == pytest.approx(
        gaussian_constant(TOKENS)
    )


def test_feed_forward_keeps_its_constant():
    torch.manual_seed(0)
    for activation in (None, torch.nn.ReLU()):
        layer = LipschitzFeedForward(WIDTH, constant=0.7, activation=activation)
        result = bounds.attack(layer.bound(3), budget=2000)
        assert result.holds
        assert result.ratio > 0.3
    with pytest.raises(TypeError, match=r"GELU's and SiLU's reach 1\.13"):
        LipschitzFeedForward(WIDTH, activation=torch.nn.GELU())


# ---- what it computes


def test_against_a_loop():
    layer = make(bias=True)
    x = draw(BATCH, TOKENS, WIDTH)
    scale = 1 / weights_bound(layer, TOKENS)
    expected = torch.zeros_like(x)
    size = WIDTH // HEADS
    for b in range(BATCH):
        for h in range(HEADS):
            rows = slice(h * size, (h + 1) * size)
            z = x[b] @ layer.heads.projection[rows].T
            distances = (z[:, None] - z[None]).square().sum(-1)
            weights = (-distances / layer.heads.log_temperature[h].exp()).softmax(-1)
            expected[b] += scale * weights @ z @ layer.output[:, rows].T
    torch.testing.assert_close(layer(x), expected + layer.bias)


def test_dot_products_of_short_tokens_are_torchs_attention():
    layer = make(FORMS[1])
    x = 0.1 * draw(BATCH, TOKENS, WIDTH)
    names = (layer.heads.query, layer.heads.key, layer.heads.value)
    q, k, v = ((x @ m.T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in names)
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    scale = 1 / weights_bound(layer, TOKENS)
    torch.testing.assert_close(layer(x), scale * heads @ layer.output.T + layer.bias)
    assert (layer(2 * x) - layer(x)).abs().max() > 1e-3
    torch.testing.assert_close(layer(1e3 * x), layer(1e4 * x))  # beyond the ball length is lost


@by_form
def test_padding_changes_nothing_and_gets_nothing(form):
    layer = make(form)
    x = draw(BATCH, TOKENS, WIDTH)
    padded = torch.cat([x, torch.full_like(x, math.nan)], 1).requires_grad_()
    mask = torch.arange(2 * TOKENS).expand(BATCH, -1) >= TOKENS
    output = layer(padded, mask)
    torch.testing.assert_close(output[:, :TOKENS], layer(x))
    assert not output[:, TOKENS:].any()
    (slope,) = torch.autograd.grad(output.sum(), padded)
    assert slope.isfinite().all()
    assert not slope[:, TOKENS:].any()
    mask = torch.tensor([[False] * TOKENS, [True] * TOKENS, [False] * 2 + [True] * 4])
    output = layer(x, mask)
    torch.testing.assert_close(output[:1], layer(x[:1]))
    torch.testing.assert_close(output[2:, :2], layer(x[2:, :2]))
    assert not output[1].any()


@by_form
def test_the_constant_holds_with_padding(form):
    """Of all outputs, those of ignored tokens included."""
    layer = make(form)
    for count in (1, 2, 5):
        ignored = torch.arange(TOKENS) >= count
        jacobian = torch.autograd.functional.jacobian(
            lambda x, ignored=ignored: layer(x[None], ignored[None])[0], draw(TOKENS, WIDTH)
        )
        square = jacobian.reshape(TOKENS * WIDTH, -1)
        assert torch.linalg.matrix_norm(square, 2) <= 1


@by_form
def test_gradients(form):
    layer = make(form, constant=0.7, width=4)
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [0.5 * draw(2, 3, 4), *(p.detach().clone() for p in layer.parameters())]
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])


@by_form
def test_shapes_and_precisions(form):
    layer = make(form, dtype=torch.float32)
    assert layer(torch.zeros(0, 5, WIDTH)).shape == (0, 5, WIDTH)
    assert layer(torch.zeros(0, 5, WIDTH), torch.zeros(0, 5, dtype=torch.bool)).shape[0] == 0
    assert layer(torch.zeros(2, 0, WIDTH)).shape == (2, 0, WIDTH)
    single = layer(torch.ones(1, 1, WIDTH))
    assert single.isfinite().all()
    assert layer.bound(1).value <= 1
    x = draw(BATCH, WIDTH, TOKENS, dtype=torch.float32).mT
    assert not x.is_contiguous()
    torch.testing.assert_close(layer(x), layer(x.contiguous()))
    half = copy.deepcopy(layer).bfloat16()
    wide = copy.deepcopy(half).float()
    output = half(x.bfloat16())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, wide(x.bfloat16().float()).bfloat16(), rtol=0, atol=0)
    zero = torch.zeros(1, 3, WIDTH, requires_grad=True)
    layer(zero).sum().backward()
    assert zero.grad.isfinite().all()


@by_form
def test_state_and_copies(form):
    layer, other = make(form), LipschitzAttention(WIDTH, HEADS, form=form).double()
    x = draw(BATCH, TOKENS, WIDTH)
    assert (layer(x) - other(x)).abs().max() > 1e-4
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer(x), copy.deepcopy(layer)(x))
    assert f"constant=1, form={form}" in repr(layer)


def test_the_state_of_another_function_is_refused():
    def refused(saved, layer, message):
        with pytest.raises(ValueError, match=message):
            layer.load_state_dict(saved.state_dict())

    dot = LipschitzAttention(8, 2, 0.9, form=DotForm(2.0))
    refused(
        dot, LipschitzAttention(8, 2, 0.5, form=DotForm(2.0)), r"constant = 0\.9, this one has 0\.5"
    )
    refused(dot, LipschitzAttention(8, 4, 0.9, form=DotForm(2.0)), "num_heads = 2, this one has 4")
    refused(dot, LipschitzAttention(8, 2, 0.9, form=DotForm(3.0)), r"radius .* = 2, this one has 3")
    slope = torch.nn.ReLU()
    refused(
        LipschitzFeedForward(8), LipschitzFeedForward(8, activation=slope), r"activation \(0 Ident"
    )
    refused(
        LipschitzFeedForward(8), LipschitzFeedForward(8, constant=2.0), "constant = 1, this one"
    )
    gaussian = LipschitzAttention(8, 2, 0.9)
    gaussian.load_state_dict(LipschitzAttention(8, 2, 0.9, form=GaussianForm(3.0)).state_dict())
    with pytest.raises(ValueError, match=r"radius .* = 2, this one has inf"):
        gaussian.set_extra_state(dot.get_extra_state().bfloat16())
    cast = {name: value.bfloat16() for name, value in gaussian.state_dict().items()}
    LipschitzAttention(8, 2, 0.9).load_state_dict(cast)  # 0.9 in half precision
    with pytest.raises(ValueError, match=r"extra state of LipschitzAttention must be like"):
        gaussian.set_extra_state({"constant": 0.9})


def test_dtypes_are_those_of_torch_layers():
    layer, x = LipschitzAttention(8, 2), torch.zeros(1, 3, 8)
    forward = LipschitzFeedForward(8)
    for refuses in (layer, forward):
        with pytest.raises(
            TypeError, match=r"x is torch.float64 .* are torch.float32; .*x\.to\(torch.fl"
        ):
            refuses(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_messages():
    with pytest.raises(ValueError, match="constant must be a finite number > 0, got 0"):
        LipschitzAttention(8, 2, 0)
    with pytest.raises(ValueError, match="divisible by num_heads, got 8 and 3"):
        LipschitzAttention(8, 3)
    with pytest.raises(TypeError, match=r"GaussianForm\(\) or DotForm\(radius\), got 'dot'"):
        LipschitzAttention(8, 2, form="dot")
    with pytest.raises(ValueError, match="radius must be a finite number > 0, got inf"):
        DotForm(math.inf)
    with pytest.raises(ValueError, match="temperature must be a finite number > 0, got -1"):
        GaussianForm(-1.0)
    layer = LipschitzAttention(8, 2)
    with pytest.raises(ValueError, match=r"\(batch, n, 8\), got torch.float32 of shape \(3, 8\)"):
        layer(torch.zeros(3, 8))
    with pytest.raises(ValueError, match="key_padding_mask must be bool, True = ignored"):
        layer(torch.zeros(1, 3, 8), torch.zeros(1, 3))
    x = torch.zeros(1, 3, 8)
    for tensors in ((x, x, x), (x, x)):
        with pytest.raises(TypeError, match=rf"use layer\(x\).* instead of {len(tensors)} tensors"):
            layer(*tensors)
    with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
        layer.bound(0)


def test_examples():
    names = {name: getattr(fnn, name) for name in fnn.__all__}
    assert doctest.testmod(module, extraglobs={"torch": torch, **names}).failed == 0
