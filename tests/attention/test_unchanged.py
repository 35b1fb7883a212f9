"""What the backward pass reads once more must be what the forward pass read, or an error."""

import sys

import pytest
import torch

import fenchel as fl
from fenchel._unchanged import Unchanged
from tests.attention.cases import draw
from tests.attention.test_tiles import CASES, SMALL

pytestmark = pytest.mark.usefixtures("kernels")

CHANGED = "modified by an inplace operation"
QUERIES, KEYS = 40, 12


def change(tensor):
    with torch.no_grad():
        tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)


def gradients(case, changed=None, create_graph=False):
    """Those of a case, where one of its tensors may change between the passes."""
    leaves = {name: x.clone().requires_grad_() for name, x in case.leaves.items()}
    options = case.options(leaves)
    constants = {
        name: x.clone() for name, x in options.items() if torch.is_tensor(x) and not x.requires_grad
    }
    regularizer = case.regularizer
    regularizer = regularizer if isinstance(regularizer, fl.Regularizer) else regularizer(leaves)
    output = fl.attention(*case.operands(leaves), regularizer, **{**options, **constants})
    if changed is not None:
        change({**leaves, **constants}[changed])
    actual = torch.autograd.grad(
        output, list(leaves.values()), draw(77, *output.shape), create_graph=create_graph
    )
    return [x.detach() for x in actual], [*leaves, *constants]


@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", CASES)
def test_right_or_refused(name, create_graph, tiles):
    """Of each tensor of each call: a copy was kept, or the change is noticed."""
    tiles(SMALL)
    expected, tensors = gradients(CASES[name], create_graph=create_graph)
    for tensor in tensors:
        try:
            actual, _ = gradients(CASES[name], tensor, create_graph)
        except RuntimeError as problem:
            assert CHANGED in str(problem)  # noqa: PT017  either is right
            continue
        assert all(map(torch.equal, actual, expected)), f"{tensor} changed unnoticed"


class Table(fl.priors.Prior):
    """A prior of somebody else, which keeps its numbers in its own way."""

    def __init__(self, held, read):
        self.held, self.read = held, read

    def log_mass(self, rows, columns):
        mass = self.read(self.held)[columns]
        return mass.expand(len(rows), -1)


class Slots:
    __slots__ = ("numbers",)

    def __init__(self, numbers):
        self.numbers = numbers


def parameter():
    return torch.nn.Parameter(draw(3, KEYS))


def embedding(x):
    return torch.nn.Embedding.from_pretrained(x.unsqueeze(-1), freeze=False)


P = fl.priors
# Name: a tensor, and regulariser and options that read it.
READ = {
    "slopes": (draw(3, 2).abs(), lambda x: (fl.Tsallis(1.5), {"base": P.ALiBi(2, x)})),
    "slopes, softmax": (
        draw(3, 2).abs(),
        lambda x: (fl.Shannon(), {"base": P.Causal() * P.ALiBi(2, x)}),
    ),
    "table": (draw(3, 8, 2), lambda x: (fl.Tsallis(1.5), {"base": P.RelativeBuckets(x)})),
    "logits": (draw(3, KEYS), lambda x: (fl.Tsallis(1.5), {"base": P.Preference(x)})),
    "lengths": (
        torch.tensor([[3, 5]]),
        lambda x: (fl.Tsallis(1.5), {"base": P.KeyPadding(x)}),
    ),
    "bias that trains": (
        draw(3, QUERIES, KEYS).requires_grad_(),
        lambda x: (fl.Tsallis(1.5), {"attn_mask": x}),
    ),
    "bias of softmax": (draw(3, QUERIES, KEYS), lambda x: (fl.Shannon(), {"attn_mask": x})),
    "base of softmax": (draw(3, QUERIES, KEYS).exp(), lambda x: (fl.Shannon(), {"base": x})),
    "mask": (draw(3, QUERIES, KEYS) > 0, lambda x: (fl.Norm(2.0), {"attn_mask": x})),
    "base": (draw(3, KEYS).exp(), lambda x: (fl.Tsallis(3.0), {"base": x.requires_grad_()})),
    "alpha": (torch.tensor(1.5), lambda x: (fl.Norm(x), {})),
    "alpha of each query": (1 + draw(3, QUERIES).abs(), lambda x: (fl.Norm(x), {})),
    "budget": (1 + draw(3, 2, 1).abs(), lambda x: (fl.Budget(x), {})),
    "in a module": (
        parameter(),
        lambda x: (fl.Tsallis(1.5), {"base": Table(embedding(x), lambda m: m.weight[:, 0])}),
    ),
    "in slots": (
        parameter(),
        lambda x: (fl.Tsallis(1.5), {"base": Table([Slots(x)], lambda s: s[0].numbers)}),
    ),
    "in a function": (
        parameter(),
        lambda x: (fl.Tsallis(1.5), {"base": Table(None, lambda _: x)}),
    ),
}
OPERANDS = ("query", "key", "value")


def attend(name, dropout_p=0.0):
    """The output, and what it was computed from by name."""
    tensor, make = READ[name]
    tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    sizes = zip(OPERANDS, (QUERIES, KEYS, KEYS), strict=True)
    # No leaves, so that autograd alone would not notice either.
    operands = {x: draw(9, 1, 2, n, 3).requires_grad_() * 1 for x, n in sizes}
    regularizer, options = make(tensor)
    output = fl.attention(*operands.values(), regularizer, dropout_p=dropout_p, **options)
    return output, {**operands, name: tensor}


# A prior in numbers is read in the forward pass alone where the kernels run.
NOT_READ_AGAIN = ("slopes", "slopes, softmax", "table", "lengths")


@pytest.mark.parametrize("name", READ)
def test_every_tensor_that_a_tile_reads(name, tiles):
    tiles(SMALL)
    for changed in (*OPERANDS, name):
        output, tensors = attend(name)
        change(tensors[changed])
        if changed in NOT_READ_AGAIN:
            continue
        with pytest.raises(RuntimeError, match=CHANGED):
            output.sum().backward()
    output, _ = attend(name)
    output.sum().backward()


def test_the_seed_of_dropout(tiles, monkeypatch):
    seed = torch.tensor(5)
    monkeypatch.setattr(sys.modules["fenchel._attention.call"], "_seed", lambda _: seed)
    tiles(SMALL)
    output, _ = attend("alpha", dropout_p=0.5)
    output.sum().backward(retain_graph=True)
    change(seed)
    with pytest.raises(RuntimeError, match=CHANGED):
        output.sum().backward()


@pytest.mark.parametrize("size", [SMALL, None], ids=["tiles", "whole"])
@pytest.mark.parametrize("name", ["bias of softmax", "base of softmax", "slopes, softmax"])
def test_second_derivatives_of_softmax(name, size, tiles):
    """They are taken from the call, of which autograd has saved query, key and value alone."""
    if size is not None:
        tiles(size)
    output, tensors = attend(name)
    change(tensors[name])
    with pytest.raises(RuntimeError, match=CHANGED):
        torch.autograd.grad(output.sum(), tensors["query"], create_graph=True)


def test_the_message_names_the_tensor_and_both_versions():
    slopes = torch.ones(2)
    unchanged = Unchanged(base=P.Causal() * P.ALiBi(2, slopes))
    unchanged.check()
    slopes.add_(1).mul_(2)
    with pytest.raises(RuntimeError, match=r"slopes, .*FloatTensor \[2\].* version 2; .* 0 inst"):
        unchanged.check()


def test_what_holds_itself_and_what_has_no_version():
    with torch.inference_mode():
        constant = torch.ones(2)
    ring = [constant, int, torch, None]
    ring.append(ring)
    Unchanged(ring=ring).check()


def test_a_mask_made_in_inference_mode(tiles):
    tiles(SMALL)
    with torch.inference_mode():
        mask = draw(3, QUERIES, KEYS) > 0
    query = draw(9, 1, 2, QUERIES, 3).requires_grad_()
    fl.attention(
        query, query[:, :, :KEYS], query[:, :, :KEYS], fl.Norm(2.0), attn_mask=mask
    ).sum().backward()
    assert query.grad.isfinite().all()
