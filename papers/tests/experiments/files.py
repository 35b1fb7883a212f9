"""Small data sets in the published file formats."""

import gzip
import pickle
import struct

import numpy as np

CLASSES = 4


def drawn(count, channels, side, seed):
    """Images whose brightness in one quarter says the class, and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count).astype(np.uint8)
    images = rng.integers(0, 90, (count, channels, side, side)).astype(np.uint8)
    half = side // 2
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 120
    return images, labels


def idx(array):
    return (
        b"\0\0\x08"
        + bytes([array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_fashion(folder, train=64, test=16, side=8, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 0), ("t10k", test, 1)):
        images, labels = drawn(count, 1, side, seed)
        for kind, array in (("images-idx3", images[:, 0]), ("labels-idx1", labels)):
            raw = idx(array)
            if zipped:
                (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(raw))
            else:
                (folder / f"{name}-{kind}-ubyte").write_bytes(raw)
    return folder


def write_cifar10(folder, batches=2, count=12, pickled=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{n}" for n in range(1, batches + 1)), "test_batch"]
    for seed, name in enumerate(names):
        images, labels = drawn(count, 3, 32, seed)
        flat = images.reshape(count, -1)
        if pickled:
            content = {"data": flat, "labels": labels.tolist(), "batch_label": name}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        else:
            rows = np.concatenate([labels[:, None], flat], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder
