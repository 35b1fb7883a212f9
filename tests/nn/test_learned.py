"""Where a regulariser is taken, so is a module that makes one; and it learns."""

import inspect

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fenchel as fl
from tests.attention.cases import draw

HEADS, N = 3, 5
Q, K, V = (draw(seed, 2, HEADS, N, 4) for seed in range(3))
SCORES, TOKENS = draw(3, 2, HEADS, N, 6), draw(4, 2, N, 12)
PACKED, STARTS = draw(5, 8, HEADS, 4), torch.tensor([0, 3, 8])  # (token, head, component)
POINTS = draw(6, 2, HEADS, 9, 4)  # (batch, head, position, channel)
AT_POINTS = draw(7, 2, HEADS, 9)


def replaced(omega):
    with fl.replace_sdpa(omega):
        return sdpa(Q, K, V)


def in_layer(make, *inputs):
    """The output of a module that `make` makes, always of the same weights."""
    torch.manual_seed(0)
    output = make().double()(*inputs)
    return getattr(output, "context", output[0] if isinstance(output, tuple) else output)


def filled():
    cache = fl.KeyValueCache(K.shape[0], HEADS, K.shape[3], V.shape[3], dtype=torch.float64)
    cache.append(K, V)
    return cache


def decoded(omega):
    with torch.no_grad():  # nothing is learned while tokens are served
        return fl.decode(Q[:, :, -1:].contiguous(), filled(), omega)


def evictable(omega):
    region = fl.QueryBall(3 * draw(8, HEADS, K.shape[3]), 0.1)
    return torch.stack(filled().evictable(region, omega)).double()


def held(omega):
    layer = fl.nn.MultiheadAttention(12, HEADS, batch_first=True)
    layer.hold(omega)
    return layer


def converted(omega):
    torch.manual_seed(0)
    return fl.nn.convert(torch.nn.MultiheadAttention(12, HEADS, batch_first=True), omega)


def mixture(omega):
    positions, start = fl.continuous.cell_centers(9, dtype=torch.float64), fl.continuous.Regions()
    weights = AT_POINTS[0].softmax(-1)
    options = {"iterations": 3, "start": start, "regularizer": omega}
    return fl.continuous.fit_mixture(weights[:, None], positions, 2, **options).mixing


def from_scores(omega):
    modes = fl.continuous.Gaussian(torch.zeros(6, 1).double(), torch.eye(1).double())
    return fl.continuous.Mixture.from_scores(SCORES, modes, omega).mixing


def continuous(omega, make):
    return in_layer(lambda: make(omega), POINTS[:, :, None], AT_POINTS[:, :, None])


# Everything public that takes a regulariser, but fenchel.hf (tests/hf), if it has a derivative.
LEARNING = {
    "fenchel.attention": lambda omega: fl.attention(Q, K, V, omega),
    "fenchel.fenchel_young_loss": lambda omega: fl.fenchel_young_loss(
        SCORES, SCORES.argmin(-1), omega
    ),
    "fenchel.replace_sdpa": replaced,
    "fenchel.solve": lambda omega: fl.solve(SCORES, omega).weights,
    "fenchel.varlen_attention": lambda omega: fl.varlen_attention(
        PACKED, PACKED, PACKED, STARTS, regularizer=omega
    ),
    "fenchel.nn.MultiheadAttention": lambda omega: in_layer(
        lambda: fl.nn.MultiheadAttention(12, HEADS, batch_first=True, regularizer=omega),
        *[TOKENS] * 3,
    ),
    "fenchel.nn.MultiheadAttention.hold": lambda omega: in_layer(
        lambda: held(omega), *[TOKENS] * 3
    ),
    "fenchel.nn.convert": lambda omega: in_layer(lambda: converted(omega), *[TOKENS] * 3),
    "fenchel.nn.ContinuousAttention1d": lambda omega: continuous(
        omega, lambda o: fl.nn.ContinuousAttention1d(o, functions=8)
    ),
    "fenchel.nn.ContinuousAttention2d": lambda omega: continuous(
        omega, lambda o: fl.nn.ContinuousAttention2d((3, 3), o, functions=9)
    ),
    "fenchel.nn.ContinuousTransformerLayer": lambda omega: in_layer(
        lambda: fl.nn.ContinuousTransformerLayer(12, HEADS, 8, omega), TOKENS
    ),
    "fenchel.continuous.Mixture.from_scores": from_scores,
    "fenchel.continuous.fit_mixture": mixture,
}
FIXED = {  # certificates, bounds and explanations: numbers about the regulariser of now
    "fenchel.decode": lambda omega: decoded(omega),
    "fenchel.KeyValueCache.evictable": lambda omega: evictable(omega),
    "fenchel.attention_solution": lambda omega: fl.attention_solution(Q, K, V, omega).threshold,
    "fenchel.explain": lambda omega: torch.tensor(len(str(fl.explain(Q, K, V, omega)))),
    "fenchel.bounds.query_bound": lambda omega: fl.bounds.query_bound(K, V, omega),
    "fenchel.bounds.query_lipschitz": lambda omega: torch.tensor(
        fl.bounds.query_lipschitz(K[0, 0], V[0, 0], omega).value
    ),
}
ONE_ALPHA = {name for name in FIXED if ".bounds." in name}  # a bound is of one head
EVERYWHERE = {**LEARNING, **FIXED}


def learned(name="", **options):
    return fl.nn.LearnedTsallis(
        1 if name in ONE_ALPHA else HEADS, dtype=torch.float64, init=1.3, **options
    )


def takers(room, name):
    """Functions, classes and methods of a room with a regulariser among their arguments."""
    for public in set(room.__all__) - {"hf", "lens"}:  # which need packages of an extra
        thing = getattr(room, public)
        methods = vars(thing) if inspect.isclass(thing) else ()
        for path in (public, *(f"{public}.{method}" for method in methods if method[0] != "_")):
            taken = thing if path == public else getattr(thing, path.partition(".")[2])
            if callable(taken) and "regularizer" in _parameters(taken):
                yield f"{name}.{path}"


def _parameters(function):
    try:
        return inspect.signature(function).parameters
    except ValueError:  # of C
        return ()


def test_the_table_is_whole():
    """A new function that takes a regulariser belongs in it."""
    rooms = ("nn", "bounds", "continuous", "dual", "measures")
    names = {*takers(fl, "fenchel")}
    names |= {name for room in rooms for name in takers(getattr(fl, room), f"fenchel.{room}")}
    answers = {"fenchel.Solution", "fenchel.Inspection"}  # they are made, not asked for
    assert names - answers == set(EVERYWHERE)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_module_is_taken_wherever_a_regularizer_is(name):
    module = learned(name)
    by_module, by_value = (
        EVERYWHERE[name](omega) for omega in (module, fl.Tsallis(module.alpha.detach()))
    )
    assert torch.equal(by_module, by_value)
    if name != "fenchel.explain":
        assert not torch.equal(by_module, EVERYWHERE[name](fl.Tsallis(1.9)))


@pytest.mark.parametrize("name", LEARNING)
def test_it_is_asked_at_every_call_and_learns(name):
    module = learned(name)
    before = LEARNING[name](module)
    before.square().sum().backward()
    assert (module.raw.grad.abs() > 1e-9).all()
    with torch.no_grad():
        module.raw.add_(1.0)
    assert (LEARNING[name](module) - before).abs().max() > 1e-6


@pytest.mark.parametrize("name", EVERYWHERE)
def test_modules_that_make_something_else_are_refused(name):
    class Odd(torch.nn.Module):
        def forward(self):
            return 1.5

    with pytest.raises(TypeError, match=r"got 1\.5"):
        EVERYWHERE[name](Odd())


@pytest.mark.parametrize("name", sorted(ONE_ALPHA))
def test_a_bound_is_of_one_head(name):
    with pytest.raises(TypeError, match=r"every head has a bound of its own; bound head by head"):
        EVERYWHERE[name](learned())


# ---- groups for an optimiser


RIGHT = torch.tensor([[1.05], [1.2], [1.8], [1.95]])  # alphas of the layer to be imitated


def layer_of(omega):
    torch.manual_seed(0)
    return fl.nn.MultiheadAttention(32, 4, batch_first=True, regularizer=omega)


def distance_after(steps, groups):
    """How far alpha is from right, in the head where it is furthest; it starts at 1.5."""
    right, layer = layer_of(fl.Tsallis(RIGHT)), layer_of(fl.nn.LearnedTsallis(4))
    optimizer, generator = torch.optim.AdamW(groups(layer)), torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = [2 * torch.randn(8, 8, 32, generator=generator)] * 3
        output, target = (each(*tokens, need_weights=False)[0] for each in (layer, right))
        loss = (output - target.detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (layer.regularizer.alpha - RIGHT).abs().max().item()


def test_alpha_moves_visibly_in_200_steps():
    """At the rate of the weights it does not, which is what was found."""
    together = distance_after(200, lambda layer: [{"params": layer.parameters(), "lr": 1e-3}])
    apart = distance_after(200, lambda layer: fl.nn.parameter_groups(layer, lr=1e-3))
    assert together > 0.35
    assert apart < 0.15


def test_groups_hold_every_parameter_once():
    block = torch.nn.TransformerEncoderLayer(12, HEADS, batch_first=True)
    layers = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    shared = fl.nn.LearnedTsallis(HEADS)
    fl.nn.convert(layers, shared)
    weights, own = fl.nn.parameter_groups(layers, lr=1e-3, regularizer_lr=0.2)
    assert own["params"] == [shared.raw]
    assert (own["lr"], own["weight_decay"]) == (0.2, 0.0)
    assert (weights["lr"], "weight_decay" in weights) == (1e-3, False)  # the optimiser's own
    assert {*map(id, weights["params"])} | {id(shared.raw)} == {*map(id, layers.parameters())}
    assert torch.optim.AdamW([weights, own], weight_decay=0.3).param_groups[1]["weight_decay"] == 0


def test_whatever_a_regularizer_holds_is_in_its_group():
    class Temperature(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.log = torch.nn.Linear(1, 1)

        def forward(self):
            return fl.Shannon(self.log.weight.exp())

    number = torch.nn.Parameter(torch.tensor(1.5))
    for omega, count in ((Temperature(), 2), (fl.Tsallis(number), 1)):
        layer = fl.nn.MultiheadAttention(12, HEADS, regularizer=omega)
        assert len(fl.nn.parameter_groups(layer, lr=1e-3)[1]["params"]) == count
    (own,) = fl.nn.parameter_groups(fl.nn.LearnedTsallis(2), lr=1e-3)
    assert own["lr"] == 0.05


def test_what_others_call_a_regularizer_is_a_weight():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = fl.nn.MultiheadAttention(
                12, HEADS, regularizer=fl.nn.LearnedTsallis(HEADS)
            )
            self.regularizer = torch.nn.Linear(12, 12)

    net = Net()
    _, own = fl.nn.parameter_groups(net, lr=1e-3)
    assert own["params"] == [net.attention.regularizer.raw]


def test_groups_that_would_change_nothing_are_refused():
    with pytest.raises(ValueError, match=r"no regulariser that learns in Linear; first convert it"):
        fl.nn.parameter_groups(torch.nn.Linear(2, 2), lr=1e-3)
    for wrong in ({"lr": 0.0}, {"lr": 1e-3, "regularizer_lr": -1.0}):
        with pytest.raises(ValueError, match="lr must be finite and > 0"):
            fl.nn.parameter_groups(fl.nn.LearnedTsallis(2), **wrong)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got list"):
        fl.nn.parameter_groups([], lr=1e-3)


def test_small_steps_of_alpha_count_in_low_precision():
    """Near 1.5 bfloat16 knows steps of 1/128; of the raw parameter, near zero, smaller ones."""
    omega = fl.nn.LearnedTsallis(1).bfloat16()
    with torch.no_grad():
        omega.raw += 0.004
    assert abs(omega.alpha.item() - 1.501) <= 1e-5
    omega.alpha.sum().backward()
    assert omega.raw.grad.dtype is torch.bfloat16
