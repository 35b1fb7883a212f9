"""Priors: what a query knows about the keys before any score is seen.

A prior is a *base measure* (`base=`: how much room each key has, never normalised; zero mass is a
mask) or a *bias* (`attn_mask=`: added to the scores). It makes its logarithm for any block of
queries and keys, so that a long one is never stored whole and never underflows:

    scores = torch.randn(8, 128, 128)                              # (head, query, key)
    fl.solve(scores, fl.Tsallis(1.5), base=fl.priors.Causal() * fl.priors.ALiBi(heads=8))
"""

from fenchel.priors.contract import Prior, Product, Shifted, Structure
from fenchel.priors.kinds import (
    ALiBi,
    Causal,
    Custom,
    Documents,
    KeyPadding,
    Preference,
    RelativeBuckets,
    Sink,
    SlidingWindow,
    alibi_slopes,
)
from fenchel.priors.measure import Base

__all__ = [
    "ALiBi",
    "Base",
    "Causal",
    "Custom",
    "Documents",
    "KeyPadding",
    "Preference",
    "Prior",
    "Product",
    "RelativeBuckets",
    "Shifted",
    "Sink",
    "SlidingWindow",
    "Structure",
    "alibi_slopes",
]
