"""Modules: torch's multi-head attention with any regulariser, new or inside a model you have, and
attention over continuous domains."""

from fenchel.nn.continuous import (
    ContinuousAttention1d,
    ContinuousAttention2d,
    ContinuousTransformerLayer,
    Select,
)
from fenchel.nn.conversion import convert
from fenchel.nn.multihead import MultiheadAttention
from fenchel.nn.regularizer import LearnedTsallis

__all__ = [
    "ContinuousAttention1d",
    "ContinuousAttention2d",
    "ContinuousTransformerLayer",
    "LearnedTsallis",
    "MultiheadAttention",
    "Select",
    "convert",
]
