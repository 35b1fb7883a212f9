"""What a model is shown: texts or images, a few at a time, and which of their tokens count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.lens.capture.evaluation import evaluating
from fenchel.lens.families import Kind
from fenchel.lens.tokenizing import LONGEST, token_limit

_ENTRIES = 2**18  # numbers of the weights of one layer that are held at once
_REMEMBERED = 64  # groups of texts whose generated tokens are kept
_STRETCH = 1.4  # longest over shortest of the texts that are padded to one length


@dataclass(frozen=True, eq=False)
class Tokens:
    """Of the sequence that asks or of the one that is asked.

    real (B, n): not padding. special (B, n): such as [CLS].
    """

    real: Tensor
    special: Tensor


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """Inputs of one call of the model.

    first: tokens of the input; second: of what an encoder-decoder writes, else None.
    words: how they read, text by text, of the first and of the second.
    """

    arguments: dict[str, Tensor]
    first: Tokens
    second: Tokens | None = None
    words: tuple[list[list[str]], ...] = ()

    @property
    def last(self) -> Tokens:
        """Those of the model's output."""
        return self.first if self.second is None else self.second

    def sides(self, kind: Kind) -> tuple[Tokens, Tokens]:
        """(those that ask, those that are asked)"""
        asking = self.first if kind == "encoder" else self.last
        return asking, self.first if kind == "cross" else asking

    def words_of(self, kind: Kind) -> tuple[list[list[str]], list[list[str]]]:
        of_input = kind == "encoder" or self.second is None
        asking = self.words[0] if of_input else self.words[1]
        return asking, self.words[0] if kind == "cross" else asking


class Dataset(Protocol):
    """Items by their number; an audit asks for a few at a time."""

    @property
    def what(self) -> str:
        """ "texts" or "images"."""

    def __len__(self) -> int: ...

    def prepare(self, model: Any, places: Sequence[int]) -> PreparedBatch: ...

    def groups(self, model: Any, places: Sequence[int]) -> list[list[int]]:
        """All places, so many at a time that one layer's weights fit."""

    def cut(self, model: Any, places: Sequence[int]) -> int:
        """How many items are longer than the model allows."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts through a tokenizer; what is longer than `longest` or than the model allows is cut.

    targets: what an encoder-decoder is to write, one per text; None: it writes `generated` tokens
        itself, greedily.
    """

    tokenizer: Any
    texts: Sequence[str]
    targets: Sequence[str] | None = None
    generated: int = 32
    longest: int = LONGEST
    what: str = field(default="texts", init=False)
    _remembered: dict[tuple[int, ...], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole(self.generated, "generated", 1)
        check_whole(self.longest, "longest", 2)
        if self.targets is not None and len(self.targets) != len(self.texts):
            raise ValueError(
                f"one target a text is needed, got {len(self.targets)} for {len(self.texts)}"
            )

    def __len__(self) -> int:
        return len(self.texts)

    def prepare(self, model: Any, places: Sequence[int]) -> PreparedBatch:
        check_decoder(model, self.targets)
        inputs = self._encode(model, [self.texts[place] for place in places])
        first = self._tokens(inputs["input_ids"], inputs["attention_mask"])
        words = self._words(inputs["input_ids"])
        if not getattr(model.config, "is_encoder_decoder", False):
            return PreparedBatch(inputs, first, None, (words,))
        more = self._decoder_inputs(model, inputs, places)
        second = self._tokens(more["decoder_input_ids"], more["decoder_attention_mask"])
        written = self._words(more["decoder_input_ids"])
        return PreparedBatch(inputs | more, first, second, (words, written))

    def groups(self, model: Any, places: Sequence[int]) -> list[list[int]]:
        """Texts of like length together, so that little is padding."""
        allowed = token_limit(model, self.tokenizer, self.longest)
        lengths = self._lengths([self.texts[place] for place in places])
        empty = [place for length, place in zip(lengths, places, strict=True) if not length]
        if empty:
            raise ValueError(
                f"text {empty[0]} (from 0) has no tokens, {self.texts[empty[0]]!r}; leave it out"
            )
        by_length = sorted(zip(lengths, places, strict=True))
        groups: list[list[int]] = []
        start = 0
        for length, place in by_length:
            length = min(length, allowed)  # all of the group are padded to it
            full = not groups or len(groups[-1]) >= at_once(model, length)
            if full or length > _STRETCH * start:
                groups.append([])
                start = length
            groups[-1].append(place)
        return groups

    def cut(self, model: Any, places: Sequence[int]) -> int:
        allowed = token_limit(model, self.tokenizer, self.longest)
        lengths = self._lengths([self.texts[place] for place in places])
        return sum(length > allowed for length in lengths)

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        rows = self.tokenizer(list(texts), verbose=False)["input_ids"]
        return [len(row) for row in rows]

    def _encode(self, model: Any, texts: Sequence[str]) -> dict[str, Tensor]:
        encoded = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",  # positions count from the first token
            truncation=True,
            max_length=token_limit(model, self.tokenizer, self.longest),
            return_tensors="pt",
        )
        device = next(model.parameters()).device
        return {name: value.to(device) for name, value in encoded.items()}

    def _tokens(self, ids: Tensor, mask: Tensor) -> Tokens:
        special = torch.tensor(sorted(self.tokenizer.all_special_ids), device=ids.device)
        real = mask.bool()
        return Tokens(real, torch.isin(ids, special) & real)

    def _words(self, ids: Tensor) -> list[list[str]]:
        """As they read alone; where that is nothing, as the vocabulary writes them."""
        names = {number: self._word(number) for number in ids.unique().tolist()}
        return [[names[number] for number in row] for row in ids.tolist()]

    def _word(self, number: int) -> str:
        read: str = self.tokenizer.decode([number])
        return read if read.strip() else str(self.tokenizer.convert_ids_to_tokens(number))

    def _decoder_inputs(
        self, model: Any, inputs: Mapping[str, Tensor], places: Sequence[int]
    ) -> dict[str, Tensor]:
        """The target, moved on by one; or what the model writes itself, greedily."""
        if self.targets is None:
            tokens = self._generate(model, inputs, tuple(places))
            labels, start = tokens[:, 1:], tokens[:, :1]
            real = _until_end(labels, _ends(model, self.tokenizer)).long()
        else:
            encoded = self._encode(model, [self.targets[place] for place in places])
            labels, real = encoded["input_ids"], encoded["attention_mask"]
            empty = [place for place, row in zip(places, real, strict=True) if not row.any()]
            if empty:
                raise ValueError(f"the target of text {empty[0]} (from 0) has no tokens")
            start = torch.full_like(labels[:, :1], _start(model, self.tokenizer))
        # a query counts if what follows it does
        return {
            "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1),
            "decoder_attention_mask": real,
        }

    def _generate(
        self, model: Any, inputs: Mapping[str, Tensor], places: tuple[int, ...]
    ) -> Tensor:
        """Remembered: a probe is asked for again and again."""
        key = (id(model), *places)
        if key not in self._remembered:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            greedy = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
            with torch.no_grad(), evaluating(model):
                self._remembered[key] = model.generate(
                    **inputs,
                    **greedy,
                    max_new_tokens=self.generated,
                    return_dict_in_generate=False,
                )
        return self._remembered[key]


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures from files, through an image processor; tokens are patches, and what comes before.

    A model whose tokens are not a grid of patches after a few special ones is refused.
    """

    processor: Any
    paths: Sequence[Path]
    what: str = field(default="images", init=False)

    def __len__(self) -> int:
        return len(self.paths)

    def prepare(self, model: Any, places: Sequence[int]) -> PreparedBatch:
        pixels = self.pixels(model, places)
        before, rows, columns = grid(model, pixels)
        count = before + rows * columns
        real = torch.ones(len(places), count, dtype=torch.bool, device=pixels.device)
        special = (torch.arange(count, device=pixels.device) < before).expand_as(real)
        extra = ["[class]", *(f"[register {n}]" for n in range(1, before))][:before]
        patches = [f"{row + 1},{column + 1}" for row in range(rows) for column in range(columns)]
        words = [[*extra, *patches] for _ in places]
        return PreparedBatch({"pixel_values": pixels}, Tokens(real, special), None, (words,))

    def groups(self, model: Any, places: Sequence[int]) -> list[list[int]]:
        before, rows, columns = grid(model, self.pixels(model, places[:1]))
        some = at_once(model, before + rows * columns)
        return [list(places[start : start + some]) for start in range(0, len(places), some)]

    def cut(self, model: Any, places: Sequence[int]) -> int:
        return 0  # the processor resizes

    def pixels(self, model: Any, places: Sequence[int]) -> Tensor:
        pictures = [open_image(self.paths[place]) for place in places]
        processed = self.processor(images=pictures, return_tensors="pt")
        first = next(model.parameters())
        pixels: Tensor = processed["pixel_values"].to(first.device, first.dtype)
        return pixels


def make_dataset(
    tokenizer: Any, texts: Sequence[Any], targets: Sequence[str] | None = None, **settings: Any
) -> Texts | Images:
    """Texts, or images where `tokenizer` is an image processor."""
    if not len(texts):
        raise ValueError("texts must not be empty")
    if not hasattr(tokenizer, "image_mean"):
        if isinstance(texts, str):
            raise TypeError("texts must be a sequence of texts, got one string")
        return Texts(tokenizer, texts, targets, **settings)
    if targets is not None:
        raise ValueError("targets are for encoder-decoders of text; images have none")
    return Images(tokenizer, [Path(path) for path in texts])


def check_decoder(model: Any, targets: Sequence[str] | None) -> None:
    """Targets only where something is written, and wherever the model cannot write itself."""
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    if targets is not None and not both:
        raise ValueError(
            f"targets are for encoder-decoders; {type(model).__name__} is none: leave them out"
        )
    if both and targets is None and not model.can_generate():
        raise ValueError(f"{type(model).__name__} has no head that writes text: give targets")


def open_image(path: Path) -> Any:
    """A PIL image in three colours."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            if picture.mode[0] in "IF":  # Pillow would cut 16 bits off at 255
                raise ValueError(f"{path} has more than 8 bits a channel; convert it to 8 bits")
            return picture.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as problem:
        raise ValueError(f"{path} cannot be read as an image: {problem}") from problem


def grid(model: Any, pixels: Tensor) -> tuple[int, int, int]:
    """(tokens before the patches, rows, columns), from the sizes of the model."""
    patch = getattr(model.config, "patch_size", None)
    if not isinstance(patch, int):
        raise ValueError(
            f"{type(model).__name__} has no patch_size in its configuration: looked for a grid of "
            "square patches, as ViT, DeiT, BEiT and DINOv2 have"
        )
    rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    with torch.no_grad():
        # a classifier has no last_hidden_state
        states = model(pixel_values=pixels[:1], output_hidden_states=True).hidden_states
        count = states[-1].shape[1]
    before = count - rows * columns
    if before < 0:
        raise ValueError(
            f"{type(model).__name__} makes {count} tokens of {rows} x {columns} patches; looked "
            "for one token per patch, after special ones"
        )
    return before, rows, columns


def at_once(model: Any, tokens: int) -> int:
    """Items of so many tokens whose weights in one layer fit."""
    return max(1, _ENTRIES // (heads(model) * tokens**2))


def heads(model: Any) -> int:
    """Only how much is done at once depends on it."""
    for name in ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads"):
        count = getattr(model.config, name, None)
        if isinstance(count, int):
            return count
    return 16


def _until_end(labels: Tensor, ends: Sequence[int]) -> Tensor:
    """True up to the first token that ends a text: the model may write padding before it."""
    ended = torch.isin(labels, torch.tensor(ends, dtype=labels.dtype, device=labels.device))
    return (ended.cumsum(1) - ended.long()) == 0


def _ends(model: Any, tokenizer: Any) -> list[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return [ends] if isinstance(ends, int) else list(ends)
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _start(model: Any, tokenizer: Any) -> int:
    for config in (getattr(model, "generation_config", None), model.config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    return int(tokenizer.pad_token_id)
