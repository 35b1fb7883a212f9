"""One call of attention, checked and brought into one layout: (batch, head, token, component)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._numerics import check_tensor, compute_dtype, expands_to, has, is_symbolic, readable
from fenchel.priors.contract import Prior
from fenchel.priors.kinds import Causal
from fenchel.priors.measure import check_base
from fenchel.regularizers.contract import Regularizer
from fenchel.scores import default_scale

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Operands of one attention: four axes each, masks and bases in views that broadcast."""

    query: Tensor  # (batch, head, query, d)
    key: Tensor  # (batch, kv_head, key, d); head = kv_head * r, query head h reads kv head h // r
    value: Tensor  # (batch, kv_head, key, d_value)
    scale: float
    mask: Tensor | None  # bool, broadcasts to the scores (batch, head, query, key)
    bias: Tensor | Prior | None  # float mask, likewise
    base: Tensor | Prior | None  # likewise; priors see the scores' axes as the caller wrote them
    causal: bool
    dropout: float
    seed: Tensor | None  # of the dropout: int64, ()
    lead: torch.Size  # leading axes of the output, before (query, d_value)
    first: int = 0  # position of the first query, in a tile of a longer call
    queries: int = 0  # of the whole call
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap); 0: as they are
    modify: Callable[[Tensor, int], Tensor] | None = None  # of the tile's scores and `first`

    @property
    def caller_shape(self) -> torch.Size:
        """Of the scores, in the caller's axes."""
        return torch.Size((*self.lead, *self.scores_shape[2:]))

    @property
    def priors(self) -> list[Prior]:
        """Of bias and base."""
        return [x for x in (self.bias, self.base) if isinstance(x, Prior)]

    @property
    def scores_shape(self) -> torch.Size:
        return torch.Size((*self.query.shape[:3], self.key.shape[2]))

    def tile(self, start: int, stop: int) -> AttentionCall:
        """The same call for the queries start .. stop - 1."""

        def rows(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[:, :, start:stop]

        def later(part: Tensor | Prior | None) -> Tensor | Prior | None:
            return part.shifted(start) if isinstance(part, Prior) else rows(part)

        return replace(
            self,
            query=self.query[:, :, start:stop],
            mask=rows(self.mask),
            bias=later(self.bias),
            base=later(self.base),
            first=self.first + start,
        )

    def restore(self, output: Tensor) -> Tensor:
        """(batch, head, ...) -> the caller's axes."""
        return output.reshape(*self.lead, *output.shape[2:])

    def hidden(self) -> Tensor | None:
        """Keys that no query may see, by the mask or by causality: True where hidden."""
        hidden = None if self.mask is None else ~self.mask
        if self.causal:
            rows, keys = self.query.shape[2], self.key.shape[2]
            last = torch.arange(self.first, self.first + rows, device=self.query.device)
            future = torch.arange(keys, device=last.device) > last.unsqueeze(-1)
            hidden = future if hidden is None else hidden | future
        return hidden


# Who looks on while attention runs: gets the call, its regulariser and what computes the output
# (batch, head, query, d_value), and returns that output.
Observer = Callable[[AttentionCall, Regularizer, Callable[[], Tensor]], Tensor]
OBSERVER: ContextVar[Observer | None] = ContextVar("fenchel_observer", default=None)


def observer() -> Observer | None:
    """Of this thread."""
    return OBSERVER.get()


# Compiled code has none, as `against_library` in `_kernels/route.py` has one choice of kernels.
observer._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Options(NamedTuple):
    """What a call of attention takes beside its operands and the regulariser; see `attention`."""

    base: Tensor | Prior | None = None
    attn_mask: Tensor | Prior | None = None
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    enable_gqa: bool = False
    softcap: float | None = None


def prepare(query: Tensor, key: Tensor, value: Tensor, options: Options) -> AttentionCall:
    """Check what a caller of `scaled_dot_product_attention` may pass, and lay it out."""
    base, attn_mask, is_causal, scale, dropout_p, enable_gqa, softcap = options
    _check_tensors(query, key, value)
    query, key, value = _autocast(query, key, value)  # first: it may make them alike
    _check_operands(query, key, value)
    _check_numbers(options)
    if scale is not None and is_symbolic(scale):  # no operator takes a number that stands for many
        query, scale = (query * scale).to(query.dtype), 1.0
    repeats = _repeats(query, key, value, enable_gqa)
    lead = _lead(query, key, value, repeats)
    shape = torch.Size((*lead, query.shape[-2], key.shape[-2]))
    kv_lead = (*lead[:-1], lead[-1] // repeats) if lead else lead
    mask, bias = _masks(attn_mask, shape, query)
    check_base(base)
    if isinstance(base, Prior):
        base = base.bind(shape)
    if isinstance(base, Tensor):
        if not base.is_floating_point() and base.dtype != torch.bool:
            base = base.to(compute_dtype(query.dtype))
        base = _broadcast(base, shape, "base", query.device)
    return AttentionCall(
        query=_four(query.expand(*lead, *query.shape[-2:])),
        key=_four(key.expand(*kv_lead, *key.shape[-2:])),
        value=_four(value.expand(*kv_lead, *value.shape[-2:])),
        scale=default_scale(query, scale),
        mask=mask,
        bias=bias,
        base=base,
        causal=is_causal,
        dropout=dropout_p,
        seed=_seed(query.device) if dropout_p > 0 else None,
        lead=lead,
        queries=query.shape[-2],
        softcap=softcap or 0.0,
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(tensor, name)
        if tensor.ndim < 2:
            raise ValueError(
                f"{name} must have at least two axes (tokens, components), "
                f"got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor of float16, bfloat16, float32 or float64, got "
                f"{tensor.layout} of {tensor.dtype}"
            )


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"query, key and value must share dtype and device; {name} is {tensor.dtype} on "
                f"{tensor.device}, query is {query.dtype} on {query.device}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have equally many components, got {query.shape[-1]} and "
            f"{key.shape[-1]} (shapes {tuple(query.shape)} and {tuple(key.shape)})"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have equally many tokens, got {key.shape[-2]} and "
            f"{value.shape[-2]} (shapes {tuple(key.shape)} and {tuple(value.shape)})"
        )


def _check_numbers(options: Options) -> None:
    for name in ("is_causal", "enable_gqa"):
        flag = getattr(options, name)
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    scale, dropout_p, softcap = options.scale, options.dropout_p, options.softcap
    if scale is not None and not _is_scale(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    if not _is_number(dropout_p) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be a number between 0 and 1, got {dropout_p!r}")
    if softcap is not None and not (_is_number(softcap) and 1e-30 <= softcap <= 1e30):
        raise ValueError(f"softcap must be a number from 1e-30 to 1e30 or None, got {softcap!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_scale(value: object) -> bool:
    """A finite number, as far as Python may look: of one that is traced nothing is asked."""
    return is_symbolic(value) or (_is_number(value) and abs(value) < math.inf)  # type: ignore[arg-type]


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The precision that torch's own attention would run in."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _repeats(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    """How many query heads read one key head."""
    if not enable_gqa:
        return 1
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError("enable_gqa needs a head axis: (..., head, token, component)")
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if value.shape[-3] != kv_heads or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"enable_gqa needs equally many key and value heads, and a multiple of them in query; "
            f"got {heads} query, {kv_heads} key and {value.shape[-3]} value heads"
        )
    return heads // kv_heads


def _lead(query: Tensor, key: Tensor, value: Tensor, repeats: int) -> torch.Size:
    shapes = [query.shape[:-2]]
    for tensor in (key, value):
        lead = tensor.shape[:-2]
        shapes.append(lead if repeats == 1 else torch.Size((*lead[:-1], lead[-1] * repeats)))
    if all(shape == shapes[0] for shape in shapes):  # torch's function is slow
        return shapes[0]
    try:
        return torch.Size(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(
            f"leading axes of query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)} do not broadcast; for fewer key heads pass enable_gqa=True"
        ) from None


def _four(tensor: Tensor) -> Tensor:
    """(..., head, token, component) -> (batch, head, token, component)."""
    if tensor.ndim < 4:
        return tensor.reshape(*[1] * (4 - tensor.ndim), *tensor.shape)
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def _masks(
    mask: Tensor | Prior | None, shape: torch.Size, like: Tensor
) -> tuple[Tensor | None, Tensor | Prior | None]:
    """(bool mask, what is added to the scores): one of them at most."""
    if mask is None:
        return None, None
    if type(mask).__name__ == "CausalBias":  # of torch.nn.attention.bias, a tensor without data
        mask = _causal_bias(mask, shape)
    if isinstance(mask, Prior):
        return None, mask.bind(shape)
    check_tensor(mask, "attn_mask")
    if mask.dtype != torch.bool and mask.dtype not in _DTYPES:
        raise TypeError(
            f"attn_mask must be bool (True = attend) or float (added to the scores), got "
            f"{mask.dtype}; pass mask.bool() or mask.to(query.dtype)"
        )
    mask = _broadcast(mask, shape, "attn_mask", like.device)
    return (mask, None) if mask.dtype == torch.bool else (None, mask)


def _causal_bias(mask: Any, shape: torch.Size) -> Prior:
    """What torch's CausalBias means: aligned with the first or with the last query."""
    lengths = (mask.seq_len_q, mask.seq_len_kv)
    if lengths != tuple(shape[-2:]):
        raise ValueError(
            f"CausalBias is for {lengths[0]} queries and {lengths[1]} keys, the scores have "
            f"{shape[-2]} and {shape[-1]}"
        )
    return Causal(lengths[1] - lengths[0] if mask.variant.name == "LOWER_RIGHT" else 0)


def _broadcast(tensor: Tensor, shape: torch.Size, name: str, device: torch.device) -> Tensor:
    """A view (batch, head, query, key) of something that broadcasts to the scores' `shape`."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and query on {device}; move one of them")
    if not expands_to(tensor.shape, shape):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} does not broadcast to the scores' shape "
            f"{tuple(shape)}: (..., query, key)"
        )
    padded = tensor.reshape(*[1] * (len(shape) - tensor.ndim), *tensor.shape)
    if len(shape) > 4:  # only the axes that merge are expanded, the others stay as small as given
        merged = padded.expand(*shape[:-3], -1, -1, -1).flatten(0, -4)
        return merged.expand(-1, *shape[-3:])
    four = torch.Size((*[1] * (4 - len(shape)), *shape))
    return padded.expand(four)


def lay_out(table: Tensor, call: AttentionCall, own: int) -> Tensor:
    """(batch, head, ...) of something with the caller's leading axes and `own` axes after them."""
    lead, last = call.lead, table.shape[table.ndim - own :]
    if not expands_to(table.shape, torch.Size((*lead, *last))):
        raise ValueError(
            f"a prior of leading axes {tuple(table.shape[: table.ndim - own])} does not broadcast "
            f"to those of the scores, {tuple(lead)}"
        )
    wide = table.reshape(*[1] * (len(lead) + own - table.ndim), *table.shape)
    wide = wide.reshape(*wide.shape[: len(lead)], *[1] * (2 - own), *last)  # two axes of its own
    shape = torch.Size((*lead, *wide.shape[len(lead) :]))
    four = _broadcast(wide, shape, "prior", table.device)
    return four.reshape(*four.shape[:2], *last) if own < 2 else four


def unexpand(tensor: Tensor) -> Tensor:
    """Without the copies that broadcasting pretends: size one along broadcast axes."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def rounded_base(call: AttentionCall) -> AttentionCall:
    """The call with a float64 base in the precision of its scores, if that holds every mass.

    Rounding moves a mass by half a unit, which is the error of the scores themselves; a mass that
    would become zero, infinite or a number of fewer digits stays as it was given.
    """
    base, dtype = call.base, compute_dtype(call.query.dtype)
    if not isinstance(base, Tensor) or base.dtype != torch.float64 or dtype == torch.float64:
        return call
    masses = unexpand(base)
    if base.requires_grad or not readable(masses):
        return call
    rounded = masses.to(dtype)
    representable = (rounded >= torch.finfo(dtype).tiny) & (rounded < torch.inf)
    if has((masses > 0) & ~representable):
        return call
    return replace(call, base=rounded.expand(base.shape))


def _seed(device: torch.device) -> Tensor:
    """From torch's generator, so that `torch.manual_seed` fixes the dropout."""
    return torch.randint(0, 2**31, (), device=device)
