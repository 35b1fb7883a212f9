"""The adapter to AdaSplash translates; a stand-in that computes what AdaSplash documents tells."""

import importlib.machinery
import sys
import types

import pytest
import torch

import fenchel as fl


@pytest.fixture
def calls(monkeypatch):
    """A stand-in for their package, on the CPU; the list of the calls it got."""
    seen = []

    def adasplash(q, k, v, alpha=1.5, is_causal=True, niter=10):
        seen.append({"alpha": alpha, "is_causal": is_causal, "niter": niter})
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return fl.entmax(scores, alpha) @ v

    package = types.ModuleType("adasplash")
    package.__spec__ = importlib.machinery.ModuleSpec("adasplash", None)
    package.adasplash = adasplash
    monkeypatch.setitem(sys.modules, "adasplash", package)
    monkeypatch.setattr("fenchel._attention.cuda.DEVICE", "cpu")
    return seen


def operands(*shape):
    return [torch.randn(*shape) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_scale_temperature_alpha_and_causality_arrive(calls, monkeypatch, causal):
    q, k, v = operands(2, 3, 128, 16)
    options = {"is_causal": causal, "scale": 0.7}
    output = fl.attention(q, k, v, fl.Tsallis(1.3, 0.5), **options)
    assert calls == [{"alpha": 1.3, "is_causal": causal, "niter": 10}]
    monkeypatch.undo()
    expected = fl.attention(q, k, v, fl.Tsallis(1.3, 0.5), **options)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_what_they_cannot_express_goes_elsewhere(calls):
    q, k, v = operands(1, 2, 128, 16)
    for omega, options in [
        (fl.Tsallis(torch.tensor(1.5)), {}),
        (fl.Tsallis(1.5, torch.tensor(1.0)), {}),
        (fl.Tsallis(1.0), {}),
        (fl.Tsallis(1.5), {"attn_mask": torch.ones(128, 128, dtype=torch.bool)}),
        (fl.Tsallis(1.5), {"base": torch.ones(128)}),
        (fl.Tsallis(1.5), {"dropout_p": 0.1}),
    ]:
        fl.attention(q, k, v, omega, **options)
    for x in (operands(1, 2, 100, 16), operands(1, 2, 384, 16), operands(1, 2, 128, 12)):
        fl.attention(*x, fl.Tsallis(1.5))
    fl.attention(q, k, v, fl.Tsallis(3.0))
    fl.attention(q.double(), k.double(), v.double(), fl.Tsallis(1.5))
    fl.attention(q[:, :, :64], k, v, fl.Tsallis(1.5))
    fl.attention(q, k[:, :1], v[:, :1], fl.Tsallis(1.5), enable_gqa=True)
    torch.func.vmap(lambda a: fl.attention(a, k[0], v[0], fl.Tsallis(1.5)))(q)
    assert calls == []
