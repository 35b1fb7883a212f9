"""A cache on disk: one safetensors file with the keys and values of each sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel._attention.cache import KeyValueCache

_FORMAT = "fenchel key-value cache, 1"


def save(cache: KeyValueCache, path: str | Path) -> None:
    """The file appears whole or not at all."""
    tensors: dict[str, Tensor] = {}
    for b in range(cache.batch):
        one = cache.select([b])  # copied: sequences may share pages, which safetensors refuses
        for name, tensor in (("key", one.key[0]), ("value", one.value[0])):
            tensors[f"{name}.{b}"] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    names = ("batch", "kv_heads", "d", "d_value", "capacity")
    shape = json.dumps({name: getattr(cache, name) for name in names})
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.unfinished")
    _safetensors().save_file(tensors, unfinished, {"format": _FORMAT, "cache": shape})
    unfinished.replace(path)


def load(path: str | Path, device: torch.device | str) -> KeyValueCache:
    library = _safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise ValueError(f"{path} holds no cache that KeyValueCache.save wrote")
            shape = json.loads(about["cache"])
            batch = range(shape["batch"])
            pairs = [(file.get_tensor(f"key.{b}"), file.get_tensor(f"value.{b}")) for b in batch]
    except (library.SafetensorError, KeyError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem
    cache = KeyValueCache(**shape, dtype=pairs[0][0].dtype, device=device)
    for b, (key, value) in enumerate(pairs):
        if key.ndim != 3 or value.ndim != 3:
            raise ValueError(f"{path} is damaged: sequence {b} is not (kv_head, token, component)")
        cache._append_to(b, key.unsqueeze(0).to(device), value.unsqueeze(0).to(device))
    return cache


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
