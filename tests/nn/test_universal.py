"""UniversalTransformer: one fixed point where that is proved, no such claim where it is not, and
the derivative of the fixed point against that of the iteration."""

import copy
import doctest
import math

import pytest
import torch

import fenchel.nn as fnn
from fenchel import bounds
from fenchel._solution import Status
from fenchel.nn import lipschitz
from fenchel.nn import universal as module
from fenchel.nn.lipschitz import DotForm, GaussianForm, LipschitzAttention, LipschitzFeedForward
from fenchel.nn.universal import FixedPoint, Iteration, UniversalTransformer

WIDTH, HEADS, BATCH, TOKENS = 6, 2, 3, 5
FORMS = [GaussianForm(), DotForm(2.0)]
by_form = pytest.mark.parametrize("form", FORMS, ids=["gaussian", "dot"])
by_memory = pytest.mark.parametrize("memory", [0, 4])


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(form=FORMS[0], constants=(0.8, 0.9), dtype=torch.float64, mixing=1.0, **solver):
    """A layer in which no parameter is zero."""
    torch.manual_seed(0)
    attention = LipschitzAttention(WIDTH, HEADS, constants[0], form=form)
    feedforward = LipschitzFeedForward(WIDTH, 7, constants[1])
    layer = UniversalTransformer(
        attention, feedforward, mixing=mixing, solver=Iteration(**solver)
    ).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def one_step(layer, x, u):
    """Written out from the parts."""
    a = layer.mixing
    x = (1 - a) * x + a * layer.attention(x)
    return (1 - a) * x + a * layer.feedforward(x) + u


def unrolled(layer, u, steps=300):
    x = u
    for _ in range(steps):
        x = one_step(layer, x, u)
    return x


def steep(slope, **solver):
    """T(X) = sign(slope) tanh(|slope| averages of X): 0 is fixed; for slope > 1 it is not alone."""
    attention = LipschitzAttention(WIDTH, HEADS, 60.0)
    feedforward = LipschitzFeedForward(WIDTH, WIDTH, 60.0)
    eye = torch.eye(WIDTH)
    with torch.no_grad():
        attention.heads.projection.copy_(eye)
        attention.output.copy_(eye)
        feedforward.inner.copy_(abs(slope) * eye)
        feedforward.outer.copy_(eye if slope > 0 else -eye)
    return UniversalTransformer(attention, feedforward, solver=Iteration(**solver)).double()


# ---- the fixed point


@by_form
@by_memory
@pytest.mark.parametrize("mixing", [1.0, 0.6])
def test_one_fixed_point_from_all_starts(form, memory, mixing):
    layer, u = make(form, memory=memory, mixing=mixing), draw(BATCH, TOKENS, WIDTH)
    starts = torch.cat([10 * draw(17, 1, TOKENS, WIDTH, seed=1), torch.zeros(3, 1, TOKENS, WIDTH)])
    ends = []
    for start in starts.to(torch.float64):
        solution = layer.solve(u, start.expand_as(u))
        assert solution.unique
        assert (solution.status == Status.OK).all()
        ends.append(solution.points.detach())
    spread = torch.stack(ends) - ends[0]
    assert spread.abs().max() < 1e-10
    torch.testing.assert_close(one_step(layer, ends[0], u), ends[0], rtol=0, atol=1e-12)
    assert (ends[0][0] - ends[0][1]).abs().max() > 0.1  # and it depends on u


def test_the_error_bound_holds_and_is_not_vacuous():
    exact, rough = make(), make(tolerance=1e-3)
    u = draw(BATCH, TOKENS, WIDTH)
    with torch.no_grad():
        true, solution = exact.solve(u).points, rough.solve(u)
    error = (solution.points - true).flatten(1).norm(dim=-1)
    assert (error > 1e-9).all()
    assert (error <= solution.error).all()
    assert (solution.error <= 20 * error).all()
    assert (solution.residual <= 1e-3 * (math.sqrt(TOKENS * WIDTH) + 100)).all()


def test_without_injection_all_tokens_collapse():
    """Vuckovic et al., 2020, remark 27: to the fixed point of f o ell, the same for every start."""
    layer = make()
    attention = layer.attention
    scale, _ = attention._scale([TOKENS], torch.float64)
    ell = scale * attention.output @ attention.heads.projection  # sum of the heads' O_h W_h
    x = torch.zeros(1, 1, WIDTH, dtype=torch.float64)
    for _ in range(300):
        x = layer.feedforward(x @ ell.T + attention.bias)
    solution = layer.solve(None, 5 * draw(BATCH, TOKENS, WIDTH))
    assert (solution.status == Status.OK).all()
    torch.testing.assert_close(solution.points, x.expand_as(solution.points), rtol=0, atol=1e-12)
    assert x.abs().max() > 0.1


@by_memory
def test_several_fixed_points_are_not_called_unique(memory):
    layer = steep(3.0, memory=memory)
    ones = torch.ones(1, TOKENS, WIDTH, dtype=torch.float64)
    start = torch.cat([ones, -ones])
    with torch.no_grad():
        solution = layer.solve(None, start)
    assert layer.constant(TOKENS) > 1
    assert (solution.status == Status.OK).all()
    torch.testing.assert_close(solution.points[0], -solution.points[1])
    assert solution.points[0].min() > 0.9
    assert not solution.unique
    assert solution.error.isinf().all()


def test_an_iteration_that_goes_on_for_ever_says_so():
    layer = steep(-3.0, max_steps=50)
    start = torch.ones(2, TOKENS, WIDTH, dtype=torch.float64)
    start[1] = 0.0  # where it stands still
    with torch.no_grad():
        solution = layer.solve(None, start)
    assert solution.status.tolist() == [Status.MAX_STEPS, Status.OK]
    assert solution.steps.tolist() == [50, 1]
    assert solution.residual[0] > 1
    assert solution.error.isinf().all()


def test_the_constant_is_that_of_the_block(monkeypatch):
    for form in FORMS:
        for mixing in (1.0, 0.5):
            layer = make(form, mixing=mixing)
            bound = layer.bound(TOKENS)
            expected = (1 - mixing + 0.8 * mixing) * (1 - mixing + 0.9 * mixing)
            assert layer.constant(TOKENS) == pytest.approx(expected)
            assert bound.value == pytest.approx(expected)
            x = draw(BATCH, TOKENS, WIDTH)
            actual = bound.trials.map.function(x)
            torch.testing.assert_close(actual, one_step(layer, x, 0.0))
            result = bounds.attack(bound, budget=2000)
            assert result.holds
            assert result.ratio > 0.02
    monkeypatch.setattr(lipschitz, "shrinking", lambda bounds, constant: 10 / bounds)
    assert not bounds.attack(make().bound(TOKENS), budget=2000).holds


@by_memory
def test_sequences_do_not_know_of_each_other(memory):
    layer, u = make(memory=memory), draw(BATCH, TOKENS, WIDTH)
    u[1] *= 1e3
    together = layer.solve(u)
    for b in range(BATCH):
        alone = layer.solve(u[b : b + 1])
        assert alone.steps == together.steps[b]
        torch.testing.assert_close(alone.points[0], together.points[b], rtol=1e-13, atol=1e-13)
    u[1, 2, 3] = math.nan
    mixed = layer.solve(u)
    assert mixed.status.tolist() == [Status.OK, Status.NONFINITE, Status.OK]
    assert mixed.error.isinf().tolist() == [False, True, False]
    assert not mixed.error.isnan().any()
    assert mixed.points[1].isnan().all()
    assert torch.equal(mixed.points[::2], together.points[::2])


def test_acceleration_needs_fewer_steps_and_falls_back():
    """With a constant near one plain iteration is slow."""
    layer = make(constants=(1.0, 0.98), mixing=0.2, max_steps=3000)
    u = draw(BATCH, TOKENS, WIDTH)
    plain = layer.solve(u)
    layer.solver = Iteration(memory=6, max_steps=3000)
    fast = layer.solve(u)
    assert (fast.status == Status.OK).all()
    assert (2 * fast.steps < plain.steps).all()
    assert (fast.points - plain.points).abs().max() < 1e-9

    def kinked(x):  # slopes 0.9 and -0.9: secants across the kink are misleading
        return 0.9 * (x - 1).abs() * torch.tensor([1.0, -1.0], dtype=torch.float64) + 0.3

    outputs = Iteration(memory=3, max_steps=2000).run(kinked, 5 * draw(50, 2))
    assert (outputs.status == Status.OK).all()
    assert (outputs.points - kinked(outputs.points)).abs().max() < 1e-12


def test_padding():
    layer, u = make(), draw(BATCH, TOKENS, WIDTH)
    padded = torch.cat([u, torch.full_like(u, math.nan)], 1)
    mask = torch.arange(2 * TOKENS).expand(BATCH, -1) >= TOKENS
    solution = layer.solve(padded, key_padding_mask=mask)
    assert (solution.status == Status.OK).all()
    torch.testing.assert_close(solution.points[:, :TOKENS], layer(u), rtol=0, atol=1e-12)
    assert not solution.points[:, TOKENS:].any()


# ---- the derivative


@by_form
@by_memory
def test_the_derivative_is_that_of_the_unrolled_iteration(form, memory):
    layer = make(form, memory=memory, mixing=0.8)
    u = draw(BATCH, TOKENS, WIDTH).requires_grad_()
    weight = 1e-6 * draw(BATCH, TOKENS, WIDTH, seed=3)  # the loss may be small
    expected = [u, *layer.parameters()]
    ours = torch.autograd.grad((layer(u) * weight).sum(), expected)
    theirs = torch.autograd.grad((unrolled(layer, u) * weight).sum(), expected)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-8 * other.abs().max()
    assert all(x.abs().max() > 0 for x in ours)


def test_gradcheck():
    layer = make(mixing=0.8)
    names = [name for name, _ in layer.named_parameters()]

    def function(u, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (u,))

    inputs = [draw(2, 2, WIDTH), *(p.detach().clone() for p in layer.parameters())]
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs], fast_mode=True)


def test_backward_does_not_unroll():
    """What is kept for the derivative does not depend on how many steps were made."""
    layer, u = make(), draw(1, TOKENS, WIDTH)

    def kept(tolerance):
        tensors = []
        layer.solver = Iteration(tolerance=tolerance)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: tensors.append(x) or x, lambda x: x
        ):
            solution = layer.solve(u)
        return len(tensors), int(solution.steps)

    few, many = kept(1e-1), kept(1e-12)
    assert few[0] == many[0]
    assert few[1] < many[1]


def test_a_second_derivative_raises_and_says_what_to_do():
    layer = make()
    u = draw(1, TOKENS, WIDTH).requires_grad_()
    (first,) = torch.autograd.grad(layer(u).sum(), u, create_graph=True)  # of a linear loss
    for expected in (u, next(layer.parameters())):
        with pytest.raises(NotImplementedError, match="unroll the layer"):
            torch.autograd.grad(first.sum(), expected, retain_graph=True)


def test_a_derivative_that_does_not_converge_says_so():
    layer = steep(3.0, max_steps=30)
    u = torch.zeros(BATCH, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    solution = layer.solve(u)  # zero, where the slope is 3
    assert (solution.status == Status.OK).all()
    with pytest.warns(RuntimeWarning, match="did not converge in 30 steps.*raise max_steps"):
        solution.points.sum().backward()


def test_it_trains():
    layer = make(constants=(0.7, 0.9), dtype=torch.float32)
    u = draw(8, TOKENS, WIDTH, dtype=torch.float32)
    target = u.cumsum(-1) / 2
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(u) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    solution = layer.solve(u)
    assert solution.unique
    assert (solution.status == Status.OK).all()


# ---- the rest


def test_shapes_precisions_and_state():
    layer = make(dtype=torch.float32)
    assert layer(torch.zeros(0, TOKENS, WIDTH)).shape == (0, TOKENS, WIDTH)
    assert layer(torch.zeros(2, 1, WIDTH)).shape == (2, 1, WIDTH)
    u = draw(BATCH, TOKENS, WIDTH, dtype=torch.float32)
    other = copy.deepcopy(layer)
    assert torch.equal(other(u), layer(u))
    fresh = UniversalTransformer(
        LipschitzAttention(WIDTH, HEADS, 0.8), LipschitzFeedForward(WIDTH, 7, 0.9)
    )
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(u), layer(u))
    half = copy.deepcopy(layer).bfloat16()
    solution = half.solve(u.bfloat16())
    assert solution.points.dtype == torch.bfloat16
    assert (solution.status == Status.OK).all()
    wide = copy.deepcopy(half).float()(u.bfloat16().float())
    torch.testing.assert_close(solution.points, wide.bfloat16())
    frozen = layer.requires_grad_(False)
    assert not frozen(u).requires_grad
    with torch.no_grad():
        assert not other(u).requires_grad
    assert isinstance(other.solve(u), FixedPoint)
    assert "mixing=1, solver=Iteration(memory=0" in repr(layer)


def test_messages():
    attention, feedforward = LipschitzAttention(WIDTH, HEADS), LipschitzFeedForward(WIDTH)
    with pytest.raises(TypeError, match="must be a LipschitzAttention, got Linear"):
        UniversalTransformer(torch.nn.Linear(2, 2), feedforward)
    with pytest.raises(TypeError, match="must be a LipschitzFeedForward, got Tanh"):
        UniversalTransformer(attention, torch.nn.Tanh())
    with pytest.raises(ValueError, match="the same embed_dim, got 6 and 4"):
        UniversalTransformer(attention, LipschitzFeedForward(4))
    with pytest.raises(ValueError, match=r"mixing must be a number in \(0, 1\], got 0"):
        UniversalTransformer(attention, feedforward, mixing=0)
    with pytest.raises(ValueError, match="tolerance must be finite and > 0, got 0"):
        Iteration(tolerance=0.0)
    with pytest.raises(ValueError, match="max_steps must be >= 1, got 0"):
        Iteration(max_steps=0)
    layer = UniversalTransformer(attention, feedforward)
    with pytest.raises(ValueError, match="give u, the input of every step, or a start"):
        layer.solve(None)
    with pytest.raises(TypeError, match=r"start is torch.float64 and the layer's weights"):
        layer.solve(torch.zeros(1, 2, WIDTH), start=torch.zeros(1, 2, WIDTH, dtype=torch.float64))
    half = UniversalTransformer(attention, feedforward, mixing=0.5)
    with pytest.raises(ValueError, match=r"mixing = 0\.5, this one has 1"):
        layer.load_state_dict(half.state_dict())
    with pytest.raises(ValueError, match=r"same shape, got u \(4, 2, 6\) and start \(3, 2, 6\)"):
        layer.solve(torch.zeros(4, 2, WIDTH), start=torch.zeros(3, 2, WIDTH))
    with pytest.raises(ValueError, match="u and start must have the same shape"):
        layer.solve(torch.zeros(1, 2, WIDTH), torch.zeros(1, 3, WIDTH))
    with pytest.raises(ValueError, match=r"start must be floating point \(batch, n, 6\)"):
        layer.solve(torch.zeros(1, 2, WIDTH), torch.zeros(1, 3, 5))


def test_examples():
    names = {name: getattr(fnn, name) for name in fnn.__all__}
    assert doctest.testmod(module, extraglobs={"torch": torch, **names}).failed == 0
