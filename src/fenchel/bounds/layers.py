"""Bounds of the parts of a transformer, of a whole layer, and of a stack of them.

A composition's constant is at most the product, a sum's the sum. Each part also says how long its
outputs can be, because dot-product attention has a bound on a ball only: a layer norm bounds them
whatever comes in.

A layer norm itself is only max|weight| / sqrt(eps) Lipschitz, and for equal weights that is its
true constant: near tokens with equal coordinates it stretches that much. Bounds of layers that
contain one are large for that reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import (
    GELU,
    Identity,
    LayerNorm,
    Module,
    MultiheadAttention,
    ReLU,
    SiLU,
    Tanh,
    TransformerEncoderLayer,
)
from torch.nn import functional as F

from fenchel._numerics import check_finite
from fenchel.bounds.bound import Bound
from fenchel.bounds.domain import Ball, Domain, Everywhere
from fenchel.bounds.maps import MapTrials, TrialStart, VectorMap, compose, trials_of
from fenchel.bounds.norms import VectorNorm, check_token_norm
from fenchel.bounds.self_attention import (
    Head,
    self_attention_lipschitz,
    size_of,
    spectral,
)

# The largest slope of each: x Phi(x) at sqrt(2), x sigmoid(x) at 2.3994.
_GELU = 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi)
_SLOPES: dict[type[Module], float] = {
    ReLU: 1.0,
    GELU: _GELU,
    SiLU: 1.099839320128867,
    Tanh: 1.0,
    Identity: 1.0,
}
_FUNCTIONS: dict[object, Module] = {  # as torch's encoder layers hold them
    F.relu: ReLU(),
    torch.relu: ReLU(),
    F.gelu: GELU(),
    F.silu: SiLU(),
    F.tanh: Tanh(),
    torch.tanh: Tanh(),
}


def token_map_lipschitz(name: str, value: float, token_map: VectorMap) -> Bound:
    """Of a map that acts on every token alike: the same constant in l2 and for the longest token.

    value: of the bound, which you have proved. token_map: of inputs (tokens, d).

    >>> token_map_lipschitz("sine", 1.0, VectorMap(torch.sin, (5, 2), Everywhere())).value
    1.0
    """
    check_token_norm(token_map.norm)
    domain = token_map.domain
    unit = domain.radius if not isinstance(domain, Everywhere) else 1.0
    assumptions = (f"{domain}", f"{token_map.shape[0]} tokens")
    return Bound(name, value, token_map.norm, assumptions, MapTrials(token_map, TrialStart(unit)))


def feed_forward_lipschitz(
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: Module,
    tokens: int,
    domain: Domain,
    *,
    norm: VectorNorm = 2.0,
) -> Bound:
    """Of x -> W_k act(... act(W_1 x + b_1) ...) + b_k, on every token: the product of the norms.

    activation: `ReLU()`, `GELU()`, `SiLU()`, `Tanh()` or `Identity()`, each zero at zero.
    """
    _check_chain(matrices)
    slope = _slope(activation)
    bound, reach = 1.0, _radius(domain)
    for number, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        steep = slope if number else 1.0
        bound *= steep * spectral(matrix)
        reach = spectral(matrix) * steep * reach + size_of(bias)

    def function(x: Tensor) -> Tensor:
        for number, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            x = activation(x) if number else x
            x = x @ matrix.to(x).mT + (0.0 if bias is None else bias.to(x))
        return x

    shape = (tokens, matrices[0].shape[1])
    return token_map_lipschitz(
        "feed-forward", bound, VectorMap(function, shape, domain, norm, reach)
    )


def _slope(activation: Module) -> float:
    """The largest of the activation."""
    exact = getattr(activation, "approximate", "none") == "none"
    if type(activation) not in _SLOPES or not exact:
        names = ", ".join(f"{kind.__name__}()" for kind in _SLOPES)
        raise ValueError(f"activation must be one of torch's {names}; got {activation!r}")
    return _SLOPES[type(activation)]


def _check_chain(matrices: Sequence[Tensor]) -> None:
    if not matrices:
        raise ValueError("matrices must not be empty")
    for before, after in pairwise(matrices):
        if after.shape[1] != before.shape[0]:
            shapes = f"{tuple(before.shape)}, then {tuple(after.shape)}"
            raise ValueError(f"matrices do not fit: {shapes}")
    for matrix in matrices:
        check_finite(matrix, "matrices")


def layer_norm_lipschitz(
    norm_layer: LayerNorm, tokens: int, domain: Domain, *, norm: VectorNorm = 2.0
) -> Bound:
    """max|weight| / sqrt(eps), whatever comes in; no output is longer than sqrt(d) max|weight| +
    |bias|."""
    if len(norm_layer.normalized_shape) != 1:
        shape = tuple(norm_layer.normalized_shape)
        raise ValueError(f"only a norm over one axis has a bound, got {shape}")
    (width,) = norm_layer.normalized_shape
    weight = torch.ones(width) if norm_layer.weight is None else norm_layer.weight.detach()
    bias = None if norm_layer.bias is None else norm_layer.bias.detach()
    largest = float(weight.abs().max())
    reach = largest * math.sqrt(width) + size_of(bias)

    def function(x: Tensor) -> Tensor:
        about = x - x.mean(-1, keepdim=True)
        spread = about.square().mean(-1, keepdim=True)
        scaled = about * (spread + norm_layer.eps).rsqrt() * weight.to(x)
        return scaled if bias is None else scaled + bias.to(x)

    def level(count: int, generator: torch.Generator) -> Tensor:  # where it is steepest
        x = torch.randn(count, tokens, 1, generator=generator, dtype=torch.float64)
        return domain.project(x.expand(-1, -1, width))

    bound = largest / math.sqrt(norm_layer.eps) if norm_layer.eps > 0 else math.inf
    token_map = VectorMap(function, (tokens, width), domain, norm, reach)
    plain = token_map_lipschitz("layer norm", bound, token_map)
    trials = trials_of(plain, "plain")
    return replace(plain, trials=replace(trials, start=replace(trials.start, guesses=level)))


def residual(bound: Bound) -> Bound:
    """Of x -> x + f(x): one more."""
    trials = trials_of(bound, "bound")
    inner = trials.map
    output = inner.output_shape
    if output != inner.shape:
        shapes = f"{tuple(inner.shape)} and {tuple(output)}"
        raise ValueError(f"x + f(x) needs inputs and outputs of one shape, got {shapes}")
    reach = inner.reach + _radius(inner.domain)
    outer = replace(inner, function=lambda x: x + inner.function(x), reach=reach)
    name = f"x + {bound.name}"
    return replace(bound, name=name, value=1 + bound.value, trials=replace(trials, map=outer))


def encoder_layer_lipschitz(
    layer: TransformerEncoderLayer,
    tokens: int,
    radius: float | None = None,
    *,
    norm: VectorNorm = 2.0,
) -> Bound:
    """Of a whole `torch.nn.TransformerEncoderLayer` in evaluation, X (tokens, d) -> Y.

    radius: of the tokens that come in. With norm_first it may be left out: the layer norm bounds
    what the attention sees.
    """
    if not isinstance(layer, TransformerEncoderLayer):
        kind = type(layer).__name__
        raise TypeError(f"layer must be a torch.nn.TransformerEncoderLayer, got {kind}")
    if layer.training and layer.dropout.p + layer.self_attn.dropout > 0:
        raise ValueError("the layer drops out at random in training; give layer.eval()")
    domain: Domain = Everywhere() if radius is None else Ball(float(radius))
    if layer.norm_first:
        inner = layer_norm_lipschitz(layer.norm1, tokens, domain, norm=norm)
        radius = _ball(_reach(inner)).radius
        first = residual(compose(inner, _attention(layer.self_attn, tokens, radius, norm)))
        middle = _outputs(first)
        inner = layer_norm_lipschitz(layer.norm2, tokens, middle, norm=norm)
        forward = _feed_forward(layer, tokens, _ball(_reach(inner)), norm)
        return compose(first, residual(compose(inner, forward)))
    first = residual(_attention(layer.self_attn, tokens, radius, norm))
    first = compose(first, layer_norm_lipschitz(layer.norm1, tokens, _outputs(first), norm=norm))
    second = residual(_feed_forward(layer, tokens, _ball(_reach(first)), norm))
    last = layer_norm_lipschitz(layer.norm2, tokens, _outputs(second), norm=norm)
    return compose(compose(first, second), last)


def stack_lipschitz(
    layers: Sequence[TransformerEncoderLayer],
    tokens: int,
    radius: float | None = None,
    *,
    norm: VectorNorm = 2.0,
) -> Bound:
    """Of all layers, one after the other: each bound holds where the one before it may lead."""
    if isinstance(layers, torch.nn.TransformerEncoder):
        raise TypeError("layers must be the layers themselves; give encoder.layers")
    if not len(layers):
        raise ValueError("layers must not be empty")
    stack = encoder_layer_lipschitz(layers[0], tokens, radius, norm=norm)
    for layer in layers[1:]:
        reach = _reach(stack)
        within = reach if math.isfinite(reach) else None
        stack = compose(stack, encoder_layer_lipschitz(layer, tokens, within, norm=norm))
    return stack


def heads_of(attention: MultiheadAttention) -> tuple[list[Head], Tensor, Tensor | None]:
    """The heads, the output matrix and its bias, detached: what `self_attention_lipschitz` takes.

    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> heads, output, bias = heads_of(layer)
    >>> bound = self_attention_lipschitz(heads, 5, 1.0, output=output, output_bias=bias)
    """
    if not isinstance(attention, MultiheadAttention):
        kind = type(attention).__name__
        raise TypeError(f"attention must be a torch.nn.MultiheadAttention, got {kind}")
    extra = attention.bias_k is not None or attention.add_zero_attn
    if attention.in_proj_weight is None or extra:
        raise ValueError(
            "only self-attention with one width, without bias_k and add_zero_attn, has a bound"
        )
    width, count = attention.embed_dim, attention.num_heads
    query, key, value = attention.in_proj_weight.detach().double().split(width)
    bias = attention.in_proj_bias
    pieces = (None,) * 3 if bias is None else bias.detach().double().split(width)
    size = width // count
    heads = []
    for number in range(count):
        part = slice(number * size, (number + 1) * size)
        biases = [None if x is None else x[part] for x in (pieces[0], pieces[2])]
        heads.append(Head(query[part], key[part], value[part], math.sqrt(size), *biases))
    out = attention.out_proj
    shift = None if out.bias is None else out.bias.detach().double()
    return heads, out.weight.detach().double(), shift


def _attention(
    attention: MultiheadAttention, tokens: int, radius: float | None, norm: VectorNorm
) -> Bound:
    heads, output, bias = heads_of(attention)
    return self_attention_lipschitz(
        heads, tokens, radius, output=output, output_bias=bias, norm=norm
    )


def _feed_forward(
    layer: TransformerEncoderLayer, tokens: int, domain: Domain, norm: VectorNorm
) -> Bound:
    parts = (layer.linear1, layer.linear2)
    matrices = [part.weight.detach().double() for part in parts]
    biases = [None if part.bias is None else part.bias.detach().double() for part in parts]
    activation: Any = layer.activation  # a function of torch, or a module
    module: Module = _FUNCTIONS.get(activation, activation)
    return feed_forward_lipschitz(matrices, biases, module, tokens, domain, norm=norm)


def _radius(domain: Domain) -> float:
    return domain.radius if isinstance(domain, Ball) and domain.centre is None else math.inf


def _reach(bound: Bound) -> float:
    return trials_of(bound, "bound").map.reach


def _outputs(bound: Bound) -> Domain:
    """Where the outputs lie."""
    reach = _reach(bound)
    return _ball(reach) if reach < math.inf else Everywhere()


def _ball(reach: float) -> Ball:
    """Of what a map may give; a map that gives zero alone has no radius."""
    return Ball(max(reach, 1e-12))
