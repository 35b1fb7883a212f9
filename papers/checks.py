"""Checks of arguments that the papers' code shares."""

from __future__ import annotations


def check_whole(value: object, name: str, low: int) -> None:
    """Refuse anything but a whole number >= low."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")
