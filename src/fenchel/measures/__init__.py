"""Attention on measures: tokens are a measure, a layer is a Markov kernel that depends on it."""

from fenchel.measures.affine import Affine
from fenchel.measures.attention import AttentionKernel, MultiHeadKernel
from fenchel.measures.distances import TransportPlan, transport_plan, wasserstein1
from fenchel.measures.empirical import Dirac, Empirical, mixture
from fenchel.measures.entropic import EntropicDistance, entropic_wasserstein1
from fenchel.measures.gaussian import GaussianMeasure
from fenchel.measures.kernels import (
    Deterministic,
    FeedForward,
    Kernel,
    KernelMixture,
    LayerNorm,
    NonlinearKernel,
    Residual,
)
from fenchel.measures.lookup import Lookup
from fenchel.measures.maximum_entropy import MaximumEntropy, maximum_entropy
from fenchel.measures.measure import Measure
from fenchel.measures.potentials import (
    Dot,
    GaussianPotential,
    InteractionPotential,
    Potential,
    ScaledDot,
)
from fenchel.measures.projection import Diracs, Gaussians, GridFamily, MomentProjection
from fenchel.measures.softmatch import Softmatch, boltzmann_gibbs
from fenchel.measures.transformer import TransformerKernel, flow

__all__ = [
    "Affine",
    "AttentionKernel",
    "Deterministic",
    "Dirac",
    "Diracs",
    "Dot",
    "Empirical",
    "EntropicDistance",
    "FeedForward",
    "GaussianMeasure",
    "GaussianPotential",
    "Gaussians",
    "GridFamily",
    "InteractionPotential",
    "Kernel",
    "KernelMixture",
    "LayerNorm",
    "Lookup",
    "MaximumEntropy",
    "Measure",
    "MomentProjection",
    "MultiHeadKernel",
    "NonlinearKernel",
    "Potential",
    "Residual",
    "ScaledDot",
    "Softmatch",
    "TransformerKernel",
    "TransportPlan",
    "boltzmann_gibbs",
    "entropic_wasserstein1",
    "flow",
    "maximum_entropy",
    "mixture",
    "transport_plan",
    "wasserstein1",
]
