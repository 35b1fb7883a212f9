"""What forbids reading values forbids every way of it."""

import pytest
import torch

import fenchel as fl
from fenchel._numerics import at_hand, has, readable
from tests.waiting import Waited, forbidden

X = torch.arange(6.0)
READS = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X.any()),
    "if": lambda: 1 if X.sum() > 0 else 2,
    "int": lambda: int(X.sum()),
    "float": lambda: float(X.sum()),
    "index of a list": lambda: [1, 2][X.long()[0]],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: X.nonzero(),
    "where with one operand": lambda: torch.where(X > 1),
    "argwhere": lambda: torch.argwhere(X > 1),
    "boolean index": lambda: X[X > 1],
    "boolean assignment": lambda: X.clone().__setitem__(X > 1, torch.ones(4)),
    "masked_select": lambda: X.masked_select(X > 1),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "bincount": lambda: X.long().bincount(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "repeat_interleave": lambda: torch.repeat_interleave(X.long()),
    "a copy from the host": lambda: torch.tensor(1.0, device="cpu"),
    "has": lambda: has(X > 1),
}


@pytest.mark.parametrize("name", READS)
def test_a_planted_read_is_found(name):
    READS[name]()
    with pytest.raises(Waited), forbidden():
        READS[name]()


def test_a_read_in_a_backward_pass_is_found():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    leaf = X.clone().requires_grad_()
    with pytest.raises(Waited), forbidden():
        Reads.apply(leaf).sum().backward()


def test_what_reads_nothing_passes():
    with forbidden():
        y = torch.where(X > 1, X, 0.0).softmax(-1)
        assert y.shape == (6,)
        assert torch.full((2,), 3.0).dtype == torch.float32
        X.gather(0, torch.tensor([1]))
        X[2:4], X[None], X[torch.tensor([0, 1])]


def test_in_passing_nothing_is_read_there():
    assert at_hand(X, None)
    with forbidden():
        assert readable(X)
        assert not at_hand(X)


def test_softmax_that_nobody_looks_at_is_the_same():
    """Rows that are empty or have no answer among them, and their gradients."""
    inf, nan = torch.inf, torch.nan
    rows = [[1.0, 2, -1], [-inf, -inf, -inf], [0, nan, 1], [inf, 0, 1], [-inf, 3, 3e38]]
    scores = torch.tensor(rows, requires_grad=True)
    seen = fl.softmax(scores)
    with forbidden():
        unseen = fl.softmax(scores)
    torch.testing.assert_close(unseen, seen, equal_nan=True, rtol=0, atol=0)
    pair = [torch.autograd.grad(p[:, 1].nansum(), scores)[0] for p in (unseen, seen)]
    torch.testing.assert_close(*pair, rtol=0, atol=0)
    assert pair[0][0].any()
