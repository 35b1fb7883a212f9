"""Images and labels from the published files, and what is said of files that are not right."""

import pickle

import numpy as np
import pytest
import torch

from fenchel.experiments.data.images import DataProblem, load_images
from tests.experiments.files import drawn, write_cifar10, write_fashion


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
