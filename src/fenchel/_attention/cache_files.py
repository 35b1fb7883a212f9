"""A cache on disk: one safetensors file with the keys and values of each sequence."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel._attention.cache import KeyValueCache

_FORMAT = "fenchel key-value cache, 2"
_NAMES = ("batch", "kv_heads", "d", "d_value", "capacity")


def save(cache: KeyValueCache, path: str | Path) -> None:
    """The file appears whole or not at all."""
    tensors: dict[str, Tensor] = {}
    for b in range(cache.batch):
        one = cache.select([b])  # copied: sequences may share pages, which safetensors refuses
        for name, tensor in (("key", one.key[0]), ("value", one.value[0])):
            tensors[f"{name}.{b}"] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    about = {
        **{name: getattr(cache, name) for name in _NAMES},
        "checksums": {name: _checksum(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(about)
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.unfinished")
    metadata = {"format": _FORMAT, "cache": text, "checksum": str(zlib.crc32(text.encode()))}
    _safetensors().save_file(tensors, unfinished, metadata)
    unfinished.replace(path)


def load(path: str | Path, device: torch.device | str) -> KeyValueCache:
    library = _safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            about = _described(file.metadata() or {}, path)
            checksums = about.pop("checksums")
            tensors = {name: file.get_tensor(name) for name in checksums}
    except (library.SafetensorError, KeyError) as problem:
        raise ValueError(_complaint(path, problem)) from problem
    for name, tensor in tensors.items():
        if _checksum(tensor) != checksums[name]:
            which, b = name.split(".")
            raise ValueError(_complaint(path, f"the {which}s of sequence {b} are not those saved"))
    cache = KeyValueCache(**about, dtype=tensors["key.0"].dtype, device=device)
    for b in range(cache.batch):
        pair = (tensors[f"{name}.{b}"].unsqueeze(0).to(device) for name in ("key", "value"))
        cache._append_to(b, *pair)
    return cache


def _described(metadata: dict[str, str], path: str | Path) -> Any:
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path} holds no cache that this version of KeyValueCache.save wrote, or its header "
            "is damaged"
        )
    text = metadata["cache"]
    if str(zlib.crc32(text.encode())) != metadata["checksum"]:
        raise ValueError(_complaint(path, "the header is not the one saved"))
    return json.loads(text)


def _checksum(tensor: Tensor) -> int:
    """Of shape, dtype and bytes."""
    about = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return zlib.crc32(content, zlib.crc32(about))


def _complaint(path: str | Path, problem: object) -> str:
    return f"{path} is damaged: {problem}; use another copy, or save the cache again"


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as problem:
        raise ImportError(
            "saving a cache needs safetensors; install it, in a clone of fenchel, with: "
            'pip install -c constraints.txt ".[hf]"'
        ) from problem

    class Library:
        save_file = staticmethod(safetensors.torch.save_file)
        safe_open = staticmethod(safetensors.safe_open)
        SafetensorError = safetensors.SafetensorError

    return Library
