"""Small sets of questions about pictures, in the files they are published in."""

import csv
import json

import h5py
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn


def noise(height, width, seed):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# ---- easy-VQA

EASY = {
    "train": [
        ["what is the blue shape?", "circle", 0],
        ["Is there a red shape?", "no", 0],
        ["is there a red shape?", "no", 7],
        ["is there a red shape?", "yes", 10],
        ["what is the blue shape?", "triangle", 10],
        ["what is the blue shape?", "triangle", 7],
    ],
    "test": [
        ["is there a red shape?", "no", 3],
        ["what is the green shape?", "square", 3],
        ["what is the blue shape?", "triangle", 1],
    ],
}


def easy_picture(part, number):
    return noise(8, 8, 100 * (part == "test") + number)


def write_easy(folder, asked=EASY):
    for part, questions in asked.items():
        images = folder / part / "images"
        images.mkdir(parents=True, exist_ok=True)
        (folder / part / "questions.json").write_text(json.dumps(questions))
        for number in {question[2] for question in questions}:
            Image.fromarray(easy_picture(part, number)).save(images / f"{number}.png")
    return folder


# ---- DAQUAR

DAQUAR = [
    ("how many chairs are there", "2", "image3"),
    ("how many lamps are there", "2", "image1"),
    ("what is on the table", "lamp, cup", "image1"),
    ("what is on the desk", "lamp, cup", "image1"),
    ("what is behind the sofa", "window", "image3"),  # once: left out
    ("what is on the wall", "lamp", "image2"),  # the training part has no such answer
    ("how many Chairs are there", "2", "image4"),
    ("what is on the carpet", "lamp, cup", "image4"),
]
LISTS = {"train": ["image3", "image1"], "test": ["image4", "image2"]}


def write_csv(path, rows, header=("question", "answer", "image_id")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_daquar(folder, rows=DAQUAR, lists=LISTS):
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "data.csv", rows)
    for part, names in lists.items():
        (folder / f"{part}_images_list.txt").write_text("\n".join(names) + "\n")
        for name in names:
            # 224 x 224: nothing is resized, so that the features can be checked without it
            picture = Image.fromarray(noise(224, 224, int(name.removeprefix("image"))))
            picture.save(images / f"{name}.jpg", quality=85)
    return folder


class Narrow(nn.Module):
    """MobileNetV2 from the table of its paper, with torchvision's names, an eighth as wide."""

    TABLE = (  # widening, channels, blocks, stride of the first
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes=5):
        super().__init__()
        layers, before = [self.unit(3, 4, 3, 2)], 4
        for widening, channels, blocks, first in self.TABLE:
            for number in range(blocks):
                after, stride = channels // 8, first if number == 0 else 1
                layers.append(Residual(before, after, widening, stride))
                before = after
        layers.append(self.unit(before, 160, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(160, classes))

    @staticmethod
    def unit(before, after, kernel, stride=1, groups=1):
        conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU6())

    def forward(self, x):
        return self.classifier(nn.functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class Residual(nn.Module):
    def __init__(self, before, after, widening, stride):
        super().__init__()
        wide = before * widening
        layers = [Narrow.unit(before, wide, 1)] if widening > 1 else []
        layers += [
            Narrow.unit(wide, wide, 3, stride, wide),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        ]
        self.conv = nn.Sequential(*layers)
        self.skips = stride == 1 and before == after

    def forward(self, x):
        return x + self.conv(x) if self.skips else self.conv(x)


def narrow(seed=0):
    """Running statistics and scales are drawn too, so that none of them can be forgotten."""
    torch.manual_seed(seed)
    network = Narrow().eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for part, low, high in (
                (layer.running_mean, -0.5, 0.5),
                (layer.running_var, 0.2, 1.5),
                (layer.weight.data, 0.5, 3.0),
                (layer.bias.data, -0.5, 1.5),
            ):
                part.uniform_(low, high)
    return network


def write_weights(path, seed=0):
    network = narrow(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in network.state_dict().items()}, path)
    return network


# ---- VQA-v2


def annotated(question, image, text, kind, *answers):
    """A question and its annotation; answers: (text, how many annotators)."""
    given = [answer for answer, count in answers for _ in range(count)]
    return (
        {"question_id": question, "image_id": image, "question": text},
        {
            "question_id": question,
            "image_id": image,
            "question_type": "what",
            "answer_type": kind,
            "multiple_choice_answer": given[0],
            "answers": [
                {"answer": answer, "answer_confidence": "yes", "answer_id": number}
                for number, answer in enumerate(given, 1)
            ],
        },
    )


VQA2 = {
    "train2014": [
        annotated(90, 9, "Is the T-shirt red?", "yes/no", ("Yes", 9), ("no", 1)),
        annotated(91, 9, "How many dogs?", "number", ("two", 6), ("2", 2), ("3.", 2)),
        annotated(250, 25, "Is it red?", "yes/no", ("yes", 10)),
        annotated(251, 25, "What's on the table?", "other", ("a zebra", 10)),
    ],
    "val2014": [
        annotated(420, 42, "Is it a giraffe?", "yes/no", ("no", 6), ("yes", 2), ("2", 1), ("?", 1)),
        annotated(421, 42, "What is it?", "other", ("giraffe", 10)),
    ],
}
GRID = (7, 7, 5)  # height, width, channels


def grid_of(image):
    return np.random.default_rng(image).normal(size=GRID).astype(np.float32)


def stored(grid, layout):
    if layout == "channels first":
        return grid.transpose(2, 0, 1)
    return grid.reshape(-1, grid.shape[-1]) if layout == "flat" else grid


def write_vqa2_json(folder, part, pairs):
    folder.mkdir(parents=True, exist_ok=True)
    questions, annotations = ([pair[at] for pair in pairs if pair[at]] for at in (0, 1))
    about = {"info": {"version": "2.0"}, "license": {}, "data_subtype": part}
    for name, key, rows in (
        (f"v2_OpenEnded_mscoco_{part}_questions.json", "questions", questions),
        (f"v2_mscoco_{part}_annotations.json", "annotations", annotations),
    ):
        (folder / name).write_text(json.dumps(about | {key: rows}))


def write_hdf5(path, arrays):
    """A dataset an array, compressed as such files usually are; a dict becomes a group."""
    with h5py.File(path, "w") as file:
        for name, x in arrays.items():
            if isinstance(x, dict):
                file.create_group(name).update(x)
            else:
                file.create_dataset(name, data=x, compression="gzip")


def write_vqa2(folder, layout="channels last", hdf5=False):
    for part, pairs in VQA2.items():
        write_vqa2_json(folder / "json", part, pairs)
        grids = {pair[0]["image_id"]: None for pair in pairs}
        grids = {image: stored(grid_of(image), layout) for image in grids}
        features = folder / "features"
        (features / part).mkdir(parents=True, exist_ok=True)
        if hdf5:
            write_hdf5(features / f"{part}.h5", {str(image): x for image, x in grids.items()})
            continue
        for image, grid in grids.items():
            np.savez(features / part / f"COCO_{part}_{image:012d}.npz", x=grid)
    return folder
