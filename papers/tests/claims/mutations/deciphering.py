"""Of the estimation problem, its expansion, heads and readings (paper D, sections 3 to 8, A, B)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import torch

from papers.tests.claims.mutations import Mutation, off_by

FACTOR = 1.001


def scaled(*fields: str, by: float = FACTOR) -> Callable[[Callable], Callable]:
    """These fields of the answer times a factor."""

    def broken(true: Callable) -> Callable:
        def call(*args, **options):
            solution = true(*args, **options)
            return replace(solution, **{name: by * getattr(solution, name) for name in fields})

        return call

    return broken


def with_argument(place: int, change: Callable) -> Callable[[Callable], Callable]:
    """The answer to another question: one of the arguments is changed."""

    def broken(true: Callable) -> Callable:
        def call(*args, **options):
            changed = [change(x) if k == place else x for k, x in enumerate(args)]
            return true(*changed, **options)

        return call

    return broken


def with_option(**changed) -> Callable[[Callable], Callable]:
    return lambda true: lambda *args, **options: true(*args, **{**options, **changed})


def with_scaled_templates(true: Callable) -> Callable:
    """The layer, with 1 / sqrt(head_dim) in its scores where its form has no such factor."""
    return lambda *args, form, **options: true(*args, form=replace(form, scale=None), **options)


def without_base(true: Callable) -> Callable:
    return lambda scores, regularizer, base: true(scores, regularizer)


def nan_weights_after(calls: int) -> Callable[[Callable], Callable]:
    """Right for so many calls, and then with weights that are not numbers."""

    def broken(true: Callable) -> Callable:
        numbered = count()

        def call(*args, **options):
            solution = true(*args, **options)
            late = next(numbered) >= calls
            return replace(solution, weights=math.nan * solution.weights) if late else solution

        return call

    return broken


def without_covariance(true: Callable) -> Callable:
    """The multiplier of N(μ, I); the mean and the dual's value there are of the true covariance."""

    def call(mean, covariance, evidence, reliability):
        alpha = torch.as_tensor(reliability, dtype=mean.dtype).unsqueeze(-1)
        solution = true(mean, torch.eye(len(mean), dtype=mean.dtype), evidence, reliability)
        multiplier = solution.multiplier
        moved = multiplier @ covariance
        slope = evidence - multiplier / (2 * alpha) - moved / 2
        value = (multiplier * slope).sum(-1)
        return replace(solution, mean=mean + moved, dual_value=value)

    return call


def stalled(true: Callable) -> Callable:
    """Ends after three steps where there are many templates."""

    def call(templates, *args, **options):
        few = {"max_steps": 3} if templates.shape[-2] > 100 else {}
        return true(templates, *args, **{**options, **few})

    return call


def compared(multiplier: float = 1.0, mean_shift: float = 1.0) -> Mutation:
    """What `Estimate.compare` says, times these factors."""

    def broken(true: Callable) -> Callable:
        return lambda lam, mean, shift: true(multiplier * lam, mean, mean_shift * shift)

    return Mutation("fenchel.dual.result.Deviation", broken)


ESTIMATE, FIRST, SECOND = (f"fenchel.dual.{x}" for x in ("estimate", "first_order", "second_order"))
OTHER_RELIABILITY = Mutation(ESTIMATE, with_argument(3, lambda x: FACTOR * x))
OTHER_SCORES = Mutation("fenchel.solve", with_argument(0, lambda x: FACTOR * x))
WITHOUT_BASE = Mutation("fenchel.solve", without_base)
MASK_FORGOTTEN = Mutation(ESTIMATE, with_argument(1, lambda u: u + 1e-3))
NAN_LATER = Mutation(ESTIMATE, nan_weights_after(1))
ONE_SIDED = Mutation("fenchel.nn.PositionPreference", with_option(bidirectional=False))

MUTATIONS = {
    "D-E1": [
        Mutation(ESTIMATE, scaled("mean")),
        Mutation(ESTIMATE, scaled("weights")),
        Mutation(FIRST, scaled("mean")),
        Mutation(SECOND, scaled("mean")),
        Mutation("fenchel.attention", off_by(FACTOR)),
    ],
    "D-E2": [Mutation(FIRST, scaled("prior_mean"))],
    "D-E3": [OTHER_RELIABILITY, MASK_FORGOTTEN],
    "D-E4": [OTHER_RELIABILITY, Mutation(ESTIMATE, scaled("mean"))],
    "D-MEM": [
        OTHER_RELIABILITY,
        Mutation("fenchel.dual.within_radius", with_argument(3, lambda x: FACTOR * x)),
    ],
    "D-E5/E6": [Mutation("fenchel.dual.gaussian", scaled(x)) for x in ("multiplier", "mean")],
    "D-T1": [
        OTHER_RELIABILITY,
        Mutation(ESTIMATE, scaled("multiplier")),
        Mutation(ESTIMATE, scaled("dual_value")),
    ],
    "D-E10": [Mutation(ESTIMATE, scaled("multiplier")), Mutation(ESTIMATE, scaled("mean"))],
    "D-E11": [OTHER_SCORES, WITHOUT_BASE],
    "D-E12": [
        OTHER_SCORES,
        Mutation(ESTIMATE, scaled("multiplier")),
        Mutation("fenchel.dual.gaussian", scaled("dual_value")),
        Mutation("fenchel.dual.gaussian", scaled("mean")),
        Mutation("fenchel.dual.gaussian", without_covariance),
    ],
    "D-E13": [OTHER_RELIABILITY, Mutation(SECOND, scaled("multiplier"))],
    "D-E14": [
        OTHER_RELIABILITY,
        Mutation(FIRST, scaled("multiplier")),
        compared(multiplier=FACTOR),
    ],
    "D-T2/E15": [OTHER_RELIABILITY, Mutation(FIRST, scaled("mean")), compared(mean_shift=2.0)],
    "D-T2dom": [
        OTHER_RELIABILITY,
        Mutation(FIRST, scaled("mean")),
        Mutation(ESTIMATE, stalled),
        compared(mean_shift=2.0),
    ],
    "D-LIM": [
        Mutation(ESTIMATE, scaled("mean", by=1.01)),
        MASK_FORGOTTEN,
        Mutation(ESTIMATE, with_argument(3, lambda x: x.clamp(max=1e4))),
        Mutation(ESTIMATE, with_argument(3, lambda x: 1.5 * x)),
    ],
    "D-Fig3": [
        OTHER_RELIABILITY,
        Mutation(FIRST, with_argument(2, lambda z: FACTOR * z)),
        compared(mean_shift=2.0),
    ],
    "D-E16": [Mutation(FIRST, scaled("mean")), Mutation("fenchel.attention", off_by(FACTOR))],
    "D-E17": [WITHOUT_BASE, ONE_SIDED],
    "D-E18": [ONE_SIDED, Mutation(FIRST, with_argument(1, lambda u: u**FACTOR))],
    "D-E19a": [Mutation(FIRST, scaled("mean")), Mutation("fenchel.attention", off_by(FACTOR))],
    "D-E19b": [
        Mutation(FIRST, with_argument(1, lambda u: u**FACTOR)),
        Mutation("fenchel.nn.PreferenceAttention", with_scaled_templates),
    ],
    "D-Fig1": [
        Mutation(FIRST, scaled("mean")),
        Mutation(FIRST, with_argument(0, lambda t: t.detach())),
        Mutation(ESTIMATE, with_argument(1, lambda u: u.detach())),
    ],
    "D-Fig2": [Mutation(FIRST, scaled("weights")), Mutation(FIRST, scaled("mean"))],
    "D-Fig4": [OTHER_RELIABILITY, compared(multiplier=FACTOR)],
    "D-E23..26": [OTHER_SCORES, WITHOUT_BASE],
    "D-E27/28": [
        OTHER_RELIABILITY,
        NAN_LATER,
        Mutation("fenchel.dual.reliability_of", off_by(FACTOR)),
    ],
    "D-E29/30": [
        OTHER_RELIABILITY,
        NAN_LATER,
        Mutation("fenchel.dual.reliability_of", off_by(FACTOR)),
    ],
}
WITHOUT: dict[str, str] = {}
