"""The audit as a whole, on small models: whatever the sittings, the same bytes."""

import pytest
import torch

from fenchel import lens
from fenchel.lens import auditing
from fenchel.lens.store import Store
from tests.lens.architectures import build

TEXTS = ["a b c d", "e f", "g h i j k", "a a b", "c", "d e f g h i", "b"]


class Letters:
    """A tokenizer of letters: 1 begins, 2 ends, 0 pads."""

    pad_token_id = 0
    all_special_ids = (0, 1, 2)
    model_max_length = 32

    def __call__(self, texts, **settings):
        rows = [[1, *(ord(word) - 92 for word in text.split()), 2] for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module", params=["bert", "gpt2", "llama", "t5", "bart"])
def model(request):
    return build(request.param)


def test_chunks_agree_with_one_pass(model):
    """But for rounding: the sums are the same however the texts are cut."""
    whole = lens.audit(model, Letters(), TEXTS, chunk=7, targets=TEXTS)
    cut = lens.audit(model, Letters(), TEXTS, chunk=2, targets=TEXTS)
    assert whole.places() == cut.places()
    assert whole.tallies.keys() == cut.tallies.keys()
    for name, value in whole.tallies.items():
        torch.testing.assert_close(value, cut.tallies[name], rtol=1e-6, atol=1e-9, msg=name)


def test_an_interrupted_audit_goes_on(model, tmp_path, monkeypatch):
    settings = {"model": "small"}
    once = Store(tmp_path / "once", settings)
    once.open(resume=False)
    wanted = lens.audit(model, Letters(), TEXTS, chunk=2, store=once, targets=TEXTS).to_csv()
    for stop in range(4):
        folder = tmp_path / f"stopped-{stop}"
        store = Store(folder, settings)
        store.open(resume=False)
        real, left = auditing.chunk_tallies, [stop]

        def dies(*arguments, real=real, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(*arguments)

        monkeypatch.setattr(auditing, "chunk_tallies", dies)
        with pytest.raises(KeyboardInterrupt):
            lens.audit(model, Letters(), TEXTS, chunk=2, store=store, targets=TEXTS)
        monkeypatch.setattr(auditing, "chunk_tallies", real)
        again = Store(folder, settings)
        again.open(resume=True)
        assert len(list(again.missing(4))) == 4 - stop
        found = lens.audit(model, Letters(), TEXTS, chunk=2, store=again, targets=TEXTS)
        assert found.to_csv() == wanted
        for number in range(4):
            assert again.path(number).read_bytes() == once.path(number).read_bytes()


def test_rows_are_heads(model):
    found = lens.audit(model, Letters(), TEXTS, targets=TEXTS)
    rows = found.rows()
    assert len(rows) == 4 * len(found.places())
    for row in rows:
        assert 0 <= row["entropy_share"] <= 1
        assert 1 <= row["effective_support"] <= 9
        assert 0 <= row["mass_first"] <= 1
        assert row["support_2"] <= row["support_1.5"] <= 9
        assert row["bound"] <= row["largest_bound"] * (1 + 1e-12)
        assert row["deviation_count"] == row["queries"]
    header = found.to_csv().splitlines()[0].split(",")
    assert header[:3] == ["kind", "layer", "head"]


def test_only_what_is_wanted_is_counted():
    found = lens.audit(build("bert"), Letters(), TEXTS, wanted=lens.Wanted(measures=("weights",)))
    assert "entropy" in found.rows()[0]
    assert not any(name.startswith(("bound", "deviation", "change")) for name in found.rows()[0])
    with pytest.raises(ValueError, match="measures must be of"):
        lens.Wanted(measures=("heat",))


def test_an_encoder_decoder_writes_its_own_target():
    found = lens.audit(
        build("bart"), Letters(), TEXTS[:2], wanted=lens.Wanted(("weights",), generated=5)
    )
    assert ("cross", 1) in found.places()
    assert found.of("decoder", 0)["queries"].min() >= 2


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="texts must not be empty"):
        lens.audit(build("bert"), Letters(), [])
    with pytest.raises(ValueError, match="one target a text"):
        lens.audit(build("t5"), Letters(), TEXTS, targets=TEXTS[:2])
    with pytest.raises(KeyError, match="no cross layer 0"):
        lens.audit(build("bert"), Letters(), TEXTS[:1]).of("cross", 0)
