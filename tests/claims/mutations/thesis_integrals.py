"""Of the thesis' chapters 4 to 6: integrals over ellipses, mixtures, and the experiments."""

import math

import fenchel.continuous as fc
from tests.claims.mutations import Mutation, off_by

INTEGRALS = "fenchel.bench.integrals_methods"


def answers(method, factor=1.001):
    """A class whose method answers a little too much."""

    def broken(true):
        def more(self, *args, **options):
            return factor * getattr(true, method)(self, *args, **options)

        return type("Broken", (true,), {method: more})

    return broken


def wider(true):
    """A fit whose covariances are too large."""

    def broken(*args, **options):
        made = true(*args, **options)
        own = made.components
        return fc.Mixture(made.mixing, fc.Gaussian(own.mean, 1.01 * own.covariance_matrix))

    return broken


def one_step_more(true):
    return lambda *args, iterations=20, **options: true(*args, iterations=iterations + 1, **options)


def one_step_without_mixing(true):
    """Fits the modes and leaves their weights as they were."""

    def broken(*args, start=None, **options):
        made = true(*args, start=start, **options)
        return fc.Mixture(start.mixing, made.components) if start is not None else made

    return broken


def of_wider_scale(true):
    def start(self, mean, scale):
        true.__init__(self, mean, 1.001 * scale)

    return type("Broken", (true,), {"__init__": start})


def as_printed(true):
    """BIC as the thesis has it, K ln n."""
    return lambda: lambda modes, dim, positions: modes * math.log(positions)


def one_mode_only(true):
    return lambda weights, positions, modes, penalty, **options: true(
        weights, positions, modes, 1e9, **options
    )


def with_more_ridge(true):
    return lambda features, positions, basis, ridge, padding: true(
        features, positions, basis, 1.001 * ridge, padding
    )


def of_wider_weights(true):
    def broken(weights, positions, family):
        made = true(weights, positions, family)
        return family.from_covariance(made.mean, 1.001 * made.covariance_matrix)

    return broken


def attends_too_much(true):
    def forward(self, features, scores, mask=None):
        found = true.forward(self, features, scores, mask)
        return found._replace(context=1.001 * found.context)

    return type("Broken", (true,), {"forward": forward})


EXPECT = Mutation("fenchel.continuous.Paraboloid", answers("expect"))
FIT = "fenchel.continuous.fit_mixture"

MUTATIONS = {
    "F-E4.13/A.12/A.15/A.16": [
        EXPECT,
        Mutation("fenchel.continuous.expectations.under_paraboloid", off_by(1 + 1e-6)),
    ],
    "F-E4.14": [EXPECT],
    "F-L1": [Mutation("fenchel.continuous.Gaussian", of_wider_scale)],
    "F-A.17": [Mutation("fenchel.continuous.Gaussian", answers("prob")), EXPECT],
    "F-A.18..21": [EXPECT],
    "F-A.22": [Mutation(f"{INTEGRALS}.radial", off_by(1.001))],
    "F-A.23": [EXPECT],
    "F-A.24/A.25": [EXPECT],
    "F-A.30/A.31": [EXPECT],
    "F-A.33/A.34": [EXPECT],
    "F-A.35..A.41": [EXPECT],
    "F-A4": [EXPECT],
    "F-NAIVE": [EXPECT, Mutation(f"{INTEGRALS}.both_ends", off_by(1.001))],
    "F-Tab4.1": [EXPECT, Mutation(f"{INTEGRALS}.trapezoid", off_by(1.001))],
    "F-E5.1/5.2/5.3": [Mutation("fenchel.continuous.Mixture", answers("prob"))],
    "F-E5.4/5.5": [Mutation("fenchel.continuous.Mixture", answers("expect"))],
    "F-E5.6..5.11": [Mutation(FIT, wider), Mutation(FIT, one_step_without_mixing)],
    "F-E5.12..5.15": [Mutation(FIT, wider), Mutation(FIT, one_step_more)],
    "F-E5.16": [Mutation("fenchel.continuous.Mixture", answers("log_likelihood"))],
    "F-POW": [Mutation("fenchel.continuous.Gaussian", answers("log_prob"))],
    "F-S5.3.3": [Mutation(FIT, wider)],
    "F-E5.17..5.20": [
        Mutation("fenchel.continuous.BIC", as_printed),
        Mutation("fenchel.continuous.select_mixture", one_mode_only),
    ],
    "F-Fig5.1": [Mutation(FIT, wider)],
    "F-Tab6.1": [Mutation("fenchel.continuous.fit_values", with_more_ridge)],
    "F-Tab6.4": [
        Mutation(FIT, wider),
        Mutation("fenchel.continuous.select_mixture", one_mode_only),
    ],
    "F-S6.2": [Mutation("fenchel.nn.ContinuousAttention2d", attends_too_much)],
    "F-Fig6.x/TabB.1": [Mutation("fenchel.continuous.match_moments", of_wider_weights)],
}
WITHOUT = {"F-Tab6.2/6.3": "arithmetic with the printed numbers alone"}
