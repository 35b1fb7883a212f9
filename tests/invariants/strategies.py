"""Scores, masses and feasible weights for Hypothesis to draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

# (unit, largest multiple): many ties, ordinary scores, large spreads, scores next to each other.
# Multiples of a power of two with at most 17 bits are exact in float32, and so are their sums with
# an integer of up to 2^6: shifting such scores makes no rounding error at all.
LATTICES = [(0.5, 6), (2.0**-10, 4096), (0.25, 2**15 - 1), (2.0**-16, 64)]


@st.composite
def lattice_rows(draw: Any, least: int = 1, most: int = 40) -> Tensor:
    """(rows, keys), float64, every score an exact multiple of a power of two."""
    unit, bound = draw(st.sampled_from(LATTICES))
    return torch.fmod(draw(_integers(least, most)), bound + 1) * unit


@st.composite
def gentle_rows(draw: Any, least: int = 1, most: int = 40) -> Tensor:
    """(rows, keys), float64, scores within 8 of zero and on no lattice."""
    return draw(_integers(least, most)) * (8 / (2**15 * math.pi / 3.2))


def score_rows(least: int = 1, most: int = 40) -> st.SearchStrategy[Tensor]:
    """Either of the above."""
    return st.one_of(lattice_rows(least, most), gentle_rows(least, most))


@st.composite
def _integers(draw: Any, least: int, most: int) -> Tensor:
    """(rows, keys) of whole numbers that fit in 16 bits. Drawn as bytes: one draw, not hundreds."""
    shape = draw(st.integers(1, 3)), draw(st.integers(least, most))
    size = 2 * math.prod(shape)
    flat = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=">i2")
    return torch.from_numpy(flat.astype(np.float64)).reshape(shape)  # (rows * keys) -> 2 axes


@st.composite
def problems(draw: Any, least: int = 1, most: int = 40) -> tuple[Tensor, Tensor]:
    """Scores (rows, keys) and a mass for each key, (keys,), at least one of them positive."""
    scores = draw(score_rows(least, most))
    return scores, draw(masses(scores.shape[-1]))


@st.composite
def masses(draw: Any, keys: int) -> Tensor:
    """(keys,), from 0 (a mask) to 3, at least one positive."""
    choices = torch.tensor([1.0, 0.0, 0.25, 1.0, 3.0], dtype=torch.float64)
    drawn = np.frombuffer(draw(st.binary(min_size=keys, max_size=keys)), dtype=np.uint8)
    mass = choices[torch.from_numpy(drawn % len(choices)).long()]
    mass[draw(st.integers(0, keys - 1))] = 1.0
    return mass


def seeds() -> st.SearchStrategy[torch.Generator]:
    return st.integers(0, 2**32 - 1).map(lambda seed: torch.Generator().manual_seed(seed))


def feasible_weights(shape: torch.Size, total: float, generator: torch.Generator) -> Tensor:
    """Random mixtures of corners of {0 <= p <= 1, sum p = total}; for total 1, of the simplex."""
    corners = torch.stack([_corner(shape, total, generator) for _ in range(4)])
    share = torch.rand((4, *shape[:-1], 1), generator=generator, dtype=torch.float64).log()
    return (corners * (3 * share).softmax(0)).sum(0).clamp(max=1)


def _corner(shape: torch.Size, total: float, generator: torch.Generator) -> Tensor:
    """Keys in random order, filled to one until the total is spent."""
    rank = torch.rand(shape, generator=generator).argsort(-1)
    return (total - rank.to(torch.float64)).clamp(0, 1)
