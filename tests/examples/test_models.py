"""Examples 04 to 06, 10, 12 and 13: models swapped, tuned and trained, certified and read."""

import pytest

from tests import needs
from tests.examples.running import number, row, run
from tests.lens.heads import folders


def assert_swapped(text):
    """[mean cosine, worst, nearest kept, links] of each way; softmax keeps everything."""
    alphas = [float(x) for x in text.split("alpha of each layer:")[1].splitlines()[0].split()]
    assert all(1 <= alpha <= 1.5 for alpha in alphas)
    assert row("softmax", text) == [1, 1, 100, 100]
    table = text[text.index("other sentences") :]
    found = {name: row(name, table) for name in ("entmax-1.25", "entmax-1.5", "recipe")}
    assert found["entmax-1.5"][3] < found["entmax-1.25"][3] < 100
    assert found["recipe"][3] >= found["entmax-1.5"][3]
    assert number(r"gap at most (\S+)", text) < 1e-9
    return alphas, found


def test_an_encoder_is_swapped(tmp_path):
    """A small one with random weights and a tokenizer."""
    folder = folders.save("bert", tmp_path / "bert")
    assert_swapped(run("04_swap_minilm", "--quick", "--model", folder))


@pytest.mark.slow
def test_minilm_by_a_recipe_moves_less_than_by_one_alpha(minilm):
    alphas, found = assert_swapped(run("04_swap_minilm", "--model", minilm))
    assert max(alphas) > 1
    assert found["recipe"][0] > found["entmax-1.5"][0]


def tuned(text, steps):
    """[right answers, zero weights], in per cent, of each line."""
    labels = [f"softmax, {steps} steps", "then entmax, untrained"]
    labels += [f"then {name}, {steps} steps" for name in ("softmax", "entmax")]
    before, swapped, stayed, after = (row(label, text) for label in labels)
    assert before[1] == stayed[1] == 0
    assert after[1] > 0
    return before, swapped, stayed, after


def test_a_tiny_model_is_tuned_to_entmax():
    before, _, stayed, after = tuned(run("05_finetune_entmax", "--quick", "--steps", 100), 100)
    assert min(stayed[0], after[0]) > 60  # of two answers; 50 is chance
    assert before[0] <= stayed[0]


@pytest.mark.slow
def test_minilm_is_tuned_to_entmax(minilm):
    before, swapped, stayed, after = tuned(run("05_finetune_entmax", "--model", minilm), 150)
    needs.shared("data", "text", covers="example 05 on real sentences")
    assert swapped[0] < before[0]
    assert after[0] > stayed[0] - 3


def written(*arguments):
    """[loss, ms a step, keys in each of three layers] of either model."""
    text = run("06_sparse_language_model", *arguments)
    found = {name: row(name, _table(text)) for name in ("softmax", "entmax-1.5")}
    assert found["softmax"][2:] == [64.5, 64.5, 64.5]
    assert max(found["entmax-1.5"][2:]) < 64.5
    assert text.count("writes: 'The ") + text.count('writes: "The ') == 2
    return found


def _table(text):
    return "\n".join(line for line in text.splitlines() if " writes: " not in line)


def test_two_language_models_learn(tmp_path):
    found = written("--quick", "--data", tmp_path)
    assert max(loss for loss, *_ in found.values()) < 4.5  # log 256 = 5.5 knows nothing


@pytest.mark.slow
def test_a_sparse_language_model_keeps_up():
    found = written()
    assert found["entmax-1.5"][0] < found["softmax"][0] + 0.1
    assert max(found["entmax-1.5"][2:]) < 40


def assert_robust_inside_its_radii(*arguments):
    text = run("10_robust_classifier", *arguments)
    inside = number(r"at 0.99 of its radius: (\d+) answers changed", text)
    assert inside == 0
    attacked, proved = (row(f"bounded, {how}", text) for how in ("attacked", "proved"))
    assert attacked[0] == proved[0]  # at no distance: the accuracy
    assert all(high >= low for high, low in zip(attacked, proved, strict=True))
    return text, attacked, proved, row("unconstrained, attacked", text)


def test_no_attack_changes_an_answer_inside_its_radius():
    assert_robust_inside_its_radii("--quick")


@pytest.mark.slow
def test_attacks_change_answers_beyond_the_radius():
    text, attacked, _, free = assert_robust_inside_its_radii()
    assert number(r"at 3.00 of its radius: (\d+) answers changed", text) > 50
    assert attacked[0] > 80
    assert free[0] > 80


def filled(*arguments):
    """[weights, halfway, at the end, worst seed] of each way, shares in per cent."""
    text = run("12_fill_in_the_blank", *arguments)
    names = ("even preference", "network on the facts", "content preference")
    return [row(name, text) for name in names]


def test_a_preference_by_content_fills_blanks():
    even, network, content = filled("--quick")
    assert even[0] < network[0] == pytest.approx(content[0], rel=0.03)  # weights of the control
    assert content[2] > even[2] + 10


@pytest.mark.slow
def test_a_preference_by_content_fills_blanks_over_seeds():
    even, _, content = filled()
    assert content[3] > even[2] + 10  # its worst seed


def sentences(*arguments):
    text = run("13_sst2_continuous", *arguments)
    names = ("discrete softmax", "continuous softmax", "continuous sparsemax")
    found = [row(name, text)[0] for name in names]
    assert 0 < number(r"not zero on (\d+)% of the sentence", text) <= 100
    return found


def test_sentiment_of_generated_sentences(tmp_path):
    assert min(sentences("--quick", "--data", tmp_path)) > 65


@pytest.mark.slow
def test_sentiment_of_real_sentences():
    assert min(sentences()) > 70
