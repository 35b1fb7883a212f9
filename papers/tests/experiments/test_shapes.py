"""Shapes-VQA: answers against a slow reading of the scenes, balance, pixels, and its version."""

import zlib
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from papers.experiments.data.questions import KINDS
from papers.experiments.data.shapes import VERSION, load_shapes
from papers.experiments.data.shapes.drawing import PALETTE
from papers.experiments.data.shapes.scene import Scene, Thing, scenes

COUNTS = (300, 200)
COLOURS = ["red", "green", "blue", "yellow"]
SHAPES = ["circle", "square", "triangle"]
NEAR = 15  # jitter and noise of a colour, along each channel


@pytest.fixture(scope="module")
def data():
    return load_shapes(images=COUNTS, seed=3)


@pytest.fixture(scope="module")
def seen():
    return {part: scenes(n, 3, part) for part, n in zip(("train", "test"), COUNTS, strict=True)}


def asked(data, part):
    """Picture, text and answer of every question."""
    split = getattr(data, part)
    assert split.answers.shape == split.worth.shape == (len(split), 1)
    assert bool((split.worth == 1).all())
    return [
        (int(split.picture[n]), data.text(split, n), data.answers[int(split.answers[n, 0])])
        for n in range(len(split))
    ]


def possible(text):
    if text.startswith("is"):
        return ["yes", "no"]
    if text.startswith("how many"):
        return ["0", "1", "2", "3"]
    return COLOURS if text.startswith("what colour") else SHAPES


def understood(text, things):
    """The answer and the things the question is about; None for one that must not be asked."""
    words = text.split()
    if text.startswith("is there a"):
        fitting = [t for t in things if [t.colour, t.shape] == words[3:]]
        return ("yes" if fitting else "no"), fitting
    if text.startswith("is the"):
        return compared(things, words[2], words[-2], words[4])
    if text.startswith("how many"):
        fitting = [t for t in things if words[2] in (t.colour, t.shape + "s")]
        return (str(len(fitting)), fitting) if len(fitting) < 4 else None
    name = words[3:][1]
    ends = {"leftmost": (1, 0), "rightmost": (-1, 0), "topmost": (0, 1), "bottommost": (0, -1)}
    if name in ends:
        a, b = ends[name]
        order = sorted(things, key=lambda t: a * t.x + b * t.y)
        first, second = (a * t.x + b * t.y for t in order[:2])
        fitting = order[:1] if second - first >= 6 else []
    else:
        fitting = [t for t in things if name in (t.colour, t.shape)]
    return (getattr(fitting[0], words[1]), fitting) if len(fitting) == 1 else None


def compared(things, first, second, side):
    one = [t for t in things if t.colour == first]
    other = [t for t in things if t.colour == second]
    if len(one) != 1 or len(other) != 1 or first == second:
        return None
    (a,), (b,) = one, other
    between = {"left": b.x - a.x, "right": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[side]
    return None if abs(between) < 8 else ("yes" if between > 0 else "no", [a, b])


def wrong(questions, seen):
    readings = [(understood(text, seen[place].things), answer) for place, text, answer in questions]
    return sum(reading is None or reading[0] != answer for reading, answer in readings)


@pytest.mark.parametrize("part", ["train", "test"])
def test_answers_are_true(data, seen, part):
    assert wrong(asked(data, part), seen[part]) == 0


def test_an_untrue_answer_would_be_noticed(data, seen):
    def mirrored(scene):
        return Scene(scene.layout, tuple(replace(t, x=63 - t.x) for t in scene.things))

    questions = asked(data, "test")
    sideways = [q for q in questions if " left of " in q[1] or " right of " in q[1]]
    assert wrong(sideways, [mirrored(scene) for scene in seen["test"]]) == len(sideways) > 50
    assert wrong(questions, seen["test"][::-1]) > len(questions) / 3


def test_the_slow_reading():
    things = (Thing("circle", "red", 10, 40, 4), Thing("square", "blue", 15, 20, 4))
    assert understood("is there a red square", things) == ("no", [])
    assert understood("is the red shape left of the blue shape", things) is None  # 5 pixels
    assert understood("is the red shape below the blue shape", things) == ("yes", list(things))
    assert understood("how many squares are there", things) == ("1", [things[1]])
    assert understood("what colour is the topmost shape", things) == ("blue", [things[1]])
    assert understood("what shape is the red one", things) == ("circle", [things[0]])
    assert understood("what shape is the green one", things) is None


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(
    "options",
    [{}, {"most": 1}, {"images": (60, 30)}, {"images": (30, 10), "seed": 1, "most": 3}],
)  # in the last, so few pictures that what was picked has to be cut
def test_every_text_has_each_answer_equally_often(data, part, options):
    if options:
        data = load_shapes(**{"images": COUNTS, **options})
    counts = defaultdict(Counter)
    for _, text, answer in asked(data, part):
        counts[text][answer] += 1
    assert counts
    for text, answers in counts.items():
        assert sorted(answers) == sorted(possible(text)), text
        assert len(set(answers.values())) == 1, (text, answers)


@pytest.mark.parametrize("part", ["train", "test"])
def test_who_does_not_look_is_right_by_chance(data, part):
    questions = asked(data, part)
    learnt = defaultdict(Counter)
    for _, text, answer in asked(data, "train"):
        learnt[text][answer] += 1
    best = {text: answers.most_common(1)[0][0] for text, answers in learnt.items()}
    known = [(text, answer) for _, text, answer in questions if text in best]
    right = sum(best[text] == answer for text, answer in known)
    even = sum(1 / len(possible(text)) for text, _ in known)
    assert right == pytest.approx(even)
    if part == "test":
        everything = np.mean([1 / len(possible(text)) for _, text, _ in questions])
        assert data.chance == pytest.approx(everything)


@pytest.mark.parametrize("part", ["train", "test"])
def test_shares_and_kinds(data, part):
    questions = asked(data, part)
    begins = Counter(text.split()[0] for _, text, _ in questions)
    there = sum(text.startswith("is there") for _, text, _ in questions)
    share = {word: count / len(questions) for word, count in begins.items()}
    assert share == pytest.approx({"is": 0.36, "how": 0.28, "what": 0.36}, abs=0.02)
    assert there / begins["is"] == pytest.approx(2 / 3, abs=0.03)
    kind = {"is": "yes/no", "how": "number", "what": "other"}
    kinds = [KINDS[number] for number in getattr(data, part).kinds.tolist()]
    assert kinds == [kind[text.split()[0]] for _, text, _ in questions]


@pytest.mark.parametrize("most", [1, 3, 8])
def test_questions_a_picture(most):
    data = load_shapes(images=COUNTS, most=most)
    for split, pictures in zip((data.train, data.test), COUNTS, strict=True):
        assert int(split.picture.bincount().max()) <= most
        assert 0.75 * most <= len(split) / pictures <= most
        rows = torch.cat([split.picture[:, None], split.words], 1)
        assert len(rows.unique(dim=0)) == len(rows)


def test_what_it_says_of_itself(data):
    assert data.name == "shapes"
    train, test = len(data.train), len(data.test)
    assert data.note == (
        f"Shapes-VQA version {VERSION}, seed 3, 300 + 200 pictures, {train:,} + {test:,} questions"
    )
    images = data.train.pictures.gathered(torch.arange(2))
    assert (images.dtype, images.shape) == (torch.uint8, (2, 3, 64, 64))
    assert len(data.train.pictures) == 300
    assert data.train.regions is None
    assert (data.test.regions.dtype, data.test.regions.shape) == (torch.bool, (test, 64, 64))
    assert data.vocabulary[:2] == ["", "<unknown>"]
    assert not bool((data.train.words == 1).any())


def box(thing, shape=(64, 64)):
    mask = np.zeros(shape, bool)
    r = thing.radius
    mask[thing.y - r : thing.y + r + 1, thing.x - r : thing.x + r + 1] = True
    return mask


def near(image, colour):
    """(64, 64): where the picture has that colour."""
    return (abs(image.astype(int) - PALETTE[colour]) <= NEAR).all(-1)


def test_regions_are_the_pixels_of_what_is_asked_about(data, seen):
    empty = 0
    for number, (place, text, _) in enumerate(asked(data, "test")):
        image = data.test.pictures.shown(place)
        _, about = understood(text, seen["test"][place].things)
        wanted = np.zeros((64, 64), bool)
        for thing in about:
            wanted |= box(thing) & near(image, thing.colour)
        np.testing.assert_array_equal(data.test.regions[number].numpy(), wanted, text)
        empty += not about
    assert empty > 100


def test_shapes_are_apart_and_whole(seen):
    for scene in seen["train"]:
        assert 2 <= len(scene.things) <= 5
        assert all(5 <= t.radius <= 8 for t in scene.things)
        boxes = [box(t) for t in scene.things]
        assert [b.sum() for b in boxes] == [(2 * t.radius + 1) ** 2 for t in scene.things]
        assert np.sum(boxes, axis=0).max() == 1
    assert {t.colour for s in seen["train"] for t in s.things} == set(COLOURS) == set(PALETTE)
    assert {t.shape for s in seen["train"] for t in s.things} == set(SHAPES)


def test_shapes_look_their_names(data, seen):
    """By pixels that only some of them have: an upper corner, a lower, a side, half a diagonal."""
    looks = {
        "circle": (False, False, True, True),
        "square": (True, True, False, True),
        "triangle": (False, True, False, False),
        "cross": (False, False, True, False),
    }
    for place, scene in enumerate(seen["train"][:200]):
        image = data.train.pictures.shown(place)
        for t in scene.things:
            r, half, has = t.radius, (t.radius + 1) // 2, near(image, t.colour)
            inner = r - (t.shape == "square")  # a square is one pixel smaller
            spots = [(-inner, -inner), (inner, -inner), (0, r), (-half, -half)]
            assert tuple(bool(has[t.y + y, t.x + x]) for y, x in spots) == looks[t.shape], t
            assert has[t.y, t.x]


def test_backgrounds_differ_and_are_never_close_to_a_colour(data, seen):
    means, reliefs = [], []
    for place, scene in enumerate(seen["train"][:200]):
        behind = ~np.any([box(t) for t in scene.things], axis=0)
        pixels = data.train.pictures.shown(place)[behind].astype(float)  # (n, 3)
        closest = min(np.linalg.norm(pixels - c, axis=1).min() for c in PALETTE.values())
        assert closest > 70
        means.append(pixels.mean())
        reliefs.append(pixels.std(0).mean())
    assert np.std(means) > 10
    assert 3 < min(reliefs) < max(reliefs) < 20


def test_layouts_take_halves_and_differ(seen):
    apart = defaultdict(list)
    for scene in seen["train"]:
        at = np.array([(t.x, t.y) for t in scene.things], float)
        distance = np.linalg.norm(at[:, None] - at[None], axis=-1) + 1e3 * np.eye(len(at))
        apart[scene.layout].append(distance.min(1).mean())
    assert len(apart["scattered"]) == len(apart["clustered"]) == 150
    assert np.mean(apart["clustered"]) < 0.8 * np.mean(apart["scattered"])


def parts(data):
    for split in (data.train, data.test):
        yield split.pictures.images
        yield from (split.picture, split.words, split.answers, split.kinds)
    yield data.test.regions


def checksum(data):
    total = 0
    for part in parts(data):
        total = zlib.crc32(part.numpy().tobytes(), total)
    return total


def test_a_seed_says_everything():
    one, same, other = (load_shapes(images=(60, 30), seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(parts(one), parts(same), strict=True))
    a, b = one.train.pictures.images, other.train.pictures.images
    assert not bool((a == b).flatten(1).all(1).any())
    assert checksum(one) == checksum(same) != checksum(other)


def test_the_parts_share_no_picture(data, seen):
    pixels = [
        {image.numpy().tobytes() for image in s.pictures.images} for s in (data.train, data.test)
    ]
    assert [len(part) for part in pixels] == [300, 200]
    assert not pixels[0] & pixels[1]
    assert not set(seen["train"]) & set(seen["test"])


def test_version_1_is_what_it_was():
    """Should this fail, the data has changed: raise VERSION, and put the new checksum here."""
    assert (VERSION, checksum(load_shapes(images=(60, 30)))) == (1, 4045884241)


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"images": (0, 5)}, r"at least 1.*got \(0, 5\).*\(6000, 1500\)"),
        ({"images": (5, 0)}, r"at least 1.*got \(5, 0\)"),
        ({"images": (5,)}, r"two counts.*got \(5,\)"),
        ({"most": 0}, "most must be >= 1.*got 0; 8 is usual"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"images": (30, 1)}, "test part.*got 1; take at least 30"),
    ],
)
def test_bad_arguments_are_refused_with_a_way_out(options, way):
    with pytest.raises(ValueError, match=way):
        load_shapes(**options)
