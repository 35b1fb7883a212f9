"""Features of Shapes-VQA: made once, kept, and made again where what is kept is not theirs."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from papers.experiments.data.digest import of_questions
from papers.experiments.data.questions import InMemory
from papers.experiments.data.shapes import features, load_seen, load_shapes

IMAGES = (128, 40)


def load_features(cache, **settings):
    """The data, and how many steps were trained for it."""
    steps = []
    data = load_seen(
        cache, images=IMAGES, advance=lambda done, total: steps.append((done, total)), **settings
    )
    return data, steps


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return (*load_features(folder), folder)


def test_features_stand_in_for_pixels(first):
    data, steps, _ = first
    plain = load_shapes(images=IMAGES)
    assert steps == [(n, 12) for n in range(1, 13)]  # six epochs of two batches
    for split, other in ((data.train, plain.train), (data.test, plain.test)):
        places = torch.tensor([0, 3])
        assert split.pictures.gathered(places).shape == (2, 8, 8, 48)
        assert split.pictures.gathered(places).dtype == torch.float32
        assert torch.equal(split.words, other.words)
        shown = torch.as_tensor(split.pictures.shown(3)).permute(2, 0, 1)
        assert torch.equal(shown, other.pictures.images[3])
    assert data.note.startswith(plain.note)


def test_what_it_says_it_names_right(first):
    """Counted again from the network's own answers would need the network: the share is a share of
    the test's shapes, and such a short training names few."""
    _, _, folder = first
    named = json.loads((folder / "shapes.json").read_text())["named"]
    assert 0 <= named < 1


def test_settings_go_by_the_pixels_and_not_by_what_was_learnt(first):
    """The last bits of a training are another processor's own; a table would not go on there."""
    data, _, _ = first

    def with_train(**changed):
        pictures = replace(data.train.pictures, **changed)
        return of_questions(replace(data, train=replace(data.train, pictures=pictures)))

    seen = data.train.pictures
    assert with_train(features=seen.features + 1e-2) == of_questions(data)
    pixels = seen.images.images.clone()
    pixels[0, 0, 0, 0] ^= 1
    assert with_train(images=InMemory(pixels)) != of_questions(data)
    assert of_questions(load_shapes(images=IMAGES)) != of_questions(data)  # pixels themselves


def test_names_are_where_the_shapes_are():
    names = features._names(30, 0, "train")
    for number, scene in enumerate(features.scenes(30, 0, "train")):
        assert int((names[number, 0] > 0).sum()) == len(scene.things)
        for thing in scene.things:
            colour, shape = names[number, :, thing.y // 8, thing.x // 8].tolist()
            assert features.COLOURS[colour - 1] == thing.colour
            assert features.SHAPES[shape - 1] == thing.shape


def test_it_learns_to_name():
    data = load_shapes(images=(400, 60))
    pixels, unseen = (split.pictures.images for split in (data.train, data.test))
    wanted = features._names(60, 0, "test")
    torch.manual_seed(0)
    network = features.Naming()

    def surprise():
        with torch.no_grad():
            _, colours, shapes = network(unseen)
        loss = torch.nn.functional.cross_entropy
        return float(loss(colours, wanted[:, 0]) + loss(shapes, wanted[:, 1]))

    before = surprise()
    features._train(network, pixels, features._names(400, 0, "train"), None)
    assert surprise() < before / 4


def test_kept_features_are_used(first):
    data, _, folder = first
    again, steps = load_features(folder)
    assert steps == []
    assert torch.equal(again.test.pictures.features, data.test.pictures.features)
    assert again.note == data.note


def test_without_a_cache_they_are_the_same(first):
    again, _ = load_features(None)
    assert torch.equal(again.train.pictures.features, first[0].train.pictures.features)


@pytest.mark.parametrize("damage", ["cut", "no facts", "other seed", "no tensors"])
def test_what_does_not_fit_is_made_again(first, tmp_path, damage):
    _, steps, folder = first
    content = (folder / "shapes.safetensors").read_bytes()
    facts = json.loads((folder / "shapes.json").read_text())
    if damage == "other seed":
        facts["seed"] = 1
    if damage != "no tensors":
        part = content[:-100] if damage == "cut" else content
        (tmp_path / "shapes.safetensors").write_bytes(part)
    text = "[]" if damage == "no facts" else json.dumps(facts)
    (tmp_path / "shapes.json").write_text(text)
    assert load_features(tmp_path)[1] == steps
    assert load_features(tmp_path)[1] == []


@pytest.mark.parametrize("damage", ["spoilt", "no checksum", "odd share", "nothing"])
def test_the_checksum_counts(first, tmp_path, damage):
    content = (first[2] / "shapes.safetensors").read_bytes()
    facts = json.loads((first[2] / "shapes.json").read_text())
    if damage == "spoilt":
        content = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
    if damage == "no checksum":
        del facts["sha256"]
    if damage == "odd share":
        facts["named"] = "x"
    (tmp_path / "shapes.safetensors").write_bytes(content)
    (tmp_path / "shapes.json").write_text(json.dumps(facts))
    assert (features._read(tmp_path, IMAGES, 0) is None) == (damage != "nothing")


@pytest.mark.parametrize("wrong", ["shape", "dtype", "not finite", "another tensor"])
def test_signed_tensors_must_fit_too(first, tmp_path, wrong):
    folder = first[2]
    tensors = load((folder / "shapes.safetensors").read_bytes())
    tensors |= {
        "shape": {"test": tensors["test"][..., :3].contiguous()},
        "dtype": {"test": tensors["test"].float()},
        "not finite": {"test": tensors["test"] * float("nan")},
        "another tensor": {"named": torch.zeros(1)},
    }[wrong]
    content = save(tensors)
    facts = json.loads((folder / "shapes.json").read_text())
    facts["sha256"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "shapes.safetensors").write_bytes(content)
    (tmp_path / "shapes.json").write_text(json.dumps(facts))
    assert features._read(tmp_path, IMAGES, 0) is None


def test_torch_s_own_random_numbers_are_left_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    load_features(None)
    assert torch.equal(torch.rand(3), wanted)
