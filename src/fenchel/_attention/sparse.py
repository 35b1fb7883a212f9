"""Tsallis attention on the support alone: the native kernels, when they run, their derivative."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fenchel._attention.call import Call, rounded_base, stored
from fenchel._attention.cuda import adasplash_attention, against_adasplash
from fenchel._attention.tiled import TILES, by_tiles, tiled
from fenchel._kernels.attention import Numbers, tsallis_attention, tsallis_attention_backward
from fenchel._kernels.route import Path, Reason, against_masses, against_sparse_attention
from fenchel._numerics import compute_dtype, where
from fenchel.priors import Causal, Prior, expand_to
from fenchel.regularizers.contract import per_row
from fenchel.regularizers.tsallis import Tsallis


def sparse_paths(call: Call, regularizer: Tsallis) -> list[Path]:
    """The fastest first."""
    if isinstance(call.base, Causal):
        call = replace(call, causal=True, base=None)
    rounded = rounded_base(call)
    return [
        Path(
            "AdaSplash on CUDA (never run on a device)",
            lambda: against_adasplash(call, regularizer),
            lambda: adasplash_attention(call, regularizer),
        ),
        Path(
            "native kernels",
            lambda: _against(rounded, regularizer) or _by_tiles(rounded, regularizer),
            lambda: _attend(rounded, regularizer),
        ),
        Path(
            "native kernels, tile by tile",
            lambda: _against(rounded, regularizer),
            lambda: by_tiles(rounded, regularizer, _attend),
        ),
        Path(TILES, lambda: None, lambda: tiled(call, regularizer)),
    ]


def _against(call: Call, regularizer: Tsallis) -> Reason:
    base = stored(call.base) if isinstance(call.base, Tensor) else None
    return against_sparse_attention(call.query, call.key, call.value, base, regularizer.alpha)


def _by_tiles(call: Call, regularizer: Tsallis) -> Reason:
    if isinstance(call.base, Prior):
        return "a prior is made tile by tile, so that it is never stored whole"
    if call.bias is not None and call.bias.requires_grad:
        return "a bias that trains gets its gradient tile by tile"
    if call.bias is not None and isinstance(regularizer.temperature, Tensor):
        return "a bias divided by one temperature per row is stored tile by tile"
    return None


def _attend(call: Call, regularizer: Tsallis) -> Tensor:
    """One call of the kernels."""
    log_mass = None
    if isinstance(call.base, Prior):
        log_mass = _log_mass(call, call.base)
        if against_masses(log_mass.detach(), regularizer.alpha) is not None:
            return tiled(call, regularizer)
    temperature = regularizer.temperature
    query, bias, scale, bias_scale = call.query, call.bias, call.scale, 1.0
    mask, mass = _mask_and_mass(call, log_mass)
    if isinstance(temperature, Tensor):
        column = _rows(temperature, call, "temperature").unsqueeze(-1)
        column = column.to(compute_dtype(query.dtype))
        query = query / column
        if bias is not None:  # -inf has no derivative in the temperature: it is a mask
            seen = bias != -torch.inf
            mask = seen if mask is None else mask & seen
            bias = where(seen, bias, 0.0) / column
    else:
        scale, bias_scale = scale / temperature, 1 / temperature
    eps = _eps(call, regularizer)
    operands = (query, call.key, call.value, eps, bias, log_mass)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    output: Tensor = tsallis_attention(
        *(query, call.key, call.value, eps, mask, bias, mass, call.seed),
        *(scale, bias_scale, log_mass is not None, call.causal, call.first),
        *(call.dropout, call.queries, save),
    )[0]
    return output.to(call.query.dtype)


def _mask_and_mass(call: Call, log_mass: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A base of truth values is a mask."""
    if not isinstance(call.base, Tensor) or call.base.dtype != torch.bool:
        return call.mask, call.base if isinstance(call.base, Tensor) else log_mass
    return (call.base if call.mask is None else call.mask & call.base), None


def _log_mass(call: Call, prior: Prior) -> Tensor:
    shape = torch.Size((*call.lead, *call.scores_shape[2:]))
    prior.check(shape)
    device = call.query.device
    rows = torch.arange(shape[-2], device=device)
    made = prior.log_mass(rows, torch.arange(shape[-1], device=device))
    made = expand_to(made, shape, f"{type(prior).__name__}.log_mass")
    return made.to(compute_dtype(call.query.dtype)).reshape(call.scores_shape)


def _rows(parameter: Tensor, call: Call, name: str) -> Tensor:
    """A parameter of the rows, (batch, head, query) in float64."""
    shape = (*call.lead, *call.scores_shape[2:])
    like = torch.empty((), dtype=torch.float64, device=call.query.device).expand(shape)
    column = per_row(parameter, like, name).squeeze(-1)
    return column.expand(shape[:-1]).reshape(call.scores_shape[:3])


def _eps(call: Call, regularizer: Tsallis) -> Tensor:
    """alpha - 1 of every row in float64, (batch, head, query)."""
    alpha = regularizer.alpha
    if isinstance(alpha, Tensor):
        return _rows(alpha.double() - 1, call, "alpha")
    return torch.tensor(alpha - 1.0, dtype=torch.float64).expand(call.scores_shape[:3])


# ---- the derivative


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # what is kept for the backward pass is no result
    ctx.save_for_backward(*inputs[:8], *output[1:])
    ctx.numbers = inputs[8:15]


def _backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # read once: a checkpoint makes them again at each reading
    operands, saved = tensors[:8], tensors[8:]
    needed = ctx.needs_input_grad[:8]
    if gradient is None:
        return (None,) * 16
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _through_tiles(operands, Numbers(*ctx.numbers), needed, gradient)
    wanted = [needed[3], needed[5], needed[6]]  # eps, bias, log mass
    query, key, value, eps, scores, log_mass = tsallis_attention_backward(
        gradient, *operands, *ctx.numbers, *saved, wanted
    )
    if wanted[1]:
        scores = (scores * Numbers(*ctx.numbers).bias_scale).to(operands[5].dtype)
    made = (query, key, value, eps, None, scores, log_mass, None)
    kept = (x if need else None for x, need in zip(made, needed, strict=True))
    return *kept, *(None,) * 8


def _through_tiles(
    operands: tuple[Any, ...], numbers: Numbers, needed: tuple[bool, ...], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """The same derivative in operations that can be differentiated again."""
    query, key, value, eps, mask, bias, mass, seed = operands
    call = Call(
        query=query,
        key=key,
        value=value,
        scale=numbers.scale,
        mask=mask,
        bias=None if bias is None else bias * numbers.bias_scale,
        base=_Made(mass) if numbers.mass_is_log else mass,
        causal=numbers.causal,
        dropout=numbers.dropout,
        seed=seed,
        lead=query.shape[:2],
        first=numbers.first,
        queries=numbers.queries,
    )
    output = tiled(call, Tsallis(eps + 1))
    wanted = [x for x, need in zip(operands, needed, strict=True) if need]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
    return *(next(found) if need else None for need in needed), *(None,) * 8


@dataclass(frozen=True)
class _Made(Prior):
    """A log mass that was already made, (batch, head, query, key)."""

    tensor: Tensor

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.tensor[..., rows, :][..., columns]


torch.library.register_autograd("fenchel::tsallis_attention", _backward, setup_context=_save)
