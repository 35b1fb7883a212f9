"""The norm of a Jacobian at a point, against dense matrices."""

import math

import pytest
import torch

from fenchel.bounds import gaussian_attention_lipschitz, local_lipschitz
from tests.bounds.draws import F64, generator, normal


def attention(d, tau, seed=0):
    q, k, v = (normal(d, d, seed=seed + s) / math.sqrt(d) for s in range(3))
    return lambda x: ((x @ q.mT) @ (x @ k.mT).mT / tau).softmax(-1) @ (x @ v.mT)


def dense(function, x):
    jacobian = torch.func.jacrev(function)(x)
    return jacobian.reshape(-1, x.numel())


MATRIX = normal(3, 3)
FUNCTIONS = {
    "attention": attention(3, 0.5),
    "sine": lambda x: (x @ MATRIX).sin() * x,
    "wider": lambda x: torch.cat([x, x.square(), x.exp()], -1),
    "sum": lambda x: x.square().sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_l2_is_the_largest_singular_value(name, seed):
    x = normal(4, 3, seed=seed)
    constant = local_lipschitz(FUNCTIONS[name], x)
    matrix = dense(FUNCTIONS[name], x)
    known = float(torch.linalg.matrix_norm(matrix, 2))
    assert constant.value == pytest.approx(known, rel=1e-8)
    assert constant.error <= 1e-9 * known
    # the direction is the one that is stretched so much
    direction = constant.direction.flatten()
    assert float(direction.norm()) == pytest.approx(1)
    assert float((matrix @ direction).norm()) == pytest.approx(known, rel=1e-8)


@pytest.mark.parametrize("products", [2, 4, 6, 10])
def test_the_error_is_a_distance_to_a_singular_value(products):
    for seed in range(10):
        matrix = normal(12, 9, seed=seed)
        constant = local_lipschitz(
            lambda x, m=matrix: m @ x, normal(9), max_products=products, tolerance=1e-15
        )
        assert constant.products <= products
        near = (torch.linalg.svdvals(matrix) - constant.value).abs().min()
        assert float(near) <= constant.error + 1e-12
        # never above the norm: it is that of a compression
        assert constant.value <= float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-12)


@pytest.mark.parametrize("tau", [8.0, 1.0])
def test_forty_products_are_enough_for_512_tokens(tau):
    function, x = attention(16, tau), normal(512, 16, seed=5)
    quick = local_lipschitz(function, x, max_products=40)
    sure = local_lipschitz(function, x, tolerance=1e-14, generator=generator(3))
    assert quick.products <= 40
    assert quick.value == pytest.approx(sure.value, rel=1e-6)
    assert quick.error <= 1e-6 * quick.value


@pytest.mark.parametrize("norm", [1.0, math.inf])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_l1_and_inf_are_column_and_row_sums(norm, name):
    x = normal(4, 3, seed=1)
    constant = local_lipschitz(FUNCTIONS[name], x, norm=norm)
    matrix = dense(FUNCTIONS[name], x)
    known = float(torch.linalg.matrix_norm(matrix, norm))
    assert constant.value == pytest.approx(known, rel=1e-13)
    assert constant.error == 0
    stretched = torch.linalg.vector_norm(matrix @ constant.direction.flatten(), norm)
    assert float(stretched) == pytest.approx(known, rel=1e-13)


@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_sums_in_several_blocks(norm, monkeypatch):
    from fenchel.bounds import local

    x = normal(4, 3, seed=1)
    whole = local_lipschitz(FUNCTIONS["sine"], x, norm=norm)
    monkeypatch.setattr(local, "_COLUMNS", 30)
    parts = local_lipschitz(FUNCTIONS["sine"], x, norm=norm)
    assert parts.value == whole.value
    assert parts.direction.equal(whole.direction)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (30, 5)])
def test_rank_deficient(rank, shape):
    matrix = normal(shape[0], rank) @ normal(rank, shape[1], seed=1)
    constant = local_lipschitz(lambda x: matrix @ x, torch.zeros(shape[1], dtype=F64))
    assert constant.value == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-10)
    assert constant.error <= 1e-9 * constant.value


def test_equal_singular_values():
    constant = local_lipschitz(lambda x: 3 * x, normal(50))
    assert constant.value == pytest.approx(3)
    assert constant.products == 2


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_zero_functions(norm):
    for function in (lambda x: 0 * x, lambda x: torch.zeros(3, dtype=F64)):
        constant = local_lipschitz(function, normal(4), norm=norm)
        assert (constant.value, constant.error) == (0, 0)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_one_number(norm):
    constant = local_lipschitz(lambda x: x**3, torch.tensor(2.0, dtype=F64), norm=norm)
    assert constant.value == pytest.approx(12)
    assert constant.error <= 1e-12
    assert constant.direction.shape == ()
    assert abs(float(constant.direction)) == pytest.approx(1)


def test_another_start_finds_the_same():
    function, x = attention(4, 0.5), normal(6, 4)
    values = [local_lipschitz(function, x, generator=generator(s)).value for s in range(4)]
    assert max(values) == pytest.approx(min(values), rel=1e-9)


def test_float32():
    function, x = attention(3, 0.5), normal(4, 3)
    single = local_lipschitz(lambda x: function(x.double()).float(), x.float())
    assert single.direction.dtype == torch.float32
    assert single.value == pytest.approx(local_lipschitz(function, x).value, rel=1e-5)


def test_every_bound_exceeds_it():
    bound = gaussian_attention_lipschitz(torch.eye(2), torch.eye(2), 5)
    assert local_lipschitz(bound.trials.map.function, normal(5, 2)).value <= bound.value


def test_bad_input():
    x = normal(3)
    with pytest.raises(TypeError, match="x must be a tensor"):
        local_lipschitz(torch.sin, 1.0)
    with pytest.raises(ValueError, match="x must be floating point and not empty"):
        local_lipschitz(torch.sin, torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="not empty"):
        local_lipschitz(torch.sin, x[:0])
    with pytest.raises(ValueError, match="norm must be 1, 2 or inf, got 3"):
        local_lipschitz(torch.sin, x, norm=3)
    for tolerance in (0.0, 1.0):
        with pytest.raises(ValueError, match="tolerance must be between 0 and 1"):
            local_lipschitz(torch.sin, x, tolerance=tolerance)
    with pytest.raises(ValueError, match="max_products must be >= 2, got 1"):
        local_lipschitz(torch.sin, x, max_products=1)


def test_torchs_own_attention_has_a_local_constant():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(5, 8, dtype=torch.float64)

    def function(z):
        return layer(z.unsqueeze(0))[0]

    jacobian = torch.autograd.functional.jacobian(function, x).reshape(40, 40)
    expected = float(torch.linalg.matrix_norm(jacobian, 2))
    constant = local_lipschitz(function, x)
    assert abs(constant.value - expected) <= 1e-8 * expected
    assert not constant.direction.requires_grad


@pytest.mark.parametrize("norm", [1, math.inf])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("tolerance", 1e-3), ("max_products", 9), ("generator", generator(1))],
    ids=["tolerance", "max_products", "generator"],
)
def test_a_sum_takes_no_settings_of_a_search(norm, setting, value):
    with pytest.raises(ValueError, match=f"{setting} belong to the search for norm 2"):
        local_lipschitz(torch.sin, normal(3), norm, **{setting: value})
