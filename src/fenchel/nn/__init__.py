"""Modules: torch's multi-head attention with any regulariser, new or inside a model you have,
attention over continuous domains, attention as estimation, and layers with a Lipschitz bound."""

from fenchel.nn.continuous import (
    ContinuousAttention1d,
    ContinuousAttention2d,
    ContinuousTransformerLayer,
)
from fenchel.nn.conversion import convert
from fenchel.nn.lipschitz import (
    DotForm,
    GaussianForm,
    LipschitzAttention,
    LipschitzFeedForward,
)
from fenchel.nn.modes import Modes, ModeSelection
from fenchel.nn.multihead import MultiheadAttention
from fenchel.nn.optimization import parameter_groups
from fenchel.nn.preference_attention import HeadForm, PreferenceAttention
from fenchel.nn.preferences import (
    ContentPreference,
    LearnedReliability,
    PositionPreference,
    UniformPreference,
)
from fenchel.nn.regularizer import LearnedTsallis
from fenchel.nn.solvers import Exact, FirstOrder, SecondOrder
from fenchel.nn.transport import TransportAttention
from fenchel.nn.universal import FixedPoint, Iteration, UniversalTransformer

__all__ = [
    "ContentPreference",
    "ContinuousAttention1d",
    "ContinuousAttention2d",
    "ContinuousTransformerLayer",
    "DotForm",
    "Exact",
    "FirstOrder",
    "FixedPoint",
    "GaussianForm",
    "HeadForm",
    "Iteration",
    "LearnedReliability",
    "LearnedTsallis",
    "LipschitzAttention",
    "LipschitzFeedForward",
    "ModeSelection",
    "Modes",
    "MultiheadAttention",
    "PositionPreference",
    "PreferenceAttention",
    "SecondOrder",
    "TransportAttention",
    "UniformPreference",
    "UniversalTransformer",
    "convert",
    "parameter_groups",
]
