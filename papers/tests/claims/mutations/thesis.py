"""The thesis but for its integrals: chapters 2 and 3, moments, continuous softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from papers.tests.claims.mutations import Mutation, off_by

Broken = Callable[[Any], Any]


# ---- the finite maps


def wrong_alpha(true):
    return lambda alpha, *rest: true(1.001 * alpha, *rest)


def wrong_temperature(true):
    return lambda temperature=1.0: true(1.001 * temperature)


def tilted(true):
    """Weights a little too even, and no longer of mass one."""

    def solve(*args, **options):
        solution = true(*args, **options)
        return replace(solution, weights=solution.weights**0.999)

    return solve


def raised_threshold(true):
    def solve(*args, **options):
        solution = true(*args, **options)
        answer = solution.answer()
        raised = answer._replace(threshold=1.001 * answer.threshold + 0.001)
        return replace(solution, answer=lambda: raised)

    return solve


# ---- classes


def overriding(name: str, wrong: Callable[[Any], Any]) -> Broken:
    """A subclass in which one member, made from the true class, is wrong."""
    return lambda true: type(true.__name__, (true,), {name: wrong(true)})


def method(name: str, factor: float = 1.001) -> Broken:
    def wrong(true):
        return lambda self, *args, **options: factor * getattr(true, name)(self, *args, **options)

    return overriding(name, wrong)


def attribute(name: str, factor: float = 1.001) -> Broken:
    return overriding(
        name, lambda true: property(lambda self: factor * getattr(true, name).fget(self))
    )


def from_covariance(true):
    """Takes the variance for the scale."""
    wrong = classmethod(lambda cls, mean, covariance: cls(mean, covariance))
    return type(true.__name__, (true,), {"from_covariance": wrong})


def wrong_scale(true):
    """Of a constructor (mean, scale, ...) or (centers, covariances)."""
    return lambda mean, scale, *rest: true(mean, 1.001 * scale, *rest)


def wrong_matrix(true):
    return lambda matrix, *rest: true(1.001 * matrix, *rest)


def heads_of(true):
    """Output maps in the wrong order."""

    def from_module(cls, module):
        heads = true.from_module(module)
        heads.outputs.reverse()
        return heads

    return type(true.__name__, (true,), {"from_module": classmethod(from_module)})


def first_output(true):
    """Of a module that returns its output and its weights."""

    def forward(self, *args, **options):
        output, weights = true.forward(self, *args, **options)
        return 1.001 * output, weights

    return type(true.__name__, (true,), {"forward": forward})


# ---- functions


def unscaled(true):
    """Without the 1 / sqrt(d)."""
    return lambda query, key, value: true(query, key, value, scale=1.0)


def wrong_ridge(true):
    def fit(features, positions, basis, ridge):
        return true(features, positions, basis, 1.01 * ridge)

    return fit


def corners(true):
    """Corners of the cells in place of their centres."""
    return lambda *counts, **options: true(*counts, **options) - 0.5 / counts[0]


def matched_scale(true):
    """The variance itself as the scale of every family."""

    def match(weights, positions, family):
        density = true(weights, positions, family)
        return family(density.mean, density.covariance_matrix)

    return match


TSALLIS = Mutation("fenchel.Tsallis", wrong_alpha)
PARABOLOID = Mutation("fenchel.continuous.Paraboloid", wrong_scale)
COVARIANCE = Mutation("fenchel.continuous.Paraboloid", attribute("covariance_matrix"))
VARIANCE_AS_SCALE = Mutation("fenchel.continuous.Paraboloid", from_covariance)
BASIS = Mutation("fenchel.continuous.GaussianBasis", wrong_scale)


def expect_of(family: str) -> Mutation:
    return Mutation(f"fenchel.continuous.{family}", method("expect"))


MUTATIONS = {
    "F-E2.2/2.3/2.6": [Mutation("fenchel.fenchel_young_loss", off_by(1.001))],
    "F-E2.4/2.5": [Mutation("fenchel.measures.Affine", wrong_matrix)],
    "F-E2.7..2.12": [
        Mutation("fenchel.solve", tilted),
        Mutation("fenchel.scores.additive", off_by(1.001)),
        Mutation("fenchel.softmax", off_by(1.001)),
    ],
    "F-E2.13": [
        Mutation("fenchel.attention", off_by(1.001)),
        Mutation("fenchel.attention", unscaled),
    ],
    "F-E2.14/2.15": [
        Mutation("fenchel.nn.MultiheadAttention", first_output),
        Mutation("fenchel.measures.MultiHeadKernel", heads_of),
    ],
    "F-Tab2.1": [
        Mutation("fenchel.scores.additive", off_by(1.001)),
        Mutation("fenchel.scores.bilinear", off_by(1.001)),
        Mutation("fenchel.scores.scaled_dot", off_by(1.001)),
    ],
    "F-E2.16": [Mutation("fenchel.sparsemax", off_by(1.001))],
    "F-E3.1": [
        TSALLIS,
        Mutation("fenchel.Shannon", wrong_temperature),
        Mutation("fenchel.solve", tilted),
    ],
    "F-E3.2": [
        TSALLIS,
        PARABOLOID,
        Mutation("fenchel.continuous.TsallisGaussian", wrong_scale),
        Mutation("fenchel.continuous.Paraboloid", method("entropy")),
    ],
    "F-E3.3/3.4": [TSALLIS, Mutation("fenchel.solve", tilted)],
    "F-E3.5": [TSALLIS, Mutation("fenchel.continuous.Paraboloid", method("entropy"))],
    "F-E3.6": [
        TSALLIS,
        Mutation("fenchel.entmax", lambda true: lambda scores, alpha: true(scores, 1.001 * alpha)),
        Mutation("fenchel.continuous.TsallisGaussian", wrong_scale),
    ],
    "F-E3.7": [TSALLIS, Mutation("fenchel.solve", raised_threshold)],
    "F-E3.8": [TSALLIS, Mutation("fenchel.solve", raised_threshold)],
    "F-E3.9": [TSALLIS, Mutation("fenchel.solve", tilted)],
    "F-E3.10/3.11": [
        Mutation("fenchel.Shannon", wrong_temperature),
        Mutation("fenchel.softmax", off_by(1.001)),
    ],
    "F-E3.12": [Mutation("fenchel.continuous.Gaussian", wrong_scale)],
    "F-E3.13": [TSALLIS, Mutation("fenchel.solve", raised_threshold)],
    "F-E3.14/3.15": [PARABOLOID],
    "F-S3.2txt": [
        PARABOLOID,
        Mutation("fenchel.Tsallis", lambda true: lambda alpha: true(1.0)),
    ],
    "F-Fig3.1": [PARABOLOID, Mutation("fenchel.continuous.Gaussian", wrong_scale)],
    "F-E3.16": [
        BASIS,
        Mutation("fenchel.continuous.fit_values", wrong_ridge),
        expect_of("Gaussian"),
        expect_of("Paraboloid"),
    ],
    "F-E3.17/3.18": [
        BASIS,
        Mutation("fenchel.continuous.fit_values", lambda true: lambda *args, ridge: true(*args)),
        Mutation("fenchel.continuous.cell_centers", corners),
    ],
    "F-E3.19": [TSALLIS, Mutation("fenchel.solve", tilted)],
    "F-E3.20": [TSALLIS, BASIS, expect_of("TsallisGaussian")],
    "F-REF1D": [BASIS, expect_of("Paraboloid")],
    "F-T1": [COVARIANCE, VARIANCE_AS_SCALE],
    "F-A.6/A.7": [PARABOLOID],
    "F-E4.2/4.3": [
        VARIANCE_AS_SCALE,
        Mutation("fenchel.continuous.Paraboloid", attribute("variance")),
    ],
    "F-E4.4": [COVARIANCE],
    "F-E4.5": [COVARIANCE],
    "F-E4.6": [Mutation("fenchel.continuous.match_moments", matched_scale)],
    "F-E4.7..4.10": [BASIS, expect_of("Gaussian")],
    "F-E4.11/4.12": [BASIS, expect_of("Gaussian")],
    "F-A.14": [PARABOLOID],
    "F-A.26": [PARABOLOID],
    "F-A.27": [PARABOLOID],
}
WITHOUT: dict[str, str] = {}
