"""Small files that would take all of the memory are refused, and take little of it."""

import gzip
import pickle
import struct
import tracemalloc
import zipfile

import h5py
import numpy as np
import pytest
from PIL import Image

from papers.experiments.data.easy import pixels
from papers.experiments.data.files import DataProblem, read_file
from papers.experiments.data.images import load_images
from papers.experiments.data.vqa2 import load_vqa2
from papers.tests.experiments.files import write_cifar10, write_fashion
from papers.tests.experiments.question_files import GRID, write_vqa2

MEGABYTE = 2**20


def refused(read, message, most):
    """That it is, and that no more than `most` bytes were held at once."""
    tracemalloc.start()
    try:
        with pytest.raises(DataProblem, match=message):
            read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak:,} bytes for a file that is refused"


def test_the_measurement_sees_what_is_held():
    def wasteful():
        raise DataProblem(f"refused after {len(bytes(4 * MEGABYTE))} bytes")

    with pytest.raises(AssertionError, match="bytes for a file that is refused"):
        refused(wasteful, "refused", MEGABYTE)


# ---- what is zipped


def test_a_zipped_file_is_read_as_far_as_its_header_says(tmp_path):
    path = write_fashion(tmp_path) / "train-images-idx3-ubyte.gz"
    head = b"\0\0\x08\3" + struct.pack(">III", 64, 8, 8)
    path.write_bytes(gzip.compress(head + bytes(64 * MEGABYTE)))
    assert path.stat().st_size < MEGABYTE
    message = r"ubyte\.gz holds more than 4,096 bytes, the most that is expected of it; get it"
    refused(lambda: load_images("fashion-mnist", tmp_path), message, 4 * MEGABYTE)


def test_a_header_says_no_more_than_there_can_be(tmp_path):
    path = write_fashion(tmp_path) / "train-images-idx3-ubyte.gz"
    head = b"\0\0\x08\3" + struct.pack(">III", 2**20, 2**6, 2**6)
    path.write_bytes(gzip.compress(head + bytes(MEGABYTE)))
    message = r"would hold 4,294,967,296 bytes by its header, at most 268,435,456 expected"
    refused(lambda: load_images("fashion-mnist", tmp_path), message, 2 * MEGABYTE)


@pytest.mark.parametrize("name", ["test_batch.bin", "test_batch"])
def test_a_file_with_holes(tmp_path, name, monkeypatch):
    """It has its size without a disk that is as large."""
    monkeypatch.setattr("papers.experiments.data.images._MOST", 2 * MEGABYTE)
    write_cifar10(tmp_path, pickled=not name.endswith(".bin"))
    with (tmp_path / name).open("r+b") as file:
        file.truncate(32 * MEGABYTE)
    message = rf"{name} holds more than 2,097,152 bytes"
    refused(lambda: load_images("cifar-10", tmp_path), message, 8 * MEGABYTE)


def test_the_limit_itself_is_allowed(tmp_path):
    plain, zipped = tmp_path / "a", tmp_path / "a.gz"
    plain.write_bytes(b"abc")
    zipped.write_bytes(gzip.compress(b"abc"))
    for path in (plain, zipped):
        assert read_file(path, 3) == b"abc"
        with pytest.raises(DataProblem, match=rf"{path.name} holds more than 2 bytes"):
            read_file(path, 2)


def grid_file(folder):
    return write_vqa2(folder) / "features" / "train2014" / "COCO_train2014_000000000009.npz"


def test_features_that_unzip_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr("papers.experiments.data.grids._MOST", MEGABYTE)
    np.savez_compressed(grid_file(tmp_path), x=np.zeros((128, 128, 256)))
    message = r"x in .*000009\.npz holds more than 1,048,576 bytes"
    refused(lambda: load_vqa2(tmp_path), message, 8 * MEGABYTE)


def test_features_are_unzipped_as_numpy_zips_them(tmp_path):
    """What bzip2 holds is unpacked whole, however little is asked for."""
    with zipfile.ZipFile(grid_file(tmp_path), "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x.npy", bytes(32 * MEGABYTE))
    message = r"000009\.npz does not give the array x of image 9: it is not compressed as numpy"
    refused(lambda: load_vqa2(tmp_path), message, 8 * MEGABYTE)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [((128, 128, 4096), {}), (GRID, {"maxshape": (None,) * 3, "chunks": (128, 128, 4096)})],
    ids=["whole", "chunks"],
)
def test_datasets_of_too_much(tmp_path, shape, settings):
    path = write_vqa2(tmp_path, hdf5=True) / "features" / "train2014.h5"
    with h5py.File(path, "a") as file:
        del file["9"]
        file.create_dataset("9", shape, np.float64, **settings)  # nothing is written to it
    message = r"dataset 9 in .*h5 takes 536,870,912 bytes, at most 67,108,864 expected"
    refused(lambda: load_vqa2(tmp_path), message, 8 * MEGABYTE)


def test_pictures_of_too_many_pixels(tmp_path):
    path = tmp_path / "wide.png"
    Image.new("1", (4096, 4097)).save(path)
    message = r"wide\.png is 4096 x 4097, more than 16,777,216 pixels; make it smaller"
    refused(lambda: pixels(path), message, MEGABYTE)


# ---- pickles


def text(letters):
    return b"X" + struct.pack("<I", len(letters)) + letters


TEXT = text(b"a" * 100_000)
ENCODE = b"\x80\x02c_codecs\nencode\nq\x00"
RECONSTRUCT = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x00"
EMPTY = b"cnumpy\nndarray\nK\x00\x85X\x01\x00\x00\x00b\x87q\x01"
BYTES = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85Rq\x02"
NESTED = b"K\x01K\x01\x86" + b"2\x86" * 20  # pairs of the pair before: 2^21 ones

BOMBS = {
    "a text encoded again and again": (
        ENCODE + TEXT + text(b"latin1") + b"\x86q\x01](" + b"h\x00h\x01R" * 500 + b"e.",
        "its calls make more bytes than it has itself",
    ),
    "a text made an array of again and again": (
        RECONSTRUCT
        + EMPTY
        + BYTES
        + b"(K\x01J\xa0\x86\x01\x00\x85h\x02\x89"
        + TEXT
        + b"tq\x03]("
        + b"h\x00h\x01Rh\x03b" * 500
        + b"e.",
        "its calls make more bytes than it has itself",
    ),
    "a place far beyond the values": (
        b"\x80\x02" + TEXT + b"0]r" + struct.pack("<I", 90_000) + b".",
        "LONG_BINPUT 90000 after 4 codes",
    ),
    "more objects than there can be": (b"\x80\x02(" + b"]" * 2**20 + b"l.", "more than 1,048,576"),
    "sets": (b"\x80\x04(" + b"\x8f" * 10_000 + b"l.", "EMPTY_SET has no place"),
    "a shape whose product is longer than all numbers": (
        RECONSTRUCT
        + EMPTY
        + BYTES
        + b"h\x00h\x01R(K\x01("
        + b"\x8b\x10\x27\x00\x00"
        + b"\x01" * 10_000
        + b"q\x03"
        + b"h\x03" * 65
        + b"th\x02\x89X\x00\x00\x00\x00tb.",
        "the shape of an array is none",
    ),
    "a kind of numbers that is written out": (
        b"\x80\x02cnumpy\ndtype\n" + NESTED + b"\x85R.",
        "an array of a tuple; whole numbers or floats expected",
    ),
    "an encoding that is written out": (
        ENCODE + text(b"a") + NESTED + b"\x86R.",
        "bytes in a tuple; latin1 expected",
    ),
    "a name that is written out": (
        b"\x80\x02cbuiltins\n" + b"a" * 100_000 + b"\n.",
        rf"holds no builtins\.{'a' * 51}; it was not called",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickles_that_grow(tmp_path, bomb):
    raw, message = BOMBS[bomb]
    write_cifar10(tmp_path, batches=1, pickled=True)
    (tmp_path / "data_batch_1").write_bytes(raw)
    message = rf"data_batch_1 \({len(raw)} bytes\) is not a batch of CIFAR: .*{message}"
    refused(lambda: load_images("cifar-10", tmp_path), message, 12 * MEGABYTE)


def test_a_batch_with_names_of_files_as_bytes_is_no_bomb(tmp_path):
    """Every name is a call: the most that an honest batch has."""
    write_cifar10(tmp_path, batches=1, count=2_000, pickled=True)
    path = tmp_path / "data_batch_1"
    content = pickle.loads(path.read_bytes())
    names = [b"a", *(f"automobile_s_{n:06d}.png".encode() for n in range(1_999))]
    content |= {"filenames": names, "batch_label": b"a"}
    for protocol in (2, 4):
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        assert len(load_images("cifar-10", tmp_path).train) == 2_000
