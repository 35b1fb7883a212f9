"""How many modes has an attention map? `select_mixture` fits one to six, and charges for each.

The maps are made, so that the answer is known: one to four equal bumps on 14 x 14 cells. Some are
clean; some have bumps narrower than a cell, counted as they are and with modes that must be as wide
as half a cell (try --least 0.4); some have a tenth of their weight spread evenly over the picture.
All are counted under two prices for a mode, AIC and BIC.

    python examples/08_counting_modes.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from _data import parser, track
from torch import Tensor

from fenchel import continuous as fc

POSITIONS = fc.cell_centers(14, 14, dtype=torch.float64)
PENALTIES = {"price 10": 10.0, "price 40": 40.0, "AIC": fc.AIC(), "BIC": fc.BIC()}


class Kind(NamedTuple):
    name: str
    width: float  # deviation of a bump; a cell is 1 / 14 = 0.071 wide
    even: float = 0.0  # share of the weight that is even over the picture
    least: float = 1e-6  # variance of a mode, over that of the positions: the library's default


def kinds(least: float) -> list[Kind]:
    # The positions fill the unit square: their variance is 1 / 12.
    wide_enough = Kind(f"narrow, {least:g} cell", 0.04, least=12 * (least / 14) ** 2)
    return [Kind("clean", 0.09), Kind("narrow", 0.04), wide_enough, Kind("a tenth even", 0.09, 0.1)]


def bumps(modes: int, count: int, kind: Kind) -> Tensor:
    """(count, 196) maps that sum to one; centres are at least 0.3 apart, and off the border."""
    centres = torch.empty(0, modes, 2, dtype=torch.float64)
    while len(centres) < count:
        drawn = 0.2 + 0.6 * torch.rand(500, modes, 2, dtype=torch.float64)
        apart = torch.cdist(drawn, drawn) + torch.eye(modes)
        centres = torch.cat([centres, drawn[apart.amin((1, 2)) > 0.3]])
    far = torch.cdist(POSITIONS, centres[:count]).square()  # (count, 196, modes)
    maps = (-far / (2 * kind.width**2)).exp().sum(-1)
    return (1 - kind.even) * maps / maps.sum(-1, keepdim=True) + kind.even / len(POSITIONS)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/08_counting_modes.py --seed 1")
    text = "deviation of the narrowest mode, in cells, where it is limited (0.5)"
    options.add_argument("--least", type=float, default=0.5, metavar="CELLS", help=text)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    count, restarts = (4, 5) if args.quick else (50, 10)
    cases = [(kind, modes) for kind in kinds(args.least) for modes in (1, 2, 3, 4)]
    lines = []
    for kind, modes in track(cases, "counting"):
        maps = bumps(modes, count, kind)
        line = f"{kind.name:<20}{modes:>3}"
        for penalty in PENALTIES.values():
            start = fc.Random(restarts, torch.Generator().manual_seed(args.seed))
            found = fc.select_mixture(
                maps, POSITIONS, 6, penalty, iterations=50, start=start, floor=kind.least
            ).modes
            right = (found == modes).double().mean()
            line += f"{right:>9.0%} ({found.double().mean():.2f})"
        lines.append(line)
    print(f"share of {count} maps counted right (mean count)")
    print(f"{'kind':<20}true" + "".join(f"{name:>15}" for name in PENALTIES))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
