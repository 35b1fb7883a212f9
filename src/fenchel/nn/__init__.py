"""Modules: torch's multi-head attention with any regulariser, new or inside a model you have."""

from fenchel.nn.conversion import convert
from fenchel.nn.multihead import MultiheadAttention
from fenchel.nn.regularizer import LearnedTsallis

__all__ = ["LearnedTsallis", "MultiheadAttention", "convert"]
