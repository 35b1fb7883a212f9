"""Attention over R^d: densities instead of weights, functions instead of values.

density = fc.match_moments(weights, positions, fc.Paraboloid)
values  = fc.fit_values(features, positions, basis)
context = values.expect(density)
"""

from fenchel.continuous.bases import (
    ExpectationWithError,
    GaussianBasis,
    ParaboloidBasis,
    cell_centers,
    expect_with_error,
)
from fenchel.continuous.densities import Density, Gaussian, Paraboloid, TsallisGaussian
from fenchel.continuous.em import (
    AIC,
    BIC,
    MDL,
    PerMode,
    Random,
    Regions,
    fit_mixture,
    select_mixture,
)
from fenchel.continuous.mixture import Mixture
from fenchel.continuous.moments import match_moments, weighted_moments
from fenchel.continuous.support import Ellipsoid
from fenchel.continuous.values import ValueFit, Values, fit_values

__all__ = [
    "AIC",
    "BIC",
    "MDL",
    "Density",
    "Ellipsoid",
    "ExpectationWithError",
    "Gaussian",
    "GaussianBasis",
    "Mixture",
    "Paraboloid",
    "ParaboloidBasis",
    "PerMode",
    "Random",
    "Regions",
    "TsallisGaussian",
    "ValueFit",
    "Values",
    "cell_centers",
    "expect_with_error",
    "fit_mixture",
    "fit_values",
    "match_moments",
    "select_mixture",
    "weighted_moments",
]
