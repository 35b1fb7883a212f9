"""What a bound says of one pair, what composes, and what is refused."""

import math

import pytest
import torch

from fenchel.bounds import (
    Ball,
    Box,
    Everywhere,
    Head,
    LongestToken,
    VectorMap,
    attack,
    compose,
    contraction,
    encoder_layer_lipschitz,
    feed_forward_lipschitz,
    gaussian_attention_lipschitz,
    heads_of,
    query_lipschitz,
    self_attention_lipschitz,
    stack_lipschitz,
    token_map_lipschitz,
)
from fenchel.bounds.maps import MapTrials
from fenchel.bounds.norms import length, top_direction, top_functional
from fenchel.measures import Dot
from tests.bounds.draws import F64, generator, normal, shrunk

TWO = torch.tensor([[0.0], [1.0]], dtype=F64)


def linear(matrix, domain=None, tokens=1):
    matrix = torch.as_tensor(matrix, dtype=F64)
    return feed_forward_lipschitz(
        [matrix], [None], torch.nn.Identity(), tokens, domain or Everywhere()
    )


# ---- one pair


def test_check_reports_quotient_ratio_and_verdict():
    # sigmoid: slope 1/4 at zero, which is the bound
    near = torch.full((1,), 1e-4, dtype=torch.float64)
    actual = query_lipschitz(TWO, TWO).check(-near, near)
    assert actual.quotient == pytest.approx(0.25, rel=1e-8)
    assert actual.ratio == pytest.approx(1, rel=1e-8)
    assert actual.holds


def test_check_fails_a_bound_that_is_too_small():
    near = torch.full((1,), 1e-4, dtype=torch.float64)
    actual = shrunk(query_lipschitz(TWO, TWO)).check(-near, near)
    assert actual.ratio == pytest.approx(1 / 0.9)
    assert not actual.holds


def test_check_uses_the_secant_where_it_is_steeper_than_the_tangent():
    # at 4 the sigmoid is flat, towards 0 it is not
    quotient = query_lipschitz(TWO, TWO).check(torch.tensor([4.0]), torch.tensor([0.0])).quotient
    sigmoid = torch.tensor([0.0, 4.0], dtype=F64).sigmoid()
    assert quotient == pytest.approx(float(sigmoid[1] - sigmoid[0]) / 4)
    tangent = float(sigmoid[1] * (1 - sigmoid[1]))
    assert quotient > 5 * tangent


def test_check_of_a_zero_bound():
    still = token_map_lipschitz("still", 0.0, VectorMap(lambda x: 0 * x + 3, (1, 2), Everywhere()))
    assert still.check(torch.zeros(1, 2), torch.ones(1, 2)).ratio == 0
    moving = token_map_lipschitz("moving", 0.0, VectorMap(lambda x: x, (1, 2), Everywhere()))
    actual = moving.check(torch.zeros(1, 2), torch.ones(1, 2))
    assert actual.ratio == math.inf
    assert not actual.holds


def test_equal_inputs_have_the_quotient_zero():
    assert query_lipschitz(TWO, TWO).check(torch.ones(1), torch.ones(1)).quotient == 0


def test_check_refuses_inputs_that_the_bound_is_not_for():
    eye = torch.eye(2)
    inside = self_attention_lipschitz(Head(eye, eye, eye, 1.0), 3, radius=1.0)
    x = torch.full((3, 2), 0.5)
    assert inside.check(x, -x).holds
    for pair in ((4 * x, x), (x, 4 * x)):
        with pytest.raises(ValueError, match="outside of what the bound is for: tokens within 1"):
            inside.check(*pair)


def test_words():
    said = str(query_lipschitz(TWO, TWO))
    assert said.startswith("query to output: at most 0.25 in norm 2.0, given all inputs")


# ---- lengths, and the directions of the power method


def test_lengths():
    x = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]], dtype=F64)
    actual = {norm: float(length(x, norm, 2)) for norm in (1.0, 2.0, math.inf, LongestToken())}
    assert actual == {
        1.0: 8.0,
        2.0: pytest.approx(math.sqrt(26)),
        math.inf: 4.0,
        LongestToken(): 5.0,
    }
    assert length(x, LongestToken(), 1).tolist() == [[5.0, 1.0]]


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf, LongestToken()])
def test_functionals_and_directions_attain_the_dual_norm(norm):
    """Both are extremal in Hoelder's inequality for the norm and its dual."""
    image = normal(5, 3, 2, seed=1)
    a = top_functional(image, norm)
    dual = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}
    size = a.norm(dim=-1).sum(-1) if norm == LongestToken() else length(a, dual[norm], 2)
    torch.testing.assert_close((a * image).sum((-2, -1)), size * length(image, norm, 2))
    b = top_direction(image, norm)
    size = image.norm(dim=-1).sum(-1) if norm == LongestToken() else length(image, dual[norm], 2)
    torch.testing.assert_close((b * image).sum((-2, -1)), size * length(b, norm, 2))


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_aim_finds_the_norm_of_a_matrix(norm):
    matrix = normal(4, 3, seed=2)
    trials = MapTrials(VectorMap(lambda x: x @ matrix.mT, (3,), Everywhere(), norm))
    state = trials.sample(8, generator(0))
    for _ in range(60):
        state = trials.aim(state)
    known = torch.linalg.matrix_norm(matrix, 2 if norm == 2 else norm)
    assert float(trials.quotient(state).max()) == pytest.approx(float(known), rel=1e-9)


def test_aim_keeps_a_direction_where_nothing_is_stretched():
    trials = MapTrials(VectorMap(lambda x: 0 * x, (3,), Everywhere()))
    x, y = normal(4, 3, seed=1), 1e12 * normal(4, 3, seed=2)
    assert trials.aim((x, y))[1].equal(y)


# ---- domains


@pytest.mark.parametrize("domain", [Ball(0.7), Box(0.7), Ball(0.7, torch.ones(3, dtype=F64))])
def test_samples_and_projections_lie_inside_and_are_nearest(domain):
    shape = torch.Size((4, 3))
    x = domain.sample(200, shape, 1.0, generator(0))
    assert torch.allclose(domain.project(x), x, atol=1e-14)
    far = 5 * normal(200, 4, 3, seed=1)
    near = domain.project(far)
    assert torch.allclose(domain.project(near), near, atol=1e-14)
    # the nearest point of a convex set: <far - near, x - near> <= 0 for every x of it
    assert float(((far - near) * (x - near)).sum(-1).max()) <= 1e-12


@pytest.mark.parametrize("radius", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("kind", [Ball, Box])
def test_a_radius_is_positive_and_finite(kind, radius):
    with pytest.raises(ValueError, match="radius must be finite and > 0"):
        kind(radius)


# ---- composition


def test_the_bound_of_a_composition_is_the_product():
    bound = compose(linear([[2.0]], Ball(1.0)), linear([[3.0]], Ball(2.0)))
    assert bound.value == pytest.approx(6)
    assert bound.trials.map.reach == pytest.approx(6)
    assert bound.name == "feed-forward after feed-forward"
    assert attack(bound, 200).ratio == pytest.approx(1)
    assert not attack(shrunk(bound), 200).holds


def test_zero_times_infinity_is_zero():
    still = token_map_lipschitz("still", 0.0, VectorMap(lambda x: 0 * x, (1, 1), Everywhere()))
    steep = token_map_lipschitz("steep", math.inf, VectorMap(lambda x: x**3, (1, 1), Everywhere()))
    assert compose(still, steep).value == 0
    assert attack(compose(still, steep), 100).ratio == 0


def test_compose_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"do not fit the second's inputs: \(1, 2\) and \(1, 1\)"):
        compose(linear([[1.0], [1.0]]), linear([[1.0]]))


def test_compose_refuses_two_norms():
    other = feed_forward_lipschitz(
        [torch.eye(1)], [None], torch.nn.Identity(), 1, Everywhere(), norm=LongestToken()
    )
    with pytest.raises(ValueError, match=r"same norm, got 2\.0 and max"):
        compose(linear([[1.0]]), other)


@pytest.mark.parametrize("domain", [Ball(1.0), Box(1.0)])
def test_compose_refuses_what_leaves_the_second_domain(domain):
    """x^2 has slope 2 on the unit ball or box, and more where the first map leads."""
    square = token_map_lipschitz("square", 2.0, VectorMap(lambda x: x**2, (1, 1), domain))
    assert compose(linear([[1.0]], Ball(1.0)), square).value == pytest.approx(2)
    for first in (linear([[10.0]], Ball(1.0)), linear([[0.1]])):
        with pytest.raises(ValueError, match="bound the second where they lie"):
            compose(first, square)


def test_compose_measures_from_the_centre_of_the_second_ball():
    """Small outputs around zero are far from a ball around 5: seen once as a ratio of 2.2."""
    keys = torch.tensor([[0.0], [8.0]])
    there = query_lipschitz(keys, keys, around=torch.tensor([5.0]), radius=0.1)
    first = query_lipschitz(0.1 * (TWO - 0.5), 0.1 * (TWO - 0.5))
    with pytest.raises(ValueError, match="of a point"):
        compose(first, there)
    wide = query_lipschitz(keys, keys, around=torch.tensor([0.1]), radius=0.2)
    assert attack(compose(first, wide), 500).holds


def test_compose_is_for_maps_of_vectors():
    measures = contraction.projection(contraction.Setting(Dot(), Ball(1.0), 1))
    with pytest.raises(TypeError, match="then must bound a map of vectors, got moment proj"):
        compose(linear([[1.0]]), measures)
    with pytest.raises(TypeError, match="first must bound"):
        compose(measures, linear([[1.0]]))


def test_assumptions_are_those_of_both_without_the_domain_that_was_proven():
    bound = compose(linear([[2.0]], Ball(1.0)), linear([[3.0]], Ball(2.0)))
    assert bound.assumptions == ("tokens within 1", "1 tokens")


def test_a_check_says_what_it_takes():
    bound = gaussian_attention_lipschitz(torch.eye(4), torch.eye(4), 8)
    with pytest.raises(TypeError, match=r"check takes 2 tensors \(x, y\), got 1"):
        bound.check(torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"inputs of shape \(8, 4\), got \(3, 4\)"):
        bound.check(torch.zeros(3, 4), torch.ones(3, 4))


def test_the_quotient_of_a_check_is_that_of_the_pair():
    torch.manual_seed(0)
    keys, values = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    bound = query_lipschitz(keys, values)
    x, y = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    apart = (x @ keys.mT).softmax(-1) @ values - (y @ keys.mT).softmax(-1) @ values
    expected = float(apart.norm() / 3**0.5)
    assert bound.check(x, y).quotient == pytest.approx(expected, rel=1e-12)
    assert bound.check(y, x).quotient == pytest.approx(expected, rel=1e-12)


def test_a_layer_in_training_is_refused():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(ValueError, match=r"layer.eval\(\)"):
        encoder_layer_lipschitz(layer, 4, 1.0)


def test_modules_are_pointed_the_way():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(TypeError, match="heads_of"):
        self_attention_lipschitz(layer.self_attn, 4, 1.0)
    with pytest.raises(TypeError, match=r"encoder.layers"):
        stack_lipschitz(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 4, 1.0)
    with pytest.raises(TypeError, match="MultiheadAttention"):
        heads_of(layer)
