"""Of paper D, its transport problem and its two tables of networks."""

from collections.abc import Callable
from dataclasses import replace

from fenchel import dual
from papers.tests.claims.mutations import Mutation, off_by
from papers.tests.claims.mutations.deciphering import nan_weights_after
from papers.tests.claims.mutations.onesided import spoiled


def with_more_gamma(true: Callable) -> Callable:
    """Of functions whose last argument without a name is gamma."""
    return lambda *args, **options: true(*args[:-1], 1.001 * args[-1], **options)


def with_wider_intervals(factor: float) -> Callable[[Callable], Callable]:
    return lambda true: lambda mean, half, count: true(mean, factor * half, count)


def with_row_sums(true: Callable) -> Callable:
    """The cost turned over: rows for columns."""
    return lambda templates, preference, cost, gamma: true(templates, preference, cost.mT, gamma)


def towards_the_preference(true: Callable) -> Callable:
    """Aims at μ + z for μ̃ + z, and says so of itself."""

    def call(templates, preference, cost, evidence, alpha, gamma):
        mean = preference @ templates
        moved = mean - dual.true_preference(templates, preference, cost, gamma).mean
        solution = true(templates, preference, cost, evidence + moved, alpha, gamma)
        return replace(solution, prior_mean=mean)

    return call


EXACT = "fenchel.dual.transport"
FIRST = "fenchel.dual.transport_first_order"
TRUE = "fenchel.dual.true_preference"
INTERVAL = "papers.experiments.statistics.Estimate"

MUTATIONS = {
    "D-E20": [
        Mutation(EXACT, spoiled(objective=1.001)),
        Mutation(EXACT, with_more_gamma),
        Mutation("fenchel.measures.wasserstein1", off_by(0.8)),
        Mutation("fenchel.measures.wasserstein1", off_by(2.0)),
        Mutation("fenchel.measures.wasserstein1", off_by(1.001)),
    ],
    "D-E21/E31": [
        Mutation(EXACT, spoiled(objective=1.001)),
        Mutation(EXACT, spoiled(weights=1.001)),
        Mutation(EXACT, with_more_gamma),
        Mutation(EXACT, towards_the_preference),
    ],
    "D-E32/E38": [Mutation(TRUE, spoiled(mean=1.001)), Mutation(TRUE, with_row_sums)],
    "D-E33": [Mutation(FIRST, spoiled(dual_value=1.001)), Mutation(FIRST, with_more_gamma)],
    "D-E34": [Mutation(FIRST, spoiled(weights=1.001)), Mutation(FIRST, spoiled(dual_value=1.001))],
    "D-E35/E36": [
        Mutation(EXACT, spoiled(multiplier=1.001)),
        Mutation(EXACT, spoiled(weights=1.001)),
        Mutation(EXACT, spoiled(dual_value=1.001)),
        Mutation(EXACT, with_more_gamma),
    ],
    "D-P1/E37": [Mutation(TRUE, with_more_gamma)],
    "D-P1lim": [Mutation(TRUE, spoiled(weights=1.001))],
    "D-E43": [Mutation(TRUE, spoiled(mean=1.001)), Mutation(TRUE, with_row_sums)],
    "D-E22/E44": [
        Mutation(EXACT, spoiled(multiplier=1.001)),
        Mutation(FIRST, spoiled(weights=1.001)),
        Mutation(FIRST, spoiled(multiplier=1.001)),
        Mutation(FIRST, nan_weights_after(3)),  # two for the orders, one for the formula
    ],
    "D-S9grp": [Mutation(FIRST, spoiled(weights=1.001))],
    "D-S9dot": [
        Mutation("fenchel.dual.dot_product_transport", off_by(1.001)),
        Mutation(FIRST, with_more_gamma),
    ],
    "D-E39": [
        Mutation(TRUE, spoiled(weights=1.001)),
        Mutation("fenchel.solve", spoiled(potential=1.001)),
    ],
    "D-E40/41/42": [
        Mutation(TRUE, spoiled(weights=1.001)),
        Mutation("fenchel.solve", spoiled(potential=1.001)),
        Mutation("fenchel.solve", spoiled(hessian=1.001)),
    ],
    "D-OTnewton": [Mutation(EXACT, spoiled(multiplier=1.001)), Mutation(EXACT, with_more_gamma)],
    "D-Tab1": [Mutation(INTERVAL, with_wider_intervals(3.0))],
    "D-Tab2": [
        Mutation(INTERVAL, with_wider_intervals(0.3)),
        Mutation(INTERVAL, with_wider_intervals(3.0)),
    ],
}
WITHOUT: dict[str, str] = {}
