"""Images and labels from the published files, and what is said of files that are not right."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch

from papers.experiments.data.files import DataProblem
from papers.experiments.data.images import load_images
from papers.tests.experiments.files import drawn, idx, write_cifar10, write_fashion


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist(tmp_path, zipped):
    write_fashion(tmp_path / "fashion-mnist", zipped=zipped)
    data = load_images("fashion-mnist", tmp_path)
    images, labels = drawn(64, 1, 8, 0)
    assert torch.equal(data.train.images, torch.from_numpy(images))
    assert data.train.labels.tolist() == labels.tolist()
    assert (len(data.test), data.classes, data.note) == (16, 10, "")


@pytest.mark.parametrize("pickled", [True, False])
def test_cifar_in_both_forms(tmp_path, pickled):
    write_cifar10(tmp_path, pickled=pickled)
    data = load_images("cifar-10", tmp_path)
    first, labels = drawn(12, 3, 32, 0)
    assert torch.equal(data.train.images[:12], torch.from_numpy(first))
    assert data.train.labels[:12].tolist() == labels.tolist()
    assert data.note == "24 of 50,000 training images"
    mean, deviation = data.statistics()
    plain = data.train.images.double() / 255
    torch.testing.assert_close(mean.double(), plain.mean((0, 2, 3)), rtol=1e-5, atol=0)
    torch.testing.assert_close(deviation.double(), plain.std((0, 2, 3)), rtol=1e-4, atol=0)


def test_cifar_100_takes_the_fine_labels(tmp_path):
    images, labels = drawn(5, 3, 32, 0)
    for name in ("train", "test"):
        rows = np.concatenate([labels[:, None] * 0 + 7, labels[:, None], images.reshape(5, -1)], 1)
        (tmp_path / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())
    assert load_images("cifar-100", tmp_path).train.labels.tolist() == labels.tolist()


def test_a_pickle_runs_nothing(tmp_path):
    write_cifar10(tmp_path, pickled=True)

    class Evil:
        def __reduce__(self):
            return (eval, ("__import__('pathlib').Path('ran').touch()",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(DataProblem, match=r"holds no builtins.eval"):
        load_images("cifar-10", tmp_path)


# ---- pickles


def write_batches(folder, train, test=None):
    """train: an object to pickle, or bytes."""
    write_cifar10(folder, batches=1, pickled=True)
    for name, content in (("data_batch_1", train), ("test_batch", test)):
        if content is not None:
            raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
            (folder / name).write_bytes(raw)
    return folder


def batch(**changed):
    images, labels = drawn(12, 3, 32, 0)
    return {"data": images.reshape(12, -1), "labels": labels.tolist()} | changed


def python_2(images, labels):
    """As cPickle of Python 2 writes it, in protocol 2: texts are bytes, and so are an array's."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    content = images.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + b"K" + bytes([len(images)]) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"
    )
    marks = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + marks + b"u."


@pytest.mark.parametrize("form", [2, 3, 4, "numpy 1", "bytes", "python 2", "labels as array"])
def test_pickled_batches_of_every_age(tmp_path, form):
    images, labels = drawn(12, 3, 32, 0)
    content, protocol = batch(), form if isinstance(form, int) else 2
    if form == "bytes":
        content = {key.encode(): value for key, value in content.items()}
    if form == "labels as array":
        content["labels"] = labels.astype(">i4")
    raw = pickle.dumps(content, protocol=protocol)
    old, new = b"numpy.core.multiarray", b"numpy._core.multiarray"
    if form == "numpy 1":
        raw = raw.replace(new, old)
        assert old in raw
    if form == "python 2":
        raw = python_2(images.reshape(12, -1), labels)
        assert pickle.loads(raw, encoding="latin1")["labels"] == labels.tolist()
    data = load_images("cifar-10", write_batches(tmp_path, raw))
    assert torch.equal(data.train.images, torch.from_numpy(images))
    assert data.train.labels.tolist() == labels.tolist()
    assert data.note == "12 of 50,000 training images"


def test_arrays_by_columns(tmp_path):
    content = batch()
    content["data"] = np.asfortranarray(content["data"])
    data = load_images("cifar-10", write_batches(tmp_path, content))
    assert torch.equal(data.train.images, torch.from_numpy(drawn(12, 3, 32, 0)[0]))


class Call:
    """Pickled as a call, and a state where one is given."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


FORGED = {
    "an array at an address": Call(np.ndarray, ((1,), np.dtype("O"), b"A" * 8)),
    "an array of objects": np.array([1, None], dtype=object),
    "records": np.zeros(2, [("a", "u1"), ("b", "u1")]),
    "bytes of any kind": np.zeros(2, "V8"),
    "no values": Call(np.empty(0).__reduce__()[0], (np.ndarray, (0,), b"b")),
    "another class": Call(np.empty(0).__reduce__()[0], (np.dtype, (0,), b"b")),
    "short": Call(*np.empty(0).__reduce__()[:2], (1, (2, 3072), np.dtype("u1"), False, b"A" * 100)),
    "negative": Call(*np.empty(0).__reduce__()[:2], (1, (-1, 3), np.dtype("u1"), False, b"")),
    "no bytes": Call(*np.empty(0).__reduce__()[:2], (1, (1,), np.dtype("u1"), False, [1])),
    "dtype of objects": Call(np.dtype, ("O",)),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_forged_arrays_are_refused(tmp_path, forged):
    write_batches(tmp_path, batch(data=forged))
    with pytest.raises(DataProblem, match=r"data_batch_1.* (is not a batch of CIFAR|its data is)"):
        load_images("cifar-10", tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02cnumpy\nndarray\nN}\x8c\x01aK\x01s\x86b.",  # a state for a class
        b"\x80\x02cnumpy\ndtype\n)\x81.",  # an object without a call
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a place that would take 16 gigabytes
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
        b"\x80\x02}.",
        b"",
        b"hello",
    ],
)
def test_damaged_pickles_are_refused(tmp_path, raw):
    with pytest.raises(DataProblem, match=r"data_batch_1 \(\d+ bytes\) is not a batch of CIFAR"):
        load_images("cifar-10", write_batches(tmp_path, raw))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": np.zeros((12, 3072))}, r"its data is float64 \(12, 3072\), expected uint8"),
        ({"data": np.zeros((12, 32, 32, 3), np.uint8)}, r"uint8 \(12, 32, 32, 3\), expected"),
        ({"data": np.zeros((12, 3000), np.uint8)}, r"uint8 \(12, 3000\), expected"),
        ({"data": "abc"}, "its data is str"),
        ({"labels": [0] * 11 + [-1]}, "label 11 is -1, expected a whole number from 0 to 9"),
        ({"labels": [10] * 12}, "label 0 is 10"),
        ({"labels": [0.9] * 12}, "label 0 is 0.9"),
        ({"labels": ["a"] * 12}, "label 0 is a str"),
        ({"labels": [True] * 12}, "label 0 is a bool"),
        ({"labels": [10**5000] * 12}, "label 0 is a int"),
        ({"labels": None}, "its labels are a NoneType"),
        ({"labels": [0] * 11}, "12 images but 11 labels"),
    ],
)
def test_what_a_pickled_batch_must_hold(tmp_path, changed, message):
    write_batches(tmp_path, batch(**changed))
    with pytest.raises(DataProblem, match=rf"data_batch_1: .*{message}"):
        load_images("cifar-10", tmp_path)


def test_the_note_counts_images(tmp_path):
    write_cifar10(tmp_path, batches=5, count=2)  # every file, but not every image
    assert load_images("cifar-10", tmp_path).note == "10 of 50,000 training images"


# ---- what is wrong


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 8, 6), (4, 8, 8)), r"train-images.*images of 8 x 6, expected squares"),
        (((4, 0, 0), (4, 8, 8)), "images of 0 x 0"),
        (((4, 8, 8), (4, 6, 6)), "sides of 8 pixels, test images of 6"),
        (((3, 8, 8), (4, 8, 8)), "3 images in train-images.* 4 labels in train-labels"),
    ],
)
def test_sides_of_images(tmp_path, shapes, message):
    for name, shape in zip(("train", "t10k"), shapes, strict=True):
        images, labels = np.zeros(shape, np.uint8), np.zeros(4, np.uint8)
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(DataProblem, match=message):
        load_images("fashion-mnist", tmp_path)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            b"\3" + struct.pack(">III", 1 << 31, 1 << 31, 4),
            "would hold 18,446,744,073,709,551,616 bytes by its header, at most 268,435,456",
        ),
        (b"\x7f" + b"\0\0\0\1" * 127 + b"a", "has 127 axes"),
        (b"\3" + struct.pack(">II", 4, 8), "is cut short: it ends within the sizes of its 3 axes"),
    ],
)
def test_idx_files_of_impossible_sizes(tmp_path, head, message):
    write_fashion(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08" + head)
    with pytest.raises(DataProblem, match=f"train-images-idx3-ubyte {message}"):
        load_images("fashion-mnist", tmp_path)


def test_damage_inside_a_zipped_file(tmp_path):
    path = write_fashion(tmp_path) / "train-images-idx3-ubyte.gz"
    raw = gzip.compress(b"a" * 1000)
    path.write_bytes(raw[:11] + b"\xff" * 4 + raw[15:])
    with pytest.raises(DataProblem, match=r"ubyte\.gz \(\d+ bytes\) does not unzip"):
        load_images("fashion-mnist", tmp_path)


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(DataProblem, match="no folder"):
        load_images("fashion-mnist", tmp_path / "nowhere")
    with pytest.raises(DataProblem, match="known are"):
        load_images("mnist", tmp_path)
    with pytest.raises(DataProblem, match="no train-images-idx3-ubyte"):
        load_images("fashion-mnist", tmp_path)
    folder = write_fashion(tmp_path / "short", zipped=False)
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataProblem, match=r"cut short.*4102 bytes, 4112 expected"):
        load_images("fashion-mnist", folder)
    path.write_bytes(b"hello")
    with pytest.raises(DataProblem, match="not an idx file"):
        load_images("fashion-mnist", folder)
    write_fashion(folder)
    zipped = folder / "train-labels-idx1-ubyte.gz"
    path.unlink()
    (folder / "train-labels-idx1-ubyte").unlink()
    zipped.write_bytes(zipped.read_bytes()[:-12])
    with pytest.raises(DataProblem, match="does not unzip"):
        load_images("fashion-mnist", folder)
    batch = write_cifar10(tmp_path / "cifar") / "data_batch_1.bin"
    batch.write_bytes(batch.read_bytes()[:-1])
    with pytest.raises(DataProblem, match="not a multiple of 3073"):
        load_images("cifar-10", batch.parent)
    (batch.parent / "test_batch.bin").unlink()
    batch.unlink()
    with pytest.raises(DataProblem, match="test_batch"):
        load_images("cifar-10", batch.parent)


def test_labels_must_fit(tmp_path):
    folder = write_cifar10(tmp_path)
    raw = bytearray((folder / "test_batch.bin").read_bytes())
    raw[0] = 10
    (folder / "test_batch.bin").write_bytes(raw)
    with pytest.raises(DataProblem, match="a label of the test part is 10, but there are 10"):
        load_images("cifar-10", folder)
