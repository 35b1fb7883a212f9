"""The estimation problem made ready: shapes, precision, and which rows share their templates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import NonFiniteError, certificate_dtype, check_tensor, has, where


@dataclass(frozen=True)
class Layout:
    """Batch axes along which templates differ make groups, the others make rows of a group."""

    batch: torch.Size
    groups: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, templates: Tensor, batch: torch.Size) -> Layout:
        """templates (*batch, n, d), with size 1 along the axes that share them."""
        shared = [templates.shape[axis] == 1 for axis in range(len(batch))]
        return cls(
            batch,
            tuple(axis for axis, same in enumerate(shared) if not same),
            tuple(axis for axis, same in enumerate(shared) if same),
        )

    def pack(self, x: Tensor, tail: int) -> Tensor:
        """(*batch, tail) or broadcastable to it -> (g, m, tail)"""
        x = x.expand((*self.batch, *x.shape[x.dim() - tail :]))
        ends = range(len(self.batch), x.dim())
        moved = x.permute((*self.groups, *self.rows, *ends))
        sizes = self.count(self.groups), self.count(self.rows)
        return moved.reshape((*sizes, *x.shape[x.dim() - tail :]))

    def count(self, axes: tuple[int, ...]) -> int:
        return math.prod([self.batch[axis] for axis in axes])

    def unpack(self, x: Tensor) -> Tensor:
        """(g, m, tail) -> (*batch, tail)"""
        order = (*self.groups, *self.rows)
        apart = x.reshape((*(self.batch[axis] for axis in order), *x.shape[2:]))
        back = [order.index(axis) for axis in range(len(order))]
        return apart.permute((*back, *range(len(order), apart.dim())))

    def unpack_filled(self, x: Tensor, empty: Tensor, missing: float) -> Tensor:
        """The same, with `missing` in the rows (g, m) that are empty."""
        row = empty.reshape(*empty.shape, *(1,) * (x.dim() - 2))
        return self.unpack(where(~row, x, missing))


@dataclass(frozen=True, eq=False)
class EstimationProblem:
    """In float64, templates about a centre that the rows of a group share.

    templates (g, n, d), preference (g, m, n) summing to one, evidence (g, m, d), target (g, m, d)
    = mean + evidence, reliability (g, m, 1), empty (g, m): no template has any preference.
    """

    templates: Tensor
    preference: Tensor
    evidence: Tensor
    target: Tensor
    reliability: Tensor
    centre: Tensor  # (g, 1, d)
    empty: Tensor
    layout: Layout
    dtype: torch.dtype

    def out(self, x: Tensor, missing: float = 0.0) -> Tensor:
        """(g, m, ...) as the caller's batch, `missing` in empty rows."""
        return self.layout.unpack_filled(x, self.empty, missing)


def make_problem(
    templates: Tensor,
    preference: Tensor | None,
    evidence: Tensor,
    reliability: float | Tensor,
    mask: Tensor | None,
) -> EstimationProblem:
    """preference None: the same for every template."""
    check_operands(templates, preference, evidence, mask)
    dtype = torch.promote_types(templates.dtype, evidence.dtype)
    if preference is None:
        preference = templates.new_ones(templates.shape[-2])
    dtype = torch.promote_types(dtype, preference.dtype)
    inner = certificate_dtype(templates.device)
    reliability = read_positive(reliability, "reliability", evidence).to(inner)
    if mask is not None:
        broadcast(
            mask=mask.shape[:-1],
            templates=templates.shape[:-2],
            preference=preference.shape[:-1],
            evidence=evidence.shape[:-1],
        )
        preference = where(mask, preference, 0.0)
        templates = clear_unused(templates, mask)
    check_finite(templates, preference, evidence)
    templates, preference, evidence = (x.to(inner) for x in (templates, preference, evidence))
    batch = broadcast(
        templates=templates.shape[:-2],
        preference=preference.shape[:-1],
        evidence=evidence.shape[:-1],
        reliability=reliability.shape,
    )
    templates = drop_copies(templates, batch)
    layout = Layout.of(templates, batch)
    grouped = group_templates(templates, layout)
    preference, empty = normalise(layout.pack(preference, 1))
    centre = _centre(grouped, preference)
    about = grouped - centre
    packed = layout.pack(evidence, 1)
    target = preference @ about + packed
    strength = layout.pack(reliability, 0).unsqueeze(-1)
    return EstimationProblem(
        about, preference, packed, target, strength, centre, empty, layout, dtype
    )


def empty_search(solution: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors such as a search returns: a solution (..., m, k); gap, steps and status (..., m)."""
    row = solution[..., 0]
    whole = torch.empty_like(row, dtype=torch.int64)
    return torch.empty_like(solution), torch.empty_like(row), whole, torch.empty_like(whole)


def broadcast(**shapes: torch.Size) -> torch.Size:
    """The batch shape of all; an error names what does not fit."""
    try:
        batch: torch.Size = torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        shown = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items() if shape)
        raise ValueError(f"the leading axes do not broadcast: {shown}") from None
    return batch


def clear_unused(templates: Tensor, mask: Tensor) -> Tensor:
    """Templates that no row may use hold anything: zero instead."""
    lead = templates.dim() - 2
    used = mask.reshape(*(1,) * (lead + 1 - mask.dim()), *mask.shape)
    while used.dim() > lead + 1:
        used = used.any(0)
    for axis in range(lead):
        if templates.shape[axis] == 1:
            used = used.any(axis, keepdim=True)
    return where(used.unsqueeze(-1), templates, 0.0)


def drop_copies(templates: Tensor, batch: torch.Size) -> Tensor:
    """(*batch, n, d) with size 1 where the same templates serve many rows, expanded or not."""
    missing = len(batch) + 2 - templates.dim()
    templates = templates.reshape(*(1,) * missing, *templates.shape)
    for axis, size in enumerate(batch):
        if size > 1 and templates.shape[axis] > 1 and templates.stride(axis) == 0:
            templates = templates.narrow(axis, 0, 1)
    return templates


def group_templates(templates: Tensor, layout: Layout) -> Tensor:
    """(g, n, d)"""
    ends = (len(layout.batch), len(layout.batch) + 1)
    moved = templates.permute((*layout.groups, *layout.rows, *ends))
    return moved.reshape(layout.count(layout.groups), *templates.shape[-2:])


def normalise(preference: Tensor) -> tuple[Tensor, Tensor]:
    """Summing to one; empty rows get an even preference, whose results are dropped."""
    top = preference.detach().amax(-1, keepdim=True)
    empty = ~(top > 0)
    filled = torch.where(empty, torch.ones_like(preference), preference)
    scaled = filled / torch.where(empty, torch.ones_like(top), top)
    return scaled / scaled.sum(-1, keepdim=True), empty.squeeze(-1)


def _centre(templates: Tensor, preference: Tensor) -> Tensor:
    """A constant to measure from: the middle of the templates in use. (g, 1, d)

    By way of the first of them, so that templates that are all the same leave exactly nothing.
    """
    used = (preference.detach() > 0).any(1).to(templates.dtype)  # (g, n)
    weights = used / used.sum(-1, keepdim=True).clamp_min(1)
    values = templates.detach()
    place = used.argmax(-1)[:, None, None].expand(-1, 1, values.shape[-1])
    first = values.gather(1, place)
    return first + weights.unsqueeze(1) @ (values - first)


def read_positive(value: float | Tensor, name: str, like: Tensor) -> Tensor:
    """A positive number, or one for each row."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    inner = certificate_dtype(like.device)
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=inner)
    tensor = tensor.to(like.device)
    if not tensor.is_floating_point():
        tensor = tensor.to(inner)
    values = tensor.detach()
    if has(~((values > 0) & values.isfinite())):
        shown = _first_unfit(values)
        kind = ValueError if math.isfinite(shown) else NonFiniteError
        raise kind(f"{name} must be finite and > 0, got {shown:g}")
    return tensor


def _first_unfit(values: Tensor) -> float:
    wrong = values[~((values > 0) & values.isfinite())]
    return float(wrong.flatten()[0])


def check_operands(
    templates: Tensor, preference: Tensor | None, evidence: Tensor, mask: Tensor | None
) -> None:
    named = {"templates": templates, "evidence": evidence}
    if preference is not None:
        named["preference"] = preference
    for name, value in named.items():
        check_tensor(value, name)
        if not value.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {value.dtype}; use .float()")
    if templates.dim() < 2 or 0 in templates.shape[-2:]:
        raise ValueError(f"templates must be (..., n, d), not empty, got {tuple(templates.shape)}")
    n, d = templates.shape[-2:]
    if evidence.dim() < 1 or evidence.shape[-1] != d:
        raise ValueError(
            f"evidence must be (..., {d}) for templates of {d} coordinates, "
            f"got {tuple(evidence.shape)}"
        )
    if preference is not None and (preference.dim() < 1 or preference.shape[-1] != n):
        raise ValueError(
            f"preference must be (..., {n}), one for each template, got {tuple(preference.shape)}"
        )
    if mask is not None:
        check_tensor(mask, "mask")
        if mask.dtype != torch.bool or mask.dim() < 1 or mask.shape[-1] != n:
            raise ValueError(
                f"mask must be bool (..., {n}), True = takes part, "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
    leads = {
        name: value.shape[:-2] if name == "templates" else value.shape[:-1]
        for name, value in named.items()
    }
    broadcast(**leads)


def check_finite(templates: Tensor, preference: Tensor, evidence: Tensor) -> None:
    for name, value in (
        ("templates", templates),
        ("preference", preference),
        ("evidence", evidence),
    ):
        if has(~value.detach().isfinite()):
            raise NonFiniteError(f"{name} must be finite; they hold NaN or infinity")
    if has(preference.detach() < 0):
        raise ValueError(
            "preference must be >= 0; pass weights, not scores (their exponential, or a softmax)"
        )
