"""Swap the softmax of a pretrained sentence encoder for entmax, without training anything.

`fenchel.hf.convert` gives all heads one alpha, or each layer its own by a recipe: the largest alpha
that alone moves the embeddings of half of the sentences by no more than a tolerance. The other half
judges: how far embeddings move, and how many links are left. The weights of any head come with a
certificate, a bound of what better weights could gain.

    python examples/04_swap_minilm.py
"""

from __future__ import annotations

from typing import Any

import torch
from _data import ROOT, add_model, need_model, parser, track
from torch import Tensor

import fenchel as fl
from fenchel import hf, lens

Inputs = dict[str, Tensor]
TOLERANCE = 0.005  # mean 1 - cosine by which one layer of the recipe may move embeddings


@torch.no_grad()
def embed(model: Any, inputs: Inputs) -> tuple[Tensor, float]:
    """(text, width) of length one, mean over tokens; and the share of weights above zero."""
    seen = inputs["attention_mask"].bool()
    made = model(**inputs, output_attentions=True)
    means = (made.last_hidden_state * seen.unsqueeze(-1)).sum(1) / seen.sum(1, keepdim=True)
    links = (torch.stack(made.attentions) > 0).double().mean((0, 2))  # (text, query, key)
    pairs = seen[:, :, None] & seen[:, None, :]  # padding is in no pair
    return torch.nn.functional.normalize(means, dim=-1), links[pairs].mean().item()


def recipe(model: Any, alphas: list[float]) -> dict[str, Any]:
    """One alpha per layer, in the form that `fenchel audit` writes: one per head."""
    heads = model.config.num_attention_heads
    of_layer = {f"encoder.layer.{n}.attention.self": [x] * heads for n, x in enumerate(alphas)}
    return {"format": "fenchel-recipe-1", "alphas": of_layer}


def choose(model: Any, inputs: Inputs, grid: list[float]) -> list[float]:
    """For each layer the largest alpha of the grid within the tolerance, or 1, which is softmax."""
    chosen = [1.0] * model.config.num_hidden_layers
    before, _ = embed(hf.convert(model, fl.Shannon()), inputs)
    for layer in track(range(len(chosen)), "each layer alone"):
        for alpha in grid:
            alone = [alpha if other == layer else 1.0 for other in range(len(chosen))]
            after, _ = embed(hf.convert(model, recipe(model, alone)), inputs)
            if 1 - (before * after).sum(-1).mean() <= TOLERANCE:
                chosen[layer] = alpha
    return chosen


def certify(model: Any, inputs: Inputs, layer: int, head: int) -> fl.Inspection:
    """A head with entmax-1.5 in one layer, softmax in the others."""
    alphas = [1.5 if other == layer else 1.0 for other in range(model.config.num_hidden_layers)]
    return fl.inspect(hf.convert(model, recipe(model, alphas)), inputs, layer, head)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/04_swap_minilm.py --quick --seed 1")
    add_model(options)
    args = options.parse_args(argv)
    need_model(args.model)
    model, tokenizer = lens.load(args.model)
    texts = lens.sentences(ROOT / "examples" / "sentences.txt", 8 if args.quick else 32)
    random = torch.Generator().manual_seed(args.seed)
    halves = torch.randperm(len(texts), generator=random).reshape(2, -1).tolist()
    tuning, others = (lens.encode(tokenizer, [texts[i] for i in half]) for half in halves)
    alphas = choose(model, tuning, [1.1, 1.5] if args.quick else [1.05, 1.1, 1.2, 1.35, 1.5])
    print("recipe, alpha of each layer:", *alphas)
    print(f"{len(halves[1])} other sentences  cosine, mean   worst  nearest kept  links kept")
    ways = {f"entmax-{alpha}": fl.Tsallis(alpha) for alpha in (1.25, 1.5)}
    before, _ = embed(hf.convert(model, fl.Shannon()), others)
    for name, way in {"softmax": fl.Shannon(), **ways, "recipe": recipe(model, alphas)}.items():
        after, links = embed(hf.convert(model, way), others)
        cosine = (before * after).sum(-1)
        was, now = ((x @ x.mT).fill_diagonal_(-2).argmax(-1) for x in (before, after))
        kept = (was == now).double().mean()
        print(f"{name:<20}{cosine.mean():>12.4f}{cosine.min():>8.4f}{kept:>14.1%}{links:>12.1%}")
    seen = certify(model, lens.encode(tokenizer, texts[:1]), 1, 0)
    print(f"layer 1, head 0, {seen.keys} tokens of one sentence, entmax-1.5:", end=" ")
    print(f"{seen.support_size.double().mean():.1f} keys a token, gap at most {seen.gap.max():.1e}")


if __name__ == "__main__":
    main()
