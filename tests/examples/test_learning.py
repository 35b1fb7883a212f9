"""Examples 01 to 03: a sparse classifier, an alpha a head, ALiBi as a base measure."""

import math
import re

import pytest

from tests.examples.running import number, row, run

MAPS = ("softmax", "entmax 1.5", "sparsemax")


def classifier(*arguments):
    """{map: [top, zeros, support, support = set, tuned, threshold]}, shares in per cent."""
    text = run("01_sparse_classifier", *arguments)
    return {name: row(name, text) for name in MAPS}


def assert_sparse_classifier(found, least):
    for name, (top, zeros, support, exact, tuned, _) in found.items():
        assert top > least, name
        assert support == pytest.approx(10 * (1 - zeros / 100), abs=0.02)  # two counts of one thing
        assert tuned >= exact - 0.1  # the threshold 0 is among those tried
    assert found["softmax"][1] == 0 == found["softmax"][3]
    assert 0 < found["entmax 1.5"][1] < found["sparsemax"][1] < 90  # one class is always left


def test_sparse_losses_predict_exact_zeros():
    assert_sparse_classifier(classifier("--steps", 25), least=40)


@pytest.mark.slow
def test_the_trained_classifier_finds_digits():
    assert_sparse_classifier(classifier(), least=85)


def alphas(*arguments):
    text = run("02_alpha_per_head", *arguments)
    fixed = [row(f"alpha {alpha} in every head", text) for alpha in ("1.0", "1.5", "2.0")]
    return row("alpha at the end, from 1.5", text), row("alpha learned", text), fixed


def test_alpha_moves_the_way_of_each_head():
    (nearest, _, narrow, wide), learned, _ = alphas("--steps", 20)
    assert nearest > 1.6  # all began at 1.5
    assert max(narrow, wide) < 1.4
    assert learned[-1] == pytest.approx(sum(learned[:-1]), abs=3e-4)


@pytest.mark.slow
def test_learned_alphas_separate_the_jobs_and_beat_any_one_alpha():
    (nearest, three, narrow, wide), learned, fixed = alphas()
    assert min(nearest, three) > 1.8
    assert max(narrow, wide) < 1.2
    assert learned[-1] < min(errors[-1] for errors in fixed)


def alibi(*arguments):
    text = run("03_alibi_prior", *arguments)
    assert number(r"difference of a weight (\S+)", text) < 1e-14
    assert number(r"score > threshold: ([\d.]+)%", text) == 100
    plain, bias, base = (
        row(f"entmax, {way}", text) for way in ("no prior", "ALiBi as bias", "ALiBi as base")
    )
    assert bias[1] < plain[1] <= base[1]  # farthest key
    assert bias[0] < plain[0] < base[0]  # keys: with less mass near by the threshold falls
    assert max(gap for *_, gap in (plain, bias, base)) < 1e-12
    lines = re.findall(r"slopes (?:asked for|learned): +(.*)", text)
    return [[float(x) for x in line.split()] for line in lines]


def test_a_base_measure_is_a_bias_for_softmax_only():
    true, learned = alibi("--quick")
    for slope, found in zip(true, learned, strict=True):  # all began at 0.1
        assert abs(math.log(found / slope)) < abs(math.log(0.1 / slope)) / 1.5


@pytest.mark.slow
def test_slopes_are_learned():
    true, learned = alibi()
    assert learned == pytest.approx(true, rel=0.2, abs=1e-4)
