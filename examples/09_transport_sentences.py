"""Transport attention between two sentences: which word's share moves to which.

Every token of the first sentence holds an equal share. It moves to the tokens of the second at the
cost 1 - cosine of their MiniLM vectors; gamma is how freely it spreads. Then evidence asks for a
mean nearer to one word, and the exact plan of `fenchel.dual.transport` says which shares follow.

    python examples/09_transport_sentences.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from _data import add_model, found, parser
from torch import Tensor
from torch.nn.functional import normalize

from fenchel import dual

FIRST = "The nurse handed the patient a glass of water."
SECOND = "A doctor gave the sick man something to drink."


def with_minilm(folder: Path, sentences: list[str]) -> list[tuple[list[str], Tensor]]:
    """Tokens and their vectors of length one, from the last layer."""
    from fenchel import lens

    model, tokenizer = lens.load(folder)
    made = []
    for sentence in sentences:
        inputs = tokenizer(sentence, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0, 1:-1]  # without [CLS] and [SEP]
        tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[1:-1]
        made.append((tokens, normalize(states.double(), dim=-1)))
    return made


def at_random(sentences: list[str]) -> list[tuple[list[str], Tensor]]:
    """One random vector a word: only equal words are alike."""
    words = [sentence.lower().removesuffix(".").split() for sentence in sentences]
    vectors = {word: torch.randn(64, dtype=torch.float64) for word in words[0] + words[1]}
    return [(line, normalize(torch.stack([vectors[w] for w in line]), dim=-1)) for line in words]


def plan_of(templates: Tensor, cost: Tensor, multiplier: Tensor, gamma: float) -> Tensor:
    """Row t, column j: how much of the share of word j ends at word t."""
    return torch.softmax(((templates @ multiplier)[:, None] - cost) / gamma, 0) / cost.shape[1]


def main(argv: list[str] | None = None) -> None:
    example = 'examples/09_transport_sentences.py --second "The man is ill." --towards ill'
    options = parser(__doc__, example, quick=False)
    options.add_argument("--first", default=FIRST, help=f"({FIRST})")
    options.add_argument("--second", default=SECOND, help=f"({SECOND})")
    options.add_argument("--towards", default="man", help="a token of the second (man)")
    options.add_argument("--gamma", type=float, default=0.05, help="spread of the plan (0.05)")
    options.add_argument("--reliability", type=float, default=0.5, help="of the evidence (0.5)")
    add_model(options)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    sentences = [args.first, args.second]
    real = found(args.model / "config.json", "a random vector for each word")
    both = with_minilm(args.model, sentences) if real else at_random(sentences)
    (words, sources), (others, templates) = both
    if args.towards not in others:
        options.error(f"--towards must be one of {', '.join(others)}; got {args.towards}")

    cost = 1 - templates @ sources.mT  # (other, word)
    wish = others.index(args.towards)
    before = plan_of(templates, cost, torch.zeros_like(templates[0]), args.gamma)
    evidence = templates[wish] - before.sum(1) @ templates
    problem = (templates, None, cost, evidence, args.reliability, args.gamma)
    exact, near = dual.transport(*problem), dual.transport_first_order(*problem)
    after = plan_of(templates, cost, exact.multiplier, args.gamma)

    print(f"{'':<12}moves to (share)         with evidence for {args.towards!r}")
    for j, word in enumerate(words):
        tops = [(plan[:, j] * len(words)).max(0) for plan in (before, after)]
        first, second = (f"{others[t]} {share:.0%}" for share, t in tops)
        print(f"{word:<12}{first:<25}{second}")
    was, now, approximate = before.sum(1)[wish], exact.weights[wish], near.weights[wish]
    print(f"weight of {args.towards!r}: {was:.4f} without evidence, {now:.4f} with it", end="; ")
    print(f"to first order, an average of attentions, {approximate:.4f}")
    off = (after.sum(1) - exact.weights).abs().max()
    print(f"the plan's sums are the solution's weights up to {off:.1e}; gap {exact.gap:.1e}")


if __name__ == "__main__":
    main()
