"""Outputs and every gradient equal the dense computation, over what a caller may pass."""

import pytest
import torch

import fenchel as fl
from tests.attention.cases import (
    ANY_BASE,
    DOUBLE,
    INF,
    REGULARIZERS,
    assert_agrees,
    chance,
    derivatives,
    draw,
    make_case,
)

pytestmark = pytest.mark.usefixtures("kernels")
FLOAT = torch.float32
SOME = ["shannon", "tsallis 1.3", "tsallis 1.5", "tsallis 2", "tsallis 3"]


def float_mask(*shape):
    """Normal numbers with a third at -inf, as a constant."""
    return draw(8, *shape).masked_fill(chance(9, 0.3, *shape), -INF)


MASKS = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "bool": lambda: {"attn_mask": chance(3, 0.7, 2, 1, 6, 9)},
    "float": lambda: {"attn_mask": float_mask(6, 9)},
    "causal and bool": lambda: {"is_causal": True, "attn_mask": chance(4, 0.6, 3, 6, 9)},
}


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT], ids=["float64", "float32"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_every_regularizer_under_every_kind_of_mask(name, mask, dtype):
    assert_agrees(fl.attention, make_case(REGULARIZERS[name], options=MASKS[mask]()), dtype)


@pytest.mark.parametrize("shape", [(9,), (6, 9), (6, 1), (3, 1, 9), (2, 1, 1, 9), (3, 6, 9), ()])
@pytest.mark.parametrize("name", SOME)
def test_masks_of_every_shape(name, shape):
    mask = chance(5, 0.6, *shape)
    assert_agrees(fl.attention, make_case(REGULARIZERS[name], options={"attn_mask": mask}))
    added = float_mask(*shape)
    assert_agrees(fl.attention, make_case(REGULARIZERS[name], options={"attn_mask": added}))


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT], ids=["float64", "float32"])
@pytest.mark.parametrize("shape", [(9,), (6, 9), (2, 1, 1, 9), (3, 6, 1), (2, 3, 6, 9)])
@pytest.mark.parametrize("name", [*SOME, "norm", "budget"])
def test_the_derivative_in_a_float_mask(name, shape, dtype):
    case = make_case(
        REGULARIZERS[name],
        options=lambda leaves: {"attn_mask": leaves["mask"], "is_causal": name != "budget"},
        mask=draw(6, *shape),
    )
    assert_agrees(fl.attention, case, dtype)


def test_a_mask_of_another_precision_is_added_in_that_of_the_scores():
    mask = draw(6, 9, dtype=torch.float32)
    for name in SOME:
        assert_agrees(fl.attention, make_case(REGULARIZERS[name], options={"attn_mask": mask}))


@pytest.mark.parametrize("name", SOME)
def test_key_padding_by_mask_prior_and_base_is_the_same(name):
    lengths = torch.tensor([4, 9])
    mask = (torch.arange(9) < lengths[:, None])[:, None, None]
    ways = [
        {"attn_mask": mask},
        {"base": mask},
        {"base": mask.to(DOUBLE)},
        {"base": fl.priors.KeyPadding(lengths[:, None])},
    ]
    for options in ways:
        assert_agrees(fl.attention, make_case(REGULARIZERS[name], options=options))
    first, *others = [
        derivatives(fl.attention, make_case(REGULARIZERS[name], options=way)) for way in ways
    ]
    for other in others:
        for key, expected in first.items():
            assert (other[key] - expected).abs().max() <= 1e-13, key


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT], ids=["float64", "float32"])
@pytest.mark.parametrize("shape", [(9,), (6, 9), (2, 1, 1, 9), (3, 1, 9), (2, 3, 6, 9)])
@pytest.mark.parametrize("name", ["shannon", "tsallis 1.3", "tsallis 1.5", "tsallis 2.5"])
def test_the_derivative_in_a_base(name, shape, dtype):
    mass = draw(7, *shape).exp()
    mass = mass.masked_fill(chance(8, 0.2, *shape), 0.0)  # where it is one-sided
    case = make_case(REGULARIZERS[name], options=lambda leaves: {"base": leaves["base"]}, base=mass)
    assert_agrees(fl.attention, case, dtype)


PRIORS = {
    "alibi": ({"slopes": draw(3, 3).abs()}, lambda x: fl.priors.ALiBi(3, x["slopes"])),
    "buckets": (
        {"table": draw(4, 8, 3)},
        lambda x: fl.priors.RelativeBuckets(x["table"], max_distance=16),
    ),
    "preference": ({"logits": draw(5, 9)}, lambda x: fl.priors.Preference(x["logits"])),
    "preference each": (
        {"logits": draw(5, 2, 1, 9)},
        lambda x: fl.priors.Preference(x["logits"]),
    ),
    "causal * alibi": (
        {"slopes": draw(3, 3).abs()},
        lambda x: fl.priors.Causal() * fl.priors.ALiBi(3, x["slopes"]),
    ),
    "window * padding * preference": (
        {"logits": draw(5, 9)},
        lambda x: (
            fl.priors.SlidingWindow(3)
            * fl.priors.KeyPadding(torch.tensor([[5], [9]]))
            * fl.priors.Preference(x["logits"])
        ),
    ),
    "shifted": ({}, lambda _: fl.priors.Causal().shifted(3) * fl.priors.ALiBi(3)),
}


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT], ids=["float64", "float32"])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", ["shannon", "tsallis 1.3", "tsallis 1.5", "tsallis 3"])
def test_the_derivative_in_the_parameters_of_a_prior(name, prior, dtype):
    leaves, make = PRIORS[prior]
    case = make_case(REGULARIZERS[name], options=lambda x: {"base": make(x)}, **leaves)
    assert_agrees(fl.attention, case, dtype)


@pytest.mark.parametrize("name", ANY_BASE)
def test_a_constant_prior_for_every_regularizer_that_takes_one(name):
    for base in (fl.priors.ALiBi(3), fl.priors.Causal() * fl.priors.ALiBi(3)):
        assert_agrees(fl.attention, make_case(REGULARIZERS[name], options={"base": base}))


@pytest.mark.parametrize("name", ["norm", "budget", "fused"])
def test_priors_that_mask_for_the_others(name):
    base = fl.priors.SlidingWindow(2) * fl.priors.KeyPadding(torch.tensor([[5], [9]]))
    assert_agrees(fl.attention, make_case(REGULARIZERS[name], options={"base": base}))


ALPHAS = {
    "one": draw(1, 1).abs().squeeze() + 1.2,
    "per head": 1.1 + draw(2, 3, 1).abs(),
    "per query": 1.1 + draw(3, 6).abs(),
    "per row": 1.05 + draw(4, 2, 3, 6).abs().clamp(max=2.0),
    "from one on": torch.tensor([[1.0], [1.5], [2.0]], dtype=DOUBLE),
}


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT], ids=["float64", "float32"])
@pytest.mark.parametrize("mask", ["none", "causal", "float"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_derivative_in_alpha_and_temperature(alpha, mask, dtype):
    case = make_case(
        lambda leaves: fl.Tsallis(leaves["alpha"], leaves["temperature"]),
        options=MASKS[mask](),
        alpha=ALPHAS[alpha],
        temperature=draw(6, 3, 1).exp(),
    )
    assert_agrees(fl.attention, case, dtype)


@pytest.mark.parametrize("shape", [(), (3, 1), (6,), (2, 1, 1)])
def test_the_derivative_in_the_temperature_of_shannon(shape):
    case = make_case(
        lambda leaves: fl.Shannon(leaves["temperature"]),
        options={"is_causal": True},
        temperature=draw(6, *shape).exp(),
    )
    assert_agrees(fl.attention, case)


def test_the_derivative_in_everything_at_once():
    case = make_case(
        lambda leaves: fl.Tsallis(leaves["alpha"], leaves["temperature"]),
        options=lambda leaves: {
            "attn_mask": leaves["mask"],
            "base": fl.priors.Causal().shifted(3) * fl.priors.ALiBi(4, leaves["slopes"]),
            "enable_gqa": True,
        },
        lead=(2, 4),
        kv_lead=(2, 2),
        alpha=1.1 + draw(2, 4, 1).abs(),
        temperature=draw(6, 4, 1).exp(),
        slopes=draw(3, 4).abs(),
        mask=draw(5, 2, 1, 1, 9),
    )
    assert_agrees(fl.attention, case)
    assert_agrees(fl.attention, case, FLOAT)


@pytest.mark.parametrize("d", [1, 3, 16, 17, 64, 80])
@pytest.mark.parametrize("name", SOME)
def test_components(name, d):
    for d_value in (d, 1, d + 3):
        case = make_case(REGULARIZERS[name], d=d, d_value=d_value, lead=(2,), queries=4)
        assert_agrees(fl.attention, case)
        assert_agrees(fl.attention, case, FLOAT)


@pytest.mark.parametrize("keys", [1, 2, 7, 65, 300])
@pytest.mark.parametrize("queries", [1, 2, 7, 65, 300])
@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5", "tsallis 2"])
def test_lengths(name, queries, keys):
    for causal in (False, True):
        case = make_case(
            REGULARIZERS[name],
            lead=(2,),
            queries=queries,
            keys=keys,
            d=3,
            d_value=2,
            options={"is_causal": causal},
        )
        assert_agrees(fl.attention, case)
        assert_agrees(fl.attention, case, FLOAT)


@pytest.mark.parametrize("name", ["tsallis 1.3", "tsallis 3", "norm", "budget", "fused"])
def test_long_rows(name):
    case = make_case(REGULARIZERS[name], lead=(2,), queries=7, keys=300)
    assert_agrees(fl.attention, case)


@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_nothing_to_attend_to_or_from(name, queries, keys):
    for options in ({}, {"is_causal": True}, {"attn_mask": chance(0, 0.5, queries, keys)}):
        case = make_case(REGULARIZERS[name], queries=queries, keys=keys, options=options)
        gradients = derivatives(fl.attention, case)
        assert gradients["output"].shape == (2, 3, queries, 4)
        assert all((x == 0).all() for x in gradients.values())


@pytest.mark.parametrize("lead", [(0, 3), (2, 0), (0,)])
@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5"])
def test_no_batch_or_no_heads(name, lead):
    gradients = derivatives(fl.attention, make_case(REGULARIZERS[name], lead=lead))
    assert gradients["output"].shape == (*lead, 6, 4)


def test_a_preference_over_no_keys():
    for name in SOME:
        base = fl.priors.Preference(torch.zeros(0, dtype=DOUBLE))
        case = make_case(REGULARIZERS[name], keys=0, options={"base": base})
        assert (derivatives(fl.attention, case)["output"] == 0).all()


def test_no_components_make_all_scores_equal():
    for name in SOME:
        assert_agrees(fl.attention, make_case(REGULARIZERS[name], d=0))


LEADS = [
    ((), None),
    ((3,), None),
    ((2, 3), None),
    ((2, 2, 3), None),
    ((2, 1, 2, 3), None),
    ((2, 3), (3,)),  # keys shared by the batch
    ((2, 3), (1, 1)),
    ((3,), (2, 3)),  # queries shared
    ((2, 1), (1, 3)),
    ((2, 1, 3), (2, 1)),
]


@pytest.mark.parametrize(("lead", "kv_lead"), LEADS)
@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5", "tsallis 2.5"])
def test_leading_axes_broadcast(name, lead, kv_lead):
    for options in ({}, {"is_causal": True}, {"attn_mask": chance(1, 0.7, 6, 9)}):
        case = make_case(REGULARIZERS[name], lead=lead, kv_lead=kv_lead, options=options)
        assert_agrees(fl.attention, case)


@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5"])
def test_masks_and_bases_of_five_axes(name):
    for shape in ((2, 1, 1, 1, 9), (3, 1, 6, 9), (2, 3, 2, 6, 9), (2, 6, 9)):
        for options in (
            {"attn_mask": chance(2, 0.7, *shape)},
            {"base": draw(3, *shape).exp()},
        ):
            case = make_case(REGULARIZERS[name], lead=(2, 3, 2), options=options)
            assert_agrees(fl.attention, case)


@pytest.mark.parametrize(("lead", "kv_lead"), [((4,), (2,)), ((2, 6), (2, 2)), ((2, 4), (2, 1))])
@pytest.mark.parametrize("name", SOME)
def test_grouped_heads(name, lead, kv_lead):
    for more in ({}, {"is_causal": True}, {"attn_mask": chance(1, 0.7, 6, 9)}):
        case = make_case(
            REGULARIZERS[name], lead=lead, kv_lead=kv_lead, options={"enable_gqa": True, **more}
        )
        assert_agrees(fl.attention, case)
        assert_agrees(fl.attention, case, FLOAT)


def swapped(leaves):
    """Leaves (batch, token, head, component)."""
    return tuple(leaves[name].transpose(1, 2) for name in ("query", "key", "value"))


def sliced(leaves):
    """Every other token, the middle components."""
    return tuple(leaves[name][:, :, ::2, 1:-1] for name in ("query", "key", "value"))


def transposed(leaves):
    """Leaves (batch, head, component, token)."""
    return tuple(leaves[name].mT for name in ("query", "key", "value"))


def expanded(leaves):
    """Stride zero over the heads, and over the components of the value."""
    query, key, value = (leaves[name][:, :1].expand(-1, 3, -1, -1) for name in names(leaves))
    return query, key, value[..., :1].expand(-1, -1, -1, 5)


def names(leaves):
    return [name for name in ("query", "key", "value") if name in leaves]


LAYOUTS = {"swapped": swapped, "sliced": sliced, "transposed": transposed, "expanded": expanded}


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT], ids=["float64", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SOME)
def test_layouts_in_memory(name, layout, dtype):
    shape = (2, 3, 5, 5)  # every view of it is a valid operand
    leaves = {key: draw(seed, *shape) for seed, key in enumerate(("query", "key", "value"))}
    case = make_case(
        REGULARIZERS[name], operands=LAYOUTS[layout], options={"is_causal": True}, **leaves
    )
    assert not case.operands(case.leaves)[2].is_contiguous()
    assert_agrees(fl.attention, case, dtype)


@pytest.mark.parametrize("name", SOME)
def test_masks_in_any_layout(name):
    wide = chance(1, 0.7, 9, 12)
    for mask in (wide.mT[::2], wide[:6, :1].expand(6, 9), wide[:, :9][:6]):
        assert_agrees(fl.attention, make_case(REGULARIZERS[name], options={"attn_mask": mask}))


@pytest.mark.parametrize("scale", [None, 0, 0.0, -0.7, 0.3, 40])
@pytest.mark.parametrize("name", [*SOME, "norm", "budget"])
def test_scales(name, scale):
    if name == "shannon" and scale == 40:
        scale = 4  # beyond it torch's own operator rounds more than the bound allows
    for causal in (False, name != "budget"):
        options = {"scale": scale, "is_causal": causal}
        assert_agrees(fl.attention, make_case(REGULARIZERS[name], options=options))


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT], ids=["float64", "float32"])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_rows_that_see_nothing(name, dtype):
    """Zeros, a gradient of zero, and no NaN anywhere, whatever it is that hides the keys."""
    seen = torch.ones(6, 9, dtype=torch.bool)
    seen[2] = False
    added = torch.zeros(6, 9, dtype=DOUBLE).masked_fill(~seen, -INF)
    for options in ({"attn_mask": seen}, {"attn_mask": added}, {"base": seen}):
        case = make_case(REGULARIZERS[name], options=options)
        gradients = derivatives(fl.attention, case, dtype)
        assert (gradients["output"][..., 2, :] == 0).all()
        assert (gradients["query"][..., 2, :] == 0).all()
        assert all(x.isfinite().all() for x in gradients.values())
        assert (gradients["output"][..., 3, :] != 0).any()
        assert_agrees(fl.attention, case, dtype)


@pytest.mark.parametrize("name", ["shannon", "tsallis 1.5", "tsallis 3"])
def test_empty_rows_leave_the_derivatives_of_mask_and_base_finite(name):
    seen = chance(1, 0.7, 6, 9)
    seen[2] = False
    mask = draw(5, 6, 9).masked_fill(~seen, -INF)
    case = make_case(
        REGULARIZERS[name],
        options=lambda leaves: {"attn_mask": leaves["mask"], "base": leaves["base"]},
        mask=mask,
        base=draw(6, 6, 9).exp(),
    )
    gradients = derivatives(fl.attention, case)
    assert all(x.isfinite().all() for x in gradients.values())
    assert (gradients["mask"][2] == 0).all()
    assert (gradients["base"][2] == 0).all()


def test_a_budget_that_a_row_cannot_meet_is_nan_there_only():
    case = make_case(fl.Budget(3), options={"is_causal": True})
    output = fl.attention(*case.operands(case.leaves), fl.Budget(3), is_causal=True)
    assert output[..., :2, :].isnan().all()
    assert output[..., 2:, :].isfinite().all()


def test_softmax_is_the_default():
    q, k, v = (draw(seed, 2, 3, 5, 4) for seed in range(3))
    assert torch.equal(fl.attention(q, k, v), fl.attention(q, k, v, fl.Shannon()))


@pytest.mark.parametrize("name", SOME)
def test_only_the_leaf_that_asks_gets_a_gradient(name):
    for expected in range(3):
        operands = [draw(seed, 2, 3, 5, 4) for seed in range(3)]
        operands[expected].requires_grad_()
        fl.attention(*operands, REGULARIZERS[name]).square().sum().backward()
        assert operands[expected].grad.abs().max() > 1e-3
        assert all(x.grad is None for i, x in enumerate(operands) if i != expected)
    with torch.no_grad():
        assert not fl.attention(*operands, REGULARIZERS[name]).requires_grad
    with torch.inference_mode():
        assert fl.attention(*operands, REGULARIZERS[name]).isfinite().all()
