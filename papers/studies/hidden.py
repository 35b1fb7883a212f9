"""Sentences as measures: the hidden states of their tokens, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel.lens.capture.evaluation import evaluating
from fenchel.lens.families import find_attentions
from fenchel.lens.inputs import Batch
from fenchel.lens.tokenizing import encode
from fenchel.measures import Empirical, wasserstein1

_ROOM = 4096  # tokens of one pass, padding counted


@dataclass(frozen=True, eq=False)
class Cloud:
    """Of one sentence: tokens (layers + 1, n, d), before the first layer and after each.

    words: bool (n), False for what the tokenizer put around the sentence, [CLS] and [SEP].
    """

    tokens: Tensor
    words: Tensor

    @property
    def inner(self) -> Tensor:
        """Without [CLS] and [SEP]. (layers + 1, words, d)"""
        return self.tokens[:, self.words]

    @property
    def embedding(self) -> Tensor:
        """The mean of all tokens at the last layer, as sentence-transformers pool MiniLM. (d)"""
        return self.tokens[-1].mean(0)


def clouds(model: Any, tokenizer: Any, texts: Sequence[str]) -> list[Cloud]:
    """One for each text, in float64.

    >>> model, tokenizer = lens.load("build/models/minilm")
    >>> clouds(model, tokenizer, ["A man is playing."])[0].tokens.shape
    torch.Size([7, 7, 384])
    """
    if not texts:
        return []
    find_attentions(model, "encoder")  # refuses what has none
    inputs = encode(tokenizer, texts, model=model)
    batch = Batch.of(model, inputs, "encoder")
    by_place: list[Cloud | None] = [None] * len(texts)
    with evaluating(model), torch.no_grad():
        for places, part in batch.groups(_ROOM):
            body = model.get_encoder() if part.encoder_only else model.base_model
            states = torch.stack(body(**part.first, output_hidden_states=True).hidden_states)
            words = _words(tokenizer, part.first["input_ids"])
            for row, place in enumerate(places.tolist()):
                real = part.real[row]
                by_place[place] = Cloud(states[:, row, real].double(), words[row, real])
    clouds = [one for one in by_place if one is not None]
    _check_words(clouds, texts)
    return clouds


def apart(one: Tensor, other: Tensor) -> Tensor:
    """W1 with the l2 norm between clouds of equal weights. (..., n, d), (..., m, d) -> (...)"""
    return wasserstein1(Empirical(one), Empirical(other), norm=2)


def spread(points: Tensor) -> Tensor:
    """The mean distance of the points to their mean; zero for a Dirac. (..., n, d) -> (...)"""
    about = points - points.mean(-2, keepdim=True)
    length: Tensor = about.norm(dim=-1).mean(-1)
    return length


def size(points: Tensor) -> Tensor:
    """The mean length of the points. (..., n, d) -> (...)"""
    length: Tensor = points.norm(dim=-1).mean(-1)
    return length


def _words(tokenizer: Any, ids: Tensor) -> Tensor:
    """Not `all_special_ids`, which holds [UNK] too: an unknown word is a word."""
    names = ("cls_token_id", "sep_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    around = {getattr(tokenizer, name, None) for name in names} - {None}
    return ~torch.isin(ids, torch.tensor(sorted(around), device=ids.device, dtype=ids.dtype))


def _check_words(clouds: list[Cloud], texts: Sequence[str]) -> None:
    for one, text in zip(clouds, texts, strict=True):
        if not bool(one.words.any()):
            raise ValueError(f"the tokenizer finds no word in {text!r}; leave it out")
