"""What an audit counts, against loops over one query at a time."""

import math

import pytest
import torch

from fenchel.lens.capture.calls import watch
from fenchel.lens.heads.counting import (
    BINS,
    REACH,
    CountedCall,
    count_bounds,
    count_head_deviation,
    count_offsets,
    count_weights,
    count_what_if,
)
from fenchel.lens.heads.datasets import Tokens
from tests.lens.architectures import build, inputs

NAMES = ["bert", "gpt2", "llama", "t5", "bart"]


def counted(name):
    """Every call of a small model, with its tokens; the first real token counts as special."""
    model, given = build(name), inputs(name)
    calls = []
    with watch(model, calls.append):
        model(**given)
    first = _tokens(given["attention_mask"])
    second = first
    if "decoder_input_ids" in given:
        second = _tokens(torch.ones_like(given["decoder_input_ids"]))
    counted_calls = []
    for call in calls:
        asking = first if call.kind == "encoder" else second
        asked = second if call.kind == "decoder" else first
        counted_calls.append(CountedCall(call, asking, asked))
    return counted_calls


def _tokens(mask):
    special = torch.zeros_like(mask, dtype=torch.bool)
    special[:, [0, -1]] = True
    return Tokens(mask.bool(), special & mask.bool())


def rows(one):
    """(text, head, query, weights as a list) of every query that counts."""
    weights = one.call.weights()
    for text in range(weights.shape[0]):
        for query in range(weights.shape[2]):
            if one.asking.real[text, query]:
                for head in range(weights.shape[1]):
                    yield text, head, query, weights[text, head, query].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_weights_by_hand(name):
    for one in counted(name):
        counts = vars(count_weights(one)).copy()
        offsets = count_offsets(one)
        assert (offsets is None) == (one.call.kind == "cross")
        if offsets is not None:
            near = offsets.mass[:, REACH - 1 : REACH + 2]
            counts |= dict(zip(["mass_previous", "mass_self", "mass_next"], near.T, strict=True))
            counts["distance"] = offsets.distance
            assert torch.equal(offsets.queries, counts["queries"])
        counts["count"] = counts["queries"]
        heads = one.call.heads
        names = ["count", "entropy", "effective_support", "mass_first", "mass_special"]
        if one.call.kind != "cross":
            names += ["distance", "mass_self", "mass_previous", "mass_next"]
        wanted = {each: [0.0] * heads for each in names}
        for text, head, query, p in rows(one):
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            values = {
                "count": 1.0,
                "entropy": entropy,
                "effective_support": math.exp(entropy),
                "mass_first": p[0],
                "mass_special": sum(
                    x for x, s in zip(p, one.asked.special[text].tolist(), strict=True) if s
                ),
                "distance": sum(x * abs(k - query) for k, x in enumerate(p)),
                "mass_self": p[query] if query < len(p) else 0.0,
                "mass_previous": p[query - 1] if query else 0.0,
                "mass_next": p[query + 1] if query + 1 < len(p) else 0.0,
            }
            for each in names:
                wanted[each][head] += values[each]
        for each in names:
            assert counts[each].tolist() == pytest.approx(wanted[each], rel=1e-9, abs=1e-12), each
        assert counts["entropy_share_histogram"].shape == (heads, BINS)
        assert torch.equal(counts["entropy_share_histogram"].sum(-1), counts["count"])


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_agreement_is_the_cosine_of_two_heads(name):
    one = counted(name)[0]
    cosines = count_weights(one).agreement
    p = one.call.weights()
    wanted = torch.zeros_like(cosines)
    for text in range(len(p)):
        for query in range(p.shape[2]):
            if one.asking.real[text, query]:
                row = p[text, :, query]
                wanted += torch.nn.functional.cosine_similarity(row[:, None], row[None], dim=-1)
    torch.testing.assert_close(cosines, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_if_by_bisection(name):
    """Sparsemax by bisection of its threshold, one row at a time."""
    for one in counted(name):
        counts = count_what_if(one, (2.0,), None).by_alpha["2"]
        _, values = one.call.repeat_groups()
        scores, output = one.call.scores(), one.call.weights() @ values
        wanted = {"change": [0.0] * one.call.heads, "support_size": [0.0] * one.call.heads}
        for text, head, query, _ in rows(one):
            row = scores[text, head, query]
            low, high = float(row[row.isfinite()].max()) - 1, float(row[row.isfinite()].max())
            for _ in range(200):
                middle = (low + high) / 2
                mass = float((row - middle).clamp_min(0).sum())
                low, high = (middle, high) if mass > 1 else (low, middle)
            p = (row - low).clamp_min(0)
            p = p / p.sum()
            here = output[text, head, query]
            moved = float((p @ values[text, head] - here).norm() / here.norm())
            wanted["change"][head] += moved
            wanted["support_size"][head] += float((p > 1e-12).sum())
        assert counts.change.tolist() == pytest.approx(wanted["change"], rel=1e-6)
        assert counts.support_size.tolist() == wanted["support_size"]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_certificates_are_of_real_keys(name):
    for one in counted(name):
        counts = count_bounds(one)
        keys, values = one.call.repeat_groups()
        for head in range(one.call.heads):
            bounds = []
            for text in range(len(keys)):
                real = one.asked.real[text]
                k, v = keys[text, head, real], values[text, head, real]
                pairs = [
                    float((k[i] - k[j]).norm() * (v[i] - v[j]).norm())
                    for i in range(len(k))
                    for j in range(i)
                ]
                bounds.append(max(pairs) * one.call.scaling / 4)
            assert float(counts.bound[head]) == pytest.approx(sum(bounds), rel=1e-9)
            assert float(counts.largest[head]) == pytest.approx(max(bounds), rel=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_head_deviations_solve_the_heads_own_problem(name):
    """One query at a time, with the keys it sees alone."""
    from fenchel.dual import estimate

    one = counted(name)[0]
    counts = count_head_deviation(one)
    keys, _ = one.call.repeat_groups()
    templates, evidence = one.call.scaling * keys, one.call.query
    total = torch.zeros(one.call.heads, dtype=torch.float64)
    for text, head, query, p in rows(one):
        seen = one.call.mask()[text, head, query]
        t, z = templates[text, head][seen], evidence[text, head, query]
        exact = estimate(t, None, z, 1.0)
        assert exact.gap < 1e-12
        first = torch.tensor(p, dtype=torch.float64)[seen] @ t
        total[head] += (first - exact.mean).norm() / exact.mean.norm()
    torch.testing.assert_close(counts.mean, total, rtol=1e-8, atol=1e-12)
