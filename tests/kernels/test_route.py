"""The one choice: which path runs, why, and the switch."""

import pytest
import torch

import fenchel as fl
from fenchel._kernels import library, route
from tests import needs


@pytest.fixture
def operands():
    return torch.randn(3, 1, 2, 20, 8).unbind(0)  # not so few queries that softmax is ours


def test_the_first_path_that_nothing_speaks_against_runs():
    paths = [
        route.Path("fast", lambda: "too large", lambda: "fast"),
        route.Path("usual", lambda: None, lambda: "usual"),
        route.Path("slow", lambda: None, lambda: "slow"),
    ]
    path, chosen = route.choose(paths)
    assert path.run() == "usual"
    assert chosen == fl.Route("usual", {"fast": "too large"})
    assert str(chosen) == "runs on: usual\nnot on fast: too large"


def test_the_last_path_is_not_asked():
    def refuse():
        raise AssertionError

    path, _ = route.choose([route.Path("only", refuse, lambda: 1)])
    assert path.run() == 1


@needs.kernels("what runs where they are")
def test_explain_says_what_runs(operands):
    assert fl.explain(*operands, fl.Tsallis(1.5)).path == "native kernels"
    assert fl.explain(*operands, fl.Tsallis(1.5), base=fl.priors.ALiBi(2)).path == "native kernels"
    custom = fl.priors.Custom(lambda b, h, i, j: (i - j).double())
    general = fl.explain(*operands, fl.Tsallis(1.5), attn_mask=custom)
    assert general.path == "native kernels, tile by tile"
    assert "no numbers describe" in general.against["native kernels"]
    window = fl.explain(*operands, attn_mask=fl.priors.SlidingWindow(2))
    assert window.path == "native kernels"
    assert fl.explain(*operands).path == "torch's fused attention"
    few = operands[0][:, :, :16]
    assert fl.explain(few, *operands[1:]).path == "native kernels"
    assert fl.explain(few.clone().requires_grad_(), *operands[1:]).path == "torch's fused attention"
    norm = fl.explain(*operands, fl.Norm(2.0))
    assert norm.path == "tiles of torch operations"
    assert "Tsallis" in norm.against["native kernels"]


def test_the_switch_is_a_reason(operands):
    with fl.use("torch"):
        chosen = fl.explain(*operands, fl.Tsallis(1.5))
    assert chosen.path == "tiles of torch operations"
    assert chosen.against["native kernels"] == 'fenchel.use("torch") is in force'


def test_other_reasons(operands):
    query, key, value = operands
    trains = torch.ones(20, requires_grad=True)
    chosen = fl.explain(query, key, value, fl.Tsallis(1.5), base=trains)
    assert "base that trains" in chosen.against["native kernels"]
    wide = torch.full((20,), 1e-30)
    assert "largest mass" in str(fl.explain(query, key, value, fl.Tsallis(1.5), base=wide))
    assert "matrix" in str(fl.explain(query, key, value, dropout_p=0.5))
    bias = torch.zeros(20, 20, requires_grad=True)
    assert "derivative in a bias" in str(fl.explain(query, key, value, attn_mask=bias))


@needs.kernels("their reasons against devices")
def test_another_device(operands):
    query, key, value = (x.to("meta") for x in operands)
    chosen = fl.explain(query, key, value, fl.Tsallis(1.5))
    assert "run on the CPU" in chosen.against["native kernels"]


def test_explain_refuses_what_attention_refuses(operands):
    with pytest.raises(TypeError, match="regularizer must be"):
        fl.explain(*operands, "softmax")


def test_the_switch_refuses_other_names():
    with pytest.raises(ValueError, match="got 'fast'"), fl.use("fast"):
        pass


def test_the_switch_is_undone_and_nests(operands):
    inside = []
    with fl.use("torch"):
        with fl.use("torch"):
            pass
        inside.append(fl.explain(*operands, fl.Tsallis(1.5)).path)
    assert inside == ["tiles of torch operations"]
    if library.loaded() is not None:
        with fl.use("native"):
            assert fl.explain(*operands, fl.Tsallis(1.5)).path == "native kernels"


def test_without_a_library_native_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr(library, "loaded", lambda: None)
    with pytest.raises(RuntimeError, match="native kernels are not there"), fl.use("native"):
        pass


@needs.kernels("both choices")
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_the_backward_pass_keeps_the_choice_of_the_forward_pass(kernels):
    query = torch.randn(1, 1, 2100, 4, requires_grad=True)
    key, value = torch.randn(2, 1, 1, 2100, 4)
    with fl.use(kernels):
        output = fl.attention(query, key, value, fl.Norm(2.0))
    with fl.use("torch"):
        (gradient,) = torch.autograd.grad(output.sum(), query)
    assert gradient.isfinite().all()


def test_asking_draws_no_random_number(operands):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    fl.explain(*operands, fl.Tsallis(1.5), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
