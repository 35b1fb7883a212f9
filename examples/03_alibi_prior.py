"""ALiBi as a base measure: mass exp(-slope distance), given to keys before any score is seen.

Under softmax a base measure and a bias on the scores are the same thing. Under entmax they are not:
a bias takes far keys below the threshold; a base measure scales what a key gets, the threshold is
on its score alone, and a far key with a good score stays in. The slopes are tensors, and train.

    python examples/03_alibi_prior.py
"""

from __future__ import annotations

import torch
from _data import add_steps, parser, steps_of, track
from torch import Tensor

import fenchel as fl

HEADS, TOKENS = 4, 128


def reach(weights: Tensor) -> tuple[float, float]:
    """Of the last query: keys with weight, and the distance of the farthest, means over heads."""
    seen = weights[:, -1] > 0
    farthest = TOKENS - 1 - seen.long().argmax(-1)
    return seen.sum(-1).double().mean().item(), farthest.double().mean().item()


def learn_slopes(true: Tensor, steps: int) -> Tensor:
    """From the outputs of heads whose slopes are `true`, starting with all slopes equal."""
    log_slopes = torch.full((HEADS,), 0.1, dtype=true.dtype).log().requires_grad_()
    optimizer = torch.optim.Adam([log_slopes], 0.05)
    for _ in track(range(steps), "slopes"):
        q, k, v = torch.randn(3, 2, HEADS, 96, 16, dtype=true.dtype)
        answer = fl.attention(q, k, v, fl.Tsallis(1.5), base=causal_alibi(true))
        optimizer.zero_grad()
        given = fl.attention(q, k, v, fl.Tsallis(1.5), base=causal_alibi(log_slopes.exp()))
        (given - answer).square().mean().backward()
        optimizer.step()
    return log_slopes.detach().exp()


def causal_alibi(slopes: Tensor | None = None) -> fl.priors.Prior:
    return fl.priors.Causal() * fl.priors.ALiBi(HEADS, slopes)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/03_alibi_prior.py --steps 50")
    add_steps(options, usual=500, quick=40)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    scores = torch.randn(HEADS, TOKENS, TOKENS, dtype=torch.float64)
    places = torch.arange(TOKENS)
    bias = causal_alibi().log_mass(places, places)  # (head, query, key), -inf in the future

    # 1. Softmax: two spellings of one thing.
    apart = fl.softmax(scores, base=causal_alibi()) - torch.softmax(scores + bias, -1)
    print(f"softmax, base against bias: largest difference of a weight {apart.abs().max():.1e}")

    # 2. Entmax: the threshold is on the score alone, or on score and distance together.
    omega = fl.Tsallis(1.5)
    ways = {
        "entmax, no prior": fl.solve(scores, omega, base=fl.priors.Causal()),
        "entmax, ALiBi as bias": fl.solve(scores + bias, omega),
        "entmax, ALiBi as base": fl.solve(scores, omega, base=causal_alibi()),
    }
    for name, solution in ways.items():
        keys, far = reach(solution.weights)
        print(f"{name:<24} keys {keys:6.2f}   farthest {far:6.1f}   gap {solution.gap.max():.0e}")
    base = ways["entmax, ALiBi as base"]
    past = (places <= places[:, None]).expand_as(scores)
    same = base.support == (past & (scores > base.threshold.unsqueeze(-1)))
    print(
        f"as base, in the support exactly if score > threshold: {same.double().mean():.1%} of keys"
    )

    # 3. Slopes that train.
    true = torch.tensor(fl.priors.alibi_slopes(HEADS), dtype=torch.float64)
    found = learn_slopes(true, steps_of(args))
    print("slopes asked for:", *(f"{x:.4f}" for x in true.tolist()))
    print("slopes learned:  ", *(f"{x:.4f}" for x in found.tolist()))


if __name__ == "__main__":
    main()
