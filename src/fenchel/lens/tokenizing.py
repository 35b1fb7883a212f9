"""Texts as a model takes them: how many tokens it reads, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

LONGEST = 512  # tokens, unless the caller says otherwise
_POSITIONS = ("position_embeddings", "embed_positions", "wpe")


def position_limit(model: Any) -> int | None:
    """Tokens of a text that the model reads at most; None: any number."""
    allowed = []
    for path, module in model.named_modules():
        # a table of positions; RoBERTa's begins after its padding
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in _POSITIONS:
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            allowed.append(module.num_embeddings - first)
    rotary = getattr(model.config, "max_position_embeddings", None)
    allowed += [rotary] if isinstance(rotary, int) and rotary > 0 else []
    return min(allowed, default=None)


def token_limit(model: Any, tokenizer: Any, longest: int) -> int:
    """Tokens of a text at most: ours, the tokenizer's and the model's. model: None where it is not
    known."""
    allowed = [longest, int(min(tokenizer.model_max_length, 2**31))]
    most = None if model is None else position_limit(model)
    return max(2, min([*allowed, most] if most is not None else allowed))


def encode(
    tokenizer: Any, texts: Sequence[str], *, decoder: bool = False, model: Any = None
) -> dict[str, Tensor]:
    """Padded; what is longer than 512 tokens, or than the tokenizer and the model allow, is cut.

    decoder: with labels, the same tokens: the decoder is given the sentence itself, moved on by
        one, as in copying it.
    model: that reads them; some tokenizers do not know how much it can.
    """
    encoded = tokenizer(
        list(texts),
        padding=True,
        truncation=True,
        max_length=token_limit(model, tokenizer, LONGEST),
        return_tensors="pt",
    )
    inputs = dict(encoded)
    if decoder:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        hidden = inputs["attention_mask"] == 0
        inputs["labels"] = inputs["input_ids"].masked_fill(hidden, -100)
    return inputs
