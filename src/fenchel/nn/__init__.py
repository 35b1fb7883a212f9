"""Modules: torch's multi-head attention with any regulariser, new or inside a model you have,
attention over continuous domains, attention as estimation, and layers with certified constants."""

from fenchel.nn.continuous import (
    ContinuousAttention1d,
    ContinuousAttention2d,
    ContinuousTransformerLayer,
    Select,
)
from fenchel.nn.conversion import convert
from fenchel.nn.lipschitz import (
    DotForm,
    GaussianForm,
    LipschitzAttention,
    LipschitzFeedForward,
)
from fenchel.nn.multihead import MultiheadAttention
from fenchel.nn.preference import (
    ContentPreference,
    LearnedReliability,
    PositionPreference,
    PreferenceAttention,
    UniformPreference,
)
from fenchel.nn.regularizer import LearnedTsallis
from fenchel.nn.transport import TransportAttention
from fenchel.nn.universal import FixedPoint, Iteration, UniversalTransformer

__all__ = [
    "ContentPreference",
    "ContinuousAttention1d",
    "ContinuousAttention2d",
    "ContinuousTransformerLayer",
    "DotForm",
    "FixedPoint",
    "GaussianForm",
    "Iteration",
    "LearnedReliability",
    "LearnedTsallis",
    "LipschitzAttention",
    "LipschitzFeedForward",
    "MultiheadAttention",
    "PositionPreference",
    "PreferenceAttention",
    "Select",
    "TransportAttention",
    "UniformPreference",
    "UniversalTransformer",
    "convert",
]
