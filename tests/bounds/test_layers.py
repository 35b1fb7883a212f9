"""Parts of a transformer, whole layers and stacks."""

import math

import pytest
import torch
from torch.nn import (
    GELU,
    Identity,
    LayerNorm,
    MultiheadAttention,
    ReLU,
    SiLU,
    Tanh,
    TransformerEncoderLayer,
)

from fenchel.bounds import (
    Ball,
    Box,
    Everywhere,
    LongestToken,
    VectorMap,
    attack,
    compose,
    contraction,
    encoder_layer_lipschitz,
    feed_forward_lipschitz,
    heads_of,
    layer_norm_lipschitz,
    residual,
    stack_lipschitz,
    token_map_lipschitz,
)
from fenchel.bounds.layers import _SLOPES
from fenchel.measures import Dot
from tests.bounds.draws import F64, generator, normal, shrunk

ONE = torch.eye(1, dtype=F64)
NORMS = [2.0, LongestToken()]


def encoder(seed=0, width=8, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = TransformerEncoderLayer(
            width, 2, 2 * width, batch_first=True, dtype=F64, **settings
        )
        with torch.no_grad():  # not at their defaults of one and zero
            for part in layer.parameters():
                part.add_(0.1 * torch.randn_like(part))
    return layer.eval()


def inside(shape, radius, count=50, seed=0):
    return Ball(radius).sample(count, torch.Size(shape), radius, generator(seed))


# ---- feed-forward


@pytest.mark.parametrize("kind", [ReLU, GELU, SiLU, Tanh, Identity])
def test_slopes_are_the_largest(kind):
    """On a grid: none above, and some just below."""
    x = torch.linspace(-10, 10, 400_001, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(kind()(1 * x).sum(), x)
    top = float(slope.abs().max())
    assert top <= _SLOPES[kind] * (1 + 1e-15)
    assert top == pytest.approx(_SLOPES[kind], rel=1e-8)


@pytest.mark.parametrize("activation", [ReLU(), GELU(), SiLU(), Tanh()])
def test_a_scalar_feed_forward_is_exact(activation):
    bound = feed_forward_lipschitz([2 * ONE, 3 * ONE], [None, None], activation, 1, Ball(3.0))
    assert bound.value == pytest.approx(6 * _SLOPES[type(activation)])
    assert attack(bound, 1500).ratio == pytest.approx(1, rel=1e-3)
    assert not attack(shrunk(bound), 1500).holds


@pytest.mark.parametrize("norm", NORMS)
def test_a_matrix_alone_is_exact(norm):
    matrix = normal(5, 4)
    bound = feed_forward_lipschitz([matrix], [normal(5)], ReLU(), 3, Everywhere(), norm=norm)
    assert bound.value == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)))
    assert attack(bound, 1500).ratio == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("activation", [ReLU(), GELU(), SiLU(), Tanh(), Identity()])
def test_no_output_is_longer_than_the_reach(activation):
    matrices = [normal(5, 4), normal(6, 5, seed=1), normal(3, 6, seed=2)]
    biases = [normal(5), None, normal(3, seed=3)]
    bound = feed_forward_lipschitz(matrices, biases, activation, 2, Ball(0.5))
    x = inside((2, 4), 0.5, 2000)
    assert float(bound.trials.map.function(x).norm(dim=-1).max()) <= bound.trials.map.reach
    assert math.isinf(
        feed_forward_lipschitz(matrices, biases, activation, 2, Box(0.5)).trials.map.reach
    )


def test_the_l2_constant_is_not_sold_as_one_of_another_norm():
    """[[1, 1], [1, -1]] has norm 1.41 in l2 and 2 in l1."""
    matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    for norm in (1.0, math.inf):
        with pytest.raises(ValueError, match=r"norm must be 2 or LongestToken\(\)"):
            feed_forward_lipschitz([matrix], [None], Identity(), 1, Everywhere(), norm=norm)


def test_bad_feed_forward():
    with pytest.raises(
        ValueError, match=r"activation must be one of torch's ReLU\(\), .*; got ELU"
    ):
        feed_forward_lipschitz([ONE], [None], torch.nn.ELU(), 1, Everywhere())
    with pytest.raises(ValueError, match="got 'relu'"):
        feed_forward_lipschitz([ONE], [None], "relu", 1, Everywhere())
    with pytest.raises(TypeError, match="function must be callable, got Tensor"):
        VectorMap(ONE, (1, 1), Everywhere())


# ---- layer norm


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_a_layer_norm_is_as_steep_as_its_bound(eps, norm):
    layer = LayerNorm(8, eps=eps, dtype=F64)
    bound = layer_norm_lipschitz(layer, 2, Everywhere(), norm=norm)
    assert bound.value == pytest.approx(1 / math.sqrt(eps))
    x = normal(2, 8)
    same = torch.ones(2, 8, dtype=F64)
    across = x - x.mean(-1, keepdim=True)
    assert bound.check(same, same + 1e-6 * across).ratio == pytest.approx(1, rel=1e-6)
    assert not attack(shrunk(bound), 1000).holds


def test_unequal_weights_leave_a_gap_to_the_true_constant():
    """diag(w) after the projection onto sum zero: for w = (1, 0) its norm is 1 / sqrt(2)."""
    layer = LayerNorm(2, eps=1e-4, dtype=F64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 0.0]))
    result = attack(layer_norm_lipschitz(layer, 1, Everywhere()), 2000)
    assert result.ratio == pytest.approx(math.sqrt(0.5), rel=1e-3)


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_layer_norm_is_torchs(settings):
    layer = LayerNorm(5, dtype=F64, **settings)
    for part in layer.parameters():
        torch.nn.init.normal_(part)
    bound = layer_norm_lipschitz(layer, 3, Everywhere())
    x = 3 * normal(20, 3, 5)
    torch.testing.assert_close(bound.trials.map.function(x), layer(x).detach(), rtol=0, atol=1e-12)
    assert float(layer(x).detach().norm(dim=-1).max()) <= bound.trials.map.reach


def test_layer_norm_without_eps_is_true_and_of_no_use():
    bound = layer_norm_lipschitz(LayerNorm(3, eps=0.0), 1, Everywhere())
    assert bound.value == math.inf


def test_a_bias_in_float32_is_measured_in_float64():
    layer = LayerNorm(1000)
    with torch.no_grad():
        layer.bias.copy_(torch.rand(1000, generator=generator(0)))
    reach = layer_norm_lipschitz(layer, 1, Everywhere()).trials.map.reach
    assert reach == math.sqrt(1000) + float(layer.bias.detach().double().norm())


# ---- residual


def test_a_residual_costs_one():
    bound = residual(feed_forward_lipschitz([2 * ONE], [None], Identity(), 1, Ball(1.0)))
    assert bound.value == pytest.approx(3)
    assert bound.trials.map.reach == pytest.approx(3)
    assert attack(bound, 300).ratio == pytest.approx(1)
    assert not attack(shrunk(bound), 300).holds


def test_a_residual_everywhere_has_no_reach():
    """So that dot products cannot be put behind it."""
    layer = LayerNorm(2, dtype=F64)
    bound = residual(layer_norm_lipschitz(layer, 1, Everywhere()))
    assert bound.trials.map.reach == math.inf
    square = token_map_lipschitz("square", 2.0, VectorMap(lambda x: x**2, (1, 2), Ball(1.0)))
    with pytest.raises(ValueError, match="tokens of length inf"):
        compose(bound, square)


def test_a_residual_of_other_shape_would_broadcast():
    """x + sum(x): the constant is 1 + d there, not 1 + sqrt(d)."""
    narrow = feed_forward_lipschitz([torch.ones(1, 16)], [None], Identity(), 1, Everywhere())
    with pytest.raises(ValueError, match=r"one shape, got \(1, 16\) and \(1, 1\)"):
        residual(narrow)


def test_a_residual_is_for_maps_of_vectors():
    with pytest.raises(TypeError, match="bound must bound a map of vectors"):
        residual(contraction.projection(contraction.Setting(Dot(), Ball(1.0), 1)))


# ---- encoder layers


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", SiLU(), ReLU(), GELU()])
@pytest.mark.parametrize("bias", [True, False])
def test_the_function_is_torchs_layer(norm_first, activation, bias):
    layer = encoder(norm_first=norm_first, activation=activation, bias=bias)
    bound = encoder_layer_lipschitz(layer, 5, 2.0)
    x = inside((5, 8), 2.0)
    with torch.no_grad():
        known = layer(x)
    torch.testing.assert_close(bound.trials.map.function(x), known, rtol=0, atol=1e-12)
    assert float(known.norm(dim=-1).max()) <= bound.trials.map.reach


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_no_layer_is_steeper_than_its_bound(norm_first, norm):
    for n in (1, 2, 6):
        bound = encoder_layer_lipschitz(encoder(norm_first=norm_first), n, 1.0, norm=norm)
        assert attack(bound, 400).holds


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_bound_is_the_product_of_the_parts(norm_first):
    layer = encoder(norm_first=norm_first)
    bound = encoder_layer_lipschitz(layer, 4, 1.0)
    bounds = [layer_norm_lipschitz(x, 4, Everywhere()).value for x in (layer.norm1, layer.norm2)]
    forward = torch.linalg.matrix_norm(layer.linear1.weight.detach(), 2)
    forward = float(forward * torch.linalg.matrix_norm(layer.linear2.weight.detach(), 2))
    if norm_first:
        assert bound.value > (1 + bounds[0]) * (1 + bounds[1] * forward)
    else:
        assert bound.value > bounds[0] * bounds[1] * (1 + forward)


def test_norm_first_needs_no_radius():
    bound = encoder_layer_lipschitz(encoder(norm_first=True), 4)
    assert math.isfinite(bound.value)
    assert bound.trials.map.reach == math.inf
    assert bound.assumptions[0] == "all inputs"
    assert attack(bound, 400).holds


def test_norm_last_needs_a_radius():
    with pytest.raises(ValueError, match="radius must be finite and > 0, got None"):
        encoder_layer_lipschitz(encoder(norm_first=False), 4)


def test_a_stack_is_torchs_encoder():
    layers = [encoder(seed, norm_first=seed % 2 == 0) for seed in range(3)]
    bound = stack_lipschitz(layers, 4, 1.0)
    x = inside((4, 8), 1.0)
    with torch.no_grad():
        known = layers[2](layers[1](layers[0](x)))
    torch.testing.assert_close(bound.trials.map.function(x), known, rtol=0, atol=1e-11)
    one, two, _ = (encoder_layer_lipschitz(layer, 4, 1.0) for layer in layers)
    assert bound.value > one.value * two.value
    assert attack(bound, 300).holds


def test_a_stack_of_norm_first_layers_needs_no_radius():
    layers = [encoder(seed, norm_first=True) for seed in range(2)]
    assert math.isfinite(stack_lipschitz(layers, 4).value)
    with pytest.raises(ValueError, match="radius must be finite"):
        stack_lipschitz([layers[0], encoder(norm_first=False)], 4)
    assert math.isfinite(stack_lipschitz([encoder(norm_first=False), layers[0]], 4, 1.0).value)


def test_bad_layers():
    with pytest.raises(ValueError, match="layers must not be empty"):
        stack_lipschitz([], 4)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.TransformerEncoderLayer, got Line"):
        encoder_layer_lipschitz(torch.nn.Linear(2, 2), 4)
    for activation in (GELU("tanh"), torch.nn.ELU(), lambda x: 5 * x):
        with pytest.raises(ValueError, match="activation must be one of torch's"):
            encoder_layer_lipschitz(encoder(activation=activation), 4, 1.0)


# ---- heads of torch's attention


@pytest.mark.parametrize("bias", [True, False])
def test_heads_of_an_attention(bias):
    layer = MultiheadAttention(6, 3, bias=bias, batch_first=True, dtype=F64)
    if bias:
        torch.nn.init.normal_(layer.in_proj_bias)
        torch.nn.init.normal_(layer.out_proj.bias)
    heads, output, shift = heads_of(layer)
    assert len(heads) == 3
    assert (shift is None) == (not bias)
    x = normal(4, 6)
    actual = torch.cat([head.output(x) for head in heads], -1) @ output.mT
    actual = actual if shift is None else actual + shift
    torch.testing.assert_close(actual, layer(x, x, x)[0].detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("extra", [{"kdim": 3}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_keys_that_are_no_tokens_are_refused(extra):
    with pytest.raises(ValueError, match="only self-attention with one width"):
        heads_of(MultiheadAttention(4, 2, **extra))
