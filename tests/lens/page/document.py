"""Made-up audits: every number follows from made-up weights and a fixed seed."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
WIDTH, WIDE = 8, 32  # links kept of a token and of a patch
ALPHAS = ("1.5", "2")

_WORDS = (
    "[CLS] the river bank was steep , so the old fisher ##man tied his boat to a willow and "
    "walked along the bank until he found a flat stone to sit on . [SEP]"
)
SENTENCE = _WORDS.split()
GERMAN = "<pad> ▁Das ▁Fluss ufer ▁war ▁steil , ▁also ▁band ▁der ▁Fischer ▁sein ▁Boot ▁an . </s>"

# name, title, unit, group, scale, of
_COLUMNS = (
    ("entropy", "entropy", "nats", "weights", "linear", "texts"),
    ("entropy_share", "share of the largest entropy", "", "weights", "linear", "texts"),
    ("effective_support", "effective support", "tokens", "weights", "log", "texts"),
    ("mass_first", "weight on the first token", "", "weights", "linear", "texts"),
    ("mass_special", "weight on special tokens", "", "weights", "linear", "texts"),
    ("mass_self", "weight on itself", "", "weights", "linear", "texts"),
    ("mass_previous", "weight on the token before", "", "weights", "linear", "texts"),
    ("mass_next", "weight on the token after", "", "weights", "linear", "texts"),
    ("distance", "distance", "tokens", "weights", "linear", "texts"),
    ("token_deviation_mean", "deviation of the mean", "", "estimation", "log", "texts"),
    ("token_deviation_multiplier", "deviation of the multiplier", "", "estimation", "log", "texts"),
    *(
        (f"{name}_{alpha}", f"{title}, α {alpha}", "", "what-if", "linear", "texts")
        for alpha in ALPHAS
        for name, title in (("kept", "links kept"), ("moved", "output moved"))
    ),
    ("tilt", "tilt of the preference", "", "geometry", "linear", "probe"),
    ("fisher_rank", "effective rank", "", "geometry", "linear", "probe"),
    ("bound", "certified constant", "", "stability", "log", "texts"),
    ("largest_bound", "largest certified constant", "", "stability", "log", "texts"),
    ("local", "local constant", "", "stability", "log", "probe"),
    ("tightness", "tightness", "", "stability", "linear", "probe"),
)


def columns() -> list[dict[str, str]]:
    keys = ("name", "title", "unit", "group", "scale", "of")
    entries = [dict(zip(keys, entry, strict=True)) for entry in _COLUMNS]
    return [{**column, "explain": f"Explains {column['title']}."} for column in entries]


def weights(kind: str, layer: int, head: int, queries: int, keys: int) -> Array:
    """(Q, n): a head that looks back, at itself, at the ends, anywhere, or at chosen words."""
    rng = np.random.default_rng(1000 * layer + 10 * head + queries)
    apart = np.arange(keys)[None] - np.arange(queries)[:, None] * (keys / queries)
    taste = rng.normal(size=keys)
    pattern = (layer + 2 * head) % 5
    scores = 0.5 * rng.normal(size=(queries, keys)) + (1.0 + layer / 4) * taste
    if pattern in (0, 1):
        scores -= np.abs(apart + 1 - pattern) * (1.5 if pattern else 3.0)
    if pattern == 2:
        scores[:, [0, -1]] += 4
    if pattern == 3:
        scores *= 0.2
    if kind == "decoder":
        scores = np.where(apart > 0, -np.inf, scores)
    masses: Array = np.exp(scores - scores.max(-1, keepdims=True))
    return masses / masses.sum(-1, keepdims=True)


def _numbers(p: Array, kind: str, layer: int, head: int) -> dict[str, float | None]:
    rng = np.random.default_rng(100 * layer + head)
    queries, keys = p.shape
    entropy = -np.sum(p * np.log(np.maximum(p, 1e-300)), -1)
    apart = np.arange(keys)[None] - np.arange(queries)[:, None]
    bound = float(np.exp(rng.normal() + layer / 3))
    numbers: dict[str, float | None] = {
        "entropy": entropy.mean(),
        "entropy_share": entropy.mean() / np.log(keys),
        "effective_support": np.exp(entropy).mean(),
        "mass_first": p[:, 0].mean(),
        "mass_special": p[:, [0, -1]].sum(-1).mean(),
        "token_deviation_mean": float(np.exp(2 * rng.normal() - 4)),
        "token_deviation_multiplier": float(np.exp(2 * rng.normal() - 3)),
        "tilt": rng.normal(),
        "fisher_rank": 1 + 15 * rng.random(),
        "bound": bound,
        "largest_bound": bound * (1 + rng.random()),
        "local": bound * rng.random(),
        "tightness": None if (layer, head) == (1, 1) else 1 + rng.random(),
    }
    for alpha, cut in zip(ALPHAS, (0.05, 0.2), strict=True):
        kept = np.where(p > cut * p.max(-1, keepdims=True), p, 0)
        numbers[f"kept_{alpha}"] = (kept > 0).mean()
        numbers[f"moved_{alpha}"] = np.abs(kept / kept.sum(-1, keepdims=True) - p).sum(-1).mean()
    places = {"mass_self": 0, "mass_previous": -1, "mass_next": 1}
    if kind == "cross":
        numbers |= dict.fromkeys((*places, "distance"))
    else:
        numbers |= {name: (p * (apart == offset)).sum(-1).mean() for name, offset in places.items()}
        numbers["distance"] = (p * np.abs(apart)).sum(-1).mean()
    return {name: None if value is None else float(value) for name, value in numbers.items()}


def packed(values: Array) -> str:
    return base64.b64encode(np.round(values).astype("<u2").tobytes()).decode()


def links(all_weights: Array, width: int = WIDTH) -> dict[str, Any]:
    """(H, Q, n)"""
    width = min(width, all_weights.shape[-1])
    to = np.argsort(-all_weights, -1, kind="stable")[..., :width]
    strongest = np.take_along_axis(all_weights, to, -1)
    return {
        "width": width,
        "queries": all_weights.shape[1],
        "keys": all_weights.shape[2],
        "to": packed(to),
        "weight": packed(strongest * 65535),
        "received": packed(all_weights.mean(1) * 65535),
        "gained": packed((gained(all_weights) + 1) / 2 * 65535),
    }


def gained(all_weights: Array) -> Array:
    """(H, n): of a made-up loss of each key, p (mean - loss) summed over queries; shares of the
    largest."""
    heads, _, keys = all_weights.shape
    losses = np.random.default_rng(keys).normal(size=(heads, 1, keys))
    mean = (all_weights * losses).sum(-1, keepdims=True)
    pull: Array = (all_weights * (mean - losses)).sum(1)
    return pull / np.abs(pull).max(-1, keepdims=True)


def without_pull(content: dict[str, Any], *layers: str) -> dict[str, Any]:
    """The document, with "gained" taken out of these layers, or of all."""
    for shown in content["examples"]:
        for layer in layers or shown["links"]:
            del shown["links"][layer]["gained"]
    return content


def example(
    layers: dict[str, int],
    heads: int,
    tokens: dict[str, list[str]],
    text: str,
    width: int = WIDTH,
) -> dict[str, Any]:
    sides = {"encoder": ("encoder",) * 2, "decoder": ("decoder",) * 2}
    sides["cross"] = ("decoder", "encoder")
    by_layer = {}
    for kind, count in layers.items():
        queries, keys = (len(tokens[side]) for side in sides[kind])
        for layer in range(count):
            every = [weights(kind, layer, head, queries, keys) for head in range(heads)]
            by_layer[f"{kind}/{layer}"] = links(np.stack(every), width)
    special = {side: [0, len(names) - 1] for side, names in tokens.items()}
    return {"text": text, "tokens": tokens, "special": special, "image": None, "links": by_layer}


def document(
    layers: dict[str, int] | None = None, heads: int = 4, name: str = "made-up"
) -> dict[str, Any]:
    """Texts. layers: how many of each kind."""
    layers = {"encoder": 3} if layers is None else layers
    places = [(kind, layer) for kind, count in layers.items() for layer in range(count)]
    rng = np.random.default_rng(0)
    rows, histograms, agreement = [], {}, {}
    for kind, layer in places:
        every = np.stack([weights(kind, layer, head, 24, 24) for head in range(heads)])
        rows += [
            {"kind": kind, "layer": layer, "head": head, **_numbers(p, kind, layer, head)}
            for head, p in enumerate(every)
        ]
        unit = every / np.linalg.norm(every, axis=-1, keepdims=True)
        agreement[f"{kind}/{layer}"] = np.einsum("aqn,bqn->ab", unit, unit) / 24
        share = -np.sum(every * np.log(np.maximum(every, 1e-300)), -1) / np.log(24)
        histograms[f"{kind}/{layer}"] = {
            "entropy_share": [np.histogram(x, 20, (0, 1))[0].tolist() for x in share],
            "top_weight": [np.histogram(x, 20, (0, 1))[0].tolist() for x in every.max(-1)],
        }
    sides = {"encoder": {"encoder"}, "decoder": {"decoder"}, "cross": {"encoder", "decoder"}}
    needed = set().union(*(sides[kind] for kind in layers))
    tokens = {side: SENTENCE if side == "encoder" else GERMAN.split() for side in sorted(needed)}
    text = " ".join(SENTENCE[1:-1]).replace(" ##", "")
    spectrum = np.sort(np.exp(2 * rng.normal(size=(heads, 16))))[:, ::-1]
    offsets = list(range(-8, 9))
    curve = rng.normal(size=(heads, 17)).cumsum(-1)
    return {
        "format": 1,
        "fenchel": "0.0",
        "model": {
            "name": name,
            "type": "bert",
            "class": "BertModel",
            "parameters": 22713216,
            "paths": {f"{kind}/{layer}": f"{kind}.{layer}.attention" for kind, layer in places},
            "heads": {f"{kind}/{layer}": heads for kind, layer in places},
        },
        "inputs": {
            "what": "texts",
            "count": 1000,
            "tokens": 25310,
            "truncated": 3,
            "longest": 64,
            "probe": 32,
            "chunk": 32,
        },
        "settings": {
            "measures": ["weights", "what_if"],
            "alphas": [1.5, 2.0],
            "layers": None,
            "heads": None,
            "probe": 32,
            "tolerance": 0.01,
            "trials": 200,
        },
        "columns": columns(),
        "rows": rows,
        "histograms": histograms,
        "agreement": {key: table.tolist() for key, table in agreement.items()},
        "spectra": {f"{kind}/{layer}": spectrum.tolist() for kind, layer in places},
        "preference": {
            f"{kind}/{layer}": {"offsets": offsets, "log": curve.tolist()}
            for kind, layer in places
            if kind != "cross"
        },
        "offsets": {},
        "everywhere": [
            {"alpha": 1.5, "cosine": 0.93, "moved": 0.37, "kl": None, "kept": 0.31},
            {"alpha": 2.0, "cosine": 0.81, "moved": 0.62, "kl": None, "kept": 0.12},
        ],
        "recipe": _recipe(rows),
        "examples": [example(layers, heads, tokens, text)],
    }


def _recipe(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    heads = [
        {key: row[key] for key in ("kind", "layer", "head")}
        | {"alpha": 1 + round(rng.random(), 3), "kept": round(rng.random(), 3)}
        for row in rows
    ]
    moved = {
        "probe": {"texts": 32, "root_mean_square": 0.007, "largest": 0.009},
        "unseen": {"texts": 32, "root_mean_square": 0.008, "largest": 0.012},
    }
    return {"tolerance": 0.01, "heads": heads, "moved": moved, "kept": 0.87}


def long_document(tokens: int = 512, layers: int = 1, heads: int = 3) -> dict[str, Any]:
    """One text of so many tokens."""
    content = document({"encoder": layers}, heads)
    words = (SENTENCE[1:-1] * (tokens // len(SENTENCE[1:-1]) + 1))[: tokens - 2]
    names = {"encoder": ["[CLS]", *words, "[SEP]"]}
    content["examples"] = [example({"encoder": layers}, heads, names, " ".join(words))]
    return content


def image_document(side: int = 14, layers: int = 2, heads: int = 3) -> dict[str, Any]:
    """An image in side x side patches behind a class token."""
    content = document({"encoder": layers}, heads)
    content["inputs"] |= {"what": "images", "truncated": 0}
    content["everywhere"], content["recipe"] = [], None
    content["spectra"], content["preference"] = {}, {}
    names = {"encoder": ["[CLS]", *(f"patch {i}" for i in range(side**2))]}
    shown = example({"encoder": layers}, heads, names, "a disc", WIDE)
    shown["special"] = {"encoder": [0]}
    shown["image"] = {"data": picture(112), "rows": side, "columns": side, "first": 1}
    content["examples"] = [shown]
    return content


def picture(side: int) -> str:
    """A disc before a gradient, as a PNG."""
    y, x = np.mgrid[:side, :side] / side
    disc = (x - 0.6) ** 2 + (y - 0.4) ** 2 < 0.06
    colours = np.stack([np.where(disc, 0.9, x), np.where(disc, 0.6, 0.4), np.where(disc, 0.1, y)])
    lines = (255 * colours).astype(np.uint8).transpose(1, 2, 0).reshape(side, 3 * side)
    raw = b"".join(b"\0" + line.tobytes() for line in lines)
    file = io.BytesIO(b"")
    file.write(b"\x89PNG\r\n\x1a\n")
    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")):
        file.write(len(body).to_bytes(4, "big") + name + body)
        file.write(zlib.crc32(name + body).to_bytes(4, "big"))
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
