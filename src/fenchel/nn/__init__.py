"""Modules: torch's multi-head attention with any regulariser, new or inside a model you have,
attention over continuous domains, and attention as estimation."""

from fenchel.nn.continuous import (
    ContinuousAttention1d,
    ContinuousAttention2d,
    ContinuousTransformerLayer,
    Select,
)
from fenchel.nn.conversion import convert
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

__all__ = [
    "ContentPreference",
    "ContinuousAttention1d",
    "ContinuousAttention2d",
    "ContinuousTransformerLayer",
    "LearnedReliability",
    "LearnedTsallis",
    "MultiheadAttention",
    "PositionPreference",
    "PreferenceAttention",
    "Select",
    "TransportAttention",
    "UniformPreference",
    "convert",
]
