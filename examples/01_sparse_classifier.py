"""A classifier whose predictions hold exact zeros, so that the classes left over are its answer.

Pictures show one digit or two laid over each other, and the target is even over the digits shown.
A Fenchel–Young loss trains the scores for the very map that makes the prediction: cross-entropy
for softmax, its sparse relatives for entmax and sparsemax. Their support is a set of labels without
a threshold; softmax needs one, tuned here on the training pictures, and tuned for all three.

    python examples/01_sparse_classifier.py
"""

from __future__ import annotations

import torch
from _data import add_steps, parser, steps_of, track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fenchel as fl

OMEGAS = {"softmax": fl.Shannon(), "entmax 1.5": fl.Tsallis(1.5), "sparsemax": fl.Tsallis(2.0)}
TRAINING = 1200  # of the 1797 digits; the others make the pictures of the test


def pictures(pixels: Tensor, digits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(count, 64) pictures and (count, 10) targets, even over the one or two digits shown."""
    first, second = torch.randint(len(pixels), (2, count))
    second = torch.where(torch.rand(count) < 0.5, first, second)  # the same twice: one digit
    shown = torch.maximum(pixels[first], pixels[second])
    target = nn.functional.one_hot(digits[first], 10) + nn.functional.one_hot(digits[second], 10)
    return shown, target / 2.0


def train(omega: fl.Regularizer, x: Tensor, y: Tensor, steps: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)  # the same start and the same batches for every loss
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in track(range(steps), f"{omega}"):
        batch = torch.randint(len(x), (256,))
        optimizer.zero_grad()
        fl.fenchel_young_loss(model(x[batch]), y[batch], omega).backward()
        optimizer.step()
    return model


def exact(p: Tensor, y: Tensor, threshold: float = 0.0) -> float:
    """Share of pictures whose set of labels is right, no more and no fewer."""
    return ((p > threshold) == (y > 0)).all(-1).double().mean().item()


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/01_sparse_classifier.py --steps 500 --seed 1")
    add_steps(options, usual=1200, quick=60)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    x, y = pictures(pixels[:TRAINING], labels[:TRAINING], 20_000)
    test_x, test_y = pictures(pixels[TRAINING:], labels[TRAINING:], 4_000)
    print(f"{len(test_x)} pictures of one or two digits; sets of labels found exactly")
    print("            top digit shown   zeros   support   support = set   tuned threshold")
    for name, omega in OMEGAS.items():
        model = train(omega, x, y, steps_of(args), args.seed)
        with torch.no_grad():
            p = fl.solve(model(test_x), omega).weights
            fitted = fl.solve(model(x), omega).weights
        best = max(torch.linspace(0.0, 0.5, 51).tolist(), key=lambda t: exact(fitted, y, t))
        top = (test_y.gather(-1, p.argmax(-1, keepdim=True)) > 0).double().mean()
        zeros, support = (p == 0).double().mean(), (p > 0).double().sum(-1).mean()
        print(
            f"{name:<12}{top:>14.1%}{zeros:>9.1%}{support:>10.2f}{exact(p, test_y):>15.1%}"
            f"{exact(p, test_y, best):>12.1%} (> {best:.2f})"
        )


if __name__ == "__main__":
    main()
