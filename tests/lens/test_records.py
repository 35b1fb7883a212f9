"""Records as JSON and back; what does not fit is refused with its place."""

from dataclasses import dataclass, field

import pytest

from fenchel.lens.records import from_json, to_json


@dataclass(frozen=True)
class Leaf:
    kind: str = field(metadata={"key": "class"})
    note: str | None = field(default=None, metadata={"optional": True})
    numbers: dict[str, float | None] = field(default_factory=dict, metadata={"flat": True})


@dataclass(frozen=True)
class Tree:
    leaves: list[Leaf]
    named: dict[str, Leaf]
    best: Leaf | None
    sizes: tuple[int, ...]


TREE = Tree([Leaf("a", numbers={"x": 1.5, "y": None})], {"b": Leaf("b", "green")}, None, (1, 2))
WRITTEN = {
    "leaves": [{"class": "a", "x": 1.5, "y": None}],
    "named": {"b": {"class": "b", "note": "green"}},
    "best": None,
    "sizes": [1, 2],
}


def test_a_record_is_written_and_read():
    assert to_json(TREE) == WRITTEN
    assert from_json(Tree, WRITTEN) == TREE


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"Tree must hold 'best', got leaves, named, sizes"):
        from_json(Tree, {name: x for name, x in WRITTEN.items() if name != "best"})
    with pytest.raises(ValueError, match=r"Tree\.named\.b must hold 'class', got note"):
        from_json(Tree, WRITTEN | {"named": {"b": {"note": "green"}}})


def test_what_is_unknown_is_named():
    with pytest.raises(ValueError, match="Tree holds roots, which this version does not know"):
        from_json(Tree, WRITTEN | {"roots": 3})
    with pytest.raises(ValueError, match=r"Tree\.best must be an object, got int"):
        from_json(Tree, WRITTEN | {"best": 3})
