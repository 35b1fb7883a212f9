"""What the numbers of an audit depend on, in a form that can be stored and compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fenchel._version import __version__
from fenchel.lens.heads.datasets import Images, Texts
from fenchel.lens.heads.settings import AuditSettings, ExecutionSettings

_SAMPLED = 2**30  # bytes of weights above which not all are read
_PIECE = 2**16  # bytes of either end of a tensor that are read then
_IDLE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")


def describe_run(
    model: Any,
    dataset: Texts | Images,
    settings: AuditSettings,
    execution: ExecutionSettings,
) -> dict[str, Any]:
    """For the store: all that numbers depend on, and not where it lies."""
    import transformers

    return {
        **dataclasses.asdict(settings),
        **dataclasses.asdict(execution),
        **_describe_dataset(dataset),
        "model": type(model).__name__,
        "weights": fingerprint(model),
        "fenchel": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _describe_dataset(dataset: Texts | Images) -> dict[str, str | None]:
    if isinstance(dataset, Images):
        reader = _reader_digest(dataset.processor)
        return {"tokenizer": reader, "texts": _items_digest(dataset.paths), "targets": None}
    return {
        "tokenizer": _reader_digest(dataset.tokenizer),
        "texts": _items_digest(dataset.texts),
        "targets": None if dataset.targets is None else _items_digest(dataset.targets),
    }


def fingerprint(model: Any) -> str:
    """SHA-256 of the configuration, and of the weights with their names, shapes and types.

    Of models above 1 GiB both ends of every tensor are read, and its sum.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _IDLE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    state = model.state_dict()
    whole = sum(x.numel() * x.element_size() for x in state.values()) <= _SAMPLED
    for name, x in sorted(state.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if whole or raw.nbytes <= 2 * _PIECE:
            digest.update(raw)
        else:
            digest.update(raw[:_PIECE])
            digest.update(raw[-_PIECE:])
            digest.update(str(int(raw.sum(dtype="uint64"))).encode())
    return digest.hexdigest()


def _items_digest(items: Sequence[str] | Sequence[Path]) -> str:
    """Of texts, or of what is in the files."""
    digest = hashlib.sha256()
    for item in items:
        raw = item.read_bytes() if isinstance(item, Path) else item.encode("utf-8", "replace")
        digest.update(f"{len(raw)} ".encode() + raw)
    return digest.hexdigest()


def _reader_digest(reader: Any) -> str:
    """Of the tokenizer's vocabulary and rules, or of the image processor's settings."""
    backend = getattr(reader, "backend_tokenizer", None)
    rules: dict[str, Any]
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules |= {"truncation": None, "padding": None}  # set anew in every call
    elif hasattr(reader, "get_vocab"):
        rules = reader.get_vocab()
    else:
        rules = {k: v for k, v in reader.to_dict().items() if k not in _IDLE}
    longest = str(getattr(reader, "model_max_length", ""))
    special = sorted(getattr(reader, "all_special_tokens", ()))
    text = json.dumps([type(reader).__name__, longest, special, rules], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
