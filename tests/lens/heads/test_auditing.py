"""The audit as a whole, on small models: what is asked for, odd texts, and the model afterwards."""

import math

import pytest
import torch

from fenchel import hf, lens
from fenchel.lens.capture.calls import watch
from fenchel.lens.heads.auditing import AuditRun
from fenchel.lens.heads.datasets import make_dataset
from fenchel.lens.heads.settings import MEASURES, STREAMED, AuditSettings
from fenchel.lens.heads.store import Store
from fenchel.lens.heads.tallies import to_arrays
from tests.lens.architectures import BUILDERS, build, pictures, processor, tokenizer

TEXTS = ["a b c d", "e f", "g h i j k", "a a b", "c", "d e f g h i", "b"]
NAMES = ["bert", "gpt2", "llama", "t5", "bart"]
ONE = {"layers": (1,), "heads": (2,), "trials": 5}  # where one head shows it
QUICK = ("weights", "what_if", "certificate", "geometry", "local", "advantage", "model")


def run(model, name, texts=TEXTS, chunk=32, store=None, **settings):
    """settings: of `AuditSettings`."""
    targets = texts if name in ("t5", "bart") else None
    return AuditRun(
        model,
        make_dataset(tokenizer(name), texts, targets),
        AuditSettings(**settings),
        chunk,
        store,
    )


def assert_same_rows(one, two, rel=1e-9, names=None):
    """Rows that hold the same numbers."""
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        for name in names or a.keys():
            wanted = b[name]
            if isinstance(wanted, float):
                wanted = pytest.approx(wanted, rel=rel, abs=1e-12, nan_ok=True)
            assert a[name] == wanted, (name, a["kind"], a["layer"], a["head"])


@pytest.mark.parametrize("wrong", [[], [{"layer": 0}], [{"entropy": 1.0}], [{"entropy": math.nan}]])
def test_other_rows_are_noticed(wrong):
    row = {"kind": "encoder", "layer": 1, "head": 2, "entropy": 0.5}
    assert_same_rows([row], [row | {"entropy": 0.5 + 1e-13}])
    with pytest.raises(AssertionError):
        assert_same_rows([row], [row | change for change in wrong])
    with pytest.raises(AssertionError):
        assert_same_rows([], [])


@pytest.fixture(scope="module", params=NAMES)
def named(request):
    return request.param, build(request.param)


def test_chunks_agree_with_one_pass(named):
    """But for rounding: the sums are the same however the texts are cut."""
    name, model = named
    whole = run(model, name, measures=STREAMED).audit()
    cut = run(model, name, measures=STREAMED, chunk=2).audit()
    sums, others = to_arrays(whole.tallies), to_arrays(cut.tallies)
    assert sums.keys() == others.keys()
    for key, value in sums.items():
        torch.testing.assert_close(value, others[key], rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_an_interrupted_audit_goes_on(name, tmp_path):
    model = build(name)
    settings = {"measures": ("weights", "what_if", "geometry"), "probe": 2}

    def begun(folder):
        store = Store(tmp_path / folder, {"model": name})
        store.open(resume=True)
        return run(model, name, chunk=3, store=store, **settings)

    wanted = begun("once").audit().to_csv()
    units = [unit.name for unit in begun("once").units()]
    assert units == [f"chunk-{n:06d}" for n in range(3)] + ["probe-000000"]
    for stop in range(len(units)):
        parts = begun(f"stopped-{stop}")
        parts.work(lambda number, stop=stop: number < stop, lambda unit: None)
        assert parts.store.names() == sorted(units[:stop])
        again = begun(f"stopped-{stop}")
        assert again.audit().to_csv() == wanted
        for unit in units:
            once = (tmp_path / "once" / f"{unit}.npz").read_bytes()
            assert again.store.path(unit).read_bytes() == once


@pytest.mark.parametrize("name", BUILDERS)
def test_the_implementation_does_not_matter(name, tmp_path):
    """Eager or sdpa: an audit computes attention itself."""
    rows = []
    for implementation in ("eager", "sdpa"):
        model = build(name, implementation)
        measures = (*QUICK, "deviation", "attack", "recipe")
        if name == "vit":
            shown = make_dataset(processor(), pictures(tmp_path))
            one = AuditRun(model, shown, AuditSettings(measures, (2.0,), tolerance=0.1, **ONE))
        else:
            more = {"alphas": (2.0,), "tolerance": 0.1, **ONE}
            one = run(model, name, TEXTS[:2], measures=measures, **more)
        rows.append(one.audit().rows())
    assert_same_rows(*rows)


def test_heads_and_layers_are_rows_of_the_whole(named):
    name, model = named
    measures = tuple(one for one in QUICK if one != "model" or name in ("bert", "llama"))
    settings = {"measures": (*measures, "deviation"), "alphas": (2.0,), "probe": 1}
    whole = run(model, name, TEXTS[:3], **settings).audit().rows()
    part = run(model, name, TEXTS[:3], **settings, layers=(1,), heads=(3, 1)).audit()
    wanted = [row for row in whole if row["layer"] == 1 and row["head"] in (1, 3)]
    # these two look at the other heads that were chosen
    names = [key for key in wanted[0] if key not in ("agreement", "layer_all_2")]
    assert_same_rows(part.rows(), wanted, names=names)
    assert {row["layer"] for row in part.rows()} == {1}


def test_wrong_numbers_are_refused():
    model = build("bert")
    with pytest.raises(ValueError, match="layers 0 to 1, no layer 2"):
        run(model, "bert", layers=(0, 2))
    with pytest.raises(ValueError, match="heads 0 to 3, no head 4"):
        run(model, "bert", heads=(4,))
    with pytest.raises(ValueError, match="measures must be of"):
        AuditSettings(measures=("heat",))
    with pytest.raises(ValueError, match="measures must be of"):
        AuditSettings(measures=())
    for alpha in (1.0, 0.5, 4.5, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            AuditSettings(alphas=(alpha,))
    for tolerance in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="tolerance"):
            AuditSettings(tolerance=tolerance)
    with pytest.raises(ValueError, match="probe"):
        AuditSettings(probe=0)


@pytest.mark.parametrize("which", ["layers", "heads"])
def test_negative_numbers_are_refused(which):
    with pytest.raises(ValueError, match="-1"):
        run(build("bert"), "bert", **{which: (-1,)})


GROUPS = {
    "weights": {"weights"},
    "deviation": {"estimation"},
    "what_if": {"what-if"},
    "certificate": {"stability"},
    "geometry": {"geometry"},
    "advantage": {"geometry"},
    "local": {"stability"},
    "attack": {"stability"},
    "model": {"what-if"},
    "recipe": {"recipe"},
}


def test_each_measure_brings_its_own_columns():
    model, seen = build("t5"), []
    for measure in MEASURES:
        audit = run(model, "t5", TEXTS[:1], measures=(measure,), layers=(0,), trials=5).audit()
        assert {column.group for column in audit.columns()} == GROUPS[measure]
        assert all(math.isfinite(row[audit.columns()[0].name]) for row in audit.rows())
        seen += [column.name for column in audit.columns()]
    whole = run(model, "t5", TEXTS[:1], **ONE).audit()
    assert sorted(seen) == sorted(column.name for column in whole.columns())
    assert len(seen) == len(set(seen))


def test_other_alphas():
    model = build("gpt2")
    audit = run(model, "gpt2", measures=("what_if", "model"), alphas=(1.25, 3.0)).audit()
    rows = audit.rows()
    for row in rows:
        assert 0 < row["kept_3"] <= row["kept_1.25"] <= 1
        assert 0 < row["model_moved_3"] < math.inf
    assert not [name for name in rows[0] if name.endswith(("_1.5", "_2"))]


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
@pytest.mark.parametrize("texts", [["a"], ["", "a b"], [""], ["a b c"]])
def test_odd_texts(name, texts):
    """One token, none of its own but special ones, one text, a probe larger than the texts."""
    audit = run(build(name), name, texts, **ONE).audit()
    for row in audit.rows():
        for column, value in row.items():
            assert isinstance(value, str | int) or not math.isinf(value), column
        assert math.isfinite(row["entropy"])
        assert row["effective_support"] >= 1
    assert audit.document().inputs.probe == len(texts)


def test_a_text_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"text 1 \(from 0\) has no tokens, ''; leave it out"):
        run(build("gpt2"), "gpt2", ["a b", ""], measures=("weights",)).audit()


CASES = [("bert", torch.float32), ("llama", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_lower_precision_is_close(name, dtype):
    low = run(build(name).to(dtype), name, TEXTS[:2], **ONE).audit().rows()
    high = run(build(name), name, TEXTS[:2], **ONE).audit().rows()
    for a, b in zip(low, high, strict=True):
        for key in ("entropy", "mass_first", "fisher_scores", "kept_2"):
            assert a[key] == pytest.approx(b[key], abs=1e-4 if dtype == torch.float32 else 0.4)
        for key, value in b.items():
            if isinstance(value, float) and math.isfinite(value):
                assert math.isfinite(a[key]), key


LEFT = [("bert", "eager"), ("bert", "sdpa"), ("llama", "sdpa"), ("bart", "eager")]


@pytest.mark.parametrize(("name", "implementation"), LEFT)
def test_the_model_is_left_as_it_was(name, implementation):
    model = build(name, implementation).train()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    shown = make_dataset(tokenizer(name), TEXTS[:3], TEXTS[:3] if name in ("t5", "bart") else None)
    with torch.no_grad():  # transformers leaves hooks of its own where it records states
        model(**shown.prepare(model, [0]).arguments, output_hidden_states=True)
    before = {path: value.clone() for path, value in model.state_dict().items()}
    modules, hooks = dict(model.named_modules()), _hooks(model)
    run(model, name, TEXTS[:2], **ONE).audit()
    assert all(module.training for module in model.modules())
    configs = [module.config for module in modules.values() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} == {implementation}
    assert [x.requires_grad for x in model.parameters()].count(False) == 1
    assert all(x.grad is None for x in model.parameters())
    assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())
    assert dict(model.named_modules()).keys() == modules.keys()
    assert _hooks(model) == hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def _hooks(model):
    return [
        (list(one._forward_hooks), list(one._forward_pre_hooks), list(one._backward_hooks))
        for one in model.modules()
    ]


def test_left_padding_changes_nothing():
    model = build("llama")
    rows = []
    for side in ("left", "right"):
        shown = make_dataset(tokenizer("llama", padding_side=side), TEXTS)
        rows.append(AuditRun(model, shown, AuditSettings(("weights", "advantage"))).audit().rows())
    assert_same_rows(*rows)


def test_an_encoder_decoder_writes_its_own_target():
    shown = make_dataset(tokenizer("bart"), TEXTS[:2], generated=5)
    audit = AuditRun(build("bart"), shown, AuditSettings(("weights",))).audit()
    assert ("cross", 1) in audit.heads
    assert 2 <= audit.of("decoder", 0).weights.queries.min() <= 10


def test_the_front_door():
    model = build("bert")
    audit = lens.audit(model, tokenizer("bert"), TEXTS[:2], measures=["weights"])
    header = audit.to_csv().splitlines()[0].split(",")
    assert header[:4] == ["kind", "layer", "head", "entropy"]
    assert len(audit.to_csv().splitlines()) == 9
    assert audit.recipe() is None
    with pytest.raises(TypeError, match="not both"):
        lens.audit(model, tokenizer("bert"), TEXTS, measures=["weights"], settings=AuditSettings())
    with pytest.raises(ValueError, match="texts must not be empty"):
        lens.audit(model, tokenizer("bert"), [])
    with pytest.raises(KeyError, match="no cross layer 0"):
        audit.of("cross", 0)
    with pytest.raises(ValueError, match="no column 'heat'"):
        audit.plot("heat")


def test_a_converted_model_is_refused():
    """Its numbers would be those of softmax, which it no longer computes."""
    model = hf.convert(build("bert"), "fenchel:sparsemax")
    with pytest.raises(ValueError, match=r"was converted \(fenchel:sparsemax\).*sdpa"):
        run(model, "bert")
    model.set_attn_implementation("sdpa")
    assert run(model, "bert", measures=("weights",)).audit().rows()


def test_a_page_and_a_short_name_for_notebooks(tmp_path):
    audit = run(build("bert"), "bert", measures=("weights",), **ONE).audit()
    assert repr(audit) == f"Audit(BertModel: 1 heads, {len(audit.columns())} columns, 7 texts)"
    page = audit.report(tmp_path / "new")
    assert page == tmp_path / "new" / "report.html"
    assert "BertModel" in page.read_text(encoding="utf-8")


def test_a_loss_of_ones_own():
    model, given = build("bert"), ["a b c", "d e"]
    first = lens.advantage(model, tokenizer("bert"), given, lambda out, _: out[0][:, 0, 0].sum())
    twice = lens.advantage(
        model, tokenizer("bert"), given, lambda out, _: 2 * out[0][:, 0, 0].sum()
    )
    torch.testing.assert_close(twice.of("encoder", 0), 2 * first.of("encoder", 0))
    assert first.of("encoder", 0).abs().max() > 0
    assert repr(first) == "Advantages(2 texts: encoder 0, encoder 1)"
    with pytest.raises(ValueError, match=r"must return one number, got shape \(2,\)"):
        lens.advantage(model, tokenizer("bert"), given, lambda out, _: out[0][:, 0, 0])
    with pytest.raises(KeyError, match="no encoder layer 5; there are: encoder 0"):
        first.of("encoder", 5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_damaged_weights_are_refused_by_name(value):
    """A NaN would pass for a query that sees nothing."""
    model = build("bert")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[8, 0] = value  # head 1: 8 numbers each
    with pytest.raises(ValueError, match="NaN or infinite in encoder layer 1, head 1"):
        run(model, "bert", measures=("weights",)).audit()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_a_model_in_training_writes_has_no_dropout(name):
    def entropies(model):
        shown = make_dataset(tokenizer(name), TEXTS)
        return AuditRun(model, shown, AuditSettings(measures=("weights",))).audit().rows()

    assert_same_rows(entropies(build(name).train()), entropies(build(name)))


def test_settings_of_generation_do_not_matter():
    plain, odd = build("t5"), build("t5")
    odd.generation_config.num_beams = 3
    odd.generation_config.num_return_sequences = 2
    odd.generation_config.return_dict_in_generate = True
    rows = [
        AuditRun(m, make_dataset(tokenizer("t5"), TEXTS), AuditSettings(measures=("weights",)))
        .audit()
        .rows()
        for m in (plain, odd)
    ]
    assert_same_rows(*rows)


def test_shared_layers_are_refused():
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "embedding_size": 8}
    more = {"intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 60}
    model = transformers.AlbertModel(transformers.AlbertConfig(**sizes, **more)).eval()
    with pytest.raises(ValueError, match="attends more than once in a pass"):
        run(model, "bert")


def test_a_model_is_watched_once_at_a_time():
    model = build("bert")
    with watch(model, lambda call: None):
        with pytest.raises(RuntimeError, match="watched already"):
            run(model, "bert")
        assert model.config._attn_implementation == "fenchel:lens"
    assert model.config._attn_implementation == "eager"


def test_targets_that_are_of_no_use_are_refused():
    with pytest.raises(ValueError, match="BertModel is none: leave them out"):
        lens.audit(build("bert"), tokenizer("bert"), TEXTS, targets=TEXTS)


def test_settings_that_mean_nothing_are_refused():
    for settings, message in (
        ({"alphas": (1.5, 1.5000001)}, "must differ"),
        ({"heads": ()}, "heads must name at least one"),
        ({"layers": ()}, "layers must name at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            AuditSettings(**settings)


def test_derivatives_need_more_than_inference_mode():
    with torch.inference_mode(), pytest.raises(ValueError, match="leave torch"):
        lens.advantage(build("bert"), tokenizer("bert"), ["a b"])
