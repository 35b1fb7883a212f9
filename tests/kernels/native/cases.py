"""Random calls of attention, each fixed by its seed, run natively and through the tiles."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fenchel as fl
from fenchel import priors
from fenchel._kernels import library
from tests import needs

needs_library = needs.kernels("the native kernels")

_LENGTHS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 47, 48, 49, 64, 97, 130, 511, 512, 513)
_DIMS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 130)
_ALPHAS = (1.0, 1 + 1e-9, 1.01, 1.1, 1.25, 1.2500001, 1.3, 1.5, 1.5, 1.8, 2.0, 2.0)
_STEEP = (2.0000001, 2.5, 3.0, 4.0)


@contextmanager
def native(enabled: bool = True, variant: str | None = None) -> Iterator[None]:
    """Native code on or off, or one of its lesser instruction sets."""
    loaded = library.loaded()
    best = loaded.variant
    if variant is not None:
        loaded.choose(variant)
    try:
        with fl.use("native" if enabled else "torch"):
            yield
    finally:
        loaded.choose(best)


@dataclass
class Case:
    """One call: operands, leaves that get a gradient by name, and the incoming gradient."""

    seed: int
    dtype: torch.dtype
    leaves: dict[str, Tensor]
    alpha: float | Tensor
    temperature: float | Tensor
    mask: Tensor | None
    base: object
    scale: float | None
    causal: bool
    dropout: float
    gqa: bool
    gradient: Tensor
    notes: dict[str, object] = field(default_factory=dict)

    @property
    def steep(self) -> bool:
        return float(torch.as_tensor(self.alpha).max()) > 2


def _layout(tensor: Tensor, r: random.Random) -> Tensor:
    how = r.choice(("whole", "whole", "heads last", "transposed", "sliced", "expanded", "shifted"))
    if how == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "transposed":
        return tensor.mT.contiguous().mT
    if how == "sliced":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if how == "expanded":
        return tensor[:1].expand_as(tensor)
    if how == "shifted":  # not aligned to a vector
        flat = tensor.new_zeros(tensor.numel() + 3)
        flat[3:] = tensor.reshape(-1)
        return flat[3:].view(tensor.shape)
    return tensor


def make(seed: int) -> Case:
    """A call of moderate size; about one in three has a mask, one in three a base."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    half = (torch.bfloat16, torch.float16)
    dtype = r.choice((torch.float32,) * 4 + (torch.float64,) * 6 + half)
    batch, (kv, heads) = r.choice((1, 1, 2, 3)), r.choice(((1, 1), (2, 2), (5, 5), (1, 4), (2, 4)))
    queries, keys = r.choice(_LENGTHS), r.choice(_LENGTHS)
    while batch * heads * queries * keys > 100_000:
        batch, (kv, heads) = 1, (1, 1)
        queries = max(1, queries // 2)
    dim, width = r.choice(_DIMS), r.choice(_DIMS)
    query, key, value = (
        normal(batch, h, n, d)
        for h, n, d in ((heads, queries, dim), (kv, keys, dim), (kv, keys, width))
    )
    kind = r.choice(("normal",) * 5 + ("constant", "ties", "large", "small"))
    if kind == "constant":
        key = key[:, :, :1].expand_as(key)
    elif kind == "ties":
        query, key = query.round(), key.round()
    scale = {"large": 20.0, "small": 1e-8}.get(kind, r.choice((None, None, 1.0, 4.0)))
    leaves = {
        name: _layout(x.to(dtype), r)
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    shape = (batch, heads, queries, keys)
    alpha = _alpha(r, g, shape, kind, leaves)
    temperature: float | Tensor = r.choice((1.0, 1.0, 0.3, 2.5))
    if dtype not in half and r.random() < 0.1:
        temperature = (torch.rand(heads, 1, generator=g) + 0.2).to(dtype)
    mask = _mask(r, g, shape, dtype, leaves)
    base = _base(r, g, shape, dtype, leaves)
    gradient = normal(batch, heads, queries, width).to(dtype)
    if r.random() < 0.3:
        gradient = gradient[:, :, :1].expand_as(gradient)
    dropout = r.choice((0.0,) * 4 + (0.1, 0.5, 1.0))
    notes = {"kind": kind, "shape": (*shape, dim, width), "kv": kv}
    return Case(
        *(seed, dtype, leaves, alpha, temperature, mask, base, scale),
        *(r.random() < 0.3, dropout, kv != heads, gradient, notes),
    )


def _alpha(
    r: random.Random,
    g: torch.Generator,
    shape: tuple[int, ...],
    kind: str,
    leaves: dict[str, Tensor],
) -> float | Tensor:
    choices = _ALPHAS if kind in ("large", "ties") else _ALPHAS + _STEEP
    if r.random() < 0.75:
        return r.choice(choices)
    rows = r.choice(((shape[1], 1), (shape[0], 1, 1), shape[:3], (shape[2],), (1,)))
    picked = torch.tensor([r.choice(choices) for _ in range(math.prod(rows))], dtype=torch.float64)
    leaves["alpha"] = picked.reshape(rows)
    return leaves["alpha"]


def _mask(
    r: random.Random,
    g: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    leaves: dict[str, Tensor],
) -> Tensor | None:
    kind = r.choice((None,) * 4 + ("bool", "bool", "float"))
    if kind is None:
        return None
    rows = [n if r.random() < 0.6 else 1 for n in shape[:3]]
    size = (*rows, shape[3])[r.choice((0, 0, 1, 2, 3)) :]
    seen = torch.rand(size, generator=g) < r.choice((0.1, 0.5, 0.9))
    if kind == "bool":
        if r.random() < 0.3:  # padding
            seen[..., shape[3] // 2 :] = False
        return seen.mT.contiguous().mT if seen.ndim > 1 and r.random() < 0.3 else seen
    mask = torch.randn(size, generator=g, dtype=torch.float64).to(dtype)
    if r.random() < 0.5:
        mask = mask.masked_fill(~seen, -math.inf)
    if r.random() < 0.5:
        leaves["mask"] = mask
    return mask


def _base(
    r: random.Random,
    g: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    leaves: dict[str, Tensor],
) -> object:
    kind = r.choice((None,) * 6 + ("mass", "bool", "alibi", "window", "preference"))
    full = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    if kind == "mass":
        mass = torch.rand(shape[r.choice((0, 1, 2, 3)) :], generator=g, dtype=torch.float64)
        return (mass * (torch.rand(mass.shape, generator=g) < 0.7)).to(dtype)
    if kind == "bool":
        return torch.rand(shape[2:], generator=g) < 0.5
    if kind == "alibi":
        leaves["slopes"] = (torch.rand(shape[1], generator=g) * 0.05).to(full)
    if kind == "preference":
        leaves["logits"] = torch.randn(shape[3], generator=g).to(full)
    return priors.SlidingWindow(r.choice((0, 3, 50))) if kind == "window" else kind


def run(case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The output and every gradient, in another precision if asked."""
    leaves = {
        name: (x if name == "alpha" else cast(x, dtype)).detach().requires_grad_()
        for name, x in case.leaves.items()
    }
    torch.manual_seed(case.seed)
    output = fl.attention(
        *(leaves[name] for name in ("query", "key", "value")),
        regularizer_of(case, leaves, dtype),
        dropout_p=case.dropout,
        **options_of(case, leaves, dtype),
    )
    gradients = torch.autograd.grad(output, list(leaves.values()), cast(case.gradient, dtype))
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    real = isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if real and dtype is not None else x


def regularizer_of(
    case: Case, leaves: dict[str, Tensor], dtype: torch.dtype | None = None
) -> fl.Tsallis:
    return fl.Tsallis(leaves.get("alpha", case.alpha), cast(case.temperature, dtype))


def options_of(
    case: Case, leaves: dict[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """What the call takes beside operands, regulariser and dropout."""
    base = case.base
    if isinstance(base, str) and base == "alibi":
        base = priors.ALiBi(len(leaves["slopes"]), leaves["slopes"])
    elif isinstance(base, str):
        base = priors.Preference(leaves["logits"])
    return {
        "base": cast(base, dtype),
        "attn_mask": leaves.get("mask", cast(case.mask, dtype)),
        "is_causal": case.causal,
        "scale": case.scale,
        "enable_gqa": case.gqa,
    }
