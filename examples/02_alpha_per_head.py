"""Learning alpha per head: some heads must leave tokens out, others must blend them all.

Four heads see the same tokens and have four jobs: the value of the token nearest to the query, the
mean of the three nearest, and two blends of all tokens with Gaussian weights. The scores are given
(minus the squared distance), a head learns its scale and its alpha. `LearnedTsallis` starts all
of them at 1.5 and the task decides; the same heads with one fixed alpha are trained beside it.

    python examples/02_alpha_per_head.py
"""

from __future__ import annotations

import torch
from _data import add_steps, parser, steps_of, track
from torch import Tensor, nn

import fenchel as fl

JOBS = ("nearest", "three", "narrow", "wide")  # softmax of -far / 4 and of -far / 16
TOKENS, WIDTH = 24, 8


class Heads(nn.Module):
    """scores: (batch, 1, query, key) -> weights (batch, head, query, key)."""

    def __init__(self, regularizer: nn.Module) -> None:
        super().__init__()
        self.regularizer = regularizer  # its forward() returns the regulariser to use now
        self.log_scale = nn.Parameter(torch.zeros(len(JOBS), 1, 1))

    def forward(self, scores: Tensor) -> Tensor:
        return fl.solve(scores * self.log_scale.exp(), self.regularizer()).weights


class Fixed(nn.Module):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self) -> fl.Tsallis:
        return fl.Tsallis(self.alpha)


def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (size, 1, query, key), values (size, 1, key, WIDTH), and the answer of each head."""
    q, k, v = torch.randn(3, size, 1, TOKENS, WIDTH)
    far = torch.cdist(q, k).square()
    order = far.argsort(-1).argsort(-1)  # 0 for the nearest key
    jobs = (order < 1).float(), (order < 3) / 3.0, (-far / 4).softmax(-1), (-far / 16).softmax(-1)
    return -far, v, torch.cat(jobs, 1) @ v


def train(regularizer: nn.Module, steps: int, seed: int, name: str) -> Tensor:
    """The mean squared error of each head on fresh sequences."""
    torch.manual_seed(seed)  # the same sequences for every regulariser
    heads = Heads(regularizer)
    optimizer = torch.optim.Adam(heads.parameters(), 0.05)
    for _ in track(range(steps), name):
        scores, v, answer = batch(16)
        optimizer.zero_grad()
        (heads(scores) @ v - answer).square().mean((0, 2, 3)).sum().backward()
        optimizer.step()
    scores, v, answer = batch(256)
    with torch.no_grad():
        return (heads(scores) @ v - answer).square().mean((0, 2, 3))


def show(name: str, errors: Tensor) -> None:
    print(f"{name:<28}", *(f"{x:9.4f}" for x in [*errors.tolist(), errors.sum().item()]))


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/02_alpha_per_head.py --steps 200")
    add_steps(options, usual=400, quick=40)
    args = options.parse_args(argv)
    steps = steps_of(args)
    print(f"{'squared error of head':<28}", *(f"{job:>9}" for job in (*JOBS, "sum")))
    learned = fl.nn.LearnedTsallis(len(JOBS), init=1.5)
    show("alpha learned", train(learned, steps, args.seed, "alpha learned"))
    for alpha in (1.0, 1.5, 2.0):
        name = f"alpha {alpha} in every head"
        show(name, train(Fixed(alpha), steps, args.seed, name))
    alphas = learned.alpha.flatten().tolist()
    print(f"{'alpha at the end, from 1.5':<28}", *(f"{alpha:9.4f}" for alpha in alphas))


if __name__ == "__main__":
    main()
