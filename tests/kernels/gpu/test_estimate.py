"""The estimate of docs/gpu.md: its figures are those stored, and its parts count what they say."""

import json
import re

import pytest
import torch

from tests import needs

needs.package("triton", covers="the estimate of the GPU kernels' cost")

from tests.kernels.gpu import estimate  # noqa: E402 - triton is there

ROOT = needs.ROOT
STORED = json.loads((ROOT / "results" / "estimates" / "gpu.json").read_text(encoding="utf-8"))


def test_the_page_has_the_stored_figures():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (A100|H100) \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == len(STORED["results"]) > 0
    for (device, rest), x in zip(rows, STORED["results"], strict=True):
        ranges = [tuple(x[name]) for name in ("forward", "backward", "both", "adasplash")]
        cells = [f"{x['active']:.2f}", *("{:.2f}–{:.2f}".format(*pair) for pair in ranges)]
        assert device == x["device"]
        assert [cell.strip() for cell in rest.split("|")][1:] == cells


def test_the_stored_figures_follow_from_their_parts():
    for x in STORED["results"]:
        (device,) = (name for name, title in estimate.NAMES.items() if title == x["device"])
        flash = estimate.FLASH[device]
        for i in (0, 1):
            forward = sum(x["parts"][name][i] for name in estimate.FORWARD)
            both = sum(part[i] for part in x["parts"].values())
            assert x["forward"][i] == pytest.approx(forward / flash, rel=1e-3)
            assert x["both"][i] == pytest.approx(both / flash / (1 + estimate.BACKWARD), rel=1e-3)


def test_sparsity_of_scores_that_are_known():
    n, seen = 256, torch.ones(256, 256, dtype=torch.bool).tril()
    alone = torch.where(torch.eye(n, dtype=torch.bool), 100.0, 0.0)
    found = estimate.sparsity("diagonal", alone, seen)
    assert (found.support, found.candidates, found.listed, found.crowded) == (1, 1, 1, 0)
    assert found.active == pytest.approx(8 / (2 + 4 + 6 + 8))  # of tiles of 64 by 32
    flat = estimate.sparsity("flat", torch.zeros(n, n), seen)
    assert flat.active == 1
    assert flat.support == flat.visible == (n + 1) / 2


def test_the_shortest_way_through_a_loop():
    """Instruction 1 jumps over 2 and 3 to 4; the branch at 5 goes back to 0."""
    code = ["FADD", "@P0 BRA", "FMUL", "HMMA", "HMMA.16816", "@P1 BRA"]
    way = estimate._shortest(code, {1: 4, 5: 0}, 0, 5)
    assert way == ["FADD", "@P0 BRA", "HMMA.16816", "@P1 BRA"]
    always = [*code[:1], "BRA", *code[2:]]
    assert estimate._shortest(always, {1: 4, 5: 0}, 0, 5)[1] == "BRA"
    loop = estimate._loop(way, warps=8)
    assert (loop.total, loop.tensor, loop.issued) == (4, 16, 8)
    assert loop.per(8) == (2, 3)
