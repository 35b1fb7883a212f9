"""Deviations: right, the same for every batching and precision, refused where senseless."""

import numpy as np
import pytest
import torch

from fenchel import lens
from tests.lens.models import (
    CASES,
    TOKENS,
    inputs_of,
    model_of,
    read_by_hand,
    reference,
    transformers,
)

MEASURES = ("multiplier", "mean", "mean_shift", "parameter")


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_agrees_with_a_plain_method_query_by_query(name):
    model, inputs = model_of(name), inputs_of()
    deviations = lens.deviation(model, inputs)
    chosen = np.random.default_rng(0)
    for _ in range(20):
        sentence = int(chosen.integers(3))
        query = int(chosen.integers([9, 6, 3][sentence]))
        layer, head = int(chosen.integers(2)), int(chosen.integers(4))
        expected = reference(*read_by_hand(model, inputs, layer, sentence, head, query))
        ours = [float(getattr(deviations, m)[layer, sentence, head, query]) for m in MEASURES]
        assert expected[0] > 1e-3  # something to measure
        np.testing.assert_allclose(ours, expected, rtol=1e-8, atol=1e-10)


def test_the_reference_is_optimal_and_notices_a_wrong_problem():
    model, inputs = model_of("bert"), inputs_of()
    templates, bias, evidence = read_by_hand(model, inputs, 0, 0, 0, 0)
    right = reference(templates, bias, evidence)
    for wrong in ((2 * templates, bias, evidence), (templates[:-1], bias[:-1], evidence)):
        assert abs(reference(*wrong)[0] / right[0] - 1) > 1e-4


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_shapes_and_padding(name, kind):
    model, inputs = model_of(name), inputs_of(kind)
    deviations = lens.deviation(model, inputs, attention=kind)
    lengths = [9, 6, 3] if kind == "encoder" else [7, 7, 4]
    assert (deviations.layers, deviations.sentences, deviations.heads) == (2, 3, 4)
    assert deviations.queries == sum(lengths)
    for measure in MEASURES:
        values = getattr(deviations, measure)
        assert values.shape == (2, 3, 4, lengths[0])
        for sentence, length in enumerate(lengths):
            assert values[:, sentence, :, :length].isfinite().all()
            assert values[:, sentence, :, length:].isnan().all()
    assert deviations.status == {"OK": 2 * 4 * sum(lengths)}
    if kind == "decoder":  # whose first word sees itself alone
        assert deviations.multiplier[..., 0].nan_to_num().abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("name", "kind"), [("bert", "encoder"), ("t5", "encoder"), ("t5", "cross")]
)
def test_alone_or_in_a_batch(name, kind, monkeypatch):
    model, inputs = model_of(name), inputs_of(kind)
    whole = lens.deviation(model, inputs, attention=kind)
    monkeypatch.setattr("fenchel.lens.deviations._ENTRIES", 1)  # each sentence a group of its own
    apart = lens.deviation(model, inputs, attention=kind)
    for measure in MEASURES:
        torch.testing.assert_close(
            getattr(whole, measure), getattr(apart, measure), rtol=1e-9, atol=1e-11, equal_nan=True
        )
    first = {name: value[1:2] for name, value in inputs.items()}
    alone = lens.deviation(model, first, attention=kind)
    torch.testing.assert_close(
        alone.multiplier[:, 0], whole.multiplier[:, 1], rtol=1e-9, atol=1e-11, equal_nan=True
    )


def test_left_padding_is_found_where_it_is():
    inputs = inputs_of(side="left")
    deviations = lens.deviation(model_of("t5"), inputs)  # T5 knows distances only
    right = lens.deviation(model_of("t5"), inputs_of())
    assert deviations.queries == right.queries
    assert deviations.multiplier[:, 2, :, : TOKENS - 3].isnan().all()
    assert deviations.multiplier[:, 2, :, TOKENS - 3 :].isfinite().all()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_single_precision_says_the_same(name, kind):
    double = lens.deviation(model_of(name), inputs_of(kind), attention=kind)
    single = lens.deviation(model_of(name, torch.float32), inputs_of(kind), attention=kind)
    assert single.multiplier.dtype == torch.float64
    # over the shift the mean's deviation has the same numerator and a smaller denominator
    smaller = (double.mean_shift / double.mean).clamp_min(1)
    for measure in MEASURES:
        actual, exact = getattr(single, measure), getattr(double, measure)
        assert torch.equal(actual.isnan(), exact.isnan())
        off = (actual - exact).abs() / (smaller if measure == "mean_shift" else 1)
        assert float(off[~off.isnan()].max()) <= 1e-5, measure


def test_the_deviation_grows_with_the_square_of_the_scaling():
    """t -> c t, which leaves the layer as it is: Deciphering Attention, figure 4."""
    model, inputs = model_of("bert"), inputs_of()
    coarse, fine = (lens.deviation(model, inputs, scaling=c) for c in (1e-3, 1e-4))
    words = ~fine.multiplier.isnan()
    for measure in ("multiplier", "parameter"):
        ratio = getattr(coarse, measure)[words] / getattr(fine, measure)[words]
        assert (ratio / 100 - 1).abs().max() <= 1e-3


def test_the_parameter_is_the_deviation_to_leading_order():
    """Where templates are short, and scores small."""
    model, inputs = model_of("bert"), inputs_of()
    for layer in model.encoder.layer:
        for parameter in layer.attention.self.query.parameters():
            parameter.data *= 1e-4
    deviations = lens.deviation(model, inputs, scaling=1e-3)
    words = ~deviations.multiplier.isnan()
    assert (deviations.multiplier[words] / deviations.parameter[words] - 1).abs().max() <= 1e-3


def test_the_multiplier_is_off_by_what_attention_does_to_the_mean():
    """lam* - reliability z = reliability (mean_u - h*), whatever the sizes."""
    problem = lens.problems(model_of("t5"), inputs_of(), reliability=2.0)[0]
    exact = problem.exact()
    apart = exact.multiplier - 2.0 * problem.evidence
    torch.testing.assert_close(apart, 2.0 * (exact.prior_mean - exact.mean), rtol=1e-9, atol=1e-9)


def test_reliability_acts_as_the_square_of_the_scaling():
    model, inputs = model_of("t5"), inputs_of()
    one = lens.deviation(model, inputs, scaling=0.5, reliability=4.0)
    other = lens.deviation(model, inputs, scaling=1.0)
    torch.testing.assert_close(one.multiplier, other.multiplier, rtol=1e-9, atol=0, equal_nan=True)
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-9, atol=0, equal_nan=True)


def test_the_default_scaling_is_that_of_a_head():
    assert lens.deviation(model_of("t5"), inputs_of()).scaling == pytest.approx(6**-0.5)
    assert lens.deviation(model_of("bert"), inputs_of()).scaling == pytest.approx(8**-0.5)


def test_the_model_is_left_as_it_was():
    model = model_of("bert").train()
    model.encoder.layer[0].eval()
    before = [module.training for module in model.modules()]
    twice = [lens.deviation(model, inputs_of()).multiplier for _ in range(2)]
    torch.testing.assert_close(*twice, rtol=0, atol=0, equal_nan=True)  # no dropout
    assert [module.training for module in model.modules()] == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_sentence_of_padding_alone_is_nan():
    inputs = inputs_of()
    inputs["attention_mask"][2] = 0
    deviations = lens.deviation(model_of("bert"), inputs)
    assert deviations.multiplier[:, 2].isnan().all()
    assert deviations.queries == 15


def test_every_query_is_counted_by_its_status():
    deviations = lens.deviation(model_of("bert"), inputs_of())
    assert deviations.status == {"OK": 2 * 4 * 18}
    assert int((~deviations.multiplier[1].isnan()).sum()) == 4 * 18


def test_advance_adds_up_to_one():
    shares = []
    lens.deviation(model_of("bert"), inputs_of(), advance=shares.append)
    assert sum(shares) == pytest.approx(1)


# ---- refusals


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        ("bert", {}, {"attention": "cross"}, "no cross attention; it has: encoder"),
        ("t5-encoder", {}, {"attention": "decoder"}, "no decoder attention; it has: encoder"),
        ("t5", {}, {"attention": "decoder"}, "needs decoder_input_ids or labels"),
        ("bert", {}, {"attention": "self"}, "one of encoder, decoder, cross, got 'self'"),
        ("bert", {}, {"scaling": 0.0}, "scaling must be finite and > 0, got 0"),
        ("bert", {}, {"reliability": -1.0}, "reliability must be finite and > 0, got -1"),
        ("bert", {"labels": torch.ones(3, 9)}, {}, "hold labels, which the audit does not use"),
        ("bert", {"attention_mask": torch.ones(3, 1, 9, 9)}, {}, "attention_mask must be a tensor"),
        ("bert", {"attention_mask": torch.ones(2, 9)}, {}, "differ in their number of sentences"),
    ],
)
def test_misuse_is_refused(name, changes, options, message):
    with pytest.raises(ValueError, match=message):
        lens.deviation(model_of(name), {**inputs_of(), **changes}, **options)


def test_other_models_and_implementations_are_refused():
    with pytest.raises(TypeError, match="must be a transformers model, got Linear"):
        lens.deviation(torch.nn.Linear(2, 2), inputs_of())
    config = transformers.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    with pytest.raises(ValueError, match="of type 'gpt2'; the audit knows bert"):
        lens.deviation(transformers.GPT2Model(config), inputs_of())
    from fenchel import hf

    sparse = hf.convert(model_of("bert"), "fenchel:entmax15")
    with pytest.raises(ValueError, match="softmax attention through eager or sdpa"):
        lens.deviation(sparse, inputs_of())
    with pytest.raises(TypeError, match="what the tokenizer returns"):
        lens.deviation(model_of("bert"), torch.ones(1, 2))
