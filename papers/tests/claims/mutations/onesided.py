"""Of paper L: the library's solve, attention, maps and priors, broken."""

from collections.abc import Callable
from dataclasses import replace

from papers.tests.claims.mutations import Mutation, off_by


class Spoiled:
    """A result of which some numbers are off by a factor; methods give them when called."""

    def __init__(self, true, factors: dict[str, float]) -> None:
        self._true, self._factors = true, factors

    def __getattr__(self, name: str):
        value = getattr(self._true, name)
        if name not in self._factors:
            return value
        factor = self._factors[name]
        if callable(value):
            return lambda *args, **options: factor * value(*args, **options)
        return factor * value


def spoiled(**factors: float) -> Callable[[Callable], Callable]:
    """Its answer, with these parts of it times a factor."""
    return lambda true: lambda *args, **options: Spoiled(true(*args, **options), factors)


def with_weights(factor: float) -> Callable[[Callable], Callable]:
    """Off by a factor in the solution itself, so that what it computes of them is off as well."""

    def broken(true: Callable) -> Callable:
        def call(*args, **options):
            solution = true(*args, **options)
            return replace(solution, weights=factor * solution.weights)

        return call

    return broken


def with_more_scores(true: Callable) -> Callable:
    return lambda scores, *args, **options: true(1.01 * scores, *args, **options)


def with_options(**others: object) -> Callable[[Callable], Callable]:
    """Called with these options, whatever was asked for."""
    return lambda true: lambda *args, **options: true(*args, **(options | others))


def turned(true: Callable) -> Callable:
    """The first argument with the other sign."""
    return lambda first, *args, **options: true(-first, *args, **options)


def with_more_alpha(true: Callable) -> Callable:
    return lambda scores, alpha: true(scores, alpha + 1e-3)


def with_steeper_slopes(true: Callable) -> Callable:
    return lambda heads, slopes: true(heads, 1.001 * slopes)


WEIGHTS = Mutation("fenchel.solve", spoiled(weights=1.001))
POTENTIAL = Mutation("fenchel.solve", spoiled(potential=1.001))
HESSIAN = Mutation("fenchel.solve", spoiled(hessian=1.001))
FISHER = Mutation("fenchel.solve", spoiled(fisher=1.001))
GRADIENT = Mutation("fenchel.solve", spoiled(gradient=1.001))
ATTENTION = Mutation("fenchel.attention", off_by(1.001))
TURNED = Mutation("fenchel.solve", turned)
WEIGHTS_WITHIN = Mutation("fenchel.solve", with_weights(1.01))
MORE_SCORES = Mutation("fenchel.solve", with_more_scores)

MUTATIONS = {
    "L-1": [WEIGHTS, POTENTIAL, ATTENTION, TURNED],
    "L-2": [
        WEIGHTS,
        Mutation("fenchel.dual.true_preference", spoiled(weights=1.001)),
        Mutation("fenchel.measures.transport_plan", spoiled(plan=1.001)),
    ],
    "L-3": [
        WEIGHTS,
        TURNED,
        MORE_SCORES,
        Mutation("fenchel.measures.wasserstein1", off_by(1.2)),
        Mutation("fenchel.measures.entropic_wasserstein1", spoiled(lower=1.1)),
        Mutation("fenchel.measures.entropic_wasserstein1", spoiled(lower=0.0, upper=1e3)),
    ],
    "L-4": [
        Mutation("fenchel.fenchel_young_loss", off_by(0.99)),
        Mutation("fenchel.fenchel_young_loss", off_by(1.001)),
    ],
    "L-E8/E9": [WEIGHTS, POTENTIAL, Mutation("fenchel.sparsemax", off_by(1.001))],
    "L-E11/E12": [WEIGHTS, POTENTIAL, ATTENTION],
    "L-SQRTD": [
        Mutation("fenchel.scores.scaled_dot", off_by(1.001)),
        Mutation("fenchel.scores.scaled_dot", with_options(scale=1.0)),
    ],
    "L-E13": [WEIGHTS, TURNED],
    "L-TabSoftmax": [WEIGHTS, TURNED, ATTENTION],
    "L-TabSparsemax": [WEIGHTS, Mutation("fenchel.sparsemax", off_by(1.001))],
    "L-TabPrior": [
        WEIGHTS,
        Mutation("fenchel.solve", with_options(base=None)),
        Mutation("fenchel.dual.first_order", spoiled(weights=1.001)),
    ],
    "L-Entmax": [
        Mutation("fenchel.entmax", with_more_alpha),
        Mutation("fenchel.sparsemax", off_by(1.001)),
    ],
    "L-ALiBi": [
        Mutation("fenchel.priors.ALiBi", with_steeper_slopes),
        Mutation("fenchel.solve", with_options(base=None)),
    ],
    "L-5": [WEIGHTS, GRADIENT, Mutation("fenchel.solve", spoiled(advantage=1.001))],
    "L-5q": [ATTENTION, Mutation("fenchel.attention", with_options(scale=None))],
    "L-5pg": [WEIGHTS, GRADIENT, HESSIAN, WEIGHTS_WITHIN, MORE_SCORES],
    "L-5var": [WEIGHTS, GRADIENT, HESSIAN, WEIGHTS_WITHIN, MORE_SCORES],
    "L-6": [WEIGHTS, HESSIAN, FISHER, POTENTIAL],
    "L-6dual": [WEIGHTS, POTENTIAL],
    "L-6KL": [WEIGHTS, FISHER, WEIGHTS_WITHIN, MORE_SCORES],
    "L-7": [HESSIAN, FISHER, TURNED],
}
WITHOUT: dict[str, str] = {}
