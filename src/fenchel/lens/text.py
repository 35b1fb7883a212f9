"""Sentences from disk, as a model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from fenchel._numerics import check_whole

_LONGEST = 512  # tokens


def sentences(path: Path, count: int) -> list[str]:
    """The first `count` lines that are not empty; of a .tsv the first column, as it stands."""
    check_whole(count, "count", 1)
    with path.open(encoding="utf-8") as lines:
        texts = (line.partition("\t")[0] if path.suffix == ".tsv" else line for line in lines)
        found = list(islice((text.strip() for text in texts if text.strip()), count))
    if not found:
        raise ValueError(f"{path} holds no sentence")
    return found


def encode(tokenizer: Any, texts: Sequence[str], *, decoder: bool = False) -> dict[str, Tensor]:
    """Padded, at most 512 tokens each.

    decoder: with labels, the same tokens: the decoder is given the sentence itself, moved on by
        one, as in copying it.
    """
    longest = min(_LONGEST, tokenizer.model_max_length)
    made = tokenizer(
        list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt"
    )
    inputs = dict(made)
    if decoder:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        hidden = inputs["attention_mask"] == 0
        inputs["labels"] = inputs["input_ids"].masked_fill(hidden, -100)
    return inputs
