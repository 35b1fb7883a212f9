"""Kernels of rows, compiled for every device."""

import pytest
import torch

from tests import needs

needs.package("triton", covers="kernels of rows, compiled for devices that are not here")

from fenchel._kernels.gpu import rows  # noqa: E402 - triton is there
from tests.kernels.gpu.compiler import DEVICES, compiled_for  # noqa: E402

FAMILIES = {
    "entmax-1.5": ("tsallis", 0.5),
    "sparsemax": ("tsallis", 1.0),
    "gentle": ("tsallis", 0.1),
    "edge": ("tsallis", 0.7),
    "normmax": ("norm", 1.0),
    "norm": ("norm", 0.5),
    "budget": ("budget", 2.5),
}
QUICK = {("sm_75", 2048), ("sm_80", 2048), ("sm_90", 65536), ("sm_100", 100), ("gfx942", 65536)}


def size(device, keys):
    slow = () if (device, keys) in QUICK else pytest.mark.slow
    return pytest.param(device, keys, marks=slow)


SIZES = [size(device, keys) for device in DEVICES for keys in (1, 20, 100, 300, 700, 2048, 65536)]


@pytest.mark.parametrize(("device", "keys"), SIZES)
def test_rows(device, keys):
    """Nothing spills. The sizes are those of every block, and of rows in several."""
    scores = torch.empty(4, keys, device="meta")
    with compiled_for(device) as launches:
        for family, parameter in FAMILIES.values():
            weights = rows.row_weights(scores, family, parameter)
            rows.row_weights_backward(weights, weights, family, parameter)
        rows.row_offsets(scores, torch.empty(4, device="meta", dtype=torch.float64))
    kernels = {launch.kernel for launch in launches}
    assert kernels == {"weigh_rows", "weigh_budget_rows", "differentiate_rows", "offset_rows"}
    assert len(launches) >= 2 * len(FAMILIES) - 1  # tsallis at 0.1 and 0.7 share a derivative
    for launch in launches:
        launch.check()
