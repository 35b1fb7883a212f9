"""What a tokenizer returns, checked, and cut into groups of sentences of about one length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel.lens.families import Kind, family_of
from fenchel.lens.tokenizing import position_limit

_FIRST = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_SECOND = ("decoder_input_ids", "decoder_attention_mask")
_IGNORED = -100  # transformers' mark of a label that is padding


@dataclass(frozen=True, eq=False)
class Batch:
    """Arguments of one forward pass, and which queries are words.

    first (B, n), second (B, m): of the encoder and of the decoder. real (B, Q): not padding.
    encoder_only: the decoder need not run.
    """

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    encoder_only: bool

    @classmethod
    def of(cls, model: Any, inputs: Mapping[str, Tensor], attention: Kind) -> Batch:
        if not isinstance(inputs, Mapping):
            raise TypeError(
                "inputs must be what the tokenizer returns, a mapping with input_ids, "
                f"got {type(inputs).__name__}"
            )
        pair = family_of(model).pair
        given = dict(inputs)
        labels = given.pop("labels", None) if pair else None
        _check(given, pair)
        device = next(model.parameters()).device
        first = {name: given[name].to(device) for name in _FIRST if name in given}
        first.setdefault("attention_mask", torch.ones_like(first["input_ids"]))
        second = {name: given[name].to(device) for name in _SECOND if name in given}
        if not pair or attention == "encoder":
            _check_length(model, first["input_ids"])
            return cls(first, {}, encoder_only=pair)
        if labels is not None:
            second = {**_from_labels(model, labels.to(device)), **second}
        if "decoder_input_ids" not in second:
            raise ValueError(
                f"{attention} attention needs decoder_input_ids or labels in inputs; "
                "fenchel.lens.encode(tokenizer, sentences, decoder=True) makes labels"
            )
        second.setdefault("decoder_attention_mask", torch.ones_like(second["decoder_input_ids"]))
        _check_length(model, first["input_ids"], second["decoder_input_ids"])
        return cls(first, second, encoder_only=False)

    @property
    def real(self) -> Tensor:
        masks = {**self.first, **self.second}
        return masks.get("decoder_attention_mask", masks["attention_mask"]).bool()

    def run(self, model: Any) -> None:
        body = model.get_encoder() if self.encoder_only else model.base_model
        body(**self.first, **self.second)

    def groups(self, room: int) -> Iterator[tuple[Tensor, Batch]]:
        """Sentences of like length, cut to the longest; each with its places in the batch.

        room: queries of a group, at most, padding counted.
        """
        ends = [_ends(self.first["attention_mask"])]
        if self.second:
            ends.append(_ends(self.second["decoder_attention_mask"]))
        asked = ends[-1].tolist()
        order = sorted(range(len(asked)), key=lambda i: [int(end[i]) for end in reversed(ends)])
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * asked[order[stop]] <= room:
                stop += 1
            places = torch.tensor(order[start:stop], device=ends[0].device)
            yield places, self._part(places, [int(end[places].max()) for end in ends])
            start = stop

    def _part(self, places: Tensor, lengths: list[int]) -> Batch:
        first = {name: x[places, : lengths[0]] for name, x in self.first.items()}
        second = {name: x[places, : lengths[-1]] for name, x in self.second.items()}
        return Batch(first, second, self.encoder_only)


def _ends(mask: Tensor) -> Tensor:
    """One beyond the last word of each sentence, at least 1. (B, n) -> (B)"""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * places).amax(-1).clamp_min(1)


def _check(given: dict[str, Any], pair: bool) -> None:
    accepted = ("input_ids", "attention_mask", *_SECOND) if pair else _FIRST
    unknown = sorted(set(given) - set(accepted))
    if unknown:
        also = " and labels" if pair else ""
        raise ValueError(
            f"inputs hold {', '.join(unknown)}, which the audit does not use; "
            f"it takes {', '.join(accepted)}{also}"
        )
    if "input_ids" not in given:
        raise ValueError(f"inputs must hold input_ids, got {', '.join(given) or 'nothing'}")
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or 0 in value.shape:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{name} must be a tensor (batch, tokens), not empty, got {shown}; "
                'call the tokenizer with return_tensors="pt", padding=True'
            )
    if len({len(value) for value in given.values()}) > 1:
        shown = ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items())
        raise ValueError(f"inputs differ in their number of sentences: {shown}")


def _check_length(model: Any, *ids: Tensor) -> None:
    """A token without a position would end deep inside the model."""
    most, given = position_limit(model), max(x.shape[1] for x in ids)
    if most is not None and given > most:
        raise ValueError(
            f"inputs have {given} tokens, but {type(model).__name__} reads at most {most}; cut "
            "them: lens.encode(tokenizer, texts, model=model)"
        )


def _from_labels(model: Any, labels: Tensor) -> dict[str, Tensor]:
    """The decoder's inputs are the labels, moved on by one."""
    words = labels != _IGNORED
    start, filler = model.config.decoder_start_token_id, model.config.pad_token_id
    if start is None:
        raise ValueError(
            "the model's configuration has no decoder_start_token_id; give decoder_input_ids "
            "instead of labels"
        )
    filled = torch.where(words, labels, torch.full_like(labels, filler or 0))
    moved = torch.cat([torch.full_like(filled[:, :1], start), filled[:, :-1]], 1)
    return {"decoder_input_ids": moved, "decoder_attention_mask": words.to(labels.dtype)}
