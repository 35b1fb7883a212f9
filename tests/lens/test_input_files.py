"""Texts and images from disk; every bad input has a message with the way out."""

import pytest
from PIL import Image

from fenchel import lens
from fenchel.lens.input_files import draw_places, read_images, read_targets, read_texts


def written(tmp_path, content, name="texts.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("one\n\n  \n two \nthree", "a.txt"),
        ("one\r\n\r\ntwo\r\nthree\r\n", "a.txt"),
        (b"\xef\xbb\xbfone\ntwo\nthree\n", "a.txt"),
        ("one\t0\ntwo\t1\n\t1\nthree\n", "a.tsv"),
    ],
)
def test_a_text_a_line(tmp_path, content, name):
    assert read_texts(written(tmp_path, content, name)) == ["one", "two", "three"]


def test_a_line_is_a_text_whatever_is_in_it(tmp_path):
    lines = ['{"text": "a, b"}', "a,b\tc", "x\u2028y", "<script>"]
    assert read_texts(written(tmp_path, "\n".join(lines), "a.jsonl")) == lines


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        (" \n\n\t\n", "only blank lines"),
        (b"ab\0c", r"binary file \(byte 2"),
        ("ab\nc\xe9d\n".encode("latin1"), r"byte 4, 0xe9, in line 2.*iconv -f latin1 -t utf-8"),
        (b"\xef\xbb\xbfab\nc\xe9d", r"byte 7, 0xe9, in line 2"),
        ("ab\n".encode("utf-16"), "iconv -f utf-16 -t utf-8"),
    ],
)
def test_bad_texts_say_the_way_out(tmp_path, content, said):
    with pytest.raises(ValueError, match=said):
        read_texts(written(tmp_path, content))


def test_what_is_not_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_texts(tmp_path / "nothing.txt")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_texts(tmp_path)


def test_a_sample_keeps_the_order_and_follows_the_seed(tmp_path):
    path = written(tmp_path, "\n".join(f"{n:03d}" for n in range(200)))
    texts = read_texts(path, sample=20, seed=1)
    assert texts == sorted(set(texts))
    assert len(texts) == 20
    assert texts == read_texts(path, 20, 1) != read_texts(path, 20, 2)
    assert len(read_texts(path, sample=1000)) == 200
    with pytest.raises(ValueError, match="sample"):
        draw_places(5, 0)


def test_targets_go_with_their_texts(tmp_path):
    assert read_targets(written(tmp_path, "x\n\ny\n"), 3) == ["x", "", "y"]
    with pytest.raises(ValueError, match="3 targets for 2 texts"):
        read_targets(written(tmp_path, "x\n\ny\n"), 2)


def test_images_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"no image; looked for .*\.jpg"):
        read_images(tmp_path)
    for name in ("b.png", "a.JPG", "c.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    written(tmp_path, "no image")
    assert [path.name for path in read_images(tmp_path)] == ["a.JPG", "b.png", "c.png"]
    assert len(read_images(tmp_path, sample=2)) == 2
    (tmp_path / "b.png").write_bytes((tmp_path / "c.png").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"b\.png cannot be read"):
        read_images(tmp_path)
    with pytest.raises(NotADirectoryError, match="does not exist"):
        read_images(tmp_path / "nowhere")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.tsv"
    path.write_text("a man is playing\t1\n\n the guitar \t0\nnobody knew it\t1\n", encoding="utf-8")
    return path


def test_sentences(text):
    assert lens.sentences(text, 2) == ["a man is playing", "the guitar"]
    assert len(lens.sentences(text, 100)) == 3
    with pytest.raises(ValueError, match="count must be"):
        lens.sentences(text, 0)
    empty = text.with_name("empty.txt")
    empty.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no sentence"):
        lens.sentences(empty, 1)
