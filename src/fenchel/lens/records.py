"""Dataclasses as JSON and back: the one place that knows how a record looks on disk.

A field may say in its metadata how it is written:
    `key`: the name in JSON, where Python has no such name.
    `optional`: left out where it is None.
    `flat`: a dict whose entries stand beside the other fields.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """What `json.dumps` takes: dicts, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return _object(value)
    if isinstance(value, Mapping):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return value


def _object(record: Any) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.metadata.get("flat"):
            written |= to_json(value)
        elif value is not None or not field.metadata.get("optional"):
            written[_key(field)] = to_json(value)
    return written


def from_json(kind: type[T], data: Any) -> T:
    """The record of this class that `to_json` wrote."""
    record: T = _read(kind, data, kind.__name__)
    return record


def _read(kind: Any, data: Any, place: str) -> Any:
    """place: where the value stands, for errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (some,) = (one for one in arguments if one is not types.NoneType)
        return None if data is None else _read(some, data, place)
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, data, place)
    if origin is dict:
        return {key: _read(arguments[1], entry, f"{place}.{key}") for key, entry in data.items()}
    if origin in (list, tuple):
        return origin(_read(arguments[0], entry, place) for entry in data)
    return data


def _read_object(kind: Any, data: Any, place: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{place} must be an object, got {type(data).__name__}")
    hints, rest, values = get_type_hints(kind), dict(data), {}
    flat = None
    for field in dataclasses.fields(kind):
        if field.metadata.get("flat"):
            flat = field
        elif _key(field) in rest:
            key = _key(field)
            values[field.name] = _read(hints[field.name], rest.pop(key), f"{place}.{key}")
        elif not field.metadata.get("optional"):
            raise ValueError(f"{place} must hold {_key(field)!r}, got {', '.join(data)}")
    if flat is not None:
        values[flat.name] = _read(hints[flat.name], rest, place)
    elif rest:
        raise ValueError(f"{place} holds {', '.join(rest)}, which this version does not know")
    return kind(**values)


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("key", field.name))
