"""MobileNetV2, its kept features, and DAQUAR by the official split."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from papers.experiments.data import mobilenet
from papers.experiments.data.daquar import load_daquar
from papers.experiments.data.digest import of_questions
from papers.experiments.data.easy import pixels
from papers.experiments.data.files import DataProblem
from papers.experiments.data.mobilenet import prepared, read_mobilenet
from papers.tests.experiments.question_files import (
    DAQUAR,
    LISTS,
    narrow,
    noise,
    write_csv,
    write_daquar,
    write_weights,
)
from tests import needs


def shared(name):
    return needs.shared("data", name, covers="real photographs and questions (DAQUAR, MobileNet)")


# ---- the network


def test_the_network_is_that_of_the_paper(tmp_path):
    write_weights(tmp_path / "model.safetensors")
    reference, network = narrow(), read_mobilenet(tmp_path)
    x = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(network.classes(x), reference(x))
        for last in (0, 1, 2, 7, 13, 17):
            expected = reference.features[: last + 1](x)
            torch.testing.assert_close(network.grid(x, last), expected)
        assert (reference.features[0](x) == 6).any()  # where the activation ends
    assert network.grid(x).shape == (2, 12, 4, 6)
    with pytest.raises(ValueError, match="last must be from 0 to 17, got 18"):
        network.grid(x, 18)


def test_prepared_keeps_the_edges():
    picture = np.zeros((20, 60, 3), np.uint8)
    picture[:, :15, 0], picture[:, 45:, 2] = 255, 255  # a square cut from the middle has neither
    x = prepared(picture)
    assert x.shape == (3, 224, 224)
    # (1 - mean) / deviation of ImageNet's red and blue, and -mean / deviation of green
    assert float(x[0, 112, 5]) == pytest.approx((1 - 0.485) / 0.229, abs=1e-5)
    assert float(x[2, 112, 218]) == pytest.approx((1 - 0.406) / 0.225, abs=1e-5)
    assert float(x[1].max()) == pytest.approx(-0.456 / 0.224, abs=1e-5)


def test_weights_that_are_not_right(tmp_path):
    with pytest.raises(DataProblem, match=r"no weights .*nothing"):
        read_mobilenet(tmp_path / "nothing")
    path = tmp_path / "model.safetensors"
    write_weights(path)
    tensors = load_file(path)
    del tensors["features.9.conv.1.1.running_var"]
    save_file(tensors, path)
    with pytest.raises(DataProblem, match=r"model\.safetensors.*features\.9\.conv\.1\.1\.running_"):
        read_mobilenet(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataProblem, match=r"\(5000 bytes\) is not a safetensors file"):
        read_mobilenet(tmp_path)


def test_real_photographs_are_recognised():
    weights, photos = shared("mobilenet_v2"), shared("photos")
    names = json.loads((weights / "imagenet_class_index.json").read_text())
    network = read_mobilenet(weights)
    for photo, name in (
        ("chelsea.png", "Egyptian_cat"),
        ("coffee.png", "espresso"),
        ("dog1.jpg", "Pembroke"),
        ("dog2.jpg", "German_shepherd"),
    ):
        with torch.no_grad():
            best = network.classes(prepared(pixels(photos / photo))[None]).argmax()
        assert names[str(int(best))][1] == name


# ---- the questions


@pytest.fixture
def places(tmp_path):
    write_weights(tmp_path / "net" / "model.safetensors")
    return write_daquar(tmp_path / "daquar"), tmp_path / "net"


def test_the_official_split(places):
    folder, weights = places
    data = load_daquar(folder.parent, weights)
    assert (data.name, data.answers) == ("daquar", ["2", "lamp, cup"])
    assert [data.text(data.train, q) for q in range(4)] == [row[0] for row in DAQUAR[:4]]
    assert "window" not in data.vocabulary
    assert "sofa" not in data.vocabulary  # of a question that was left out
    assert data.text(data.test, 1) == "how many chairs are there"
    assert data.text(data.test, 2) == "what is on the <unknown>"
    assert data.train.answers.tolist() == [[0], [0], [1], [1]]
    assert data.test.answers.tolist() == [[-1], [0], [1]]
    assert data.train.kinds.tolist() == [1, 1, 2, 2]
    for split, part, rows in ((data.train, "train", DAQUAR[:4]), (data.test, "test", DAQUAR[5:])):
        named = [LISTS[part][place] for place in split.picture.tolist()]
        assert named == [row[2] for row in rows]


def test_the_note(places):
    folder, weights = places
    note = load_daquar(folder, weights).note
    assert "4 of 5 training questions on 2 pictures (answers that occur at least 2 times)" in note
    assert "3 test questions on 2; 2 answers" in note
    assert "2 test questions (66.7 %) have one of them" in note
    assert "always '2' is right on 33.3 %" in note
    assert "after 5 words (0 are cut)" in note
    every = load_daquar(folder, weights, least=1)
    assert (len(every.train), every.answers) == (5, ["2", "lamp, cup", "window"])
    with pytest.raises(ValueError, match="least must be >= 1, got 0"):
        load_daquar(folder, weights, least=0)
    with pytest.raises(DataProblem, match="no training answer occurs 3 times"):
        load_daquar(folder, weights, least=3)


def test_features_are_the_networks(places, tmp_path):
    folder, weights = places
    data, reference = load_daquar(folder, weights, tmp_path / "kept"), narrow()
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for split, part in ((data.train, "train"), (data.test, "test")):
        assert len(split.pictures) == 2
        features = split.pictures.gathered(torch.tensor([1, 0, 1]))
        assert features.dtype == torch.float32
        for row, place in enumerate((1, 0, 1)):
            with Image.open(folder / "images" / f"{LISTS[part][place]}.jpg") as picture:
                values = np.asarray(picture)
            assert np.array_equal(split.pictures.shown(place), values)
            x = torch.from_numpy((values / 255 - mean) / deviation).float().permute(2, 0, 1)
            with torch.no_grad():
                expected = reference.features[:14](x[None])[0].permute(1, 2, 0)
            assert expected.shape == (14, 14, 12)
            # kept in half precision: 11 bits
            torch.testing.assert_close(features[row], expected, rtol=2**-10, atol=1e-3)


def test_features_are_made_once(places, tmp_path):
    folder, weights = places
    kept, heard = tmp_path / "a" / "kept", []

    def load():
        heard.clear()
        data = load_daquar(folder, weights, kept, lambda *at: heard.append(at))
        return torch.cat([part.pictures.features for part in (data.train, data.test)])

    def spoil(content):
        return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]

    first = load()
    assert heard == [(4, 4)]
    assert torch.equal(load(), first)
    assert heard == []
    tensors, facts = kept / "features.safetensors", kept / "features.json"
    for path, change in (
        (tensors, lambda content: content[:-100]),
        (tensors, spoil),
        (facts, lambda content: content[:-5]),
        (facts, lambda content: b"[1]"),
    ):
        path.write_bytes(change(path.read_bytes()))
        assert torch.equal(load(), first)
        assert heard == [(4, 4)], path
        load()
        assert heard == []
    assert sorted(path.name for path in kept.iterdir()) == [facts.name, tensors.name]


def test_features_of_something_else_are_made_again(places, tmp_path):
    folder, weights = places
    kept, heard = tmp_path / "kept", []

    def load():
        heard.clear()
        return load_daquar(folder, weights, kept, lambda *at: heard.append(at)).train.pictures

    first = load().features
    write_weights(weights / "model.safetensors", seed=1)
    other = load().features
    assert heard
    assert not torch.equal(first, other)
    picture = Image.fromarray(noise(30, 40, 5))
    picture.save(folder / "images" / "image1.jpg")
    changed = load().features
    assert heard
    assert torch.equal(changed[0], other[0])
    assert not torch.equal(changed[1], other[1])
    (folder / "train_images_list.txt").write_text("image1 image3")
    assert torch.equal(load().features, changed.flip(0))
    assert heard


def test_what_is_wrong_is_named(places, tmp_path):
    folder, weights = places

    def refused(message):
        with pytest.raises(DataProblem, match=message):
            load_daquar(folder, weights, tmp_path / "kept")

    with pytest.raises(DataProblem, match=r"no folder .*nowhere"):
        load_daquar(tmp_path / "nowhere", weights)
    with pytest.raises(DataProblem, match=r"no weights .*absent.*safetensors"):
        load_daquar(folder, tmp_path / "absent", tmp_path / "kept")
    (tmp_path / "file").touch()
    with pytest.raises(DataProblem, match="file is a file; give a folder"):
        load_daquar(folder, weights, tmp_path / "file")
    (folder / "images" / "image2.jpg").unlink()
    refused(r"no picture .*image2\.jpg; 1 of the 4")
    (folder / "images" / "image2.jpg").write_bytes(b"hello")
    refused(r"image2\.jpg \(5 bytes\) is not a picture")
    write_csv(folder / "data.csv", DAQUAR, ("question", "reply", "image_id"))
    refused(r"data\.csv has no column answer; .* got question, reply, image_id")
    write_csv(folder / "data.csv", [*DAQUAR, ("what is it", "")])
    refused(r"data\.csv, line 10: 2 fields, 3 expected")
    write_csv(folder / "data.csv", [*DAQUAR, ("what is it", "lamp", "image9")])
    refused("asks about image9, which is neither in")
    write_csv(folder / "data.csv", DAQUAR[:5])
    refused(r"no question on a picture of test_images_list\.txt")
    (folder / "test_images_list.txt").write_text("image3 image2")
    refused(r"image3 and 0 more are in both train_images_list\.txt and test_images_list\.txt")
    (folder / "test_images_list.txt").write_text("image2 image2")
    refused(r"test_images_list\.txt names image2 more than once")
    (folder / "test_images_list.txt").write_text("")
    refused(r"test_images_list\.txt names no picture")
    (folder / "test_images_list.txt").unlink()
    refused(r"there is no .*test_images_list\.txt")
    write_daquar(folder)
    (folder / "data.csv").unlink()
    refused(r"there is no .*data\.csv")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (b"what is it,lamp,image3,cup\n", "line 10: 4 fields, 3 expected"),
        (b"  ,lamp,image3\n", "line 10: question is empty"),
        (b"what is it, ,image3\n", "line 10: answer is empty"),
        (b"what is it,lamp,\n", "line 10: image_id is empty"),
        (b'"what" is it,lamp,image3\n', "after line 10: "),
        (b'"what is it,lamp,image3\n', "after line 10: "),
        (b"what is it," + b"a" * 200_000 + b",image3\n", "after line 10: field larger"),
        (b"caf\xe9,lamp,image3\n", "after line .*codec can't decode"),
    ],
)
def test_rows_that_are_not_right(places, more, message):
    folder, weights = places
    path = folder / "data.csv"
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(DataProblem, match=rf"data\.csv, {message}"):
        load_daquar(folder, weights)


def test_a_mark_before_the_first_line_and_columns_named_twice(places):
    folder, weights = places
    path = folder / "data.csv"
    plain = load_daquar(folder, weights)
    for file in (path, folder / "train_images_list.txt"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    marked = load_daquar(folder, weights)
    assert torch.equal(marked.train.words, plain.train.words)
    assert marked.note == plain.note
    header = ("question", "answer", "image_id", "answer")
    write_csv(path, [(*row, "2") for row in DAQUAR], header)
    with pytest.raises(DataProblem, match=r"data\.csv has more than one column answer"):
        load_daquar(folder, weights)
    (folder / "train_images_list.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataProblem, match=r"train_images_list\.txt is not UTF-8"):
        load_daquar(folder, weights)


def test_a_picture_of_the_same_name_and_size_is_another(places, tmp_path):
    folder, weights = places
    kept, heard = tmp_path / "kept", []
    load_daquar(folder, weights, kept)
    path = folder / "images" / "image1.jpg"
    path.write_bytes(path.read_bytes() + b"\0")
    load_daquar(folder, weights, kept)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    load_daquar(folder, weights, kept, lambda *at: heard.append(at))
    assert heard


def test_features_that_are_not_finite(places, tmp_path):
    folder, weights = places
    path, kept = weights / "model.safetensors", tmp_path / "kept"
    tensors = load_file(path)
    large = tensors | {"features.13.conv.3.weight": tensors["features.13.conv.3.weight"] * 1e6}
    save_file(large, path)
    with pytest.raises(DataProblem, match=r"image3\.jpg: its features are not finite in half"):
        load_daquar(folder, weights, kept)
    assert not kept.exists()
    tensors["features.9.conv.1.1.bias"][0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(DataProblem, match=r"features\.9\.conv\.1\.1\.bias is not finite"):
        load_daquar(folder, weights, kept)


def test_kept_features_that_are_not_finite_are_made_again(places, tmp_path, monkeypatch):
    folder, weights = places
    kept, heard = tmp_path / "kept", []
    first = load_daquar(folder, weights, kept).train.pictures.features
    with monkeypatch.context() as patch:
        patch.setattr(mobilenet, "_kept", lambda *_: None)
        patch.setattr(mobilenet, "_made", lambda paths, *_: torch.full((4, 14, 14, 12), np.nan))
        load_daquar(folder, weights, kept)
    again = load_daquar(folder, weights, kept, lambda *at: heard.append(at))
    assert heard
    assert torch.equal(again.train.pictures.features, first)


def test_settings_go_by_the_files_and_not_by_the_features(places):
    folder, weights = places
    data = load_daquar(folder, weights)
    known = of_questions(data)
    rounded = replace(data.train.pictures, features=data.train.pictures.features + 1e-2)
    assert of_questions(replace(data, train=replace(data.train, pictures=rounded))) == known
    tensors = load_file(weights / "model.safetensors")
    tensors["features.0.0.weight"][0, 0, 0, 0] += 1
    save_file(tensors, weights / "model.safetensors")
    assert of_questions(data) != known
    write_weights(weights / "model.safetensors")
    assert of_questions(data) == known
    picture = data.test.pictures.paths[0]
    picture.write_bytes(picture.read_bytes() + b"\0")
    assert of_questions(data) != known


def test_the_real_questions(tmp_path):
    folder = shared("daquar")
    # narrow weights and a stand-in for the features: the questions are what is counted here
    write_weights(tmp_path / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "papers.experiments.data.mobilenet._made",
            lambda paths, network, advance: torch.zeros(len(paths), 14, 14, 12).half(),
        )
        data = load_daquar(folder, tmp_path)
    assert (len(data.train.pictures), len(data.test.pictures)) == (795, 654)
    assert len(data.test) == 5673  # README of the data
    assert "of 6,795 training questions" in data.note
    assert len(data.train) < 6795
    for place in data.train.answers.unique().tolist():
        assert int((data.train.answers == place).sum()) >= 2
    assert "always '2' is right on 5.0 %" in data.note  # README of the data: the floor
    inside = float((data.test.answers >= 0).float().mean())
    assert 0.85 < inside < 0.9033  # 90.3 % of the test answers occur in the training part at all
    assert f"({100 * inside:.1f} %)" in data.note


def test_the_real_features():
    """Of one photograph, from the file to the grid, against those kept by a study."""
    folder, weights = shared("daquar"), shared("mobilenet_v2")
    kept = needs.ROOT / "build" / "experiments" / "daquar-features"
    covers = "features of real photographs against those kept by a study"
    if not (kept / "features.json").is_file():
        needs.skip("no build/experiments/daquar-features (load_daquar's cache)", covers)

    def advance(done, total):
        needs.skip(f"{kept.name} was made of something else", covers)

    data, network = load_daquar(folder, weights, kept, advance), read_mobilenet(weights)
    for split, place in ((data.train, 794), (data.test, 0)):
        features = split.pictures.gathered(torch.tensor([place]))
        assert features.shape == (1, 14, 14, 96)
        with torch.no_grad():
            x = prepared(split.pictures.shown(place))
            expected = network.grid(x[None]).permute(0, 2, 3, 1)
        torch.testing.assert_close(features, expected, rtol=2**-10, atol=2e-3)
