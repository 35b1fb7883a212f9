"""The attention benchmark counts what it says it counts. No test depends on a time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import attention, attention_memory, machine
from benchmarks import attention_methods as methods
from benchmarks.attention_methods import CAUSAL, PADDED, PLAIN, Method, Shape
from benchmarks.attention_rounds import Neighbours, Rounds, interleave
from benchmarks.maps import DIRECTIONS
from tests import needs


def _broken(x: methods.Inputs) -> torch.Tensor:
    raise RuntimeError("no luck\nand much more")


SHAPE = Shape(heads=2, dim=8)
TINY = attention.Sweep(
    sizes=(8, 24),
    deviations=(0.5, 1.0),
    alphas=(1.5, 2.0),
    focus=24,
    peers=((methods.SOFTMAX, 24), (methods.SORT_15, 8), (Method("broken", _broken), 24)),
    memory=(),
    row_maps=(4, 8),
    shape=SHAPE,
    rounds=Rounds(2, 2, 0.1),
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(json.dumps(attention.run(TINY).as_json()))


def entries_of(document: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [e for e in document["results"] if all(e[k] == v for k, v in wanted.items())]


def test_the_sweep_names_every_case_once() -> None:
    for n in TINY.sizes:
        cases = TINY.cases(n)
        assert len(set(cases)) == len(cases)
    small, focus = (
        {(c.method.name, c.deviation, c.variant) for c in TINY.cases(n)} for n in (8, 24)
    )
    assert ("entmax.entmax15", 1.0, PLAIN) in small - focus
    assert {("fl Tsallis(1.5)", 0.02, PLAIN), ("fl Tsallis(per head)", 1.0, PLAIN)} <= focus - small
    for variant in (CAUSAL, PADDED):
        assert {("torch SDPA", 1.0, variant), ("fl Tsallis(2)", 1.0, variant)} <= focus - small


def test_the_full_sweep_asks_peers_only_where_they_can_answer() -> None:
    reach: dict[str, list[int]] = {}
    for n in attention.FULL.sizes:
        for case in attention.FULL.cases(n):
            reach.setdefault(case.method.name, []).append(n)
    assert max(reach["plain softmax"]) == max(reach["FlexAttention"]) == 4096
    assert max(reach["entmax.entmax_bisect 1.5"]) == 1024
    assert reach["entmax.entmax15 k=512"] == [1024, 2048]  # below, top-k is the sort itself
    assert set(reach["fl Tsallis(1.5)"]) == set(attention.FULL.sizes)
    assert max(reach["fl Tsallis(1.3)"]) == 4096  # longer takes minutes


def test_a_shorter_sweep_moves_its_extras() -> None:
    short = attention.FULL.up_to(1500)
    assert max(short.sizes) == short.focus == 1024
    assert short.memory == ()
    with pytest.raises(ValueError, match="the shortest sequence has 128 tokens, got 100"):
        attention.FULL.up_to(100)


def test_json_has_every_case_in_both_directions(document: dict[str, Any]) -> None:
    assert document["bench"] == "attention"
    assert document["kernels"] == machine.kernels()
    assert document["machine"]["torch"] == torch.__version__
    assert document["settings"]["threads"] == torch.get_num_threads()
    assert document["settings"]["heads"] == 2
    for n in TINY.sizes:
        for case in TINY.cases(n):
            name = {"method": case.method.name, "deviation": case.deviation, "n": n}
            entries = entries_of(document, **name, variant=case.variant)
            assert [e["direction"] for e in entries] == list(DIRECTIONS)


def test_ratios_are_to_the_sdpa_of_the_same_variant(document: dict[str, Any]) -> None:
    checked = 0
    for entry in document["results"]:
        if not entry["error"]:
            same = {key: entry[key] for key in ("n", "variant", "direction")}
            (baseline,) = entries_of(document, method="torch SDPA", **same)
            assert entry["ratio"] == pytest.approx(entry["seconds"] / baseline["seconds"])
            assert entry["ratio_min"] <= entry["ratio"] <= entry["ratio_max"]
            assert entry["rounds"] == 2
            checked += 1
    assert checked > 30


def test_what_fails_says_why_and_stops_nobody(document: dict[str, Any]) -> None:
    entries = entries_of(document, method="broken")
    assert len(entries) == 4
    assert {e["error"] for e in entries} == {"RuntimeError: no luck"}
    assert {e["seconds"] for e in entries} == {e["ratio"] for e in entries} == {None}


def test_row_maps_are_compared_with_softmax(document: dict[str, Any]) -> None:
    names = [entry["method"] for entry in document["maps"]]
    assert names == [n for n in ("torch.softmax", "fl.entmax 1.5", "fl.sparsemax") for _ in (0, 1)]
    softmax = {e["direction"]: e["seconds"] for e in document["maps"][:2]}
    for entry in document["maps"]:
        assert entry["ratio"] == pytest.approx(entry["seconds"] / softmax[entry["direction"]])
        assert (entry["rows"], entry["length"]) == (4, 8)


def test_progress_reaches_one() -> None:
    shares: list[float] = []
    labels: set[str] = set()

    def advance(what: str, share: float) -> None:
        labels.add(what)
        shares.append(share)

    attention.run(replace(TINY, peers=(), focus=0), advance)
    assert sum(shares) == pytest.approx(1)
    assert labels == {"row maps", "n = 8", "n = 24"}


def test_threads_are_set_and_given_back() -> None:
    before, seen = torch.get_num_threads(), []

    def call(x: methods.Inputs) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x.query.clone()

    sweep = replace(TINY, peers=((Method("spy", call), 24),), focus=0, threads=before + 1)
    assert attention.run(sweep).threads == before + 1
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_a_sweep_refuses_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="sizes must be positive and not empty"):
        attention.Sweep(sizes=())
    with pytest.raises(ValueError, match="threads must be >= 1"):
        attention.Sweep(threads=0)
    with pytest.raises(ValueError, match="least <= most"):
        Rounds(3, 2)


@pytest.mark.parametrize("deviation", [0.2, 1.0, 2.0])
def test_scores_have_the_deviation_they_are_named_after(deviation: float) -> None:
    x = Shape().inputs(256, deviation)
    scores = x.query @ x.key.mT / 8
    assert float(scores.std()) == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize("variant", [PLAIN, CAUSAL, PADDED])
def test_methods_compute_what_they_are_called(variant: str) -> None:
    x = SHAPE.inputs(24, 1.0, variant)
    torch.testing.assert_close(methods.SOFTMAX.call(x), methods.SDPA.call(x))
    needs.package("entmax", "the methods of the benchmark against each other")
    for package, alpha in ((methods.SORT_15, 1.5), (methods.BISECT, 1.5), (methods.SORT_2, 2.0)):
        torch.testing.assert_close(methods.tsallis(alpha).call(x), package.call(x))
    assert not torch.allclose(methods.tsallis(1.5).call(x), methods.SDPA.call(x), atol=1e-3)


def test_alpha_per_head_gets_its_gradient() -> None:
    x = SHAPE.inputs(24, 1.0)
    gradients = methods.thunk(methods.PER_HEAD, x, "forward+backward")()
    assert isinstance(gradients, tuple)
    assert gradients[3].shape == (2, 1)
    assert float(gradients[3].abs().min()) > 0
    assert methods.thunk(methods.SDPA, x, "forward+backward")().__len__() == 3  # type: ignore[attr-defined]


def test_without_the_entmax_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    sweep = replace(TINY, sizes=(8,), peers=((methods.SORT_15, 8),), row_maps=None)
    document = attention.run(sweep).as_json()
    errors = {e["error"] for e in entries_of(document, method="entmax.entmax15")}
    assert errors == {"ModuleNotFoundError: the entmax package is not installed"}


# ---- rounds


def test_rounds_fit_the_time() -> None:
    rounds = Rounds(least=3, most=9, seconds=20)
    assert [rounds.count(one) for one in (0.0, 1.0, 4.0, 100.0)] == [9, 9, 5, 3]


def test_calls_are_interleaved() -> None:
    order: list[str] = []

    def make(name: str) -> Any:
        return lambda: lambda: (order.append(name), time.sleep(6e-3))

    samples = interleave([make("a"), make("b")], Rounds(3, 3, 1))
    assert order[-6:] == ["a", "b"] * 3
    assert [len(s.seconds) for s in samples] == [3, 3]
    assert min(samples[0].seconds) >= 6e-3


def test_a_long_call_counts_from_its_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.attention_rounds._LONG", 0.01)
    calls: list[int] = []
    (samples,) = interleave([lambda: lambda: (calls.append(1), time.sleep(0.011))], Rounds(3, 3, 1))
    assert len(calls) == len(samples.seconds) == 3


def test_a_compiled_method_is_called_before_it_is_timed() -> None:
    calls: list[int] = []

    def call(x: methods.Inputs) -> torch.Tensor:
        calls.append(1)
        return x.query

    methods.thunk(Method("x", call), SHAPE.inputs(8, 1.0), "forward")
    assert calls == []
    methods.thunk(Method("x", call, compiles=True), SHAPE.inputs(8, 1.0), "forward")
    assert calls == [1]


def test_work_of_others_is_seen_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(0.0, 0.0, 0.0), (10.0, 8.0, 5.0)])
    monkeypatch.setattr(Neighbours, "_now", staticmethod(lambda: next(counts)))
    share = Neighbours().share()
    assert share == pytest.approx(0.3)
    report = attention.Report(TINY, 1, (), others=share)
    assert "other processes had 30% of the processors" in report.warning
    assert report.as_json()["warning"] == report.warning
    assert attention.Report(TINY, 1, (), others=0.05).warning == ""
    assert attention.Report(TINY, 1, (), others=None).warning == ""


# ---- memory


def test_memory_of_a_process_of_its_own() -> None:
    """At n = 1024 with 8 heads the scores alone are 32 MiB: plain softmax cannot hide them."""
    plain = attention_memory.measure(attention_memory.Request("plain softmax", 1024))
    fused = attention_memory.measure(attention_memory.Request("torch SDPA", 1024))
    assert plain.error == fused.error == ""
    assert plain.extra is not None
    assert fused.extra is not None
    assert plain.extra > 2 * 32 * 2**20 > fused.extra > 4 * 2**20


def test_memory_that_cannot_be_measured_says_why() -> None:
    peak = attention_memory.measure(attention_memory.Request("nonsense", 8))
    assert peak.extra is None
    assert "no method is called 'nonsense'" in peak.error


def test_memory_ratios() -> None:
    peaks = (
        attention_memory.Peak("torch SDPA", 8, 100),
        attention_memory.Peak("fl Tsallis(1.5)", 8, 150),
        attention_memory.Peak("plain softmax", 16, 150),
        attention_memory.Peak("broken", 8, None, "why"),
    )
    document = attention.Report(TINY, 1, (), memory=peaks).as_json()
    assert [entry["ratio"] for entry in document["memory"]] == [1.0, 1.5, None, None]
    assert document["memory"][3]["error"] == "why"


def test_methods_are_found_by_name() -> None:
    x = SHAPE.inputs(8, 1.0)
    torch.testing.assert_close(
        methods.named("fl Tsallis(1.3)").call(x), methods.tsallis(1.3).call(x)
    )
    for method, _ in (*attention.FULL.memory, *attention.QUICK.memory):
        assert methods.named(method.name).name == method.name


@pytest.mark.slow
@needs.compiler("FlexAttention in the benchmark")
@pytest.mark.filterwarnings("default")
def test_flex_attention_stays_compiled_when_its_backward_is_refused() -> None:
    inputs = SHAPE.inputs(32, 1.0)
    torch.compiler.reset()
    methods._flex_refuses_backward.cache_clear()
    torch.testing.assert_close(methods.FLEX.call(inputs), methods.SDPA.call(inputs))
    if not methods._flex_refuses_backward():
        needs.skip("this torch has the backward", "a FlexAttention without one")
    with pytest.raises(NotImplementedError, match="backward"):
        methods.thunk(methods.FLEX, inputs, "forward+backward")
    with torch.compiler.set_stance("fail_on_recompile"):
        methods.FLEX.call(inputs)


def test_long_sequences_are_measured_with_the_first_alpha_alone():
    sweep = attention.Sweep(sizes=(64, 128), focus=64, long=64, alphas=(1.5, 2.0), peers=())
    names = {n: {case.method.name for case in sweep.cases(n)} for n in sweep.sizes}
    assert names[64] - names[128] >= {"fl Tsallis(2)"}
    assert "fl Tsallis(1.5)" in names[128]
