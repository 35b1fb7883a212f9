"""How the network reads the picture in the end: weights over a grid, or a density over the plane.
CLAIMS F-S6.2, F-Tab6.2, F-Tab6.3"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fenchel.nn as fnn
from fenchel import solve
from fenchel.continuous import Density, Gaussian, Mixture, Paraboloid, cell_centers
from fenchel.nn import Modes, ModeSelection
from fenchel.regularizers import Regularizer, Shannon, Tsallis

BLIND = "question-only"
_DISCRETE: dict[str, Regularizer] = {
    "softmax": Shannon(),
    "entmax": Tsallis(1.5),
    "sparsemax": Tsallis(2.0),
}
_CONTINUOUS = re.compile(r"continuous-(softmax|sparsemax)-(\d+)|(\d+)-mca-(\d+)")
KNOWN = (
    f"{BLIND}, softmax, entmax, sparsemax, continuous-softmax-N, continuous-sparsemax-N, K-mca-N "
    "(N functions, K modes)"
)


@dataclass(frozen=True)
class Plane:
    """A density of `modes` modes of a regulariser's family; values in `functions` functions."""

    regularizer: Regularizer
    functions: int
    modes: int

    @property
    def iterations(self) -> int:
        """Of EM in training, as in the thesis (beneath its Table 6.3); 20 where it says none."""
        return {2: 2, 4: 5}.get(self.modes, 20)


def plane(attention: str) -> Plane | None:
    """What the name of a continuous attention says; None for a discrete one."""
    if attention in _DISCRETE or attention == BLIND:
        return None
    match = _CONTINUOUS.fullmatch(attention)
    if match is None:
        raise ValueError(f"attention must be of {KNOWN}, got {attention!r}")
    family, count, modes, count_of_modes = match.groups()
    numbers = int(modes or 1), int(count or count_of_modes)
    _check_spelling(attention, family or "softmax", *numbers)
    return Plane(Tsallis(2.0) if family == "sparsemax" else Shannon(), numbers[1], numbers[0])


def _check_spelling(attention: str, family: str, modes: int, functions: int) -> None:
    """One name for one attention: a run is stored under it."""
    if modes < 1:
        raise ValueError(f"modes must be >= 1, got {modes} in {attention!r}")
    if functions < 1 or math.isqrt(functions) ** 2 != functions:
        raise ValueError(
            f"functions stand in a square: N must be 1, 4, 9, 16, …, got {functions} in "
            f"{attention!r}"
        )
    right = f"{modes}-mca-{functions}" if modes > 1 else f"continuous-{family}-{functions}"
    if attention != right:
        raise ValueError(f"attention {attention!r} is spelt {right!r}")


class Reading(nn.Module):
    """Scores of the cells, then their expectation under what the attention makes of them.

    The discrete and the continuous ones have the same parameters: those of the scores.
    """

    def __init__(self, width: int, inner: int, grid: tuple[int, int], attention: str) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, 1))
        settings = plane(attention)
        self.regularizer = None if settings is not None else _DISCRETE[attention]
        self.density = None
        if settings is not None:
            self.density = fnn.ContinuousAttention2d(
                grid,
                settings.regularizer,
                settings.functions,
                modes=Modes(settings.modes, settings.iterations),
            )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | Density | Mixture]:
        """(batch, cell, width) -> context (batch, width), and the weights or the density."""
        scores = self.score(tokens).squeeze(-1)
        if self.density is not None:
            attended = self.density(tokens, scores)
            return attended.context, attended.density
        assert self.regularizer is not None
        weights = solve(scores, self.regularizer).weights
        return (weights.unsqueeze(1) @ tokens).squeeze(1), weights

    def selecting(self, penalty: float, generator: torch.Generator) -> None:
        """From now on as many modes for each example as pay for themselves."""
        if self.density is None:
            raise ValueError("modes are chosen for a continuous attention")
        from fenchel.continuous import Random

        self.density.modes = ModeSelection(max_modes=5, penalty=penalty, start=Random(3, generator))


def masses(attention: Tensor | Density | Mixture, grid: tuple[int, int], side: int) -> Tensor:
    """(batch, side, side), the share of the attention in each pixel of the picture, sum 1.

    What a density has outside the picture is left out.
    """
    if isinstance(attention, Tensor):
        cells = attention.unflatten(-1, grid)
        rows, columns = (torch.arange(side) * size // side for size in grid)
        picture = cells[:, rows][:, :, columns]
    else:
        places = cell_centers(side, side, dtype=attention.mean.dtype, device=attention.mean.device)
        densities = _widened(attention, 1 / side).prob(places.unsqueeze(1))  # (pixel, batch)
        picture = densities.T.unflatten(-1, (side, side))
    shares: Tensor = picture / picture.sum((-2, -1), keepdim=True).clamp_min(1e-30)
    return shares


def _widened(attention: Density | Mixture, pixel: float) -> Density | Mixture:
    """By about the spread of a pixel, over which its centre then stands for a mean; without that a
    density that is narrower than a pixel would be missed by all centres."""
    if isinstance(attention, Mixture):
        return Mixture(attention.mixing, _wider(attention.components, pixel))
    return _wider(attention, pixel)


def _wider(density: Density, pixel: float) -> Density:
    # A square of that side has pixel^2 / 12; with 1 / 8 a paraboloid reaches from corner to centre.
    eye = torch.eye(2, dtype=density.mean.dtype, device=density.mean.device)
    family = Paraboloid if isinstance(density, Paraboloid) else Gaussian
    return family.from_covariance(density.mean, density.covariance_matrix + pixel**2 / 8 * eye)
