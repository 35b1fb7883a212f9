"""The attentions that are compared, all on the same queries, keys and values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fenchel as fl

PLAIN, CAUSAL, PADDED = "plain", "causal", "padded"
_KEPT = 0.75  # of the keys, where the rest is padding


@dataclass(frozen=True, eq=False)
class Inputs:
    """Operands of one attention, and what arrives from behind in a backward pass."""

    query: Tensor  # (1, head, n, d), as are the next three
    key: Tensor
    value: Tensor
    cotangent: Tensor
    alpha: Tensor  # (head, 1): one for each head, from 1.3 to 2
    mask: Tensor | None = None  # (1, 1, 1, n), True = attend
    causal: bool = False

    def leaves(self) -> Inputs:
        """The same numbers, to be differentiated in."""
        names = ("query", "key", "value", "alpha")
        fresh = {name: getattr(self, name).clone().requires_grad_() for name in names}
        return replace(self, **fresh)

    def hidden(self) -> Tensor | None:
        """True where a query may not look; broadcasts to (1, head, n, n)."""
        if self.causal:
            n = self.query.shape[-2]
            return torch.ones(n, n, dtype=torch.bool).triu(1)
        return None if self.mask is None else ~self.mask


@dataclass(frozen=True)
class Shape:
    """Of the heads: how many, how wide, and the seed of what is in them."""

    heads: int = 8
    dim: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heads < 1 or self.dim < 1:
            raise ValueError(f"heads and dim must be >= 1, got {self.heads} and {self.dim}")

    def inputs(self, n: int, deviation: float, variant: str = PLAIN) -> Inputs:
        """Normal entries such that <q, k> / sqrt(dim) has this standard deviation. float32."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (4, 1, self.heads, n, self.dim)
        query, key, value, cotangent = torch.randn(size, generator=generator).unbind(0)
        mask = (torch.arange(n) < math.ceil(_KEPT * n)).reshape(1, 1, 1, n)
        return Inputs(
            query=query * math.sqrt(deviation),
            key=key * math.sqrt(deviation),
            value=value,
            cotangent=cotangent,
            alpha=torch.linspace(1.3, 2.0, self.heads).unsqueeze(-1),
            mask=mask if variant == PADDED else None,
            causal=variant == CAUSAL,
        )


@dataclass(frozen=True)
class Method:
    name: str
    call: Callable[[Inputs], Tensor]
    above: int = 0  # only for more tokens than this
    learns_alpha: bool = False
    compiles: bool = False  # at its first call, which is then no measure of anything


def thunk(method: Method, inputs: Inputs, direction: str) -> Callable[[], object]:
    """One call, without arguments, forward or forward+backward."""
    x = inputs if direction == "forward" else inputs.leaves()
    if method.compiles:
        method.call(x)
    if direction == "forward":
        return lambda: method.call(x)
    wanted = [x.query, x.key, x.value, *([x.alpha] if method.learns_alpha else [])]
    return lambda: torch.autograd.grad(method.call(x), wanted, x.cotangent)


def tsallis(alpha: float) -> Method:
    """Ours, at one alpha for all heads."""

    def call(x: Inputs) -> Tensor:
        return _ours(x, fl.Tsallis(alpha))

    return Method(f"fl Tsallis({alpha:g})", call)


def _ours(x: Inputs, regularizer: fl.Regularizer) -> Tensor:
    operands = (x.query, x.key, x.value, regularizer)
    return fl.attention(*operands, attn_mask=x.mask, is_causal=x.causal)


def _sdpa(x: Inputs) -> Tensor:
    return scaled_dot_product_attention(
        x.query, x.key, x.value, attn_mask=x.mask, is_causal=x.causal
    )


def _dense(x: Inputs, weights: Callable[[Tensor], Tensor]) -> Tensor:
    scores = x.query @ x.key.mT / math.sqrt(x.query.shape[-1])
    hidden = x.hidden()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return weights(scores) @ x.value


def _package(function: str, **options: Any) -> Callable[[Inputs], Tensor]:
    """A map of the entmax package in place of softmax."""

    def call(x: Inputs) -> Tensor:
        try:
            import entmax
        except ModuleNotFoundError:
            raise ModuleNotFoundError("the entmax package is not installed") from None
        return _dense(x, lambda scores: getattr(entmax, function)(scores, dim=-1, **options))

    return call


def _flex(x: Inputs) -> Tensor:
    if x.mask is not None or x.causal:
        raise NotImplementedError("measured without masks only")
    refusal = _flex_refuses_backward()  # asked before anything else is compiled
    if refusal and x.query.requires_grad:
        raise NotImplementedError(refusal)
    output: Tensor = _compiled_flex()(x.query, x.key, x.value)
    return output


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _flex_refuses_backward() -> str:
    """Its reason, or nothing. A refused compilation leaves later forward passes uncompiled, some
    ten times slower, unless all that was compiled is forgotten: so it is asked once, and first."""
    query = torch.zeros(1, 1, 16, 16, requires_grad=True)
    try:
        _compiled_flex()(query, query, query).sum().backward()
    except NotImplementedError as refusal:
        torch.compiler.reset()
        return str(refusal)
    return ""


SDPA = Method("torch SDPA", _sdpa)
SOFTMAX = Method("plain softmax", lambda x: _dense(x, lambda scores: torch.softmax(scores, -1)))
PER_HEAD = Method(
    "fl Tsallis(per head)", lambda x: _ours(x, fl.Tsallis(x.alpha)), learns_alpha=True
)
SORT_15 = Method("entmax.entmax15", _package("entmax15"))
TOP_15 = Method("entmax.entmax15 k=512", _package("entmax15", k=512), above=512)
SORT_2 = Method("entmax.sparsemax", _package("sparsemax"))
BISECT = Method("entmax.entmax_bisect 1.5", _package("entmax_bisect", alpha=1.5))
FLEX = Method("FlexAttention", _flex, compiles=True)


def named(name: str) -> Method:
    """A method by its name, for a process of its own."""
    known = {method.name: method for method in (SDPA, SOFTMAX, PER_HEAD, SORT_15, SORT_2, BISECT)}
    if name in known:
        return known[name]
    prefix, suffix = "fl Tsallis(", ")"
    if name.startswith(prefix) and name.endswith(suffix):
        return tsallis(float(name[len(prefix) : -len(suffix)]))
    raise ValueError(f"no method is called {name!r}; known: {', '.join(known)}, fl Tsallis(1.5)")
