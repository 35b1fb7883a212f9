"""Certificates of the parts of a transformer, of a whole layer, and of a stack of them.

A composition's constant is at most the product, a sum's the sum. Each part also says how long its
outputs can be, because dot-product attention is certified on a ball only: a layer norm bounds them
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

import torch
from torch import Tensor
from torch.nn import LayerNorm, MultiheadAttention, TransformerEncoderLayer
from torch.nn import functional as F

from fenchel._numerics import check_whole
from fenchel.bounds.certificate import Certificate, MapTrials, as_maps, compose, image_shape
from fenchel.bounds.domain import Ball, Domain, Everywhere
from fenchel.bounds.self_attention import (
    Head,
    Norm,
    check_norm,
    self_attention_lipschitz,
    size_of,
    spectral,
)

# The largest slope of each: x Phi(x) at sqrt(2), x sigmoid(x) at 2.3994.
_GELU = 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi)
_SLOPES = {"relu": 1.0, "gelu": _GELU, "silu": 1.099839320128867, "tanh": 1.0, "identity": 1.0}

_ACTIVATIONS: dict[str, tuple[tuple[object, ...], type]] = {
    "relu": ((F.relu, torch.relu), torch.nn.ReLU),
    "gelu": ((F.gelu,), torch.nn.GELU),
    "silu": ((F.silu,), torch.nn.SiLU),
    "tanh": ((F.tanh, torch.tanh), torch.nn.Tanh),
    "identity": ((), torch.nn.Identity),
}


def token_map(
    name: str,
    bound: float,
    function: object,
    shape: tuple[int, int],
    domain: Domain,
    *,
    reach: float = math.inf,
    norm: Norm = 2.0,
) -> Certificate:
    """Of a map that acts on every token alike: the same constant in l2 and for the longest token.

    shape: (tokens, d) of the input. reach: no output token is longer.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    if not isinstance(domain, Domain):
        raise TypeError(f"domain must be Everywhere(), Ball(radius) or Box(radius), got {domain!r}")
    for size in shape:
        check_whole(size, "tokens and d", 1)
    check_norm(norm)
    unit = domain.radius if not isinstance(domain, Everywhere) else 1.0
    trials = MapTrials(function, torch.Size(shape), domain, norm, unit, reach=reach)
    given = (f"{domain}", f"{shape[0]} tokens")
    return Certificate(name, bound, norm, given, trials)


def feed_forward_lipschitz(
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    tokens: int,
    domain: Domain,
    *,
    norm: Norm = 2.0,
) -> Certificate:
    """Of x -> W_k act(... act(W_1 x + b_1) ...) + b_k, on every token: the product of the norms.

    activation: relu, gelu, silu, tanh or identity, each zero at zero.
    """
    _check_chain(matrices)
    if not isinstance(activation, str) or activation not in _SLOPES:
        raise ValueError(f"activation must be one of {', '.join(_SLOPES)}; got {activation!r}")
    act = (lambda x: x) if activation == "identity" else getattr(F, activation, torch.tanh)
    slope = _SLOPES[activation]
    bound, reach = 1.0, _radius(domain)
    for number, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        steep = slope if number else 1.0
        bound *= steep * spectral(matrix)
        reach = spectral(matrix) * steep * reach + size_of(bias)

    def function(x: Tensor) -> Tensor:
        for number, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            x = act(x) if number else x
            x = x @ matrix.to(x).mT + (0.0 if bias is None else bias.to(x))
        return x

    shape = (tokens, matrices[0].shape[1])
    return token_map("feed-forward", bound, function, shape, domain, reach=reach, norm=norm)


def _check_chain(matrices: Sequence[Tensor]) -> None:
    if not matrices:
        raise ValueError("matrices must not be empty")
    for before, after in pairwise(matrices):
        if after.shape[1] != before.shape[0]:
            shapes = f"{tuple(before.shape)}, then {tuple(after.shape)}"
            raise ValueError(f"matrices do not fit: {shapes}")
    if not all(bool(matrix.isfinite().all()) for matrix in matrices):
        raise ValueError("matrices must be finite; they hold NaN or infinity")


def layer_norm_lipschitz(
    norm_layer: LayerNorm, tokens: int, domain: Domain, *, norm: Norm = 2.0
) -> Certificate:
    """max|weight| / sqrt(eps), whatever comes in; no output is longer than sqrt(d) max|weight| +
    |bias|."""
    if len(norm_layer.normalized_shape) != 1:
        shape = tuple(norm_layer.normalized_shape)
        raise ValueError(f"only a norm over one axis can be certified, got {shape}")
    (width,) = norm_layer.normalized_shape
    weight = torch.ones(width) if norm_layer.weight is None else norm_layer.weight.detach()
    bias = None if norm_layer.bias is None else norm_layer.bias.detach()
    largest = float(weight.abs().max())
    reach = largest * math.sqrt(width) + size_of(bias)

    def function(x: Tensor) -> Tensor:
        about = x - x.mean(-1, keepdim=True)
        spread = about.square().mean(-1, keepdim=True)
        made = about * (spread + norm_layer.eps).rsqrt() * weight.to(x)
        return made if bias is None else made + bias.to(x)

    def level(count: int, generator: torch.Generator) -> Tensor:  # where it is steepest
        x = torch.randn(count, tokens, 1, generator=generator, dtype=torch.float64)
        return domain.project(x.expand(-1, -1, width))

    bound = largest / math.sqrt(norm_layer.eps) if norm_layer.eps > 0 else math.inf
    shape = (tokens, width)
    made = token_map("layer norm", bound, function, shape, domain, reach=reach, norm=norm)
    return replace(made, trials=replace(as_maps(made, "made"), guesses=level))


def residual(certificate: Certificate) -> Certificate:
    """Of x -> x + f(x): one more."""
    trials = as_maps(certificate, "certificate")
    inner = trials.function
    made = image_shape(trials)
    if made != trials.shape:
        shapes = f"{tuple(trials.shape)} and {tuple(made)}"
        raise ValueError(f"x + f(x) needs inputs and outputs of one shape, got {shapes}")
    reach = trials.reach + _radius(trials.domain)
    moved = replace(trials, function=lambda x: x + inner(x), reach=reach)
    name = f"x + {certificate.name}"
    return replace(certificate, name=name, bound=1 + certificate.bound, trials=moved)


def encoder_layer_lipschitz(
    layer: TransformerEncoderLayer, tokens: int, radius: float | None = None, *, norm: Norm = 2.0
) -> Certificate:
    """Of a whole `torch.nn.TransformerEncoderLayer` in evaluation, X (tokens, d) -> Y.

    radius: of the tokens that come in. With norm_first it may be left out: the layer norm bounds
    what the attention sees.
    """
    if not isinstance(layer, TransformerEncoderLayer):
        kind = type(layer).__name__
        raise TypeError(f"layer must be a torch.nn.TransformerEncoderLayer, got {kind}")
    if layer.training and layer.dropout.p + layer.self_attn.dropout > 0:
        raise ValueError("the layer drops out at random in training; certify layer.eval()")
    given: Domain = Everywhere() if radius is None else Ball(float(radius))
    if layer.norm_first:
        inner = layer_norm_lipschitz(layer.norm1, tokens, given, norm=norm)
        seen = _ball(_reach(inner)).radius
        first = residual(compose(inner, _attention(layer.self_attn, tokens, seen, norm)))
        middle = _reached(first)
        inner = layer_norm_lipschitz(layer.norm2, tokens, middle, norm=norm)
        forward = _feed_forward(layer, tokens, _ball(_reach(inner)), norm)
        return compose(first, residual(compose(inner, forward)))
    first = residual(_attention(layer.self_attn, tokens, radius, norm))
    first = compose(first, layer_norm_lipschitz(layer.norm1, tokens, _reached(first), norm=norm))
    second = residual(_feed_forward(layer, tokens, _ball(_reach(first)), norm))
    last = layer_norm_lipschitz(layer.norm2, tokens, _reached(second), norm=norm)
    return compose(compose(first, second), last)


def stack_lipschitz(
    layers: Sequence[TransformerEncoderLayer],
    tokens: int,
    radius: float | None = None,
    *,
    norm: Norm = 2.0,
) -> Certificate:
    """Of all layers, one after the other: each is certified where the one before it may lead."""
    if isinstance(layers, torch.nn.TransformerEncoder):
        raise TypeError("layers must be the layers themselves; give encoder.layers")
    if not len(layers):
        raise ValueError("layers must not be empty")
    made = encoder_layer_lipschitz(layers[0], tokens, radius, norm=norm)
    for layer in layers[1:]:
        reach = _reach(made)
        within = reach if math.isfinite(reach) else None
        made = compose(made, encoder_layer_lipschitz(layer, tokens, within, norm=norm))
    return made


def heads_of(attention: MultiheadAttention) -> tuple[list[Head], Tensor, Tensor | None]:
    """The heads, the output matrix and its bias, detached: what `self_attention_lipschitz` takes.

    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> heads, output, bias = heads_of(layer)
    >>> made = self_attention_lipschitz(heads, 5, 1.0, output=output, output_bias=bias)
    """
    if not isinstance(attention, MultiheadAttention):
        kind = type(attention).__name__
        raise TypeError(f"attention must be a torch.nn.MultiheadAttention, got {kind}")
    extra = attention.bias_k is not None or attention.add_zero_attn
    if attention.in_proj_weight is None or extra:
        raise ValueError(
            "only self-attention with one width, without bias_k and add_zero_attn, can be certified"
        )
    width, count = attention.embed_dim, attention.num_heads
    query, key, value = attention.in_proj_weight.detach().double().split(width)
    bias = attention.in_proj_bias
    pieces = (None,) * 3 if bias is None else bias.detach().double().split(width)
    size = width // count
    heads = []
    for number in range(count):
        part = slice(number * size, (number + 1) * size)
        own = [None if x is None else x[part] for x in (pieces[0], pieces[2])]
        heads.append(Head(query[part], key[part], value[part], math.sqrt(size), *own))
    out = attention.out_proj
    shift = None if out.bias is None else out.bias.detach().double()
    return heads, out.weight.detach().double(), shift


def _attention(
    attention: MultiheadAttention, tokens: int, radius: float | None, norm: Norm
) -> Certificate:
    heads, output, bias = heads_of(attention)
    return self_attention_lipschitz(
        heads, tokens, radius, output=output, output_bias=bias, norm=norm
    )


def _feed_forward(
    layer: TransformerEncoderLayer, tokens: int, domain: Domain, norm: Norm
) -> Certificate:
    parts = (layer.linear1, layer.linear2)
    matrices = [part.weight.detach().double() for part in parts]
    biases = [None if part.bias is None else part.bias.detach().double() for part in parts]
    return feed_forward_lipschitz(matrices, biases, _activation(layer), tokens, domain, norm=norm)


def _activation(layer: TransformerEncoderLayer) -> str:
    given = layer.activation
    for name, (functions, module) in _ACTIVATIONS.items():
        exact = getattr(given, "approximate", "none") == "none"
        if any(given is known for known in functions) or (type(given) is module and exact):
            return name
    raise ValueError(f"activation must be torch's {', '.join(_SLOPES)}; got {given!r}")


def _radius(domain: Domain) -> float:
    return domain.radius if isinstance(domain, Ball) and domain.centre is None else math.inf


def _reach(certificate: Certificate) -> float:
    assert isinstance(certificate.trials, MapTrials)
    return certificate.trials.reach


def _reached(certificate: Certificate) -> Domain:
    reach = _reach(certificate)
    return _ball(reach) if reach < math.inf else Everywhere()


def _ball(reach: float) -> Ball:
    """Of what a map may give; a map that gives zero alone has no radius."""
    return Ball(max(reach, 1e-12))
