"""Chunks on disk: whole or not at all, in order, whoever made them."""

import pytest
import torch

from fenchel.lens.store import OtherSettings, Store
from fenchel.lens.tallies import added

PARTS = [
    {"count": torch.tensor([1.0, 2.0], dtype=torch.float64), "largest_x": torch.tensor([3.0])},
    {"count": torch.tensor([0.1, 0.2], dtype=torch.float64), "largest_x": torch.tensor([2.0])},
    {"count": torch.tensor([0.7, 0.9], dtype=torch.float64), "largest_x": torch.tensor([5.0])},
]


def store(folder, settings=None, resume=True):
    made = Store(folder, {"model": "m"} if settings is None else settings)
    made.open(resume)
    return made


def test_chunks_are_added_in_their_order(tmp_path):
    one = store(tmp_path)
    for number in (2, 0, 1):
        one.save(number, PARTS[number])
    total = one.total(3)
    wanted = added(added(PARTS[0], PARTS[1]), PARTS[2])
    assert torch.equal(total["count"], wanted["count"])
    assert total["largest_x"].item() == 5.0


def test_what_is_missing_is_known(tmp_path):
    one = store(tmp_path)
    one.save(1, PARTS[1])
    assert list(one.missing(3)) == [0, 2]
    with pytest.raises(FileNotFoundError, match="--resume"):
        one.total(3)


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_damaged_chunk_is_set_aside(tmp_path, harm):
    one = store(tmp_path)
    one.save(0, PARTS[0])
    path = one.path(0)
    raw = bytearray(path.read_bytes())
    if harm == "flip":
        raw[-3] ^= 1
    path.write_bytes(raw[: {"cut": len(raw) // 2, "empty": 0}.get(harm, len(raw))])
    assert one.load(0) is None
    assert [p.name for p in one.set_aside] == ["chunk-000000.damaged"]
    assert list(one.missing(1)) == [0]
    one.save(0, PARTS[0])
    assert torch.equal(one.total(1)["count"], PARTS[0]["count"])


def test_other_settings_are_not_mixed(tmp_path):
    store(tmp_path).save(0, PARTS[0])
    with pytest.raises(OtherSettings, match="model"):
        store(tmp_path, {"model": "other"})
    again = store(tmp_path, {"model": "other"}, resume=False)
    assert list(again.missing(1)) == [0]


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    one = store(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        one.save(0, PARTS[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["settings.json"]
