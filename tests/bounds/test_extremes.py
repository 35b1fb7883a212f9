"""Numbers at the ends of their range: bounds that are true, or a message, never zero."""

import math

import pytest
import torch
from torch.nn import ReLU

from fenchel import bounds
from fenchel.measures import Dot
from fenchel.regularizers import Shannon, Tsallis
from papers.studies.campaign import Draw, query_softmax
from tests.bounds.draws import F64, normal


@pytest.mark.parametrize("regularizer", [Shannon, lambda t: Tsallis(1.5, t)])
@pytest.mark.parametrize("power", [-200, -100, 0, 100, 200])
def test_the_bound_of_a_query_scales(regularizer, power):
    """Keys and temperature by one factor change nothing; values do, in proportion."""
    keys, values = normal(6, 3), normal(6, 2, seed=1)
    plain = bounds.query_bound(keys, values, regularizer(0.5))
    scale = 10.0**power
    moved = bounds.query_bound(scale * keys, values, regularizer(0.5 * scale))
    torch.testing.assert_close(moved, plain, rtol=1e-12, atol=0)
    if abs(power) <= 100:
        other = bounds.query_bound(keys, scale * values, regularizer(0.5))
        torch.testing.assert_close(other, scale * plain, rtol=1e-12, atol=0)


def test_an_underflow_is_not_zero():
    keys, values = 1e-200 * normal(5, 2), 1e-200 * normal(5, 2, seed=1)
    bound = bounds.query_lipschitz(keys, values, Shannon(1e-300))
    assert 0 < bound.value < 1e-90
    values = torch.tensor([[1e-162, 1e-162], [0, 0], [0, 0], [0, 0]], dtype=F64)
    dropped = bounds.perturbation.dropped(torch.zeros(4, dtype=F64), values, 1).value
    assert dropped == pytest.approx(math.sqrt(2) * 1e-162 / 4, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-250, 1e-200, 1.0, 1e150, 1e250])
def test_a_local_constant_of_any_size(scale):
    x = torch.ones(5, dtype=F64)
    constant = bounds.local_lipschitz(lambda z: scale * z * torch.arange(1.0, 6.0, dtype=F64), x)
    assert constant.value == pytest.approx(5 * scale, rel=1e-9)


def test_what_is_no_number_is_refused():
    eye = torch.eye(2, dtype=F64)
    huge = bounds.Head(1e200 * eye, 1e200 * eye, eye, 1.0)
    with pytest.raises(ValueError, match="scale them down"):
        bounds.self_attention_lipschitz(huge, 4, 1.0)
    same = bounds.VectorMap(lambda x: x, (2, 2), bounds.Everywhere())
    with pytest.raises(ValueError, match=">= 0, got -1"):
        bounds.token_map_lipschitz("x", -1.0, same)
    setting = bounds.Setting(Dot(), bounds.Box(1.0), 2)
    with pytest.raises(ValueError, match="value must be finite"):
        bounds.contraction.attention(setting, torch.full((2, 2), math.nan))
    with pytest.raises(ValueError, match="keys must be finite"):
        bounds.query_bound(torch.full((3, 2), math.nan), torch.zeros(3, 2))


def test_what_is_infinite_is_said_to_be():
    eye = torch.eye(2, dtype=F64)
    head = bounds.Head(eye, eye, eye, 1.0)
    assert bounds.self_attention_lipschitz(head, 4, 1e160).value == math.inf
    setting = bounds.Setting(Dot(), bounds.Box(1e200), 2)
    assert bounds.contraction.in_query(setting).value == math.inf


def test_new_tokens_with_any_score_stay_in_the_hull():
    scores, values = torch.zeros(4, dtype=F64), torch.ones(4, 1, dtype=F64)
    bound = bounds.perturbation.added(scores, values, 20_000, largest_score=1e4, radius=3.0)
    assert bound.value == pytest.approx(4.0, rel=1e-9)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_norm_that_gives_zero_has_a_bound(norm_first):
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, norm_first=norm_first, dtype=F64).eval()
    with torch.no_grad():
        layer.norm1.weight.zero_()
        layer.norm1.bias.zero_()
    bound = bounds.encoder_layer_lipschitz(layer, 3, 1.0)
    assert bounds.attack(bound, 300).holds


def test_an_activation_is_known_by_itself_and_not_by_its_name():
    def relu(x):
        return 5 * x

    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, activation=relu, dtype=F64).eval()
    with pytest.raises(ValueError, match="activation must be one of torch's"):
        bounds.encoder_layer_lipschitz(layer, 3, 1.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bounds.attack([1], 5), TypeError, "must be a Bound"),
        (lambda: bounds.attack(query_softmax(Draw(0)), 5, generator=3), TypeError, "Generator"),
        (lambda: bounds.query_bound(torch.eye(2), torch.eye(2), norm=[2]), ValueError, "norm"),
        (lambda: bounds.query_bound(torch.eye(2), torch.eye(2), norm=True), ValueError, "norm"),
        (lambda: bounds.query_bound([[1.0]], torch.eye(1)), TypeError, "keys must be a tensor"),
        (lambda: bounds.query_bound(torch.zeros(0, 2), torch.zeros(0, 2)), ValueError, "empty"),
        (
            lambda: bounds.feed_forward_lipschitz([], [], ReLU(), 2, bounds.Ball(1.0)),
            ValueError,
            "must not be empty",
        ),
        (
            lambda: bounds.feed_forward_lipschitz(
                [torch.zeros(2, 2), torch.zeros(3, 5)], [None, None], ReLU(), 2, bounds.Ball(1.0)
            ),
            ValueError,
            "do not fit",
        ),
        (
            lambda: bounds.feed_forward_lipschitz([torch.eye(2)], [None], ReLU(), 2, 3.0),
            TypeError,
            "domain must be",
        ),
        (
            lambda: bounds.layer_norm_lipschitz(torch.nn.LayerNorm((2, 3)), 2, bounds.Everywhere()),
            ValueError,
            "one axis",
        ),
        (
            lambda: bounds.layer_norm_lipschitz(torch.nn.LayerNorm(2), -2, bounds.Everywhere()),
            ValueError,
            "tokens",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()
