"""A few texts with the strongest links of every head, small enough for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.lens.capture.calls import Call, watch
from fenchel.lens.heads.advantages import Advantages, advantages
from fenchel.lens.heads.datasets import Dataset, Images, Texts, grid
from fenchel.lens.heads.settings import AuditSettings
from fenchel.lens.heads.tallies import Counted

_WIDTH = 8  # links kept of a query
_WIDE = 32  # for images, whose weights are drawn as a map
_THUMBNAIL = 224  # pixels
_WHOLE = 65535


@dataclass
class Example:
    """One text or image. links: "kind/layer" -> what `_packed` makes; tokens, special: by side."""

    text: str
    tokens: dict[str, list[str]] = field(default_factory=dict)
    special: dict[str, list[int]] = field(default_factory=dict)
    image: dict[str, Any] | None = None
    links: dict[str, Any] = field(default_factory=dict)


def examples(
    model: Any, dataset: Dataset, places: Sequence[int], settings: AuditSettings
) -> list[Example]:
    return [_example(model, dataset, place, settings) for place in places]


def _example(model: Any, dataset: Dataset, place: int, settings: AuditSettings) -> Example:
    prepared = dataset.prepare(model, [place])
    made = Example(_title(dataset, place))
    width = _WIDE if isinstance(dataset, Images) else _WIDTH
    if isinstance(dataset, Images):
        made.image = _picture(model, dataset, place)

    def keep(call: Call) -> None:
        if not settings.includes_layer(call.layer):
            return
        asking, asked = prepared.sides(call.kind)
        counted = Counted(call, asking, asked, settings.choose_heads(call.heads))
        rows, keys = asking.real[0], asked.real[0]
        weights = counted.weights[0][:, rows][:, :, keys]  # (H, Q, n), no padding
        made.links[f"{call.kind}/{call.layer}"] = packed(weights, width)
        own, other = prepared.words_of(call.kind)
        sides = {"encoder": ("encoder", "encoder"), "cross": ("decoder", "encoder")}
        here, there = sides.get(call.kind, ("decoder", "decoder"))
        for side, words, tokens in ((here, own, asking), (there, other, asked)):
            real = tokens.real[0]
            made.tokens[side] = [w for w, keep in zip(words[0], real.tolist(), strict=True) if keep]
            made.special[side] = tokens.special[0][real].nonzero()[:, 0].tolist()

    with watch(model, keep):
        model(**prepared.arguments)
    if settings.asks_for("advantage"):
        _add_pulls(made, advantages(model, prepared), settings)
    return made


def _add_pulls(example: Example, pulls: Advantages, settings: AuditSettings) -> None:
    """gained: what each key would gain from all queries, as shares of the head's largest, H x n."""
    for one in pulls.found:
        links = example.links.get(f"{one.call.kind}/{one.call.layer}")
        if links is not None:
            asking, asked = pulls.prepared.sides(one.call.kind)
            scores = one.scores[0][settings.choose_heads(one.call.heads)]  # (H, Q, n)
            gained = scores[:, asking.real[0]].sum(1)[:, asked.real[0]]
            most = gained.abs().amax(-1, keepdim=True).clamp_min(1e-300)
            links["gained"] = _encoded((gained / most + 1) / 2 * _WHOLE)  # half is nothing


def _title(dataset: Dataset, place: int) -> str:
    if isinstance(dataset, Images):
        return dataset.paths[place].name
    assert isinstance(dataset, Texts)
    return dataset.texts[place]


def packed(weights: Tensor, width: int) -> dict[str, Any]:
    """(H, Q, n): the strongest keys of each query and what each key receives, in 16 bits."""
    _, queries, keys = weights.shape
    width = min(width, keys)
    strongest = weights.topk(width, dim=-1)
    return {
        "width": width,
        "queries": queries,
        "keys": keys,
        "to": _encoded(strongest.indices),
        "weight": _encoded(strongest.values * _WHOLE),
        "received": _encoded(weights.mean(1) * _WHOLE),
    }


def _encoded(numbers: Tensor) -> str:
    """Whole numbers up to 65,535, little endian, in base 64."""
    whole = numbers.double().round().clamp(0, _WHOLE).cpu().numpy().astype("<u2")
    return base64.b64encode(np.ascontiguousarray(whole).tobytes()).decode("ascii")


def _picture(model: Any, dataset: Images, place: int) -> dict[str, Any]:
    """As the model sees it: cut and resized by its processor."""
    pixels = dataset.pixels(model, [place])
    before, rows, columns = grid(model, pixels)
    shown = _visible(pixels[0].float())
    from PIL import Image

    picture = Image.fromarray((shown * 255).round().byte().permute(1, 2, 0).cpu().numpy())
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    place_of = {"rows": rows, "columns": columns, "first": before}
    return {"data": f"data:image/jpeg;base64,{data}", **place_of}


def _visible(pixels: Tensor) -> Tensor:
    """Back to 0..1, whatever mean and deviation were taken out. (3, h, w)"""
    low, high = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    return (pixels - low) / (high - low).clamp_min(torch.finfo(pixels.dtype).eps)
