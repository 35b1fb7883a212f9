"""Attention on the GPU's kernels, in the interpreter, against float64: features by pairs."""

from itertools import combinations

import pytest
import torch

from fenchel._attention.sparse import GPU_PATH
from fenchel._kernels.gpu.devices_run import checks
from tests import needs

needs.package("triton", covers="fused attention on a GPU, interpreted")

from tests.kernels.gpu.interpreted import cases  # noqa: E402 - triton is there

QUICK, ALL = 6, 330
SEEDS = [pytest.param(seed, marks=() if seed < QUICK else pytest.mark.slow) for seed in range(ALL)]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_feature_agrees_with_float64(seed):
    case = cases.make(seed)
    exact = cases.errors(case, cases.run(case, "gpu"), cases.run(case, "torch", torch.float64))
    if case.dtype == torch.float32:
        bars = dict.fromkeys(exact, 1e-5)
    else:
        reference = cases.run(case, "torch", torch.float64)
        bars = {
            name: 2 * error + 1e-5
            for name, error in cases.errors(case, cases.run_plainly(case), reference).items()
        }
    wrong = {name: (error, bars[name]) for name, error in exact.items() if not error <= bars[name]}
    assert not wrong, f"{wrong} of {case.levels}"


def test_the_gpu_kernels_are_what_runs():
    """In every case, the slow ones among them."""
    others = {
        seed: path for seed in range(ALL) if (path := cases.path(cases.make(seed))) != GPU_PATH
    }
    assert not others
    assert checks() in GPU_PATH


def test_pairs():
    """Every two levels of different features meet in some case, where they can."""
    met = {
        pair
        for seed in range(ALL)
        for pair in combinations(sorted(cases.levels_of(seed).items()), 2)
    }
    wanted = {
        ((a, x), (b, y))
        for a, b in combinations(sorted(cases.FEATURES), 2)
        for x in cases.FEATURES[a]
        for y in cases.FEATURES[b]
    }
    assert wanted - met == {
        (("base", "sink"), ("bias", "sink")),
        (("lengths", "more queries"), ("seen", "documents")),
    }


def test_a_wrong_answer_is_noticed():
    plain = {"dtype": "float32", "alpha": "1.5", "bias": "none", "base": "none", "seen": "all"}
    case = cases.make(0, **plain)
    exact = cases.run(case, "torch", torch.float64)
    spoilt = {name: x + 1e-4 * x.abs().max() for name, x in exact.items()}
    assert min(cases.errors(case, spoilt, exact).values()) > 1e-5
