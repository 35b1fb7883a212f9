"""Layers with a Lipschitz bound, of weights and inputs that no one would choose: factors that
cancel, numbers near the ends of float32, zeros, second derivatives, old state dicts."""

import math

import pytest
import torch

from fenchel import bounds
from fenchel.bounds import modules as formulas
from fenchel.nn.lipschitz import DotForm, GaussianForm, LipschitzAttention, LipschitzFeedForward
from fenchel.nn.universal import UniversalTransformer

FORMS = [GaussianForm(), DotForm(2.0)]
by_form = pytest.mark.parametrize("form", FORMS, ids=["gaussian", "dot"])


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(form, constant=0.9, scale=1.0, **options):
    torch.manual_seed(0)
    layer = LipschitzAttention(8, 2, constant, form=form, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "temperature" not in name:
                parameter.mul_(scale)
    return layer


def cancelling(value, output, constant, radius=1.0, dtype=torch.float32):
    """Y = O V x: no scores, and an O that takes away what V gives."""
    layer = LipschitzAttention(2, 1, constant, form=DotForm(radius), bias=False).to(dtype)
    zero = torch.zeros(2, 2)
    state = {"output": output, "heads.query": zero, "heads.key": zero, "heads.value": value}
    layer.load_state_dict(state)
    return layer


# ---- bounds


VALUE = torch.tensor([[7461.19091796875, 6194.0029296875], [7461.19140625, 6194.00390625]])
OUTPUT = torch.tensor(
    [[6984.89501953125, -6984.89501953125], [1905.927490234375, -1905.927490234375]]
)


def test_factors_that_cancel_do_not_hide_the_constant():
    layer = cancelling(VALUE, OUTPUT, 0.9)
    bound = layer.bound(2)
    assert bound.value == 0.9
    result = bounds.attack(bound, budget=300)
    assert result.holds
    assert result.observed > 0
    raw = float(layer.heads.bound(layer.output.detach(), [1]).detach())
    true = float(torch.linalg.matrix_norm(OUTPUT.double() @ VALUE.double(), 2))
    assert true <= raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_norms_are_never_below_the_product_in_exact_arithmetic(dtype):
    from fractions import Fraction

    generator = torch.Generator().manual_seed(0)
    for shift in (12, 20, 24, 44, 52):
        for _ in range(10):
            w, e, u = torch.randn(3, 2, generator=generator, dtype=torch.float64)
            left = 1024 * torch.stack([u, -u], 1).to(dtype)
            right = 1024 * torch.stack([w, w + e * 2.0**-shift]).to(dtype)
            exact = [
                [
                    sum(Fraction(float(left[i, k])) * Fraction(float(right[k, j])) for k in (0, 1))
                    for j in (0, 1)
                ]
                for i in (0, 1)
            ]
            true = torch.tensor([[float(x) for x in row] for row in exact], dtype=torch.float64)
            size = float(torch.linalg.matrix_norm(true, 2))
            eps = torch.finfo(dtype).eps
            actual = float(formulas._product_spectral(left, right, eps))
            assert actual >= size
            most = 32 * eps * float(torch.linalg.matrix_norm(left, 2))
            assert actual <= size + most * float(torch.linalg.matrix_norm(right, 2))


@by_form
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e10, 1e20, 1e30])
def test_weights_of_any_size(form, scale):
    layer = make(form, scale=scale, bias=False)
    x = draw(2, 5, 8)
    bound = layer.bound(5)
    assert 0 < bound.value <= 0.9
    result = bounds.attack(bound, budget=300)
    assert result.holds
    assert 0 < result.ratio <= 1
    output = layer(x)
    assert output.isfinite().all()
    wide = make(form, scale=scale, bias=False).double()(x.double())
    torch.testing.assert_close(output.double(), wide, rtol=1e-3, atol=1e-44)


@by_form
@pytest.mark.parametrize("scale", [1e-30, 1e10, 1e19, 1e30, 1e38])
def test_inputs_of_any_size(form, scale):
    layer = make(form)
    x = (draw(2, 5, 8).clamp(-3, 3) * scale).requires_grad_()
    output = layer(x)
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for n, p in layer.named_parameters() if "temp" not in n)
    wide = make(form).double()(x.detach().double())
    torch.testing.assert_close(output.double(), wide, rtol=1e-3, atol=1e-5 * min(scale, 2))


@by_form
def test_masks_with_large_inputs(form):
    layer = make(form)
    x = draw(2, 5, 8) * 1e25
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    output = layer(x, mask)
    # Digits count from the size of the outputs: one may be a small difference of large ones.
    torch.testing.assert_close(output[1:, :3] / 1e25, layer(x[1:, :3]) / 1e25)
    assert not output[1, 3:].any()


@by_form
def test_weights_that_are_no_numbers(form):
    layer = make(form)
    with torch.no_grad():
        layer.output[0, 0] = math.nan
    with pytest.raises(ValueError, match="weights of the layer must be finite"):
        layer(draw(1, 3, 8))
    large = make(form).double()
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.mul_(1e200)
    with pytest.raises(ValueError, match="norms of the layer's weights overflow float64"):
        large(draw(1, 3, 8).double())


@pytest.mark.parametrize("value", [1e-30, 1e-15, 1e15, 1e20, 1e30])
def test_the_whole_range_of_the_settings_works(value):
    layers = [
        LipschitzAttention(8, 2, value, form=FORMS[1]),
        LipschitzAttention(8, 2, value),
        LipschitzAttention(8, 2, form=DotForm(value)),
        LipschitzAttention(8, 2, form=GaussianForm(value)),
        LipschitzFeedForward(8, constant=value),
    ]
    for layer in layers:
        x = draw(2, 3, 8).requires_grad_()
        output = layer(x)
        output.sum().backward()
        assert output.isfinite().all()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        assert 0 < layer.bound(3).value <= layer.constant


def test_settings_out_of_range_are_refused():
    for make_one in (
        lambda: GaussianForm(1e-300),
        lambda: DotForm(1e200),
        lambda: LipschitzAttention(8, 2, 1e300),
        lambda: LipschitzFeedForward(8, constant=1e-320),
    ):
        with pytest.raises(ValueError, match=r"must be within 1e-30 and 1e\+30"):
            make_one()


# ---- derivatives


@pytest.mark.parametrize("name", ["output", "heads.value", "heads.query", "heads.key"])
@pytest.mark.parametrize("constant", [0.9, 100.0])
def test_slopes_where_a_matrix_is_zero(name, constant):
    layer = make(FORMS[1], constant)
    with torch.no_grad():
        layer.get_parameter(name).zero_()
    layer(draw(2, 5, 8)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@by_form
@pytest.mark.parametrize("constant", [0.3, 100.0])
def test_second_derivatives(form, constant):
    torch.manual_seed(0)
    layer = LipschitzAttention(4, 2, constant, form=form).double()
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [0.5 * draw(1, 3, 4).double(), *(p.detach().clone() for p in layer.parameters())]
    assert torch.autograd.gradgradcheck(function, [x.requires_grad_() for x in inputs])


def test_norms_and_their_derivatives_where_singular_values_are_equal_or_zero():
    eye = torch.eye(3, dtype=torch.float64, requires_grad=True)
    norm = formulas._spectral(eye)
    (slope,) = torch.autograd.grad(norm, eye, create_graph=True)
    assert float(norm.detach()) == pytest.approx(1.0, rel=1e-14)
    assert float(slope.detach().diagonal().sum()) == pytest.approx(1.0)  # some u u'
    zero = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(formulas._spectral(zero), zero, create_graph=True)
    assert not slope.any()
    low = draw(5, 1).double() @ draw(1, 5, seed=1).double()  # rank one
    function = formulas._spectral
    assert torch.autograd.gradgradcheck(function, [low.requires_grad_()])
    for shape in ((3, 7), (7, 3), (2, 4, 4)):
        matrix = draw(*shape).double().requires_grad_()
        torch.testing.assert_close(function(matrix), torch.linalg.matrix_norm(matrix, 2))
        assert torch.autograd.gradgradcheck(function, [matrix])


# ---- state


def test_state_dicts_without_the_numbers_load():
    attention, forward = LipschitzAttention(8, 2, 0.7), LipschitzFeedForward(8, constant=0.9)
    layer = torch.nn.Sequential(UniversalTransformer(attention, forward))
    bare = {k: v for k, v in layer.state_dict().items() if not k.endswith("_extra_state")}
    assert len(bare) == len(layer.state_dict()) - 3
    assert layer.load_state_dict(bare).missing_keys == []
    del bare["0.attention.output"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.attention\.output"):
        layer.load_state_dict(bare)
