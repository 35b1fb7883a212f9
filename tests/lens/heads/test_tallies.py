"""Records of sums: added field by field, written as arrays and read again."""

import pytest
import torch

from fenchel.lens.heads.tallies import (
    AttentionTally,
    BoundTally,
    InputTally,
    OutputTally,
    Tallies,
    add,
    from_arrays,
    to_arrays,
)


def bounds(texts, largest):
    return BoundTally(*(torch.tensor([float(x)]) for x in (texts, 0, largest)))


def test_sums_and_maxima_are_added_apart():
    both = add(bounds(texts=1, largest=2), bounds(texts=3, largest=1))
    assert both.texts.item() == 4.0
    assert both.largest.item() == 2.0


def test_what_only_one_holds_is_in_the_sum():
    one = Tallies({"encoder/0": AttentionTally(bounds=bounds(1, 2))})
    two = Tallies({"encoder/1": AttentionTally(bounds=bounds(3, 4))}, everywhere={"2": output()})
    both = add(add(one, two), one)
    assert both.attentions["encoder/0"].bounds.texts.item() == 2.0
    assert both.attentions["encoder/1"].bounds.texts.item() == 3.0
    assert both.everywhere["2"].kl is None
    assert both.inputs is None


def output():
    return OutputTally(*(torch.tensor([float(x)]) for x in range(4)))


def test_a_record_comes_back_from_its_arrays():
    one = Tallies(
        {"encoder/10": AttentionTally(bounds=bounds(1, 2), model={"1.5": output()})},
        inputs=InputTally(torch.tensor([7.0]), torch.tensor([0.0])),
    )
    arrays = to_arrays(one)
    assert list(arrays)[:2] == [
        "attentions:encoder/10:bounds:texts",
        "attentions:encoder/10:bounds:bound",
    ]
    again = from_arrays(Tallies, arrays)
    assert to_arrays(again).keys() == arrays.keys()
    assert all(torch.equal(x, to_arrays(again)[name]) for name, x in arrays.items())
    assert again.attentions["encoder/10"].weights is None
    assert again.recipe == {}
    del arrays["inputs:cut"]
    with pytest.raises(KeyError):
        from_arrays(Tallies, arrays)
    with pytest.raises(KeyError, match="Tallies has no encoder/0/entropy"):
        from_arrays(Tallies, {"encoder/0/entropy": torch.ones(1)})
