"""Two inputs on their way through the layers: how far apart they are, and how far each is spread.

W1 (l2) between the token clouds, its ratio to the clouds' own spread, and that spread. A cloud
whose spread falls to zero has collapsed to a Dirac: its tokens can no longer be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fenchel.measures import Empirical, wasserstein1
from papers.checks import check_whole
from papers.studies.documents import interval, ratio_interval
from papers.studies.hidden import apart, clouds, size, spread
from papers.studies.stacks import STACKS, Stack

ROUNDING = 1e-9
_COLLAPSED = 1e-13  # spread of a cloud, in units of its tokens' length
_CHUNK = 16  # pairs whose hidden states are held at once
_WORDS = (
    "spread: mean distance of a cloud's tokens to their mean; zero is a Dirac, and below 1e-13 of "
    "the tokens' length it is rounding",
    "random weights show what an architecture does by itself; they say nothing about training",
    "in a model, layer norm rescales every layer: read W1 / spread and spread / length, not W1",
    "certified: product of the layers' constants times W2 of the inputs, which is above W1",
)


@dataclass(frozen=True, eq=False)
class Depth:
    """Each (pair, layers + 1), before the first layer and after each.

    distance: W1 between the two clouds. spread, size: mean distance of a cloud's tokens to their
    mean, and mean length of its tokens; of both clouds together. bound: certified for the distance.
    """

    name: str
    distance: Tensor = field(repr=False)
    spread: Tensor = field(repr=False)
    size: Tensor = field(repr=False)
    bound: Tensor | None = field(default=None, repr=False)

    @property
    def exceeded(self) -> int:
        """Distances above their bound; it must be 0."""
        if self.bound is None:
            return 0
        return int((self.distance > self.bound * (1 + ROUNDING)).sum())

    def as_json(self) -> dict[str, Any]:
        """Means over pairs with 95 % intervals; of ratios to layer 0, geometric means.

        alike: spread / size, which no rescaling of all tokens changes.
        """
        document: dict[str, Any] = {"name": self.name, "pairs": len(self.distance), "layers": []}
        for layer in range(self.distance.shape[1]):
            entry = {
                "layer": layer,
                "distance": interval(self.distance[:, layer]),
                "distance_to_start": ratio_interval(_to_start(self.distance, layer)),
                "relative": ratio_interval(self._relative(layer)),
                "spread": ratio_interval(_to_start(self.spread, layer)),
                "alike": ratio_interval(self.spread[:, layer] / self.size[:, layer]),
            }
            if self.bound is not None:
                entry["bound"] = ratio_interval(self.bound[:, layer] / self.distance[:, 0])
            document["layers"].append(entry)
        if self.bound is not None:
            document["exceeded"] = self.exceeded
        return document

    def _relative(self, layer: int) -> Tensor:
        """W1 in units of the spread; NaN where that is rounding. (pair)"""
        spreads = self.spread[:, layer]
        collapsed = spreads <= _COLLAPSED * self.size[:, layer]
        return torch.where(collapsed, torch.nan, self.distance[:, layer] / spreads)


def _to_start(values: Tensor, layer: int) -> Tensor:
    return values[:, layer] / values[:, 0]


def depth_document(model: Depth | None, stacks: Sequence[Depth]) -> dict[str, Any]:
    """For JSON: of the model, if there is one, and of the stacks."""
    return {
        "study": "depth",
        "model": None if model is None else model.as_json(),
        "stacks": [stack.as_json() for stack in stacks],
        "words": list(_WORDS),
    }


def depth_of_model(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    name: str = "model",
    advance: Callable[[float], object] | None = None,
) -> Depth:
    """Of the first sentence and the second, the third and the fourth, and so on, with [CLS] and
    [SEP]; a last one alone is left out.

    >>> model, tokenizer = lens.load("build/models/minilm")
    >>> depth_of_model(model, tokenizer, ["A man plays.", "Nobody knew it."]).distance.shape
    torch.Size([1, 7])
    """
    pairs = list(zip(texts[::2], texts[1::2], strict=False))
    if not pairs:
        raise ValueError(f"two sentences make a pair, got {len(texts)}; give a longer text")
    rows = []
    for start in range(0, len(pairs), _CHUNK):
        some = pairs[start : start + _CHUNK]
        flat = clouds(model, tokenizer, [text for pair in some for text in pair])
        for one, other in zip(flat[::2], flat[1::2], strict=True):
            rows.append(_figures(one.tokens, other.tokens))
        if advance is not None:
            advance(len(some) / len(pairs))
    return Depth(name, *torch.stack(rows).unbind(1))


def depth_of_stacks(
    *,
    layers: int = 12,
    pairs: int = 20,
    tokens: int = 16,
    width: int = 16,
    seed: int = 0,
    advance: Callable[[float], object] | None = None,
) -> list[Depth]:
    """Of random stacks, see `stacks`: for each pair new inputs and new weights, float64.

    Inputs are two clouds of normal points, (tokens, width) each.
    """
    for value, label in ((layers, "layers"), (pairs, "pairs"), (tokens, "tokens")):
        check_whole(value, label, 1)
    return [
        _of_stack(stack, range(seed, seed + pairs), (layers, tokens, width), advance)
        for stack in STACKS
    ]


def _of_stack(
    stack: Stack,
    seeds: Iterable[int],
    sizes: tuple[int, int, int],
    advance: Callable[[float], object] | None,
) -> Depth:
    layers, tokens, width = sizes
    rows, bounds = [], []
    numbers = list(seeds)
    for seed in numbers:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(2, tokens, width, generator=generator, dtype=torch.float64)
        states, constants = stack.run(start, layers, generator)
        rows.append(_figures(states[:, 0], states[:, 1]))
        if constants is not None:
            bounds.append(contracted(start, constants))
        if advance is not None:
            advance(1 / len(numbers) / len(STACKS))
    bound = torch.stack(bounds) if bounds else None
    distance, spreads, lengths = torch.stack(rows).unbind(1)
    return Depth(stack.name, distance, spreads, lengths, bound)


def contracted(start: Tensor, constants: Sequence[float]) -> Tensor:
    """The product of the constants so far, times W2 of the inputs (2, n, d). (layers + 1)

    Constants are of X -> Y in the l2 norm of all n tokens, and layers do not see their order. So
    with the tokens in the order that makes |X - X'| / sqrt(n) = W2, that falls with the constants;
    and W1 <= W2 <= |Y - Y'| / sqrt(n).
    """

    def squared(x: Tensor, y: Tensor) -> Tensor:
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)

    first = wasserstein1(Empirical(start[0]), Empirical(start[1]), norm=squared).sqrt()
    steps = torch.tensor([1.0, *constants], dtype=torch.float64)
    return first * steps.cumprod(0)


def _figures(one: Tensor, other: Tensor) -> Tensor:
    """W1, spread and size, (3, layers + 1), of clouds (layers + 1, n, d)."""
    spreads = (spread(one) + spread(other)) / 2
    sizes = (size(one) + size(other)) / 2
    return torch.stack([apart(one, other), spreads, sizes])
