"""A classifier that knows how far each input can be moved before its answer may change.

Digits are read row by row through `fl.nn.LipschitzAttention`. Every layer has a Lipschitz bound,
so the margin between two logits, over the constant of their difference, is a radius in l2 within
which no attack can change the answer. The script attacks inside the radii and beyond them, and
beside it a classifier of the same shape that holds no constant.

    python examples/10_robust_classifier.py
"""

from __future__ import annotations

import torch
from _data import add_steps, parser, steps_of, track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import fenchel as fl

WIDTH, TRAINING = 16, 1200  # of the 1797 digits; the others are the test
DISTANCES = (0.0, 0.1, 0.2, 0.4, 0.8)  # in l2; a pixel runs from 0 to 1


class Classifier(nn.Module):
    """The rows of a picture are its tokens: (batch, 8, 8) -> logits (batch, 10)."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.held, self.enter, self.leave = held, nn.Linear(8, WIDTH), nn.Linear(8 * WIDTH, 10)
        self.place = nn.Parameter(torch.randn(8, WIDTH) / 4)  # where a row is; changes no distance
        if held:
            orthogonal(self.enter)  # keeps lengths: a constant of one
            self.attention = fl.nn.LipschitzAttention(WIDTH, 4, constant=1.0)
        else:
            self.attention = fl.nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.place
        x = x + (self.attention(x) if self.held else self.attention(x, x, x)[0])
        return self.leave(x.flatten(1))


def radii(model: Classifier, x: Tensor) -> Tensor:
    """Nearer to each picture than this, in l2, no digit can overtake the answer."""
    constant = 1 + model.attention.bound(tokens=8).value  # of x + attention(x)
    logits, w = model(x), model.leave.weight
    best = logits.argmax(-1)
    margin = logits.gather(-1, best[:, None]) - logits  # (picture, digit)
    radius = margin / (constant * torch.cdist(w[best], w))
    return radius.masked_fill(best[:, None] == torch.arange(10), torch.inf).amin(-1)


def attack(model: Classifier, x: Tensor, radius: Tensor, steps: int) -> Tensor:
    """Which answers change while the margin descends, projected onto the ball at each step."""
    answer, radius = model(x).argmax(-1), radius[:, None]
    own = answer[:, None] == torch.arange(10)
    shift, changed = torch.zeros_like(x).flatten(1), torch.zeros(len(x), dtype=torch.bool)
    for _ in range(steps):
        logits = model(x + shift.requires_grad_().view_as(x))
        changed |= logits.argmax(-1) != answer
        margin = logits[own] - logits.masked_fill(own, -torch.inf).amax(-1)
        (slope,) = torch.autograd.grad(margin.sum(), shift)
        shift = shift.detach() - radius / 4 * nn.functional.normalize(slope)
        shift *= (radius / shift.norm(dim=-1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
    return changed


def train(held: bool, x: Tensor, y: Tensor, steps: int, seed: int) -> Classifier:
    torch.manual_seed(seed)
    model = Classifier(held)
    torch.manual_seed(seed)  # again: the same batches for both
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in track(range(steps), "bounded" if held else "unconstrained"):
        batch = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model.requires_grad_(False)


def show(name: str, which: list[Tensor]) -> None:
    print(f"{name:<25}", *(f"{share.double().mean():6.1%}" for share in which))


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/10_robust_classifier.py --steps 500 --seed 1")
    add_steps(options, usual=1000, quick=100)
    args = options.parse_args(argv)
    digits = load_digits()
    x, y = torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)
    known, new = (x[:TRAINING], y[:TRAINING]), x[TRAINING:]
    bounded, free = (train(held, *known, steps_of(args), args.seed) for held in (True, False))
    radius, tries = radii(bounded, new), 8 if args.quick else 40
    print(f"{len(new)} pictures, proved radius {radius.median():.3f} in the median")
    for factor in (0.99, 1.5, 2.0, 3.0):
        changed = attack(bounded, new, factor * radius, tries).sum()
        print(f"each attacked at {factor:.2f} of its radius: {changed} answers changed")
    print("right answers at distance", *(f"{d:6.1f}" for d in DISTANCES))
    evenly = [torch.full_like(radius, d) for d in DISTANCES]
    right = [model(new).argmax(-1) == y[TRAINING:] for model in (bounded, free)]
    show("bounded, attacked", [right[0] & ~attack(bounded, new, d, tries) for d in evenly])
    show("bounded, proved", [right[0] & (radius >= d) for d in DISTANCES])
    show("unconstrained, attacked", [right[1] & ~attack(free, new, d, tries) for d in evenly])


if __name__ == "__main__":
    main()
