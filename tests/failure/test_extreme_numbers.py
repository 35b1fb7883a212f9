"""Numbers at the ends: towering scores, flat rows, huge alpha, masses of every size."""

import pytest
import torch

import fenchel as fl
from fenchel.testing import gap_tolerance
from tests.families import FAMILIES

SCORES = torch.tensor([[0.3, -1.0, 2.0, 0.5], [1.0, 1.0, 0.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_towering_scores(name, dtype):
    scores = torch.tensor([[1e30, -1e30, 0.0, 1e30 / 2], [-1e30, 3.0, 2.9, -1e30]], dtype=dtype)
    leaf = scores.requires_grad_()
    solution = fl.solve(leaf, FAMILIES[name]())
    assert (solution.status == fl.Status.OK).all()
    total = FAMILIES[name]().total(scores)
    assert (solution.weights.sum(-1) - total).abs().max() <= 1e-6
    (gradient,) = torch.autograd.grad((solution.weights**2).sum(), leaf)
    assert gradient.isfinite().all()
    if name not in ("budget", "fused", "fused grid"):
        assert solution.weights[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_scores_at_the_ends_of_the_range(dtype):
    top = torch.finfo(dtype).max
    scores = torch.tensor([[top, -top, 0.0, top]], dtype=dtype)
    for omega in (fl.Shannon(), fl.Shannon(1e-3), fl.Tsallis(1.5), fl.Tsallis(3.0), fl.Norm(2.0)):
        weights = fl.solve(scores, omega).weights
        expected = torch.tensor([[0.5, 0, 0, 0.5]], dtype=dtype)
        assert (weights - expected).abs().max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", FAMILIES)
def test_float16_with_a_wide_spread(name):
    scores = torch.tensor([[1e4, -1e4, 9999.0, 0.0]], dtype=torch.float16).requires_grad_()
    solution = fl.solve(scores, FAMILIES[name]())
    assert solution.weights.dtype == torch.float16
    assert solution.weights.isfinite().all()
    assert (solution.weights.float().sum() - FAMILIES[name]().total(scores.float())).abs() < 1e-3
    (gradient,) = torch.autograd.grad((solution.weights**2).sum(), scores)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_strides_do_not_matter(name):
    dense = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    omega = FAMILIES[name]() if name != "fused grid" else fl.Fused(0.2, grid=(2, 2))
    views = {
        "transposed": dense.t(),
        "every other": torch.stack([dense[:, :4]] * 2, -1)[..., 0],
        "zero stride": dense[:1, :4].expand(5, 4),
        "flipped": dense[:, :4].flip(-1),
    }
    for view in views.values():
        expected = fl.solve(view.contiguous(), omega).weights
        assert torch.equal(fl.solve(view, omega).weights, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("alpha", [1.5, 1.8, 2.0, 3.0])
def test_flat_rows_of_many_keys(dtype, alpha):
    for scores in (torch.zeros(1, 100_000, dtype=dtype), 1e-4 * torch.randn(2, 4096, dtype=dtype)):
        solution = fl.solve(scores, fl.Tsallis(alpha))
        assert (solution.weights.double().sum(-1) - 1).abs().max() <= 1e3 * torch.finfo(dtype).eps
        assert (solution.gap <= gap_tolerance(dtype)).all()


@pytest.mark.parametrize("alpha", [10.0, 20.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_very_large_alpha(dtype, alpha):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(400, 6, dtype=dtype, generator=generator)
    leaf = scores.requires_grad_()
    solution = fl.solve(leaf, fl.Tsallis(alpha))
    assert (solution.weights.sum(-1) - 1).abs().max() <= 64 * torch.finfo(dtype).eps
    assert (solution.gap <= gap_tolerance(dtype)).all()
    if alpha < 50:  # there slopes of 1e96 cancel, and nothing is left of a derivative
        (gradient,) = torch.autograd.grad((solution.weights**2).sum(), leaf)
        assert gradient.isfinite().all()


def test_a_threshold_that_no_float_holds_is_said():
    """Five ties at alpha = 1000: the threshold lies 5^-999 below them."""
    solution = fl.solve(torch.zeros(5, dtype=torch.float64), fl.Tsallis(1000.0))
    assert solution.status == fl.Status.MAX_STEPS
    assert solution.gap > 1e-3
    assert "alpha" in solution.explain()


def test_masses_wider_than_the_scores_keep_their_range():
    base = torch.tensor([1e-50, 3e-50], dtype=torch.float64)
    solution = fl.solve(torch.zeros(2), fl.Shannon(), base=base)
    assert solution.weights.dtype == torch.float32
    assert (solution.weights - torch.tensor([0.25, 0.75])).abs().max() <= 1e-7


def test_a_tensor_alpha_is_subtracted_in_its_own_precision():
    alpha = 1 + 1e-9
    number = fl.solve(SCORES.float(), fl.Tsallis(alpha)).threshold
    tensor = fl.solve(
        SCORES.float(), fl.Tsallis(torch.tensor(alpha, dtype=torch.float64))
    ).threshold
    assert (number - tensor).abs().max() <= 1e-6 * number.abs().max()
    assert (fl.solve(SCORES.float(), fl.Norm(1 + 1e-6)).status == fl.Status.OK).all()


def test_default_dtype_does_not_leak():
    torch.set_default_dtype(torch.float64)
    try:
        for make in FAMILIES.values():
            solution = fl.solve(SCORES.float(), make())
            assert solution.threshold.dtype == solution.potential.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_fused_on_long_and_even_rows_ends():
    for scores, strength in (
        (torch.linspace(0, 1, 1000), 1000.0),
        (torch.linspace(0, 60, 10_000).sin(), 10.0),
        (torch.randn(1, 20_000).cumsum(-1).double(), 10.0),
    ):
        solution = fl.solve(scores, fl.Fused(strength))
        assert (solution.status == fl.Status.OK).all()
        assert (solution.gap <= 1e-9).all()


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.5, 2.0, 5.0])
@pytest.mark.parametrize(("dtype", "span"), [(torch.float32, 1e4), (torch.float64, 1e30)])
def test_masses_of_very_different_size(dtype, span, alpha):
    base = torch.tensor([1 / span, 1.0, span, 0.0], dtype=dtype)
    # 0.9: at 1 the light key alone would carry exactly everything, a tie at the edge.
    solution = fl.solve(0.9 * SCORES.to(dtype), fl.Tsallis(alpha), base=base)
    assert (solution.weights.sum(-1) - 1).abs().max() <= 32 * torch.finfo(dtype).eps
    assert (solution.gap <= gap_tolerance(dtype)).all()


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.5, 2.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_an_even_base_of_extreme_size_only_sets_the_temperature(dtype, alpha):
    limits = torch.finfo(dtype)
    tiny = fl.solve(
        SCORES.to(dtype), fl.Tsallis(alpha), base=torch.full((4,), limits.tiny, dtype=dtype)
    )
    huge = fl.solve(
        SCORES.to(dtype), fl.Tsallis(alpha), base=torch.full((4,), limits.max / 8, dtype=dtype)
    )
    for solution in (tiny, huge):
        assert (solution.weights.sum(-1) - 1).abs().max() <= 64 * limits.eps
    if alpha >= 1.5:  # tau c^(1 - alpha): nearly infinite, nearly zero
        assert (tiny.weights - 0.25).abs().max() <= 1e-6
        assert (
            huge.weights - fl.solve(SCORES.to(dtype), fl.Shannon(1e-6)).weights
        ).abs().max() <= 1e-6


@pytest.mark.parametrize(("alpha", "log_mass"), [(2.0, 60.0), (1.5, 100.0), (2.0, 80.0)])
def test_a_light_key_may_win_against_a_mountain_of_mass(alpha, log_mass):
    """By hand for alpha = 2: p2 = 3 - t = 1 leaves nothing for the other, whatever its mass."""
    scores = torch.tensor([0.0, 3.0])
    prior = fl.priors.Preference(torch.tensor([log_mass, 0.0]))
    solution = fl.solve(scores, fl.Tsallis(alpha), base=prior)
    assert solution.status == fl.Status.OK
    assert solution.weights.tolist() == [0, 1]
    assert solution.gap <= 1e-9


def test_a_base_beyond_float64_is_said_and_not_certified():
    base = torch.tensor([1e66, 1.0], dtype=torch.float64)
    solution = fl.solve(torch.tensor([0.0, 3.0]).double(), fl.Tsallis(4.0), base=base)
    assert solution.status == fl.Status.MAX_STEPS
    assert solution.gap == torch.inf


@pytest.mark.parametrize("tau", [1e-25, 1e25])
def test_a_temperature_of_extreme_size_is_a_unit(tau):
    scaled = fl.solve(torch.tensor([0.0, -0.3]) * tau, fl.Tsallis(1.5, tau)).weights
    assert (scaled - fl.entmax(torch.tensor([0.0, -0.3]), 1.5)).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("alpha", "scores", "utility", "slope"),
    [
        (8.0, (0.0, -0.14, -0.1425), (0.3, 1.1, 0.7), 0.81397),
        (12.0, (0.0, -0.085, -0.09), (0.3, 0.7, 1.1), 0.4252),
        (21.0, (0.0, -0.0409), (1.0, 3.0), 2.42),
    ],
)
def test_steep_keys_answer_for_the_constraint(alpha, scores, utility, slope):
    """Slopes from 400 digits; a key whose own slope is 1e20 must not lose what the other gains."""
    leaf = torch.tensor([scores], dtype=torch.float64, requires_grad=True)
    direction = torch.tensor([utility], dtype=torch.float64)
    expected = torch.tensor([[-slope, slope, 0.0]])[:, : len(scores)]
    solution = fl.solve(leaf, fl.Tsallis(alpha))
    (gradient,) = torch.autograd.grad((solution.weights * direction).sum(), leaf)
    assert (gradient - expected).abs().max() <= 5e-3
    assert (solution.gradient(direction) - expected).abs().max() <= 5e-3
    assert gradient.sum().abs() <= 1e-6
    # Where alpha cannot be read, float32 rows must be as good.
    narrow = leaf.detach().float()
    mapped = torch.func.vmap(
        torch.func.grad(lambda s, a: (fl.entmax(s, a) * direction[0].float()).sum())
    )(narrow, torch.tensor([alpha]))
    assert (mapped - expected).abs().max() <= 0.02 * slope


def test_escort_of_steep_rows_in_float32():
    escort = fl.solve(torch.zeros(200), fl.Tsallis(20.0)).escort()
    assert (escort - 1 / 200).abs().max() <= 1e-6
