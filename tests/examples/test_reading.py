"""Examples 07, 08, 09 and 11: a photograph, counting modes, transport of words, advantages."""

import numpy as np
import pytest
from PIL import Image

from tests.examples.running import number, row, run


def shares(text):
    """Where each attention is not zero, in per cent."""
    return {
        name: number(rf"{name} +reads .*non-zero on (\d+)%", text)
        for name in ("softmax", "sparsemax", "Gaussian", "paraboloid")
    }


def test_attention_stays_on_a_disc(tmp_path):
    rows, columns = np.mgrid[:140, :140]
    inside = (rows - 60) ** 2 + (columns - 80) ** 2 < 30**2  # 14 % of the picture
    pixels = np.where(inside[..., None], (200, 40, 20), (10, 40, 120)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "disc.png")
    out = tmp_path / "new" / "disc.png"
    text = run("07_photograph", "--image", tmp_path / "disc.png", "--cell", 6, 8, "--out", out)
    found = shares(text)
    assert found["softmax"] == found["Gaussian"] == 100
    assert found["sparsemax"] < 20
    assert 10 < found["paraboloid"] < 40
    assert number(r"softmax +reads +\(([\d.]+)", text) == pytest.approx(200 / 255, abs=0.05)
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height > 100


def test_no_photograph_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("07_photograph", "--image", tmp_path / "none.png", "--out", tmp_path / "out.png")
    assert stopped.value.code == 2
    assert "give --image" in capsys.readouterr().err


@pytest.mark.slow
def test_the_flower(tmp_path):
    found = shares(run("07_photograph", "--out", tmp_path / "flower.png"))
    assert found["sparsemax"] < found["paraboloid"] < found["Gaussian"] == 100


def counts(text, kind, true):
    """[share counted right, mean count] under price 10, price 40, AIC and BIC."""
    label = f"{kind:<20}{true:>3}"
    found = row(label, text)
    return list(zip(found[::2], found[1::2], strict=True))


def assert_modes_are_counted(text):
    for true in (1, 2, 3, 4):
        price, _, aic, _ = counts(text, "clean", true)
        assert price == aic == (100, true)
        for _, mean in counts(text, "narrow", true):
            assert mean > true + 1  # modes collapse on single cells
        for right, _ in counts(text, "narrow, 0.5 cell", true):
            assert right == 100
    for true in (1, 2, 3):
        assert counts(text, "a tenth even", true)[0] == (0, true + 1)  # the even part is a mode


def test_modes_are_counted_where_the_truth_is_known():
    assert_modes_are_counted(run("08_counting_modes", "--quick"))


@pytest.mark.slow
def test_modes_are_counted_on_many_maps():
    assert_modes_are_counted(run("08_counting_modes"))


def assert_plan_is_exact(text):
    assert number(r"weights up to (\S+);", text) < 1e-12
    assert number(r"gap (\S+)", text) < 1e-12
    before = number(r"(\S+) without evidence", text)
    after = number(r"(\S+) with it", text)
    assert 0 <= before < after <= 1


def test_a_sentence_moves_to_itself(tmp_path):
    same = "all words of this one differ"
    sentences = ("--first", same, "--second", same, "--towards", "one")
    text = run("09_transport_sentences", *sentences, "--model", tmp_path)
    for word in same.split():
        assert text.count(f"\n{word:<12}{word} 100%") == 1


def test_evidence_moves_shares(tmp_path):
    text = run("09_transport_sentences", "--model", tmp_path)
    assert "a random vector for each word takes its place" in text
    assert_plan_is_exact(text)


def test_a_word_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("09_transport_sentences", "--towards", "zebra", "--model", tmp_path)
    assert stopped.value.code == 2
    assert "one of a, doctor, gave" in capsys.readouterr().err


@pytest.mark.slow
def test_words_move_to_words_of_their_kind(minilm):
    text = run("09_transport_sentences", "--model", minilm)
    for word, other in {"nurse": "doctor", "handed": "gave", "water": "drink"}.items():
        assert number(rf"\n{word} +{other} (\d+)%", text) > 50
    assert number(r"\npatient .* man (\d+)%", text) > 50
    assert_plan_is_exact(text)


def assert_advantages_agree(text, close):
    assert number(r"found another way: (\S+)", text) < close
    assert number(r"add up to (\S+)", text) == 0
    assert number(r"; ([\d.]+)% of keys with positive advantage are outside", text) > 0


def test_advantages_of_a_random_head(tmp_path):
    text = run("11_advantage", "--model", tmp_path)
    assert "a head with random scores and utilities takes its place" in text
    assert_advantages_agree(text, close=1e-12)


@pytest.mark.slow
def test_advantages_of_a_head_of_minilm(minilm):
    assert_advantages_agree(run("11_advantage", "--model", minilm), close=1e-4)
