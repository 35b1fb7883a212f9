"""Continuous attention on a photograph: weights on a grid of cells, or a density over the picture.

A cell asks which others have its colour. Discrete attention answers with a weight for each of
14 x 14 cells; continuous attention with a Gaussian of the same mean and covariance as softmax's
weights, or a paraboloid of the same, which is zero outside an ellipse. Each reads the colour that
it attends to, and a picture shows where; cell and kernel were chosen to show the difference well.
The photograph is scikit-learn's flower.jpg (flickr.com/photos/vultilion, CC BY 2.0), or yours.

    python examples/07_photograph.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from _data import absent, add_out, parser, picture
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

import fenchel as fl
from fenchel import continuous as fc
from fenchel.lens.pictures import attention_map

GRID = 14
WIDTH = 0.2  # of the kernel that compares colours


def read_image(path: Path | None) -> Tensor:
    """(height, width, 3), from 0 to 1."""
    if path is None:
        return torch.tensor(load_sample_image("flower.jpg")) / 255
    if not path.is_file():
        absent(path, "give --image the path of a photograph, or leave it out for the flower")
    with Image.open(path) as image:
        return torch.tensor(np.asarray(image.convert("RGB"))) / 255


def covered(density: fc.Density, side: int = 200) -> tuple[float, float]:
    """Shares: of the picture where the density is not zero; of its mass that is on the picture."""
    p = density.prob(fc.cell_centers(side, side, dtype=torch.float64))
    return (p > 0).double().mean().item(), p.mean().item()


def colour(rgb: Tensor) -> str:
    return "(" + ", ".join(f"{channel:.2f}" for channel in rgb.tolist()) + ")"


def main(argv: list[str] | None = None) -> None:
    example = "examples/07_photograph.py --image cat.jpg --cell 6 8"
    options = parser(__doc__, example, seed=False, quick=False)
    options.add_argument("--image", type=Path, metavar="FILE", help="another photograph")
    cell = {"nargs": 2, "type": int, "default": (6, 5), "metavar": ("ROW", "COLUMN")}
    options.add_argument("--cell", **cell, help=f"that asks, 0 to {GRID - 1} from the upper left")
    add_out(options, "07_photograph.png")
    args = options.parse_args(argv)
    if not all(0 <= place < GRID for place in args.cell):
        options.error(f"--cell must lie between 0 and {GRID - 1}, got {args.cell}")
    image = read_image(args.image)
    cells = torch.nn.functional.adaptive_avg_pool2d(image.permute(2, 0, 1), GRID)
    features = cells.flatten(1).mT.double()  # (196, 3): the mean colour of each cell
    asking = features[args.cell[0] * GRID + args.cell[1]]
    scores = -(features - asking).square().sum(-1) / (2 * WIDTH**2)
    print(f"the colour that asks          {colour(asking)}")

    shown: dict[str, Tensor | fc.Density] = {}
    for name, omega in {"softmax": fl.Shannon(), "sparsemax": fl.Tsallis(2.0)}.items():
        weights = fl.solve(scores, omega).weights
        shown[name] = weights.reshape(GRID, GRID)
        share = (weights > 0).double().mean()
        print(f"{name:<20} reads    {colour(weights @ features)}, non-zero on {share:.0%} of cells")
    for name, omega in {"Gaussian": fl.Shannon(), "paraboloid": fl.Tsallis(2.0)}.items():
        layer = fl.nn.ContinuousAttention2d((GRID, GRID), omega, functions=100).double()
        context, density = layer(features[None], scores[None])
        shown[name] = density[0]
        share, inside = covered(density[0])
        print(
            f"{name:<20} reads    {colour(context[0])}, non-zero on {share:.0%} of the picture, "
            f"{inside:.1%} of its mass on it"
        )
    figure = attention_map(image, shown, top=15.0)  # brighter than this only sparsemax is
    figure.savefig(picture(args.out), dpi=150)
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
