"""A few texts with the strongest links of every head, small enough for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fenchel.lens.capture.calls import Call
from fenchel.lens.document import Example, Links, Picture
from fenchel.lens.families import Kind, place_name
from fenchel.lens.heads.advantages import Advantages, advantages
from fenchel.lens.heads.batch_tallies import count_calls
from fenchel.lens.heads.counting import CountedCall
from fenchel.lens.heads.datasets import Dataset, Images, PreparedBatch, Texts, Tokens, grid
from fenchel.lens.heads.settings import AuditSettings

_WIDTH = 8  # links kept of a query
_WIDE = 32  # for images, whose weights are drawn as a map
_THUMBNAIL = 224  # pixels
_WHOLE = 65535


def make_examples(
    model: Any, dataset: Dataset, places: Sequence[int], settings: AuditSettings
) -> list[Example]:
    return [_example(model, dataset, place, settings) for place in places]


def _example(model: Any, dataset: Dataset, place: int, settings: AuditSettings) -> Example:
    prepared = dataset.prepare(model, [place])
    is_image = isinstance(dataset, Images)
    width = _WIDE if is_image else _WIDTH
    links = count_calls(
        model, prepared, lambda call: _strongest_links(call, prepared, settings, width)
    )
    if settings.asks_for("advantage"):
        links = _add_gains(links, advantages(model, prepared), settings)
    sides = _sides(prepared, links)
    return Example(
        text=_title(dataset, place),
        tokens={side: _real_words(tokens, words[0]) for side, (tokens, words) in sides.items()},
        special={side: _special_places(tokens) for side, (tokens, _) in sides.items()},
        image=_picture(model, dataset, place) if isinstance(dataset, Images) else None,
        links=links,
    )


def _strongest_links(
    call: Call, prepared: PreparedBatch, settings: AuditSettings, width: int
) -> Links | None:
    if not settings.includes_layer(call.layer):
        return None
    asking, asked = prepared.sides(call.kind)
    counted = CountedCall(call, asking, asked, settings.choose_heads(call.heads))
    weights = counted.weights[0][:, asking.real[0]][:, :, asked.real[0]]
    return pack_links(weights, width)  # (H, Q, n), no padding


def _sides(
    prepared: PreparedBatch, links: Mapping[str, Links]
) -> dict[str, tuple[Tokens, list[list[str]]]]:
    """The tokens and words of "encoder" and "decoder", those that some attention looks at."""
    sides: dict[str, tuple[Tokens, list[list[str]]]] = {}
    for name in links:
        kind = cast(Kind, name.partition("/")[0])
        names = {"encoder": ("encoder", "encoder"), "cross": ("decoder", "encoder")}
        both = names.get(kind, ("decoder", "decoder"))
        sides |= zip(
            both, zip(prepared.sides(kind), prepared.words_of(kind), strict=True), strict=True
        )
    return sides


def _real_words(tokens: Tokens, words: Sequence[str]) -> list[str]:
    """Without padding."""
    return [word for word, real in zip(words, tokens.real[0].tolist(), strict=True) if real]


def _special_places(tokens: Tokens) -> list[int]:
    places: list[int] = tokens.special[0][tokens.real[0]].nonzero()[:, 0].tolist()
    return places


def _add_gains(
    links: Mapping[str, Links], pulls: Advantages, settings: AuditSettings
) -> dict[str, Links]:
    """What each key would gain from all queries, as shares of the head's largest, H x n."""
    with_gains = dict(links)
    for one in pulls.by_call:
        name = place_name(one.call.kind, one.call.layer)
        if name in links:
            asking, asked = pulls.prepared.sides(one.call.kind)
            scores = one.scores[0][settings.choose_heads(one.call.heads)]  # (H, Q, n)
            gains = scores[:, asking.real[0]].sum(1)[:, asked.real[0]]
            most = gains.abs().amax(-1, keepdim=True).clamp_min(1e-300)
            encoded = _encode((gains / most + 1) / 2 * _WHOLE)  # half is nothing
            with_gains[name] = replace(links[name], gained=encoded)
    return with_gains


def _title(dataset: Dataset, place: int) -> str:
    if isinstance(dataset, Images):
        return dataset.paths[place].name
    assert isinstance(dataset, Texts)
    return dataset.texts[place]


def pack_links(weights: Tensor, width: int) -> Links:
    """(H, Q, n): the strongest keys of each query and what each key receives, in 16 bits."""
    _, queries, keys = weights.shape
    width = min(width, keys)
    strongest = weights.topk(width, dim=-1)
    return Links(
        width=width,
        queries=queries,
        keys=keys,
        to=_encode(strongest.indices),
        weight=_encode(strongest.values * _WHOLE),
        received=_encode(weights.mean(1) * _WHOLE),
    )


def _encode(numbers: Tensor) -> str:
    """Whole numbers up to 65,535, little endian, in base 64."""
    whole = numbers.double().round().clamp(0, _WHOLE).cpu().numpy().astype("<u2")
    return base64.b64encode(np.ascontiguousarray(whole).tobytes()).decode("ascii")


def _picture(model: Any, dataset: Images, place: int) -> Picture:
    """As the model sees it: cut and resized by its processor."""
    pixels = dataset.pixels(model, [place])
    before, rows, columns = grid(model, pixels)
    shown = _rescale(pixels[0].float())
    from PIL import Image

    picture = Image.fromarray((shown * 255).round().byte().permute(1, 2, 0).cpu().numpy())
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Picture(f"data:image/jpeg;base64,{data}", rows, columns, first=before)


def _rescale(pixels: Tensor) -> Tensor:
    """Back to 0..1, whatever mean and deviation were taken out. (3, h, w)"""
    low, high = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    return (pixels - low) / (high - low).clamp_min(torch.finfo(pixels.dtype).eps)
