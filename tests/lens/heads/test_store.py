"""Units on disk: whole or not at all, of one audit only."""

import pytest
import torch

from fenchel.lens.heads.store import OtherSettings, Store
from fenchel.lens.heads.tallies import InputTally, Tallies, to_arrays

TOKENS = torch.tensor([0.1, 0.2], dtype=torch.float64)
PART = Tallies(inputs=InputTally(TOKENS, cut=torch.tensor([3.0])))


def store(folder, settings=None, resume=True):
    units = Store(folder, {"model": "m", "alphas": (1.5, 2.0)} if settings is None else settings)
    units.open(resume)
    return units


def test_a_unit_comes_back_as_it_was(tmp_path):
    store(tmp_path).save("chunk-000001", PART)
    again = store(tmp_path)
    assert again.names() == ["chunk-000001"]
    tallies = again.load("chunk-000001")
    assert to_arrays(tallies).keys() == to_arrays(PART).keys()
    assert all(torch.equal(to_arrays(tallies)[name], x) for name, x in to_arrays(PART).items())
    assert again.load("chunk-000000") is None
    assert again.set_aside == []


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "another's"])
def test_a_damaged_unit_is_set_aside(tmp_path, harm):
    one = store(tmp_path)
    one.save("model-1.5", PART)
    path = one.path("model-1.5")
    raw = bytearray(path.read_bytes())
    if harm == "flip":
        raw[-3] ^= 1
    if harm == "another's":
        one.save("model-2", PART)
        raw = one.path("model-2").read_bytes()
    path.write_bytes(raw[: {"cut": len(raw) // 2, "empty": 0}.get(harm, len(raw))])
    assert one.load("model-1.5") is None
    assert [p.name for p in one.set_aside] == ["model-1.5.damaged"]
    assert one.set_aside[0].exists()
    one.save("model-1.5", PART)
    assert torch.equal(one.load("model-1.5").inputs.tokens, TOKENS)


def test_other_settings_are_not_mixed(tmp_path):
    store(tmp_path).save("attack", PART)
    with pytest.raises(OtherSettings, match='model was "m", is "other"'):
        store(tmp_path, {"model": "other", "alphas": [1.5, 2.0]})
    with pytest.raises(OtherSettings, match=r"alphas was \[1.5, 2.0\], is null"):
        store(tmp_path, {"model": "m"})
    assert store(tmp_path).load("attack") is not None, "nothing is lost"
    assert store(tmp_path, {"model": "other"}, resume=False).names() == []


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_without_its_settings_a_unit_is_known_by_its_checksum(tmp_path, content):
    store(tmp_path).save("attack", PART)
    path = tmp_path / "settings.json"
    path.unlink() if content is None else path.write_text(content)
    assert store(tmp_path).load("attack") is not None
    path.unlink()
    other = store(tmp_path, {"model": "other"})
    assert other.load("attack") is None
    assert len(other.set_aside) == 1


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    one = store(tmp_path)
    one.save("chunk-000000", PART)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        one.save("chunk-000001", PART)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["chunk-000000.npz", "settings.json"]
    assert one.load("chunk-000000") is not None


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    store(tmp_path).save("attack", PART)
    (tmp_path / ".attack.npz.4711").write_bytes(b"half")
    assert store(tmp_path).names() == ["attack"]
    assert not list(tmp_path.glob(".*"))


def test_files_of_others_stay(tmp_path):
    """A folder that is not ours, and names that are not ours in a folder that is."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "recipe.npz").write_bytes(b"mine")
    Store(foreign, {}).open(resume=False)
    assert (foreign / "recipe.npz").read_bytes() == b"mine"

    units = Store(tmp_path / "units", {})
    units.open(resume=False)
    units.save("chunk-000000", PART)
    for name in ("mydata.npz", "x.damaged"):
        (units.folder / name).write_bytes(b"mine")
    units.open(resume=False)
    assert sorted(path.name for path in units.folder.iterdir()) == [
        "mydata.npz",
        "settings.json",
        "x.damaged",
    ]


def test_beginning_again_does_so_though_the_settings_are_damaged(tmp_path):
    """Else units would be taken for new ones that nobody asked to go on with."""
    units = Store(tmp_path, {"model": "a"})
    units.open(resume=False)
    units.save("chunk-000000", PART)
    (tmp_path / "settings.json").write_text('{"mod')
    units.open(resume=False)
    assert units.load("chunk-000000") is None
