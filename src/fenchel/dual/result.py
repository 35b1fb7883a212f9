"""What the solvers of this folder return, and how far two of them are apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status, explain_statuses
from fenchel.dual.problem import broadcast

_ROUNDINGS = 16  # of the terms of a mean that may add up
_REMEDIES = {
    Status.OK: "nothing to do: the row is solved",
    Status.EMPTY: "no template takes part, so all results are zero; unmask one, or give it "
    "preference",
    Status.NONFINITE: "a value left the range of float64; make evidence, templates or reliability "
    "smaller (templates / c with evidence / c and reliability c^2 are the same problem), or, of a "
    "transport, let every column of the cost go somewhere",
    Status.INFEASIBLE: "no weights bring the mean within the radius, and what a large reliability "
    "gives is returned; enlarge the radius, or give templates that surround the target",
    Status.MAX_STEPS: "the tolerance was not reached; the gap says how far off the row may be, and "
    "derivatives mean nothing. Raise max_steps if you lowered it, or the tolerance; beyond "
    "reliability |t|^2 of some 1e9 rounding is what is left: lower the reliability, or enlarge "
    "the radius",
}


@dataclass(frozen=True, eq=False)
class Deviation:
    """Relative differences of one estimate from another, one per row, in float64: |a - b| / |b|.

    mean_shift: |a - b| / |b - what no evidence gives|, of the means. Each is 0 where a and b are
    the same up to rounding, and inf where only b is zero.
    """

    multiplier: Tensor
    mean: Tensor
    mean_shift: Tensor


@dataclass(frozen=True, eq=False)
class Unrounded:
    """Results in float64, before they take the precision of the operands; without derivatives.

    multiplier, mean, prior_mean, centre (..., d): means are counted from the centre.
    noise, multiplier_noise (...): differences up to this may be rounding.
    """

    multiplier: Tensor
    mean: Tensor
    prior_mean: Tensor
    centre: Tensor
    noise: Tensor
    multiplier_noise: Tensor

    @classmethod
    def of(
        cls,
        multiplier: Tensor,
        means: tuple[Tensor, Tensor, Tensor],
        size: Tensor,
        evidence: Tensor,
        reliability: Tensor,
    ) -> Unrounded:
        """means: mean, prior mean, centre. size (...): of the terms whose sums the means are.

        What such a sum loses, the multiplier, reliability (target - mean), loses times the
        reliability (..., 1).
        """
        eps = _ROUNDINGS * torch.finfo(size.dtype).eps
        strength, length = reliability.detach().squeeze(-1), evidence.detach().norm(dim=-1)
        noise = eps * size.detach()
        mean, prior, centre = (x.detach() for x in means)
        doubt = strength * (noise + eps * length)
        return cls(multiplier.detach(), mean, prior, centre, noise, doubt)


@dataclass(frozen=True, eq=False)
class Estimate:
    """The solution, exact or approximate, of one estimation problem a row.

    multiplier (..., d): lam of the dual. weights (..., n): over the templates; None where the
    preference is continuous. mean (..., d): the estimate itself, sum_i weights_i t_i.
    objective, dual_value (...): of the two problems, at these weights and this multiplier.
    gap (...): bounds how far the objective is from its minimum; computed without cancellation, so
    it is finer than the difference of the two values. It carries no derivative.
    steps (...): Newton's. status (...): codes of `fenchel.Status`; `explain` says them in words.
    prior_mean (..., d): what no evidence would give.

    multiplier, weights, mean and prior_mean are in the precision of the operands; objective,
    dual_value and gap in float64. Derivatives are those of the solution: where the status is
    MAX_STEPS they are taken at a point that is none, and mean nothing.
    """

    multiplier: Tensor
    weights: Tensor | None = field(repr=False)
    mean: Tensor
    objective: Tensor
    dual_value: Tensor
    gap: Tensor
    steps: Tensor
    status: Tensor
    prior_mean: Tensor = field(repr=False)
    unrounded: Unrounded = field(repr=False)

    def compare(self, other: Estimate) -> Deviation:
        """How far this one is from `other`, relative to the other; 0 where both are the same.

        From the numbers before they were rounded to the precision of the operands; differences that
        may be rounding of float64 count as zero. inf where the other is zero and this one is not.

        >>> from fenchel.dual import estimate, first_order
        >>> templates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> problem = (templates, None, torch.tensor([0.3, 0.0]), 0.5)
        >>> deviation = first_order(*problem).compare(estimate(*problem))
        >>> bool(deviation.mean < deviation.multiplier)
        True
        """
        if not isinstance(other, Estimate):
            raise TypeError(f"other must be an Estimate, got {type(other).__name__}")
        first, second = self.unrounded, other.unrounded
        if first.mean.shape[-1] != second.mean.shape[-1]:
            raise ValueError(
                f"the estimates have {first.mean.shape[-1]} and {second.mean.shape[-1]} "
                "coordinates; compare two solutions of one problem"
            )
        broadcast(this=first.noise.shape, other=second.noise.shape)
        means = first.mean - second.mean + (first.centre - second.centre)
        noise = first.noise + second.noise
        doubt = first.multiplier_noise + second.multiplier_noise
        return Deviation(
            _relative(first.multiplier - second.multiplier, second.multiplier, doubt),
            _relative(means, second.mean + second.centre, noise),
            _relative(means, second.mean - second.prior_mean, noise),
        )

    def explain(self) -> str:
        """One line for each status that occurs, with what to do about it."""
        return explain_statuses(self.status, _REMEDIES)

    def __repr__(self) -> str:
        worst = Status(int(self.status.max())) if self.status.numel() else Status.OK
        return (
            f"Estimate(batch={tuple(self.gap.shape)}, d={self.mean.shape[-1]}, "
            f"gap <= {float(self.gap.max()) if self.gap.numel() else 0.0:.1e}, "
            f"worst status {worst.name})"
        )


def _relative(apart: Tensor, size: Tensor, noise: Tensor) -> Tensor:
    """|apart| / |size|, where what is within the noise is zero. (...)"""
    off, length = apart.norm(dim=-1), size.norm(dim=-1)
    ratio = where(length > noise, off / where(length > 0, length, 1.0), torch.inf)
    return where(off > noise, ratio, 0.0)
