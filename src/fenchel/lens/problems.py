"""Every attention layer of a model as an estimation problem.

The scores of a head are sigma <K x_i + b_K, Q y_k + b_Q> + bias_ik; sigma is 1 / sqrt(d') in BERT
and 1 in T5. With templates t_i = c x_i, the inputs of the key projection, and

    reliability z_k = (sigma / c) K^T (Q y_k + b_Q),     u_ik proportional to exp(bias_ik),

they are <t_i, reliability z_k> + log u_ik but for constants in i: <b_K, .> is one. So `first_order`
is the layer itself, and `estimate` the problem that it approximates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, where
from fenchel.dual import Estimate, estimate, first_order
from fenchel.lens.inputs import Batch
from fenchel.lens.recognise import Attention, Kind, attentions


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """The estimation problems of one layer, one for each sentence, head and query; float64.

    templates (B, 1, 1, n, d): shared by heads and queries. preference (1 or B, H, Q, n), or None
    for an even one. evidence (B, H, Q, d). mask (1 or B, 1, 1 or Q, n): True = may be seen.
    """

    templates: Tensor
    preference: Tensor | None
    evidence: Tensor
    mask: Tensor
    reliability: float

    def exact(self) -> Estimate:
        return estimate(*self._operands(), mask=self.mask)

    def first_order(self) -> Estimate:
        """The layer itself: `weights` are the model's attention."""
        return first_order(*self._operands(), mask=self.mask)

    def _operands(self) -> tuple[Tensor, Tensor | None, Tensor, float]:
        return self.templates, self.preference, self.evidence, self.reliability

    def reduced(self) -> LayerProblem:
        """The same in n + 1 coordinates, where they are fewer: the span of the templates, and what
        of the evidence is orthogonal to it, which passes into every multiplier unchanged.

        An isometry, so that lengths of multipliers, means and their differences stay.
        """
        n, d = self.templates.shape[-2:]
        if n + 1 >= d:
            return self
        axes, lower = torch.linalg.qr(self.templates.mT)  # (B, 1, 1, d, n), (B, 1, 1, n, n)
        inside = self.evidence @ axes[:, 0]
        square = self.evidence.square().sum(-1, keepdim=True)
        outside = (square - inside.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
        templates = torch.nn.functional.pad(lower.mT, (0, 1))
        return replace(self, templates=templates, evidence=torch.cat([inside, outside], -1))

    def parameter(self) -> Tensor:
        """reliability |Sigma z| / |z|, Sigma the covariance of the templates under u. (B, H, Q)

        The deviation of the multiplier to leading order in the templates and the scores.
        """
        preference = self._normalised()
        scores = self.evidence @ self.templates[:, 0].mT  # (B, H, Q, n)
        centred = preference * (scores - (preference * scores).sum(-1, keepdim=True))
        moved = (centred @ self.templates[:, 0]).norm(dim=-1)
        length = self.evidence.norm(dim=-1)
        found: Tensor = self.reliability * moved / where(length > 0, length, 1.0)
        return found

    def _normalised(self) -> Tensor:
        given = self.evidence.new_ones(()) if self.preference is None else self.preference
        on = where(self.mask, given, 0.0)
        return on / on.sum(-1, keepdim=True).clamp_min(torch.finfo(on.dtype).tiny)


def problems(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    attention: Kind = "encoder",
    reliability: float = 1.0,
    scaling: float | None = None,
) -> list[LayerProblem]:
    """The estimation problem of each layer, whose first-order solution is the model's attention.

    Arguments as of `deviation`; all sentences in one pass of the model, so that memory grows with
    their number.
    """
    found = attentions(model, attention)  # Deciphering Attention, eq. 19
    batch = Batch.of(model, inputs, attention)
    return list(layer_problems(model, found, batch, reliability, scaling))


def layer_problems(
    model: Any,
    found: list[Attention],
    batch: Batch,
    reliability: float,
    scaling: float | None,
) -> Iterator[LayerProblem]:
    """After one pass of the model; made one at a time, since evidence is large."""
    factor = check_scaling(scaling, found[0])
    seen = [_Seen() for _ in found]
    with evaluating(model), ExitStack() as hooks, torch.no_grad():
        for one, to in zip(found, seen, strict=True):
            for hook in _watch(one, to):
                hooks.callback(hook.remove)
        batch.run(model)
    for one, layer in zip(found, seen, strict=True):
        yield _problem(one, layer, reliability, factor)


def check_scaling(scaling: float | None, one: Attention) -> float:
    """None: 1 / sqrt(d'), d' the size of a head."""
    if scaling is None:
        return 1 / math.sqrt(one.head_size)
    if isinstance(scaling, bool) or not isinstance(scaling, int | float):
        raise TypeError(f"scaling must be a number or None, got {type(scaling).__name__}")
    if not 0 < scaling < float("inf"):
        raise ValueError(f"scaling must be finite and > 0, got {scaling}")
    return float(scaling)


# ---- what a layer was given


@dataclass
class _Seen:
    """keys (B, n, d) and queries (B, Q, d): inputs of the two projections."""

    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    queries: Tensor = field(default_factory=lambda: torch.empty(0))
    mask: Tensor | None = None
    bias: Tensor | None = None


def _watch(one: Attention, to: _Seen) -> Iterator[Any]:
    signature = inspect.signature(type(one.module).forward)

    def keys(_: Any, args: Any) -> None:
        to.keys = args[0]

    def queries(_: Any, args: Any) -> None:
        to.queries = args[0]

    def called(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = signature.bind(module, *args, **kwargs).arguments
        to.mask = given.get(one.family.mask)
        if one.family.pair and one.kind != "cross":  # there it is zero
            to.bias = output[1]

    yield one.key.register_forward_pre_hook(keys)
    yield one.query.register_forward_pre_hook(queries)
    yield one.module.register_forward_hook(called, with_kwargs=True)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout; modules that were in training mode are put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# ---- as a problem


def _problem(one: Attention, seen: _Seen, reliability: float, factor: float) -> LayerProblem:
    inner = certificate_dtype(seen.keys.device)
    keys, queries = seen.keys.to(inner), seen.queries.to(inner)
    query, key = (
        one.per_head(one.query.weight.detach().to(inner)),
        one.per_head(one.key.weight.detach().to(inner)),
    )
    asked = torch.einsum("hfd,bqd->bhqf", query, queries)
    if one.query.bias is not None:
        asked = asked + one.per_head(one.query.bias.detach().to(inner)).unsqueeze(-2)  # (H, 1, f)
    strength = one.scaling / (factor * reliability)
    preference = None
    if seen.bias is not None:
        bias = seen.bias.detach().to(inner)  # (1, H, Q, n)
        preference = (bias - bias.amax(-1, keepdim=True)).exp()
    return LayerProblem(
        templates=(factor * keys)[:, None, None],
        preference=preference,
        evidence=strength * (asked @ key),  # (B, H, Q, f) @ (H, f, d)
        mask=_visible(one, seen),
        reliability=reliability,
    )


def _visible(one: Attention, seen: _Seen) -> Tensor:
    """Masks as transformers makes them: bool, or numbers that are hugely negative where hidden.

    None is everything, or everything up to the query where sdpa is told so by a flag.
    """
    mask = seen.mask
    if mask is None:
        full = torch.ones(
            seen.queries.shape[1], seen.keys.shape[1], dtype=torch.bool, device=seen.keys.device
        )
        return (full.tril() if one.module.is_causal else full)[None, None]
    return mask if mask.dtype == torch.bool else mask > 0.5 * torch.finfo(mask.dtype).min
