"""What the entmax package promises of its losses, asked of ours."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

from . import entmax_shim as ours

LOSSES = {
    "SparsemaxLoss": (ours.SparsemaxLoss, ours.sparsemax),
    "SparsemaxLoss, top 5": (partial(ours.SparsemaxLoss, k=5), ours.sparsemax),
    "Entmax15Loss": (ours.Entmax15Loss, ours.entmax15),
    "Entmax15Loss, top 5": (partial(ours.Entmax15Loss, k=5), ours.entmax15),
    "SparsemaxBisectLoss": (ours.SparsemaxBisectLoss, ours.sparsemax_bisect),
    "EntmaxBisectLoss": (
        partial(ours.EntmaxBisectLoss, alpha=1.3),
        partial(ours.entmax_bisect, alpha=1.3),
    ),
    "NormmaxBisectLoss": (ours.NormmaxBisectLoss, ours.normmax_bisect),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def batch(seed: int, rows: int = 4, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (rows,), generator=generator)


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_never_negative(name: str, seed: int) -> None:
    x, y = batch(seed)
    losses = LOSSES[name][0](reduction="none")(x, y)
    assert losses.shape == y.shape
    assert bool((losses >= 0).all())
    assert bool((losses > 0).any())


@every_loss
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "elementwise_mean", "none"])
def test_gradient(name: str, ignored: bool, reduction: str) -> None:
    x, y = batch(1, rows=3, classes=6)
    loss = LOSSES[name][0](ignore_index=y[0] if ignored else -100, reduction=reduction)
    assert gradcheck(loss, (x.requires_grad_(), y))


@every_loss
def test_gradient_is_weights_minus_target(name: str) -> None:
    make, weights = LOSSES[name]
    x, y = batch(2)
    (gradient,) = torch.autograd.grad(make(reduction="sum")(x.requires_grad_(), y), x)
    expected = weights(x) - torch.nn.functional.one_hot(y, x.shape[-1])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=64 * torch.finfo(x.dtype).eps)


@every_loss
def test_zero_where_the_target_dominates(name: str) -> None:
    """A lead of 100 exceeds 1 / (alpha - 1) for every alpha here: the map is one-hot."""
    x, y = batch(3)
    x.scatter_add_(1, y[:, None], torch.full((len(y), 1), 100.0, dtype=x.dtype))
    losses = LOSSES[name][0](reduction="none")(x, y)
    assert torch.equal(losses, torch.zeros_like(losses))
    other = LOSSES[name][0](reduction="none")(x, (y + 1) % x.shape[-1])
    assert bool((other > 90).all())


@every_loss
def test_ignored_rows_count_nothing(name: str) -> None:
    make, _ = LOSSES[name]
    x, y = batch(4, rows=20, classes=6)
    kept = y != y[0]
    assert 0 < int(kept.sum()) < 20
    for reduction in ("sum", "elementwise_mean"):
        ignoring = make(reduction=reduction, ignore_index=y[0])(x, y)
        torch.testing.assert_close(ignoring, make(reduction=reduction)(x[kept], y[kept]))
    assert make(reduction="sum", ignore_index=y[0])(x, y) < make(reduction="sum")(x, y)


@every_loss
def test_ignored_rows_have_no_gradient(name: str) -> None:
    x, y = batch(5, rows=6)
    LOSSES[name][0](ignore_index=y[0])(x.requires_grad_(), y).backward()
    assert bool((x.grad[y == y[0]] == 0).all())
    assert bool((x.grad[y != y[0]] != 0).any())


@every_loss
@pytest.mark.parametrize("wrong", [10, -1])
def test_a_class_that_does_not_exist_is_refused(name: str, wrong: int) -> None:
    x, y = batch(6)
    y[2] = wrong
    with pytest.raises(ValueError, match=r"class indices must lie in \[0, 10\)"):
        LOSSES[name][0]()(x, y)


@every_loss
def test_an_unknown_reduction_is_refused(name: str) -> None:
    x, y = batch(7)
    with pytest.raises(ValueError, match="reduction must be one of"):
        LOSSES[name][0](reduction="median")(x, y)


def test_one_alpha_for_each_sample() -> None:
    x, y = batch(8)
    alpha = torch.tensor([[1.2], [1.5], [2.0], [3.0]], dtype=x.dtype)
    together = ours.entmax_bisect_loss(x, y, alpha)
    for i, a in enumerate(alpha.flatten().tolist()):
        alone = ours.entmax_bisect_loss(x[i : i + 1], y[i : i + 1], a)
        torch.testing.assert_close(together[i : i + 1], alone)
