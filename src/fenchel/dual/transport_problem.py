"""The transport problem made ready: costs as scores, shapes, and which rows share what.

Everything is divided by gamma: v = lam / gamma, strength = reliability / gamma, and the column of
the plan that belongs to j is u_j softmax over t of <t, v + shift_j> + logit_jt, with

    a given cost:          logit_jt = -M[t, j] / gamma,  shift = 0,
    the dot-product cost:  logit = 0 (-inf: masked),     shift_j = t_j / gamma.

So the second never forms a matrix of costs. Constants of a column cancel in its softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, check_tensor, has, where
from fenchel.dual.problem import (
    Layout,
    broadcast,
    check_finite,
    check_operands,
    clear_unused,
    drop_copies,
    group_templates,
    normalise,
    read_positive,
)

_BELOW = 1e-6  # of the largest cost, below zero: what rounding leaves of a distance


@dataclass(frozen=True, eq=False)
class TransportProblem:
    """In float64, templates about a centre that the rows of a group share.

    templates (g, N, d), preference (g, m, n) summing to one, evidence (g, m, d),
    logits (g, m or 1, n or 1, N), shifts (g, m or 1, n or 1, d), strength and gamma (g, m, 1),
    constant (g, m): what the sum of u_j times the columns' potentials lacks.
    empty (g, m): nothing takes part; wrong (g, m): no plan has a finite cost.
    """

    templates: Tensor
    preference: Tensor
    logits: Tensor
    shifts: Tensor
    evidence: Tensor
    strength: Tensor
    gamma: Tensor
    constant: Tensor
    centre: Tensor  # (g, 1, d)
    empty: Tensor
    wrong: Tensor
    layout: Layout
    dtype: torch.dtype

    def out(self, x: Tensor, missing: float = 0.0) -> Tensor:
        """(g, m, ...) as the caller's batch, `missing` in empty rows."""
        return self.layout.unpack_filled(x, self.empty, missing)


def make_transport(
    templates: Tensor,
    preference: Tensor | None,
    cost: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    gamma: float | Tensor,
    mask: Tensor | None,
) -> TransportProblem:
    """preference None: even. cost None: minus the dot products of the templates."""
    check_operands(templates, None, evidence, mask)
    preference = _read_preference(templates, preference, cost)
    dtype = templates.dtype
    for x in (preference, evidence) if cost is None else (preference, evidence, cost):
        dtype = torch.promote_types(dtype, x.dtype)
    inner = certificate_dtype(templates.device)
    reliability = read_positive(reliability, "reliability", evidence).to(inner)
    gamma = read_positive(gamma, "gamma", evidence).to(inner)
    batch = broadcast_batch(templates, preference, cost, evidence, reliability, gamma, mask)
    if mask is not None:
        templates = clear_unused(templates, mask)
        if preference.shape[-1] == mask.shape[-1]:  # the columns are the templates
            preference = where(mask, preference, 0.0)
    check_finite(templates, preference, evidence)
    templates = drop_copies(templates.to(inner), batch)
    layout = Layout.of(templates, batch)
    grouped = group_templates(templates, layout)
    weights, empty = normalise(layout.pack(preference.to(inner), 1))
    visible = None if mask is None else spread(mask.unsqueeze(-2), layout)  # (g, m|1, 1, N)
    if visible is not None:
        empty = empty | ~visible.any(-1).squeeze(-1)
    flat = spread(gamma.reshape(*gamma.shape, 1, 1), layout)  # (g, m|1, 1, 1)
    centre = grouped.detach().mean(1, keepdim=True)
    if cost is None:
        logits, shifts = _dot_product(grouped, visible, flat)
        constant = (weights * (shifts @ centre.unsqueeze(1).mT).squeeze(-1)).sum(-1)
    else:
        logits, least = _logits(cost, visible, flat, weights, empty, layout)
        shifts = grouped.new_zeros(len(grouped), 1, 1, grouped.shape[-1])
        constant = -(weights * (least / flat).squeeze(-1)).sum(-1)
    dead = ~(logits.detach() > -torch.inf).any(-1, keepdim=True)  # (g, m|1, n|1, 1)
    wrong = (dead.squeeze(-1) & (weights > 0)).any(-1) & ~empty
    packed = layout.pack(gamma, 0).unsqueeze(-1)
    return TransportProblem(
        templates=grouped - centre,
        preference=weights,
        logits=where(~dead, logits, 0.0),
        shifts=shifts,
        evidence=layout.pack(evidence.to(inner), 1),
        strength=layout.pack(reliability, 0).unsqueeze(-1) / packed,
        gamma=packed,
        constant=constant,
        centre=centre,
        empty=empty,
        wrong=wrong,
        layout=layout,
        dtype=dtype,
    )


def spread(x: Tensor, layout: Layout) -> Tensor:
    """(..., a, b) -> (g, m, a, b), or (g, 1, a, b) where all rows of a group share it."""
    x = drop_copies(x, layout.batch)
    if all(x.shape[axis] == 1 for axis in layout.rows):
        sizes = [1 if axis in layout.rows else size for axis, size in enumerate(layout.batch)]
        x = x.expand(*sizes, *x.shape[-2:])
        return group_templates(x, layout).unsqueeze(1)
    return layout.pack(x, 2)


def _dot_product(templates: Tensor, visible: Tensor | None, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, shifts): M[t, j] = C - <t, t_j>."""
    shifts = templates.unsqueeze(1) / gamma  # (g, m|1, N, d)
    logits = templates.new_zeros(len(templates), 1, 1, templates.shape[1])
    if visible is not None:
        logits = where(visible, logits, -torch.inf)
    return logits, shifts


def _logits(
    cost: Tensor,
    visible: Tensor | None,
    gamma: Tensor,
    preference: Tensor,
    empty: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """(least - M) / gamma with the templates last, -inf where M is infinite (g, m|1, n, N), and
    the least cost of each column (g, m|1, n, 1), without which a large constant would cost digits.
    """
    price = whole = spread(cost.to(gamma.dtype), layout).mT  # (g, m|1, n, N)
    if visible is not None:
        price = where(visible, price, torch.inf)
        if price.shape[-1] == price.shape[-2]:  # the columns are the templates: anything there
            price = where(visible.mT, price, torch.inf)
    values = price.detach()
    _check_cost(values, torch.finfo(cost.dtype).eps)
    finite = values < torch.inf
    used = (preference.detach() > 0) & ~empty.unsqueeze(-1)
    stuck = used & ~finite.any(-1)
    if has(stuck):
        column = int(stuck.nonzero()[0, -1])
        masked = has(stuck & (whole.detach() < torch.inf).any(-1))
        raise ValueError(_dead_column(column, masked))
    least = values.amin(-1, keepdim=True)
    least = where(least < torch.inf, least, 0.0)
    return where(finite, (least - where(finite, price, 0.0)) / gamma, -torch.inf), least


def _check_cost(values: Tensor, eps: float) -> None:
    """Not NaN, and not below zero by more than rounding of the largest."""
    if has(values.isnan()):
        raise ValueError(
            "cost must not hold NaN; use +inf for what is not allowed, and look at what made it"
        )
    largest = where(values.abs() < torch.inf, values, 0.0).abs().amax() if values.numel() else 0.0
    if has(values < -max(_BELOW, 8 * eps) * largest):
        raise ValueError(
            f"cost must be >= 0, or +inf for what is not allowed, got {float(values.min()):g}; if "
            "it is a similarity, turn its sign, or subtract the least, cost - cost.min(), which "
            "moves no weight"
        )


def _dead_column(column: int, masked: bool) -> str:
    if masked:
        return (
            f"mask takes out every template that column {column} of the cost may go to, but leaves "
            "its preference; unmask one of them, or set that preference to zero"
        )
    return (
        f"cost must be finite somewhere in every column with preference; column {column} is "
        "infinite everywhere, so its preference can go nowhere; set it to zero, or allow a template"
    )


def _read_preference(templates: Tensor, preference: Tensor | None, cost: Tensor | None) -> Tensor:
    count = templates.shape[-2]
    columns = count
    if cost is not None:
        check_tensor(cost, "cost")
        if not cost.is_floating_point():
            raise TypeError(f"cost must be floating point, got {cost.dtype}; use .float()")
        if cost.dim() < 2 or cost.shape[-2] != count or cost.shape[-1] == 0:
            raise ValueError(
                f"cost must be (..., {count}, n): one row a template, one column an entry of the "
                f"preference, got {tuple(cost.shape)}"
            )
        columns = cost.shape[-1]
    if preference is None:
        return templates.new_ones(columns)
    check_tensor(preference, "preference")
    if not preference.is_floating_point():
        raise TypeError(f"preference must be floating point, got {preference.dtype}; use .float()")
    if preference.dim() < 1 or preference.shape[-1] != columns:
        entries = "each template" if cost is None else "each column of the cost"
        raise ValueError(
            f"preference must be (..., {columns}), one for {entries}, got {tuple(preference.shape)}"
        )
    return preference


def broadcast_batch(
    templates: Tensor,
    preference: Tensor,
    cost: Tensor | None,
    evidence: Tensor,
    reliability: Tensor,
    gamma: Tensor,
    mask: Tensor | None,
) -> torch.Size:
    return broadcast(
        templates=templates.shape[:-2],
        preference=preference.shape[:-1],
        cost=torch.Size() if cost is None else cost.shape[:-2],
        evidence=evidence.shape[:-1],
        reliability=reliability.shape,
        gamma=gamma.shape,
        mask=torch.Size() if mask is None else mask.shape[:-1],
    )
