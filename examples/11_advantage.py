"""Reading a head with the advantage view: not what it looks at, but what a gradient would favour.

The advantage of a key is its utility less the mean utility of what the head attends to; a step up
the gradient raises the scores of keys where it is positive. Here utility is what brings the
embedding of a sentence nearer to that of another, in one head of MiniLM, picked among 72 as easy to
read. Under entmax, with the same scores, keys outside the support get no gradient.

    python examples/11_advantage.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _data import add_model, found, parser
from torch import Tensor

import fenchel as fl

TEXT = "She did not say that he stole the money; she said that he had borrowed it."
OTHER = "He borrowed the money."
# Tokens; weights, utility and gradient in the scores (query, key), the latter for comparison.
Head = tuple[list[str], Tensor, Tensor, Tensor]


def minilm_head(folder: Path, texts: tuple[str, str], layer: int, head: int) -> Head:
    from fenchel import lens

    model, tokenizer = lens.load(folder)
    model.set_attn_implementation("eager")  # the one that hands out its weights
    first, second = (tokenizer(text, return_tensors="pt") for text in texts)
    with torch.no_grad():
        goal = model(**second).last_hidden_state[0].mean(0)

    def distance(outputs: Any, _: Any = None) -> Tensor:
        return -torch.cosine_similarity(outputs.last_hidden_state[0].mean(0), goal, dim=0)

    outputs = model(**first, output_attentions=True)
    weights = outputs.attentions[layer]  # (1, head, query, key)
    (slope,) = torch.autograd.grad(distance(outputs), weights)
    gradient = lens.advantage(model, tokenizer, texts[:1], distance).of("encoder", layer)
    tokens = tokenizer.convert_ids_to_tokens(first["input_ids"][0])
    return tokens, weights[0, head].detach().double(), -slope[0, head], gradient[0, head]


def random_head(text: str) -> Head:
    tokens = text.split()
    scores, utility = torch.randn(2, len(tokens), len(tokens), dtype=torch.float64)
    weights = scores.mul_(2).requires_grad_().softmax(-1)
    (gradient,) = torch.autograd.grad((weights * utility).sum(), scores)
    return tokens, weights.detach(), utility, gradient


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/11_advantage.py --layer 0 --head 3", quick=False)
    options.add_argument("--text", default=TEXT, help=f"({TEXT})")
    options.add_argument("--other", default=OTHER, help=f"to come nearer to ({OTHER})")
    options.add_argument("--layer", type=int, choices=range(6), default=5, help="from 0 (5)")
    options.add_argument("--head", type=int, choices=range(12), default=8, help="from 0 (8)")
    add_model(options)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    real = found(args.model / "config.json", "a head with random scores and utilities")
    both = (args.text, args.other)
    head = minilm_head(args.model, both, args.layer, args.head) if real else random_head(args.text)
    tokens, weights, utility, expected = head

    scores = weights.clamp_min(1e-300).log()  # up to a constant a query, which changes nothing
    soft, sparse = fl.solve(scores, fl.Shannon()), fl.solve(scores, fl.Tsallis(1.5))
    advantage, gradient = soft.advantage(utility), soft.gradient(utility)
    off = (gradient - expected).abs().max() / expected.abs().max()
    print(f"gradient by advantages and found another way: {off:.1e} of its size apart")
    query = gradient.abs().sum(-1).argmax()  # the one whose scores matter most
    print(f"query {tokens[query]!r}, one of {len(tokens)} tokens")
    shown = {"looks at": weights, "advantage for": advantage, "gradient for": gradient}
    for name, values in shown.items():
        best = values[query].argsort(descending=True)[:3].tolist()
        print(f"  {name:<15}" + "   ".join(f"{tokens[k]} {values[query, k]:.2g}" for k in best))
    on = (weights * (advantage > 0)).sum(-1).mean()
    print(f"all queries: {on:.1%} of the weight lies on keys with positive advantage;", end=" ")
    same = (weights.argmax(-1) == gradient.argmax(-1)).double().mean()
    print(f"the key with most weight has the largest gradient for {same:.1%} of queries")
    wanted = sparse.advantage(utility) > 0
    outside = wanted & ~sparse.support
    print(f"entmax 1.5: {sparse.support_size.double().mean():.1f} keys a query;", end=" ")
    print(
        f"{outside.sum() / wanted.sum():.1%} of keys with positive advantage are outside,", end=" "
    )
    print(f"where gradients add up to {sparse.gradient(utility)[outside].abs().sum():g}")


if __name__ == "__main__":
    main()
