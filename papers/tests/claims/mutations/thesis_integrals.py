"""Of the thesis' chapters 4 to 6: integrals over ellipses, mixtures, and the experiments."""

import itertools
import math

import fenchel.continuous as fc
from benchmarks import integrals_methods
from papers.tests.claims.mutations import Mutation, off_by

INTEGRALS = "benchmarks.integrals_methods"


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
        mixture = true(*args, **options)
        components = mixture.components
        return fc.Mixture(
            mixture.mixing, fc.Gaussian(components.mean, 1.01 * components.covariance_matrix)
        )

    return broken


def wider_if_several(factor):
    """A fit whose covariances are too large, for two modes and more."""

    def broken(true):
        def fit(*args, **options):
            mixture = true(*args, **options)
            components, times = mixture.components, factor if mixture.mixing.shape[-1] > 1 else 1
            return fc.Mixture(
                mixture.mixing, fc.Gaussian(components.mean, times * components.covariance_matrix)
            )

        return fit

    return broken


def one_step_if_several(true):
    def broken(weights, positions, modes, *, iterations=20, **options):
        steps = iterations if modes == 1 else 1
        return true(weights, positions, modes, iterations=steps, **options)

    return broken


def one_step_more(true):
    return lambda *args, iterations=20, **options: true(*args, iterations=iterations + 1, **options)


def one_step_without_mixing(true):
    """Fits the modes and leaves their weights as they were."""

    def broken(*args, start=None, **options):
        mixture = true(*args, start=start, **options)
        return fc.Mixture(start.mixing, mixture.components) if start is not None else mixture

    return broken


def of_wider_scale(true):
    def start(self, mean, scale):
        true.__init__(self, mean, 1.001 * scale)

    return type("Broken", (true,), {"__init__": start})


def as_printed(true):
    """BIC as the thesis has it, K ln n."""
    return lambda: lambda modes, dim, positions: modes * math.log(positions)


def three_a_mode(true):
    """AIC that counts no free parameters, 3 K."""
    return lambda: lambda modes, dim, positions: 3.0 * modes


def at_half_the_price(true):
    """A choice that takes half of what each number of modes costs."""

    def broken(weights, positions, modes, penalty, **options):
        def half(*asked):
            return (penalty * asked[0] if isinstance(penalty, float) else penalty(*asked)) / 2

        return true(weights, positions, modes, half, **options)

    return broken


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
        density = true(weights, positions, family)
        return family.from_covariance(density.mean, 1.001 * density.covariance_matrix)

    return broken


def shifted(true):
    """Of weights and the positions they lie at, which are elsewhere."""
    return lambda weights, positions, *rest, **options: true(
        weights, positions + 0.05, *rest, **options
    )


def as_slow_as_quadrature(true):
    """A sum over angles that does the work of quadrature too."""

    def broken(problem, *rest):
        integrals_methods.quadrature(problem)
        return true(problem, *rest)

    return broken


def attends_too_much(true):
    def forward(self, features, scores, mask=None):
        output = true.forward(self, features, scores, mask)
        return output._replace(context=1.001 * output.context)

    return type("Broken", (true,), {"forward": forward})


def without_number(name):
    """A fit whose modes have NaN for all of their "mean" or "covariance_matrix"."""

    def nan(self):
        return math.nan * getattr(fc.Gaussian, name).fget(self)

    def broken(true):
        def fit(*args, **options):
            mixture = true(*args, **options)
            components = mixture.components
            wrong = type("Broken", (fc.Gaussian,), {name: property(nan)})
            return fc.Mixture(mixture.mixing, wrong(components.mean, components.covariance_matrix))

        return fit

    return broken


def nan_after(calls, method="expect"):
    """A class whose method has no number to give after so many calls."""

    def broken(true):
        done = itertools.count()

        def answer(self, *args, **options):
            value = getattr(true, method)(self, *args, **options)
            return value if next(done) < calls else math.nan * value

        return type("Broken", (true,), {method: answer})

    return broken


def matched_to_nan(true):
    """Moments whose paraboloid has NaN for every expectation."""

    def broken(*args, **options):
        density = true(*args, **options)
        if isinstance(density, fc.Paraboloid):
            density.__class__ = nan_after(0)(fc.Paraboloid)
        return density

    return broken


def corners(true):
    """Corners of the cells, as the thesis has them, but for the last."""
    return lambda *counts, **options: true(*counts, **options) - 0.5 / counts[0]


def ends_included(true):
    """All l / sqrt(L), as the thesis has them."""
    return lambda *counts, **options: true(*(count + 1 for count in counts), **options)


def no_number_for_five(true):
    """A fit of five modes that, started from a mixture, has NaN for its means."""
    nan = without_number("mean")(true)

    def fit(weights, positions, modes, *, start=None, **options):
        chosen = nan if modes == 5 and isinstance(start, fc.Mixture) else true
        return chosen(weights, positions, modes, start=start, **options)

    return fit


EXPECT = Mutation("fenchel.continuous.Paraboloid", answers("expect"))
NAN_LATER = Mutation("fenchel.continuous.Paraboloid", nan_after(1))
FIT = "fenchel.continuous.fit_mixture"

MUTATIONS = {
    "F-E4.13/A.12/A.15/A.16": [
        EXPECT,
        NAN_LATER,
        Mutation("fenchel.continuous.expectations.under_paraboloid", off_by(1 + 1e-6)),
    ],
    "F-E4.14": [EXPECT, NAN_LATER],
    "F-L1": [Mutation("fenchel.continuous.Gaussian", of_wider_scale)],
    "F-A.17": [Mutation("fenchel.continuous.Gaussian", answers("prob")), EXPECT],
    "F-A.18..21": [EXPECT, NAN_LATER],
    "F-A.22": [Mutation(f"{INTEGRALS}.radial", off_by(1.001))],
    "F-A.23": [EXPECT, NAN_LATER],
    "F-A.24/A.25": [EXPECT, NAN_LATER],
    "F-A.30/A.31": [EXPECT, NAN_LATER],
    "F-A.33/A.34": [EXPECT, NAN_LATER],
    "F-A.35..A.41": [EXPECT, NAN_LATER],
    "F-A4": [EXPECT, NAN_LATER],
    "F-NAIVE": [EXPECT, NAN_LATER, Mutation(f"{INTEGRALS}.both_ends", off_by(1.001))],
    "F-Tab4.1": [
        EXPECT,
        Mutation(f"{INTEGRALS}.trapezoid", off_by(1.001)),
        Mutation(f"{INTEGRALS}.trapezoid", as_slow_as_quadrature),
    ],
    "F-E5.1/5.2/5.3": [Mutation("fenchel.continuous.Mixture", answers("prob"))],
    "F-E5.4/5.5": [Mutation("fenchel.continuous.Mixture", answers("expect"))],
    "F-E5.6..5.11": [
        Mutation(FIT, wider),
        Mutation(FIT, one_step_without_mixing),
        Mutation(FIT, without_number("mean")),
        Mutation(FIT, without_number("covariance_matrix")),
    ],
    "F-E5.12..5.15": [Mutation(FIT, wider), Mutation(FIT, one_step_more)],
    "F-E5.16": [Mutation("fenchel.continuous.Mixture", answers("log_likelihood"))],
    "F-POW": [Mutation("fenchel.continuous.Gaussian", answers("log_prob"))],
    "F-S5.3.3": [
        Mutation(FIT, wider),
        Mutation(FIT, wider_if_several(2)),
        Mutation(FIT, one_step_if_several),
        Mutation(FIT, no_number_for_five),
    ],
    "F-E5.17..5.20": [
        Mutation("fenchel.continuous.BIC", as_printed),
        Mutation("fenchel.continuous.AIC", three_a_mode),
        Mutation("fenchel.continuous.select_mixture", one_mode_only),
        Mutation("fenchel.continuous.select_mixture", at_half_the_price),
    ],
    "F-Fig5.1": [
        Mutation(FIT, wider),
        Mutation(FIT, wider_if_several(1.5)),
        Mutation(FIT, without_number("covariance_matrix")),
    ],
    "F-Tab6.1": [Mutation("fenchel.continuous.fit_values", with_more_ridge)],
    "F-Tab6.4": [
        Mutation(FIT, wider),
        Mutation("fenchel.continuous.select_mixture", one_mode_only),
        Mutation("fenchel.continuous.select_mixture", at_half_the_price),
    ],
    "F-S6.2": [
        Mutation("fenchel.nn.ContinuousAttention2d", attends_too_much),
        Mutation("fenchel.nn.continuous_density.match_moments", shifted),
        Mutation("fenchel.nn.modes.fit_mixture", shifted),
        Mutation("fenchel.nn.continuous_density.match_moments", matched_to_nan),
        Mutation("fenchel.continuous.cell_centers", corners),
        Mutation("fenchel.continuous.cell_centers", ends_included),
    ],
    "F-Fig6.x/TabB.1": [Mutation("fenchel.continuous.match_moments", of_wider_weights)],
}
WITHOUT = {"F-Tab6.2/6.3": "arithmetic with the printed numbers alone"}
