"""What is broken for the claims of A Mathematical Theory of Attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from fenchel import measures
from papers.tests.claims.mutations import Mutation, off_by

Broken = Callable[[Callable], Callable]


# ---- ways to break something


def bound_off_by(factor: float) -> Broken:
    """A bound with another value."""

    def broken(true: Callable) -> Callable:
        def mutant(*args, **options):
            bound = true(*args, **options)
            return replace(bound, value=factor * bound.value)

        return mutant

    return broken


def tenth_beyond_two(true: Callable) -> Callable:
    """A bound for keys and values that is a tenth of itself for more than two of them."""

    def mutant(keys, *rest, **options):
        bound = true(keys, *rest, **options)
        return replace(bound, value=0.1 * bound.value) if len(keys) > 2 else bound

    return mutant


def field_off_by(name: str, factor: float) -> Broken:
    """A named tuple with one entry times a factor."""

    def broken(true: Callable) -> Callable:
        def mutant(*args, **options):
            bound = true(*args, **options)
            return bound._replace(**{name: factor * getattr(bound, name)})

        return mutant

    return broken


def methods(**changed: Callable[[type], object]) -> Broken:
    """A subclass with other methods, each made of the true class."""
    return lambda true: type(true.__name__, (true,), {n: m(true) for n, m in changed.items()})


def hotter(true: type) -> Callable:
    """A potential of a slightly higher temperature."""
    return lambda temperature=1.0, *maps: true(1.01 * temperature, *maps)


def steeper(true: type) -> Callable:
    """A kernel whose potential is G^1.01."""

    def mutant(potential, *lookup):
        return true(measures.Potential(lambda x, y: 1.01 * potential.log(x, y)), *lookup)

    return mutant


def blind(true: type) -> Callable:
    """A kernel whose potential is one everywhere."""

    def mutant(potential, *lookup):
        return true(measures.Potential(lambda x, y: 0 * potential.log(x, y)), *lookup)

    return mutant


def stretched(true: Callable) -> Callable:
    """A flow whose last measure is a little larger."""

    def flow(mu, kernels):
        *others, last = true(mu, kernels)
        return [*others, measures.Empirical(1.001 * last.points, last.weights)]

    return flow


def weightless(true: type) -> Callable:
    """__call__ of a softmatch that takes all keys for equal."""
    return lambda self, nu: true.__call__(self, measures.Empirical(nu.points))


def larger_mean(true: type) -> Callable:
    """__call__ of a projection whose image is shifted by a share of the mean."""

    def call(self, given):
        density = true.__call__(self, given)
        return density.translate(1e-3 * density.mean)

    return call


def even(true: type) -> Callable:
    """__call__ of a projection onto even weights, whatever the moments are."""
    return lambda self, given: measures.Empirical(given.points.expand(*given.weights.shape, -1))


def idle(true: Callable) -> Callable:
    """An attack that observes nothing."""
    return lambda *args, **options: replace(true(*args, **options), observed=0.0)


# ---- which


W1 = Mutation("fenchel.measures.wasserstein1", off_by(1.001))
DOT = Mutation("fenchel.measures.Dot", hotter)
GAUSSIAN = Mutation("fenchel.measures.GaussianPotential", hotter)
SOFTMATCH = Mutation("fenchel.measures.Softmatch", steeper)
ATTENTION = Mutation("fenchel.measures.AttentionKernel", steeper)
BLIND = Mutation("fenchel.measures.AttentionKernel", blind)
FLOW = Mutation("fenchel.measures.flow", stretched)
TILT = Mutation(
    "fenchel.measures.boltzmann_gibbs", lambda true: lambda log_g, nu: true(1.001 * log_g, nu)
)
PROJECTION = Mutation("fenchel.measures.MomentProjection", methods(__call__=larger_mean))
TABLE = Mutation(
    "fenchel.measures.Lookup",
    methods(table=lambda true: staticmethod(lambda k, v: true.table(k, 1.001 * v))),
)
CHAIN = Mutation(
    "fenchel.measures.Lookup",
    methods(stochastic=lambda true: staticmethod(lambda x, m: true.stochastic(x, m.roll(1, -1)))),
)
LOOKUP = Mutation("fenchel.measures.Lookup", lambda true: lambda matrix: true(1.001 * matrix))
KL = Mutation(
    "fenchel.measures.Empirical",
    methods(kl=lambda true: lambda self, other: 1.001 * true.kl(self, other)),
)
KL_NEGATIVE = Mutation(
    "fenchel.measures.Empirical",
    methods(kl=lambda true: lambda self, other: -true.kl(self, other)),
)
CONVOLUTION = Mutation(
    "fenchel.measures.Empirical",
    methods(
        convolve=lambda true: lambda self, other: true.convolve(self, true.convolve(other, other))
    ),
)
IDLE = Mutation("fenchel.bounds.attack", idle)
PROXIMITY = Mutation("fenchel.bounds.query_lipschitz", bound_off_by(0.999))
GAUSSIAN_BOUND = "fenchel.bounds.gaussian_attention_lipschitz"
MAXIMUM_ENTROPY = "fenchel.measures.maximum_entropy"


def constant(name: str) -> Mutation:
    return Mutation(f"fenchel.bounds.contraction.{name}", bound_off_by(1.001))


MUTATIONS = {
    "M-D1": [Mutation("fenchel.attention", off_by(1.001))],
    "M-D2": [CHAIN],
    "M-D3": [TILT],
    "M-D4": [DOT, Mutation("fenchel.measures.Softmatch", methods(__call__=weightless))],
    "M-D5": [TABLE],
    "M-D6/7/Eq2": [PROJECTION],
    "M-D8/P9": [TABLE, ATTENTION],
    "M-FLOW": [FLOW, ATTENTION],
    "M-R11": [GAUSSIAN],
    "M-S3.1": [SOFTMATCH],
    "M-P12/Eq3/Eq5": [
        Mutation(
            "fenchel.measures.ScaledDot",
            lambda true: lambda temperature, *maps: true(math.sqrt(6), *maps),
        ),
        Mutation(
            "fenchel.measures.TransformerKernel",
            methods(
                from_layer=lambda true: staticmethod(
                    lambda layer, **options: true.from_layer(layer, residual=False, norm=False)
                )
            ),
        ),
    ],
    "M-W1": [W1, Mutation("fenchel.measures.transport_plan", field_off_by("plan", 2))],
    "M-BL": [W1],
    "M-KL": [KL],
    "M-D13/D35": [CONVOLUTION],
    "M-L31": [TILT, W1],
    "M-L32/33/34": [KL_NEGATIVE],
    "M-L36": [CONVOLUTION],
    "M-L37": [W1],
    "M-L38": [W1, CHAIN],
    "M-L39": [PROXIMITY],
    "M-L40": [W1, GAUSSIAN],
    "M-L41": [W1],
    "M-E9": [SOFTMATCH],
    "M-NEG": [W1, constant("neighbourhood"), ATTENTION],
    "M-T14": [
        Mutation(
            MAXIMUM_ENTROPY,
            lambda true: lambda nu, k, f, **options: true(nu, k, 1.001 * f, **options),
        ),
        TILT,
    ],
    "M-T14b": [Mutation(MAXIMUM_ENTROPY, field_off_by("multiplier", 1.001))],
    "M-R15": [Mutation(MAXIMUM_ENTROPY, field_off_by("divergence", 1.001))],
    "M-P16": [
        Mutation("fenchel.measures.GridFamily", lambda true: lambda points, weights: true(points)),
        Mutation("fenchel.measures.MomentProjection", methods(__call__=even)),
    ],
    "M-P17": [PROJECTION, W1],
    "M-P19a": [constant("in_query"), W1, IDLE],
    "M-P19b": [constant("in_measure"), W1, IDLE],
    "M-P20": [constant("projection"), PROJECTION, W1],
    "M-P21": [LOOKUP],
    "M-D22": [
        Mutation(
            "fenchel.bounds.attack",
            lambda true: lambda *args, **options: replace(true(*args, **options), observed=0.999),
        ),
        W1,
    ],
    "M-T23": [constant("attention"), W1, ATTENTION, IDLE],
    "M-C24": [
        constant("attention_query"),
        IDLE,
        Mutation("fenchel.attention", off_by(1.001)),
    ],
    "M-C24+": [
        PROXIMITY,
        Mutation("fenchel.bounds.query_lipschitz", tenth_beyond_two),
    ],
    "M-P25": [constant("neighbourhood"), W1, ATTENTION, IDLE],
    "M-P26": [constant("attention"), FLOW, W1, ATTENTION, BLIND],
    "M-R27": [FLOW, ATTENTION, BLIND],
    "M-P28": [SOFTMATCH, W1, IDLE],
    "M-T29": [
        GAUSSIAN,
        Mutation("fenchel.bounds.gaussian_constant", off_by(1.001)),
        *(Mutation(GAUSSIAN_BOUND, bound_off_by(factor)) for factor in (0.9, 1.001, 100)),
        W1,
        IDLE,
    ],
    "M-C30": [GAUSSIAN],
}
WITHOUT = {}
