"""Transport with the dot-product cost, to first order: an average of attentions.

With M[t, j] = C - <t, t_j> and lam = reliability z,

    p = sum_j u_j softmax_t(<t, reliability z + t_j> / gamma):

one attention for each template j, whose query is the evidence moved by t_j, whose keys and values
are the templates. C cancels, and no matrix of costs or weights is ever whole in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._attention import attention
from fenchel._kernels import average
from fenchel._kernels.route import against_average
from fenchel._numerics import check_tensor, compute_dtype, full_precision, where
from fenchel.dual.problem import (
    Layout,
    check_finite,
    check_operands,
    clear_unused,
    drop_copies,
    group_templates,
    normalise,
    read_positive,
)
from fenchel.dual.transport_problem import broadcast_batch, spread

# Deciphering Attention, section 9, with a dot product as cost.
_ENTRIES = 2**22  # numbers of the queries that are held at once


def dot_product_transport(
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    gamma: float | Tensor,
    *,
    mask: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """The mean of `transport_first_order(..., cost=None, ...)`, in memory that is linear in N.

    templates (..., N, d), preference (..., N) >= 0 or None for an even one, evidence (..., d),
    reliability > 0 and gamma > 0, numbers or (...); mask (..., N): True = takes part. Leading axes
    broadcast; rows that share their templates go through `fenchel.attention` together. Returns
    (..., d), zeros where nothing takes part. Computed in the precision of the inputs, at least
    float32.
    values (..., N, e): averaged in place of the templates, shared as they are; gives (..., e).

    >>> templates, evidence = torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    >>> dot_product_transport(templates, None, evidence, 1.0, gamma=1.0)[1]
    tensor([0.3333, 0.3333, 0.3333])
    """
    check_operands(templates, preference, evidence, mask)
    if preference is None:
        preference = templates.new_ones(templates.shape[-2])
    dtype = torch.promote_types(templates.dtype, evidence.dtype)
    dtype = torch.promote_types(dtype, preference.dtype)
    if values is not None:
        check_tensor(values, "values")
        dtype = torch.promote_types(dtype, values.dtype)
    inner = compute_dtype(dtype)
    reliability = read_positive(reliability, "reliability", evidence).to(inner)
    gamma = read_positive(gamma, "gamma", evidence).to(inner)
    batch = broadcast_batch(templates, preference, None, evidence, reliability, gamma, mask)
    if mask is not None:
        preference, templates = where(mask, preference, 0.0), clear_unused(templates, mask)
    check_finite(templates, preference, evidence)
    templates = drop_copies(templates.to(inner), batch)
    layout = Layout.of(templates, batch)
    keys = group_templates(templates, layout)  # (g, N, d)
    content = None if values is None else _group_values(values.to(inner), keys, layout)
    shares, empty = normalise(layout.pack(preference.to(inner), 1))
    moved = reliability.unsqueeze(-1) * evidence.to(inner)
    moved = layout.pack(moved.expand(*batch, -1), 1)  # (g, m, d)
    heat = layout.pack(gamma, 0).unsqueeze(-1)
    visible = None if mask is None else spread(mask.unsqueeze(-2), layout)  # (g, m|1, 1, N)
    mean = _average(keys, content, shares, moved, heat, visible)
    return layout.unpack(where(~empty.unsqueeze(-1), mean, 0.0)).to(dtype)


def _group_values(values: Tensor, keys: Tensor, layout: Layout) -> Tensor:
    """(..., N, e) -> (g, N, e)"""
    if values.dim() < 2 or values.shape[-2] != keys.shape[1]:
        raise ValueError(
            f"values must be (..., {keys.shape[1]}, e), one for each template, "
            f"got {tuple(values.shape)}"
        )
    try:
        grouped = spread(values, layout)
    except RuntimeError:
        grouped = values.new_empty(0, 0)
    if grouped.shape[:2] != (len(keys), 1):
        raise ValueError(
            "values must be shared by the rows that share their templates, got "
            f"{tuple(values.shape)} for a batch of {tuple(layout.batch)}"
        )
    return grouped.squeeze(1)


def _average(
    keys: Tensor,
    values: Tensor | None,
    shares: Tensor,
    moved: Tensor,
    gamma: Tensor,
    visible: Tensor | None,
) -> Tensor:
    """sum_j u_j attention(moved + t_j), some rows at a time. (g, m, e)"""
    groups, rows = shares.shape[:2]
    centre = keys.detach().mean(1, keepdim=True)  # the softmax is the same, rounding is less
    about = keys - centre
    content = about if values is None else values
    some = max(1, _ENTRIES // max(1, groups * keys.shape[1] * keys.shape[2]))
    parts = [moved.new_empty(groups, 0, content.shape[-1])]
    for start in range(0, rows, some):
        part = slice(start, start + some)
        query = (moved[:, part].unsqueeze(2) + keys.unsqueeze(1)) / gamma[:, part].unsqueeze(2)
        if visible is None and against_average(query, groups, keys.shape[1]) is None:
            parts.append(average.average_attention(query, about, content, shares[:, part]))
            continue
        allowed = visible if visible is None or visible.shape[1] == 1 else visible[:, part]
        if allowed is not None:
            allowed = allowed | ~allowed.any(-1, keepdim=True)  # empty rows: dropped later
        # rows in the place of heads, (g, m', N, d), which all see the same keys
        key, value = (x.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for x in (about, content))
        with full_precision(query):
            outputs = attention(query, key, value, attn_mask=allowed, scale=1.0)
            parts.append((shares[:, part].unsqueeze(2) @ outputs).squeeze(2))
    mean = torch.cat(parts, 1)
    return mean + centre if values is None else mean
