"""Tsallis attention on the support alone: the kernels, when they run, their derivative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fenchel._attention.call import AttentionCall, lay_out, rounded_base, unexpand
from fenchel._attention.tiled import TILES, StoredLogMass, by_tiles, log_mass_of_tile, tiled
from fenchel._kernels.attention import Gradients, attend, register_derivative
from fenchel._kernels.attention_call import FAR, Arguments
from fenchel._kernels.gpu.devices_run import checks
from fenchel._kernels.route import (
    Path,
    Reason,
    against_gpu_attention,
    against_masses,
    against_sparse_attention,
    against_structured_masses,
)
from fenchel._numerics import compute_dtype, has, where
from fenchel.priors.contract import Prior, Structure, Structured
from fenchel.regularizers.contract import Regularizer, per_row
from fenchel.regularizers.tsallis import Tsallis

NATIVE_PATH = "native kernels"
GPU_PATH = f"GPU kernels ({checks()})"


def sparse_paths(call: AttentionCall, regularizer: Tsallis) -> list[Path]:
    """The fastest first."""
    rounded = rounded_base(call)
    numbers = CallNumbers(rounded)
    return [
        Path(
            GPU_PATH,
            lambda: against_whole_on_gpu(numbers, regularizer),
            lambda: attend_structured(numbers, regularizer, gpu=True),
        ),
        Path(
            NATIVE_PATH,
            lambda: _against(rounded) or against_whole(numbers, regularizer),
            lambda: attend_structured(numbers, regularizer),
        ),
        Path(
            "native kernels, tile by tile",
            lambda: _against(rounded),
            lambda: by_tiles(rounded, regularizer, _attend_tile),
        ),
        Path(TILES, lambda: None, lambda: tiled(call, regularizer)),
    ]


def _against(call: AttentionCall) -> Reason:
    return against_sparse_attention(call.query, call.key, call.value, _small_base(call))


def _small_base(call: AttentionCall) -> Tensor | None:
    """Without the copies of broadcasting."""
    return unexpand(call.base) if isinstance(call.base, Tensor) else None


class CallNumbers:
    """A call, and what its priors are in numbers, as far as they can be told."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.bias, self.base = self._numbers(call.bias), self._numbers(call.base)

    @property
    def complete(self) -> bool:
        """Every prior is told in numbers."""
        pairs = ((self.call.bias, self.bias), (self.call.base, self.base))
        return not any(isinstance(x, Prior) and numbers is None for x, numbers in pairs)

    def seen(self) -> Structure:
        """What both priors and causality let a query see."""
        nothing: dict[str, Any] = dict.fromkeys(_SCORED)
        queries, keys = self.call.scores_shape[2:]
        joined = Structure(queries, keys, highest=self.call.first if self.call.causal else None)
        for numbers in (self.bias, self.base):
            if numbers is not None:
                joined = replace(numbers, **nothing) * joined
        return joined

    def seen_surely(self) -> Structure | None:
        """The same, where every query has that many keys; None if some may have fewer."""
        return self.seen()

    def _numbers(self, term: Tensor | Prior | None) -> Structure | None:
        if not isinstance(term, Prior):
            return None
        queries, keys = self.call.scores_shape[2:]
        return term.structure(queries, keys, 0, self.call.query.device)


def against_whole(numbers: CallNumbers, regularizer: Tsallis) -> Reason:
    """All queries in one call of the kernels. For softmax a base is a bias, of any size."""
    call = numbers.call
    if isinstance(call.bias, Tensor) and call.bias.requires_grad:
        return "a bias that trains gets its gradient tile by tile"
    return _against_numbers(numbers, regularizer)


def against_whole_on_gpu(numbers: CallNumbers, regularizer: Tsallis) -> Reason:
    """The same for the GPU's kernels, which have no other way."""
    call = numbers.call
    operands = (call.query, call.key, call.value)
    reason = against_gpu_attention(*operands, _small_base(call), regularizer.alpha)
    return reason or _against_numbers(numbers, regularizer)


def _against_numbers(numbers: CallNumbers, regularizer: Tsallis) -> Reason:
    call, temperature = numbers.call, regularizer.temperature
    if not numbers.complete:
        return "a prior that no numbers describe is made tile by tile, so that it is never stored"
    if isinstance(temperature, Tensor):
        if isinstance(call.bias, Tensor):
            return "a bias divided by one temperature per row is stored tile by tile"
        per_query = temperature.ndim > 0 and temperature.shape[-1] != 1
        if call.softcap or (call.bias is not None and per_query):
            return "a softcap or a prior divided by one temperature per row is made tile by tile"
    return _against_masses(numbers, regularizer)


def _against_masses(numbers: CallNumbers, regularizer: Tsallis) -> Reason:
    call, alpha = numbers.call, regularizer.alpha
    dtype = compute_dtype(call.query.dtype)
    masked = call.mask is not None or isinstance(call.bias, Tensor)
    if isinstance(call.base, Tensor) and call.base.dtype != torch.bool:
        log_mass = unexpand(call.base).to(dtype).log()
        return against_masses(log_mass, alpha, masked or call.causal or numbers.bias is not None)
    base = numbers.base
    if base is None or is_softmax(regularizer):
        return None
    if base.relative is None and base.of_key is None and base.sink is None:
        return None  # a mask: no number of the bias is looked at
    masked = masked or isinstance(call.base, Tensor) or _hides(numbers.bias)
    return against_structured_masses(base, None if masked else numbers.seen_surely(), dtype, alpha)


def _hides(bias: Structure | None) -> bool:
    """A bias of -inf is a mask."""
    tables = () if bias is None else (bias.relative, bias.of_key)
    return any(table is not None and has(table == -torch.inf) for table in tables)


def is_softmax(regularizer: Tsallis) -> bool:
    """For which masses are biases, whatever their size."""
    return not isinstance(regularizer.alpha, Tensor) and regularizer.alpha == 1


def attend_structured(numbers: CallNumbers, regularizer: Tsallis, gpu: bool = False) -> Tensor:
    """All queries in one call of the kernels."""
    x = arguments(numbers, regularizer)
    x = for_gpu(x, regularizer) if gpu else x
    return run_kernels(x).to(numbers.call.query.dtype)


def for_gpu(x: Arguments, regularizer: Tsallis) -> Arguments:
    """The same call for the GPU's kernels, which have closed forms for some alphas."""
    alpha = regularizer.alpha
    return x._replace(gpu=True, uniform_eps=-1.0 if isinstance(alpha, Tensor) else alpha - 1.0)


def arguments(numbers: CallNumbers, regularizer: Tsallis) -> Arguments:
    """Of the operator, with every prior in numbers."""
    terms = _terms(numbers, regularizer) if numbers.call.priors else {}
    return _arguments(numbers.call, regularizer, terms)


def _attend_tile(call: AttentionCall, regularizer: Tsallis) -> Tensor:
    """One call of the kernels, with priors stored for this block of queries."""
    terms: dict[str, Any] = {}
    sinks = [prior for prior in call.priors if prior.sink is not None]
    if sinks:
        return tiled(call, regularizer)
    if isinstance(call.base, Prior):
        log_mass = log_mass_of_tile(call.base, call).reshape(call.scores_shape)
        terms |= {"mass": log_mass, "mass_is_log": True}
    bound = call.bias if isinstance(call.bias, Prior) else None
    if bound is not None:
        call = replace(call, bias=log_mass_of_tile(bound, call).reshape(call.scores_shape))
    masses = _visible_masses(call, terms.get("mass"))
    if masses is not None and against_masses(masses, regularizer.alpha) is not None:
        return tiled(call if bound is None else replace(call, bias=bound), regularizer)
    if isinstance(regularizer.temperature, Tensor) and call.softcap:
        return tiled(call, regularizer)
    return run_kernels(_arguments(call, regularizer, terms)).to(call.query.dtype)


def _visible_masses(call: AttentionCall, log_mass: Tensor | None) -> Tensor | None:
    """Logs of the masses of this tile, without those that a mask hides."""
    if isinstance(call.base, Tensor) and call.base.dtype != torch.bool:
        log_mass = call.base.to(compute_dtype(call.query.dtype)).log()
    if log_mass is None:
        return None
    log_mass, hidden = log_mass.detach(), call.hidden()
    if hidden is not None:
        log_mass = where(~hidden, log_mass, -torch.inf)
    if isinstance(call.bias, Tensor):
        log_mass = where(call.bias.detach() != -torch.inf, log_mass, -torch.inf)
    return log_mass


def _terms(numbers: CallNumbers, regularizer: Tsallis) -> dict[str, Any]:
    """What the priors are, as the operator takes it."""
    call, bias, base = numbers.call, numbers.bias, numbers.base
    terms: dict[str, Any] = {}
    if bias is not None:
        bias = _lay_out_numbers(bias, call)
        for name in _SCORED:
            terms[name] = _cooled(getattr(bias, name), regularizer.temperature, call)
    if base is not None:
        base = _lay_out_numbers(base, call)
        for name in _SCORED:
            _add_mass(terms, name, getattr(base, name), is_softmax(regularizer))
    seen = _lay_out_numbers(numbers.seen(), call)
    return terms | {name: getattr(seen, name) for name in _RANGES}


def _add_mass(terms: dict[str, Any], name: str, table: Tensor | None, softmax: bool) -> None:
    if table is None:
        return
    score = terms.get(name)
    if name == "sink" and score is not None:
        raise ValueError("attention has one Sink, as base or as attn_mask")
    if softmax:
        terms[name] = table if score is None else score + table
        return
    terms[f"{name}_log_mass"] = table
    if name == "sink":
        terms[name] = torch.zeros_like(table)


_SCORED = ("relative", "of_key", "sink")
_RANGES = ("lowest", "highest", "start", "stop")


def _lay_out_numbers(numbers: Structure, call: AttentionCall) -> Structure:
    """Tensors (batch, head, ...), in the precisions of the operator."""
    dtype = compute_dtype(call.query.dtype)
    kinds = {"relative": dtype, "of_key": dtype, "sink": torch.float64}
    kinds |= {"start": torch.int64, "stop": torch.int64}
    laid_out: dict[str, Any] = {}
    for name, kind in kinds.items():
        tensor = getattr(numbers, name)
        if tensor is not None:
            laid_out[name] = lay_out(tensor.to(kind), call, 0 if name == "sink" else 1)
    return replace(numbers, **laid_out)


def _cooled(
    table: Tensor | None, temperature: float | Tensor, call: AttentionCall
) -> Tensor | None:
    """A bias of the scores, (batch, head) or (batch, head, position), over the temperature."""
    if table is None:
        return None
    if not isinstance(temperature, Tensor) and temperature == 1:
        return table
    if isinstance(temperature, Tensor):
        column = _rows(temperature, call, "temperature")[..., :1].to(table.dtype)
        temperature = column if table.ndim == 3 else column.squeeze(-1)
    lowest = torch.finfo(table.dtype).min  # finite scores stay finite: -inf alone hides
    return where(table != -torch.inf, (table / temperature).clamp(min=lowest), -torch.inf)


def _arguments(call: AttentionCall, regularizer: Tsallis, terms: dict[str, Any]) -> Arguments:
    temperature = regularizer.temperature
    query, scale, bias_scale, softcap = call.query, call.scale, 1.0, call.softcap
    bias = call.bias if isinstance(call.bias, Tensor) else None
    mask = call.mask
    if isinstance(call.base, Tensor):
        if call.base.dtype == torch.bool:  # a base of truth values is a mask
            mask = call.base if mask is None else mask & call.base
        else:
            terms["mass"] = call.base
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
        softcap = softcap / temperature
    if call.causal:
        highest = terms.get("highest")
        terms["highest"] = call.first if highest is None else min(call.first, highest)
    terms = {name: term for name, term in terms.items() if term is not None}
    return Arguments(
        query=query,
        key=call.key,
        value=call.value,
        eps=_eps(call, regularizer),
        mask=mask,
        bias=bias,
        seed=call.seed,
        scale=scale,
        bias_scale=bias_scale,
        softcap=softcap,
        first=call.first,
        dropout=call.dropout,
        queries=call.queries,
        longest_query=query.shape[2],
        longest_key=call.key.shape[2],
    )._replace(**terms)


def run_kernels(x: Arguments) -> Tensor:
    """The operator, which keeps supports where a derivative may be asked for."""
    trains = (tensor is not None and tensor.requires_grad for tensor in x.tensors.values())
    save = torch.is_grad_enabled() and any(trains)
    return attend(x, save)


def _rows(parameter: Tensor, call: AttentionCall, name: str) -> Tensor:
    """A parameter of the rows, (batch, head, query) in float64."""
    shape = call.caller_shape
    like = torch.empty((), dtype=torch.float64, device=call.query.device).expand(shape)
    column = per_row(parameter, like, name).squeeze(-1)
    return column.expand(shape[:-1]).reshape(call.scores_shape[:3])


def _eps(call: AttentionCall, regularizer: Tsallis) -> Tensor:
    """alpha - 1 of every row in float64, (batch, head, query)."""
    alpha = regularizer.alpha
    if isinstance(alpha, Tensor):
        return _rows(alpha.double() - 1, call, "alpha")
    eps = torch.full((), alpha - 1.0, dtype=torch.float64, device=call.query.device)
    return eps.expand(call.scores_shape[:3])


# ---- the derivative in operations that can be differentiated again


def _through_tiles(x: Arguments, gradient: Tensor, needed: dict[str, bool]) -> Gradients:
    output = attend_by_sequence(x, Tsallis(x.eps + 1), x.scale, x.softcap)
    names = [name for name in x.tensors if needed[name]]
    leaves = [getattr(x, name) for name in names]
    gradients = torch.autograd.grad(output, leaves, gradient, create_graph=True)
    return dict(zip(names, gradients, strict=True))


def attend_by_sequence(
    x: Arguments, regularizer: Regularizer, scale: float, softcap: float
) -> Tensor:
    """What the operator computes, in torch's operations and with any regulariser.

    scale, softcap: before they are divided by a temperature that the regulariser has.
    """
    if x.query_start is None or x.key_start is None:
        return tiled(_call(x, scale, softcap), regularizer)
    parts, queries = [], x.query.shape[2]
    for start, stop, one in split_sequences(x):
        parts.append(tiled(_call(one, scale, softcap), regularizer.tile(start, stop, queries)))
    return torch.cat(parts, 2)


def _call(x: Arguments, scale: float, softcap: float) -> AttentionCall:
    bias, base = _structures(x)
    return AttentionCall(
        query=x.query,
        key=x.key,
        value=x.value,
        scale=scale,
        mask=x.mask,
        bias=bias if x.bias is None else x.bias * x.bias_scale,
        base=base if x.mass is None or x.mass_is_log else x.mass,
        causal=x.highest == x.first,
        dropout=x.dropout,
        seed=x.seed,
        lead=x.query.shape[:2],
        first=x.first,
        queries=x.queries,
        softcap=softcap,
    )


def _structures(x: Arguments) -> tuple[Prior | None, Prior | None]:
    """Bias and base that the numbers describe; what is seen goes where there is room for it."""
    queries, keys = x.query.shape[2], x.key.shape[2]
    seen = Structure(
        queries,
        keys,
        lowest=None if x.lowest == -FAR else x.lowest,
        highest=None if x.highest == FAR else x.highest,
        start=x.start,
        stop=x.stop,
    )
    bias = Structure(queries, keys, relative=x.relative, of_key=x.of_key)
    base = Structure(queries, keys, relative=x.relative_log_mass, of_key=x.of_key_log_mass)
    if x.sink_log_mass is not None:
        base = replace(base, sink=x.sink_log_mass)
    else:
        bias = replace(bias, sink=x.sink)
    if x.bias is None:
        bias = bias * seen
    else:
        base = base * seen
    measure: Prior | None = None if base.says_nothing else Structured(base)
    if x.mass is not None and x.mass_is_log:
        stored = StoredLogMass(x.mass)
        measure = stored if measure is None else stored * measure
    return None if bias.says_nothing else Structured(bias), measure


def split_sequences(x: Arguments) -> list[tuple[int, int, Arguments]]:
    """First and last + 1 query, and the call, of each of the packed sequences."""
    assert x.query_start is not None
    assert x.key_start is not None
    queries, keys = x.query_start.diff().tolist(), x.key_start.diff().tolist()
    calls = []
    first_query = first_key = 0
    for n, m in zip(queries, keys, strict=True):
        rows, columns = slice(first_query, first_query + n), slice(first_key, first_key + m)
        parts: dict[str, Any] = {"query_start": None, "key_start": None, "queries": x.queries}
        for name in ("query", "eps", "start", "stop"):
            parts[name] = _part(getattr(x, name), rows)
        for name in ("key", "value", "of_key", "of_key_log_mass"):
            parts[name] = _part(getattr(x, name), columns)
        positions = slice(x.longest_query - n, x.longest_query + m - 1)
        for name in ("relative", "relative_log_mass"):
            parts[name] = _part(getattr(x, name), positions)
        parts |= {"longest_query": n, "longest_key": m, "first": first_query}
        calls.append((first_query, first_query + n, x._replace(**parts)))
        first_query, first_key = first_query + n, first_key + m
    return calls


def _part(tensor: Tensor | None, part: slice) -> Tensor | None:
    """Of the third axis: tokens or positions."""
    return None if tensor is None else tensor[:, :, part]


register_derivative(_through_tiles)
