"""Bad input on purpose: an error that gives the value and the way out, or NaN in its own rows."""

import math
import sys

import pytest
import torch

import fenchel as fl
from tests.attention.cases import (
    DOUBLE,
    INF,
    REGULARIZERS,
    chance,
    dense,
    draw,
    largest_difference,
)

pytestmark = pytest.mark.usefixtures("kernels")

Q, K, V = draw(0, 2, 4, 5, 8), draw(1, 2, 4, 6, 8), draw(2, 2, 4, 6, 3)
BOTH = [fl.Shannon(), fl.Tsallis(1.5)]


def attend(query=Q, key=K, value=V, regularizer=None, **options):
    return fl.attention(query, key, value, regularizer or fl.Tsallis(1.5), **options)


WRONG = {
    "query list": (lambda: attend([1.0]), TypeError, ("query", "tensor", "list", "torch.tensor")),
    "key None": (lambda: attend(key=None), TypeError, ("key", "tensor", "NoneType")),
    "value number": (lambda: attend(value=1.0), TypeError, ("value", "tensor", "float")),
    "one axis": (lambda: attend(Q[0, 0, 0]), ValueError, ("query", "two axes", "(8,)")),
    "no axis": (lambda: attend(value=V.sum()), ValueError, ("value", "two axes", "()")),
    "whole numbers": (lambda: attend(Q.long()), TypeError, ("query", "float32", "int64")),
    "complex": (lambda: attend(key=K + 0j), TypeError, ("key", "float32", "complex128")),
    "sparse": (lambda: attend(value=V.to_sparse()), TypeError, ("value", "dense", "sparse")),
    "precisions": (
        lambda: attend(key=K.float()),
        ValueError,
        ("share dtype", "key", "float32", "float64"),
    ),
    "devices": (lambda: attend(value=V.to("meta")), ValueError, ("share", "meta", "cpu")),
    "components": (
        lambda: attend(Q[..., :7]),
        ValueError,
        ("components", "7", "8", "(2, 4, 5, 7)"),
    ),
    "tokens": (lambda: attend(value=V[:, :, :4]), ValueError, ("tokens", "6", "4", "(2, 4, 4, 3)")),
    "heads": (
        lambda: attend(key=K[:, :2], value=V[:, :2]),
        ValueError,
        ("do not broadcast", "(2, 2, 6, 8)", "enable_gqa=True"),
    ),
    "batch": (
        lambda: attend(draw(0, 3, 4, 5, 8)),
        ValueError,
        ("do not broadcast", "(3, 4, 5, 8)"),
    ),
    "groups do not divide": (
        lambda: attend(key=K[:, :3], value=V[:, :3], enable_gqa=True),
        ValueError,
        ("enable_gqa", "4 query", "3 key", "3 value"),
    ),
    "groups of value": (
        lambda: attend(key=K[:, :2], enable_gqa=True),
        ValueError,
        ("enable_gqa", "2 key", "4 value"),
    ),
    "groups of nothing": (
        lambda: attend(key=K[:, :0], value=V[:, :0], enable_gqa=True),
        ValueError,
        ("enable_gqa", "0 key"),
    ),
    "groups without heads": (
        lambda: attend(Q[0, 0], K[0, 0], V[0, 0], enable_gqa=True),
        ValueError,
        ("enable_gqa", "head axis"),
    ),
    "mask list": (lambda: attend(attn_mask=[True]), TypeError, ("attn_mask", "tensor", "list")),
    "mask of whole numbers": (
        lambda: attend(attn_mask=torch.ones(5, 6).long()),
        TypeError,
        ("attn_mask", "True = attend", "int64", "mask.bool()"),
    ),
    "mask too long": (
        lambda: attend(attn_mask=torch.ones(5, 7) > 0),
        ValueError,
        ("attn_mask", "(5, 7)", "(2, 4, 5, 6)", "query, key"),
    ),
    "mask of more axes": (
        lambda: attend(attn_mask=torch.ones(2, 1, 4, 5, 6)),
        ValueError,
        ("attn_mask", "(2, 1, 4, 5, 6)", "(2, 4, 5, 6)"),
    ),
    "mask would enlarge": (
        lambda: attend(Q[:1], K[:1], V[:1], attn_mask=torch.ones(2, 4, 5, 6)),
        ValueError,
        ("attn_mask", "(2, 4, 5, 6)", "(1, 4, 5, 6)"),
    ),
    "mask elsewhere": (
        lambda: attend(attn_mask=torch.ones(5, 6, device="meta")),
        ValueError,
        ("attn_mask", "meta", "cpu", "move"),
    ),
    "dropout above": (lambda: attend(dropout_p=1.5), ValueError, ("dropout_p", "0 and 1", "1.5")),
    "dropout below": (lambda: attend(dropout_p=-0.1), ValueError, ("dropout_p", "-0.1")),
    "dropout nan": (lambda: attend(dropout_p=math.nan), ValueError, ("dropout_p", "nan")),
    "dropout text": (lambda: attend(dropout_p="0.1"), ValueError, ("dropout_p", "'0.1'")),
    "dropout None": (lambda: attend(dropout_p=None), ValueError, ("dropout_p", "None")),
    "scale inf": (lambda: attend(scale=INF), ValueError, ("scale", "finite", "None", "inf")),
    "scale nan": (lambda: attend(scale=math.nan), ValueError, ("scale", "nan")),
    "scale text": (lambda: attend(scale="1"), ValueError, ("scale", "'1'")),
    "causal number": (lambda: attend(is_causal=1), TypeError, ("is_causal", "True or False", "1")),
    "causal None": (lambda: attend(is_causal=None), TypeError, ("is_causal", "None")),
    "groups number": (lambda: attend(enable_gqa=0), TypeError, ("enable_gqa", "True or False")),
    "class": (lambda: attend(regularizer=fl.Tsallis), TypeError, ("regularizer", "Tsallis(1.5)")),
    "name": (lambda: attend(regularizer="entmax"), TypeError, ("Tsallis(1.5)", "'entmax'")),
    "mask in the place of a regularizer": (
        lambda: fl.attention(Q, K, V, torch.ones(5, 6, dtype=torch.bool)),
        TypeError,
        ("regularizer", "Tsallis(1.5)", "tensor of shape (5, 6)", "attn_mask=mask"),
    ),
    "number": (lambda: attend(regularizer=1.5), TypeError, ("Tsallis(1.5)", "1.5")),
    "alpha of another shape": (
        lambda: attend(regularizer=fl.Tsallis(torch.full((3, 1), 1.5))),
        ValueError,
        ("alpha", "(3, 1)", "(2, 4, 5)", "(heads, 1)"),
    ),
    "norm with masses": (
        lambda: attend(regularizer=fl.Norm(2.0), base=torch.full((6,), 2.0)),
        ValueError,
        ("Norm", "only masks", "base=(mass > 0)"),
    ),
    "fused with a prior": (
        lambda: attend(regularizer=fl.Fused(0.1), base=fl.priors.ALiBi(4)),
        ValueError,
        ("Fused", "only masks", "Shannon or Tsallis"),
    ),
    "budget with a trained mask": (
        lambda: attend(regularizer=fl.Budget(1), base=torch.ones(6).requires_grad_()),
        ValueError,
        ("Budget", "detach"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_value_and_the_way_out(name):
    call, error, words = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words), caught.value
    assert len(str(caught.value)) < 300, "numbers of tensors are not for messages"


WRONG_BASES = {
    "negative": (-torch.ones(6), ValueError, ("non-negative", "-1", "bias.exp()")),
    "too long": (torch.ones(7), ValueError, ("base", "(7,)", "(2, 4, 5, 6)")),
    "elsewhere": (torch.ones(6, device="meta"), ValueError, ("base", "meta", "cpu")),
    "complex": (torch.ones(6) + 0j, TypeError, ("base", "real")),
    "list": ([1.0] * 6, TypeError, ("base", "list", "torch.tensor")),
    "class": (fl.priors.Causal, TypeError, ("base", "Causal(...)")),
    "name": ("causal", TypeError, ("base", "str")),
    "lengths of the batch": (
        fl.priors.KeyPadding(torch.tensor([3, 4])),
        ValueError,
        ("lengths[:, None]", "(2, 4, 5, 6)"),
    ),
    "logits": (fl.priors.Preference(torch.zeros(7)), ValueError, ("7 logits", "6 keys")),
    "heads": (fl.priors.ALiBi(3), ValueError, ("ALiBi", "3 heads", "(2, 4, 5, 6)")),
}


@pytest.mark.parametrize("regularizer", BOTH, ids=str)
@pytest.mark.parametrize("name", WRONG_BASES)
def test_wrong_bases_are_refused_on_every_path(name, regularizer):
    base, error, words = WRONG_BASES[name]
    with pytest.raises(error) as caught:
        attend(regularizer=regularizer, base=base)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_strange_scores_make_nan_in_their_own_row(name, dtype):
    mask = torch.zeros(5, 6, dtype=dtype)
    mask[1, 2], mask[3, 0] = torch.nan, INF
    operands = [x.to(dtype).requires_grad_() for x in (Q, K, V)]
    output = fl.attention(*operands, REGULARIZERS[name], attn_mask=mask)
    clean = fl.attention(*operands, REGULARIZERS[name])
    broken = torch.tensor([False, True, False, True, False])
    assert output[:, :, broken].isnan().all()
    assert largest_difference(output[:, :, ~broken], clean[:, :, ~broken]) <= 1e-5
    (gradient,) = torch.autograd.grad(output[:, :, ~broken].sum(), operands[0])
    assert gradient[:, :, ~broken].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_a_strange_query_makes_nan_in_its_own_row(name, dtype):
    query = Q.clone()
    query[0, 1, 2, 3] = torch.nan
    query[1, 0, 4, 0] = INF
    output = attend(query.to(dtype), K.to(dtype), V.to(dtype), REGULARIZERS[name])
    expected = query.isfinite().all(-1)
    assert torch.equal(output.isnan().any(-1), ~expected)


@pytest.mark.parametrize("content", [math.nan, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("how", ["bool", "causal", "base", "prior"])
@pytest.mark.parametrize("name", ["shannon", "tsallis 1", "tsallis 1.3", "tsallis 1.5", "norm"])
def test_what_a_hidden_key_holds_does_not_matter(name, how, content):
    """Padding may be uninitialised memory, its keys and its values."""
    key, value = K.clone(), V.clone()
    key[:, :, 5] = value[:, :, 5] = (
        content  # the last of six keys, of which five queries see five causally
    )
    seen = torch.arange(6) < 5
    options = {
        "bool": {"attn_mask": seen},
        "causal": {"is_causal": True},
        "base": {"base": seen},
        "prior": {"base": fl.priors.KeyPadding(torch.tensor(5))},
    }[how]
    output = attend(key=key, value=value, regularizer=REGULARIZERS[name], **options)
    assert output.isfinite().all()
    expected = dense(Q, K, V, REGULARIZERS[name], **options)
    assert largest_difference(output, expected) <= 1e-13


@pytest.mark.parametrize("content", [math.nan, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("regularizer", BOTH, ids=str)
def test_a_base_that_is_not_a_number_is_not_a_mask(regularizer, content):
    base = torch.ones(5, 6, dtype=DOUBLE)
    base[2, 1] = content
    output = attend(regularizer=regularizer, base=base)
    broken = torch.arange(5) == 2
    assert output[:, :, broken].isnan().all()
    assert output[:, :, ~broken].isfinite().all()


@pytest.mark.parametrize("size", [1e-60, 1e60])
@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(1.0), fl.Tsallis(1.2)], ids=str)
def test_masses_beyond_the_range_of_float32(regularizer, size):
    """`solve` takes a float64 base in float64; so does attention."""
    base = size * (1 + torch.arange(6, dtype=DOUBLE))
    expected = dense(Q, K, V, regularizer, base=base)
    output = attend(Q.float(), K.float(), V.float(), regularizer, base=base)
    assert output.dtype == torch.float32
    assert largest_difference(output, expected) <= 1e-5


@pytest.fixture
def no_tiles(kernels, monkeypatch):
    """The generic path raises."""
    assert kernels == "native"  # without, the tiles are the only path of Tsallis

    def refuse(*_):
        raise AssertionError("the generic tiles")

    for path in ("sparse", "dense"):
        monkeypatch.setattr(sys.modules[f"fenchel._attention.{path}"], "tiled", refuse)


MASSES = {"key": (0.5 + chance(1, 0.7, 6)) / 3, "query and key": draw(3, 5, 6).exp()}


FAST = [
    (regularizer, dtype)
    for regularizer in (*BOTH, fl.Tsallis(1.2))
    for dtype in (torch.float32, torch.bfloat16)
    # softmax in half precision takes the tiles with any base
    if dtype == torch.float32 or not isinstance(regularizer, fl.Shannon)
]


@pytest.mark.parametrize("kernels", ["native"], indirect=True)
@pytest.mark.parametrize(("regularizer", "dtype"), FAST, ids=str)
@pytest.mark.parametrize("name", MASSES)
def test_a_float64_base_of_usual_masses_takes_the_fast_path(name, regularizer, dtype, no_tiles):
    base = MASSES[name].double()
    base[..., 3] = 0.0
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    output = attend(q, k, v, regularizer, base=base)
    assert torch.equal(output, attend(q, k, v, regularizer, base=base.float()))
    expected = dense(q.double(), k.double(), v.double(), regularizer, base=base)
    assert largest_difference(output, expected) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kernels", ["native"], indirect=True)
@pytest.mark.parametrize("mass", [1e-60, 1e-40, 1e60, INF, math.nan])
@pytest.mark.parametrize("regularizer", BOTH, ids=str)
def test_a_float64_base_that_float32_does_not_hold_keeps_its_digits(regularizer, mass, no_tiles):
    base = torch.ones(6, dtype=DOUBLE)
    base[2] = mass
    with pytest.raises(AssertionError, match="the generic tiles"):
        attend(Q.float(), K.float(), V.float(), regularizer, base=base)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_huge_scores_stay_finite(name, dtype):
    operands = [x.to(dtype).requires_grad_() for x in (1e15 * Q, 1e15 * K, V)]
    output = fl.attention(*operands, REGULARIZERS[name])
    assert output.isfinite().all()
    best = (Q @ K.mT).argmax(-1)
    if name not in ("budget", "fused"):  # all weight on the best key
        expected = V.gather(2, best.unsqueeze(-1).expand(-1, -1, -1, 3))
        assert largest_difference(output, expected.to(dtype)) <= 1e-5
    gradients = torch.autograd.grad(output.square().sum(), operands)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_shapes_without_numbers():
    """On the meta device, where models are laid out before they are loaded."""
    q, k, v = (x.to("meta") for x in (Q, K, V))
    for regularizer in (fl.Shannon(), fl.Tsallis(1.5), fl.Tsallis(1.3), fl.Norm(2.0)):
        output = fl.attention(q, k, v, regularizer, is_causal=True)
        assert output.shape == (2, 4, 5, 3)
        assert output.device.type == "meta"


@pytest.mark.parametrize("temperature", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize("make", [fl.Shannon, lambda tau: fl.Tsallis(1.5, tau)], ids=["1", "1.5"])
def test_a_row_at_the_lowest_number_is_not_empty(make, temperature, kernels):
    zeros, value = torch.zeros(1, 1, 3, 4), torch.eye(3)[None, None]
    lowest = torch.full((1, 3), torch.finfo(torch.float32).min)
    output = fl.attention(zeros[:, :, :1], zeros, value, make(temperature), attn_mask=lowest)
    torch.testing.assert_close(output, torch.full((1, 1, 1, 3), 1 / 3))


@pytest.mark.parametrize("regularizer", BOTH, ids=str)
def test_nan_in_a_prior_is_no_mask(regularizer):
    logits = torch.zeros(6, dtype=DOUBLE)
    logits[3] = math.nan
    assert fl.attention(Q, K, V, regularizer, base=fl.priors.Preference(logits)).isnan().all()
