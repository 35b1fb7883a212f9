"""Fenchel–Young losses: value, gradient, targets, weights, reductions, errors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
from tests.families import FAMILIES

DOUBLE = torch.float64
UNIT_MASS = [name for name in FAMILIES if name != "budget"]


def scores(seed=0, count=5):
    return 2 * torch.randn(count, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 3, 1, 1, 2])


def test_shannon_is_cross_entropy():
    x = scores()
    for reduction in ("mean", "sum", "none"):
        ours = fl.fenchel_young_loss(x, LABELS, fl.Shannon(), reduction=reduction)
        theirs = torch.nn.functional.cross_entropy(x, LABELS, reduction=reduction)
        assert (ours - theirs).abs().max() <= 1e-14


def test_weights_and_ignored_rows_are_those_of_cross_entropy():
    x, weight = scores(), torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=DOUBLE)
    labels = LABELS.clone()
    labels[1] = -100
    for reduction in ("mean", "sum", "none"):
        ours = fl.fenchel_young_loss(x, labels, fl.Shannon(), weight=weight, reduction=reduction)
        theirs = torch.nn.functional.cross_entropy(x, labels, weight=weight, reduction=reduction)
        assert (ours - theirs).abs().max() <= 1e-14
    other = fl.fenchel_young_loss(
        x, torch.where(labels < 0, 7, labels), fl.Shannon(), ignore_index=7
    )
    assert other == fl.fenchel_young_loss(x, labels, fl.Shannon())


@pytest.mark.parametrize("name", UNIT_MASS)
def test_gradient_is_weights_minus_target(name):
    x = scores().requires_grad_()
    omega = FAMILIES[name]()
    loss = fl.fenchel_young_loss(x, LABELS, omega, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    target = torch.nn.functional.one_hot(LABELS, 4)
    assert (gradient - (fl.solve(x, omega).weights - target)).abs().max() <= 1e-13


@pytest.mark.parametrize("name", FAMILIES)
def test_definition(name):
    x, omega = scores(), FAMILIES[name]()
    target = fl.solve(scores(1), omega).weights
    base = fl.priors.Base(torch.ones_like(x, dtype=torch.bool))
    definition = fl.solve(x, omega).potential + omega.value(target, base) - (x * target).sum(-1)
    ours = fl.fenchel_young_loss(x, target, omega, reduction="none")
    assert (ours - definition).abs().max() <= 1e-13


@pytest.mark.parametrize("name", FAMILIES)
def test_zero_exactly_at_the_optimum_and_positive_elsewhere(name):
    x, omega = scores() / 4, FAMILIES[name]()
    here = fl.fenchel_young_loss(x, fl.solve(x, omega).weights, omega, reduction="none")
    assert (here >= 0).all()
    assert here.max() <= (1e-12 if name == "fused grid" else 1e-28)  # the grid is iterated
    other = fl.solve(scores(1) / 4, omega).weights
    there = fl.fenchel_young_loss(x, other, omega, reduction="none")
    assert (there > 1e-3).all()


@pytest.mark.parametrize("name", [n for n in UNIT_MASS if not FAMILIES[n]().full_support])
def test_a_margin_makes_the_loss_exactly_zero(name):
    x = torch.tensor([[9.0, 0.0, -1.0, 2.0]], dtype=DOUBLE).requires_grad_()
    loss = fl.fenchel_young_loss(x, torch.tensor([0]), FAMILIES[name]())
    if name.startswith("fused"):  # a jump costs total variation, so its margin is larger
        x = 10 * x
        loss = fl.fenchel_young_loss(x, torch.tensor([0]), FAMILIES[name]())
    assert loss == 0 or (name == "fused grid" and 0 <= loss <= 1e-28)
    (gradient,) = torch.autograd.grad(loss, x)
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_convex_along_a_line(name):
    omega, target = FAMILIES[name](), fl.solve(scores(1), FAMILIES[name]()).weights
    a, b = scores(2), scores(3)
    loss = [
        fl.fenchel_young_loss((1 - t) * a + t * b, target, omega, reduction="none")
        for t in (0.0, 0.5, 1.0)
    ]
    assert (loss[1] <= (loss[0] + loss[2]) / 2 + 1e-13).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_derivatives_in_scores(name):
    omega = FAMILIES[name]()
    target = fl.solve(scores(1), omega).weights.detach()
    x = scores().requires_grad_()
    assert gradcheck(lambda s: fl.fenchel_young_loss(s, target, omega), x)
    assert gradgradcheck(lambda s: fl.fenchel_young_loss(s, target, omega), x)


def test_derivatives_in_alpha_temperature_and_target():
    inputs = (
        scores().requires_grad_(),
        torch.tensor(1.4, dtype=DOUBLE, requires_grad=True),
        torch.tensor(0.8, dtype=DOUBLE, requires_grad=True),
    )
    target = fl.softmax(scores(1))
    assert gradcheck(lambda s, a, t: fl.fenchel_young_loss(s, target, fl.Tsallis(a, t)), inputs)
    logits = scores(4).requires_grad_()
    assert gradcheck(
        lambda z: fl.fenchel_young_loss(scores(), torch.softmax(z, -1), fl.Tsallis(1.5)), logits
    )


@pytest.mark.parametrize("omega", [fl.Shannon(0.7), fl.Tsallis(1.3), fl.Tsallis(2.0)], ids=str)
@pytest.mark.parametrize("kind", ["measure", "prior"])
def test_derivatives_in_the_base(omega, kind):
    generator = torch.Generator().manual_seed(5)
    scores, logits = torch.randn(2, 2, 4, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 3])

    def loss(scores, logits):
        base = logits.exp() if kind == "measure" else fl.priors.Preference(logits[0])
        return fl.fenchel_young_loss(scores, labels, omega, base=base)

    inputs = (scores.requires_grad_(), logits.requires_grad_())
    assert gradcheck(loss, inputs, check_forward_ad=True)
    assert gradgradcheck(loss, inputs)


def test_transforms():
    omega = fl.Tsallis(1.5)

    def one(s, y):
        return fl.fenchel_young_loss(s, y, omega)

    x = scores()
    per_row = torch.func.vmap(torch.func.grad(one))(x, LABELS)
    target = torch.nn.functional.one_hot(LABELS, 4)
    assert (per_row - (fl.solve(x, omega).weights - target)).abs().max() <= 1e-14
    torch._dynamo.reset()
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    assert (compiled(x, LABELS) - one(x, LABELS)).abs() <= 1e-15


def test_float32_keeps_its_digits_near_the_optimum():
    x = scores().float()
    target = fl.entmax(x.double(), 1.5).float()
    target = target / target.sum(-1, keepdim=True)
    loss = fl.fenchel_young_loss(x, target, fl.Tsallis(1.5), reduction="none")
    assert loss.dtype == torch.float32
    assert (loss >= 0).all()
    assert loss.max() <= 1e-12  # dual minus primal in float32 would leave 1e-7


def test_masked_target_is_infinitely_wrong():
    keep = torch.tensor([False, True, True, True])
    loss = fl.fenchel_young_loss(scores(), torch.zeros(5).long(), fl.Tsallis(1.5), base=keep)
    assert loss == torch.inf


def test_no_class_left_is_infinitely_wrong_too():
    x = scores()
    x[0] = -torch.inf
    loss = fl.fenchel_young_loss(x, LABELS, fl.Tsallis(1.5), reduction="none")
    assert loss[0] == torch.inf
    assert loss[1:].isfinite().all()


def test_a_weightless_class_costs_nothing_even_if_masked():
    keep, weight = torch.tensor([False, True, True, True]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    loss = fl.fenchel_young_loss(scores(), LABELS, fl.Tsallis(1.5), base=keep, weight=weight)
    assert loss.isfinite()


def test_small_integer_targets_and_targets_of_another_precision():
    x = torch.randn(1, 200, dtype=DOUBLE)
    by_byte = fl.fenchel_young_loss(x, torch.tensor([156], dtype=torch.uint8), fl.Shannon())
    assert by_byte == fl.fenchel_young_loss(x, torch.tensor([156]), fl.Shannon())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        soft = torch.softmax(torch.randn(1, 200), -1).to(dtype)
        assert fl.fenchel_young_loss(x, soft, fl.Tsallis(1.5)) > 0


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_derivative_in_a_target_that_is_zero(alpha):
    x = torch.tensor([[1.0, 0.5, -1.0]], dtype=DOUBLE)
    y = torch.tensor([[0.6, 0.4, 0.0]], dtype=DOUBLE, requires_grad=True)
    (gradient,) = torch.autograd.grad(fl.fenchel_young_loss(x, y, fl.Tsallis(alpha)), y)
    h = 1e-7
    move = torch.tensor([[-h, 0.0, h]], dtype=DOUBLE)
    ahead = fl.fenchel_young_loss(x, y.detach() + move, fl.Tsallis(alpha))
    slope = (ahead - fl.fenchel_young_loss(x, y.detach(), fl.Tsallis(alpha))) / h
    # p^alpha has an h^(alpha - 1) left over
    assert (gradient[0, 2] - gradient[0, 0] - slope).abs() <= 2 * h ** min(alpha - 1, 1)


def test_all_rows_ignored_is_zero_not_nan():
    loss = fl.fenchel_young_loss(scores(), torch.full((5,), -100), fl.Tsallis(1.5))
    assert loss == 0


def test_budget_takes_a_distribution_of_its_own_mass():
    omega = fl.Budget(2)
    target = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 5, dtype=DOUBLE)
    assert fl.fenchel_young_loss(scores(), target, omega) > 0
    with pytest.raises(ValueError, match="sum k"):
        fl.fenchel_young_loss(scores(), LABELS, omega)
    with pytest.raises(ValueError, match="sum to 2"):
        fl.fenchel_young_loss(scores(), target / 2, omega)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"target": torch.tensor([0, 1, 2, 3, 4])}, ValueError, ("[0, 4)", "4", "ignore_index")),
        ({"target": torch.tensor([0, 1])}, ValueError, ("(5,)", "(2,)")),
        ({"target": torch.ones(5, 3) / 3}, ValueError, ("(5, 4)", "(5, 3)")),
        ({"target": torch.ones(5, 4)}, ValueError, ("sum to 1", "divide")),
        ({"target": torch.tensor([[1.5, -0.5, 0, 0]] * 5)}, ValueError, ("non-negative", "-0.5")),
        ({"target": LABELS, "weight": torch.ones(3)}, ValueError, ("(4,)", "(3,)")),
        ({"target": LABELS, "reduction": "avg"}, ValueError, ("avg", "mean")),
        ({"target": LABELS > 1}, ValueError, ("class indices", "bool")),
        ({"target": [0, 1, 2, 3, 0]}, TypeError, ("target", "list")),
        ({"target": LABELS, "weight": [1.0] * 4}, TypeError, ("weight", "list")),
        ({"target": LABELS, "weight": -torch.ones(4)}, ValueError, ("weight", "-1")),
        ({"target": LABELS, "ignore_index": None}, TypeError, ("ignore_index", "None")),
        ({"target": torch.ones(5, 4) / 4, "ignore_index": 3}, ValueError, ("class indices",)),
    ],
)
def test_bad_input(arguments, error, words):
    with pytest.raises(error) as caught:
        fl.fenchel_young_loss(scores(), regularizer=fl.Tsallis(1.5), **arguments)
    assert all(word in str(caught.value) for word in words), caught.value
