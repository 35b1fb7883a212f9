"""Tsallis attention on the support alone: the native kernels, when they run, their derivative."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fenchel._attention.call import AttentionCall, rounded_base, unexpand
from fenchel._attention.tiled import TILES, by_tiles, tiled
from fenchel._kernels.attention import Arguments, Gradients, register_derivative, tsallis_attention
from fenchel._kernels.route import Path, Reason, against_masses, against_sparse_attention
from fenchel._numerics import compute_dtype, where
from fenchel.priors import Causal, Prior, expand_to
from fenchel.regularizers.contract import per_row
from fenchel.regularizers.tsallis import Tsallis

NATIVE_PATH = "native kernels"


def sparse_paths(call: AttentionCall, regularizer: Tsallis) -> list[Path]:
    """The fastest first."""
    if isinstance(call.base, Causal):
        call = replace(call, causal=True, base=None)
    rounded = rounded_base(call)
    return [
        Path(
            "AdaSplash on CUDA (never run on a device)",
            lambda: _against_cuda(call, regularizer),
            lambda: _attend_on_cuda(call, regularizer),
        ),
        Path(
            NATIVE_PATH,
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


def _against_cuda(call: AttentionCall, regularizer: Tsallis) -> Reason:
    from fenchel._attention.cuda import against_adasplash

    return against_adasplash(call, regularizer)


def _attend_on_cuda(call: AttentionCall, regularizer: Tsallis) -> Tensor:
    from fenchel._attention.cuda import adasplash_attention

    return adasplash_attention(call, regularizer)


def _against(call: AttentionCall, regularizer: Tsallis) -> Reason:
    base = unexpand(call.base) if isinstance(call.base, Tensor) else None
    return against_sparse_attention(call.query, call.key, call.value, base, regularizer.alpha)


def _by_tiles(call: AttentionCall, regularizer: Tsallis) -> Reason:
    if isinstance(call.base, Prior):
        return "a prior is made tile by tile, so that it is never stored whole"
    if call.bias is not None and call.bias.requires_grad:
        return "a bias that trains gets its gradient tile by tile"
    if call.bias is not None and isinstance(regularizer.temperature, Tensor):
        return "a bias divided by one temperature per row is stored tile by tile"
    return None


def _attend(call: AttentionCall, regularizer: Tsallis) -> Tensor:
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
            lowest = torch.finfo(column.dtype).min  # finite scores stay finite: -inf alone hides
            bias = (where(seen, bias, 0.0) / column).clamp(min=lowest)
    else:
        scale, bias_scale = scale / temperature, 1 / temperature
    eps = _eps(call, regularizer)
    operands = (query, call.key, call.value, eps, bias, log_mass)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    output: Tensor = tsallis_attention(
        query=query,
        key=call.key,
        value=call.value,
        eps=eps,
        mask=mask,
        bias=bias,
        mass=mass,
        seed=call.seed,
        scale=scale,
        bias_scale=bias_scale,
        mass_is_log=log_mass is not None,
        causal=call.causal,
        first=call.first,
        dropout=call.dropout,
        queries=call.queries,
        save=save,
    )[0]
    return output.to(call.query.dtype)


def _mask_and_mass(
    call: AttentionCall, log_mass: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """A base of truth values is a mask."""
    if not isinstance(call.base, Tensor) or call.base.dtype != torch.bool:
        return call.mask, call.base if isinstance(call.base, Tensor) else log_mass
    return (call.base if call.mask is None else call.mask & call.base), None


def _log_mass(call: AttentionCall, prior: Prior) -> Tensor:
    shape = torch.Size((*call.lead, *call.scores_shape[2:]))
    prior.check(shape)
    device = call.query.device
    rows = torch.arange(shape[-2], device=device)
    log_mass = prior.log_mass(rows, torch.arange(shape[-1], device=device))
    log_mass = expand_to(log_mass, shape, f"{type(prior).__name__}.log_mass")
    return log_mass.to(compute_dtype(call.query.dtype)).reshape(call.scores_shape)


def _rows(parameter: Tensor, call: AttentionCall, name: str) -> Tensor:
    """A parameter of the rows, (batch, head, query) in float64."""
    shape = (*call.lead, *call.scores_shape[2:])
    like = torch.empty((), dtype=torch.float64, device=call.query.device).expand(shape)
    column = per_row(parameter, like, name).squeeze(-1)
    return column.expand(shape[:-1]).reshape(call.scores_shape[:3])


def _eps(call: AttentionCall, regularizer: Tsallis) -> Tensor:
    """alpha - 1 of every row in float64, (batch, head, query)."""
    alpha = regularizer.alpha
    if isinstance(alpha, Tensor):
        return _rows(alpha.double() - 1, call, "alpha")
    return torch.tensor(alpha - 1.0, dtype=torch.float64).expand(call.scores_shape[:3])


def _through_tiles(x: Arguments, gradient: Tensor, needed: dict[str, bool]) -> Gradients:
    """The derivative in operations that can be differentiated again."""
    call = AttentionCall(
        query=x.query,
        key=x.key,
        value=x.value,
        scale=x.scale,
        mask=x.mask,
        bias=None if x.bias is None else x.bias * x.bias_scale,
        base=_LogMass(x.mass) if x.mass is not None and x.mass_is_log else x.mass,
        causal=x.causal,
        dropout=x.dropout,
        seed=x.seed,
        lead=x.query.shape[:2],
        first=x.first,
        queries=x.queries,
    )
    output = tiled(call, Tsallis(x.eps + 1))
    names = [name for name in x.tensors if needed[name]]
    leaves = [getattr(x, name) for name in names]
    gradients = torch.autograd.grad(output, leaves, gradient, create_graph=True)
    return dict(zip(names, gradients, strict=True))


@dataclass(frozen=True)
class _LogMass(Prior):
    """A log mass that is stored, (batch, head, query, key)."""

    tensor: Tensor

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.tensor[..., rows, :][..., columns]


register_derivative(_through_tiles)
