"""What a launcher of several processes, torchrun or accelerate, says in the environment."""

from __future__ import annotations

import os
import re

_LEAST = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": -1, "MASTER_PORT": 0}
_WAY_OUT = "unset it, or start by torchrun or accelerate launch, which set it"


def world_size() -> int:
    """How many processes were started."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """The number of this one, from 0."""
    number, count = _number("RANK", 0), world_size()
    if number >= count:
        raise ValueError(
            f"the environment variable RANK is {number}, expected less than WORLD_SIZE, which is "
            f"{count}; {_WAY_OUT}"
        )
    return number


def check_environment() -> None:
    """All that torch and accelerate read too; they do not say which variable is wrong."""
    for name in _LEAST:
        _number(name, _LEAST[name])
    rank()


def _number(name: str, otherwise: int) -> int:
    """otherwise: where it is not set, or empty."""
    text = os.environ.get(name, "").strip()
    if not text:
        return otherwise
    least = _LEAST[name]
    if re.fullmatch("-?[0-9]{1,9}", text) is None or int(text) < least:
        raise ValueError(
            f"the environment variable {name} is {text!r}, expected a whole number >= {least}; "
            f"{_WAY_OUT}"
        )
    return int(text)
