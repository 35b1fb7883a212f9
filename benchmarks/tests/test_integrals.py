"""The study of integrals measures what it says. No test depends on a time."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import integrals, tables
from benchmarks import integrals_methods as methods
from benchmarks.attention_rounds import Neighbours, Rounds
from benchmarks.command import commands
from benchmarks.integrals_methods import METHODS, Setting
from fenchel.continuous.ball import Rule
from tests import needs

needs.package("scipy", "the benchmark of integrals")

SMOOTH, NARROW = Setting("smooth", 0.05, (1.0, 4.0)), Setting("narrow", 0.001, (1.0, 4.0))
TINY = integrals.Sweep(
    settings=(SMOOTH, NARROW),
    densities=2,
    functions=3,
    doubles=1,
    singles=2,
    nodes=(10, 100),
    tolerances=(1e-3, 1e-6, 1e-9),
    reference=2000,
    rounds=Rounds(1, 1, 0.1),
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(json.dumps(integrals.run(TINY).as_json()))


def entries(document: dict[str, Any], setting: str) -> dict[str, dict[str, Any]]:
    return {e["method"]: e for e in document["results"] if e["setting"] == setting}


# ---- the JSON


def test_json_has_every_method_in_every_setting(document: dict[str, Any]) -> None:
    assert document["bench"] == "integrals"
    assert document["machine"]["torch"] == torch.__version__
    assert document["settings"]["functions"] == 9
    for setting in ("smooth", "narrow"):
        by_method = entries(document, setting)
        assert list(by_method) == [method.name for method in METHODS]
        assert {e["error"] for e in by_method.values()} == {""}
        counts = {name: e["integrals"] for name, e in by_method.items()}
        assert counts == {
            m.name: 18 if m.batched else TINY.count(m) for m in METHODS
        }  # 2 densities times 9 functions at once, few alone
        assert all(e["seconds"] > 0 and e["seconds_alone"] > 0 for e in by_method.values())


@pytest.mark.parametrize("setting", ["smooth", "narrow"])
def test_counting_both_ends_is_the_larger_error(document: dict[str, Any], setting: str) -> None:
    errors = {name: e["largest_error"] for name, e in entries(document, setting).items()}
    wrong = errors.pop(methods.BOTH_ENDS)
    assert wrong > 1e-3
    assert max(errors.values()) < 1e-6  # of the quadrature that scipy stops at 1.5e-8
    assert errors[methods.OURS] <= 1e-9


def test_ours_is_within_its_tolerance_and_names_its_nodes(document: dict[str, Any]) -> None:
    ours = [e for e in document["curves"] if e["method"] == methods.OURS]
    assert [e["tolerance"] for e in ours] == [*TINY.tolerances] * 2
    for entry in ours:
        assert entry["largest_error"] <= entry["tolerance"]
        assert entry["nodes"] == Rule.closed(entry["tolerance"]).nodes
        assert entry["most"] == 3 * entry["nodes"]


def test_few_steps_of_the_angle_do_not_resolve_narrow_functions(document: dict[str, Any]) -> None:
    few, many = (
        e["largest_error"]
        for e in document["curves"]
        if (e["setting"], e["method"]) == ("narrow", integrals.TRAPEZOID)
    )
    assert few > 1e-2
    assert many < 1e-6


def test_references_agree_and_say_how_well(document: dict[str, Any]) -> None:
    assert [e["setting"] for e in document["references"]] == ["smooth", "narrow"]
    assert all(0 < e["apart"] < 1e-12 for e in document["references"])


def test_a_reference_that_does_not_agree_is_refused() -> None:
    with pytest.raises(ArithmeticError, match="no reference: 20 angles and fl expect at 1e-14"):
        integrals.reference(NARROW.problem(1, 3, 0), 20)


# ---- the mathematics


@pytest.mark.parametrize("r0", [-3.0, -0.2, 0.0, 0.4, 1.3, 5.0])
@pytest.mark.parametrize("sigma", [0.05, 0.3, 2.0])
def test_the_radius_in_closed_form(r0: float, sigma: float) -> None:
    """Against 100 Gauss–Legendre nodes, which resolve the narrowest of these."""
    x, w = numpy.polynomial.legendre.leggauss(100)
    r = (x + 1) / 2
    normal = numpy.exp(-(((r - r0) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
    wanted = float((w / 2 * (r - r**3) * normal).sum())
    assert methods.radial(r0, sigma, math) == pytest.approx(wanted, rel=1e-9, abs=1e-13)
    tensors = (torch.tensor(value, dtype=torch.float64) for value in (r0, sigma))
    assert float(methods.radial(*tensors, torch)) == pytest.approx(wanted, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("method", [m for m in METHODS if m.name != methods.BOTH_ENDS])
def test_methods_compute_the_expectation(method: methods.Method) -> None:
    """Against a grid over the ellipse's box, which knows nothing of discs and rays."""
    problem = replace_functions(SMOOTH.problem(1, 2, 3))
    low, high = (x[0] for x in problem.density.projection())
    side = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    points = torch.cartesian_prod(*(low[i] + (high[i] - low[i]) * side for i in (0, 1)))
    cell = float((high - low).prod()) / len(points)
    wanted = (problem.density.prob(points).unsqueeze(-1) * problem.basis(points)).sum(0) * cell
    values = method.call(problem)
    assert values.shape == (1, len(problem.basis))
    torch.testing.assert_close(values[0], wanted, rtol=2e-6, atol=1e-6)


def replace_functions(problem: methods.Problem) -> methods.Problem:
    """Two of the functions, neither round nor alike."""
    squares = torch.tensor([[[0.05, 0.02], [0.02, 0.04]], [[0.03, -0.01], [-0.01, 0.02]]])
    basis = methods.fc.GaussianBasis(problem.basis.centers[:2], squares.to(torch.float64))
    return methods.Problem(problem.density, basis)


def test_both_ends_counts_the_point_at_zero_twice() -> None:
    problem = NARROW.problem(2, 3, 0)
    disc, step = methods.Disc.of(problem), 2 * math.pi / 100
    at_zero = methods.ray(disc, torch.zeros((), dtype=torch.float64), torch)
    once = methods.trapezoid(problem, 99) * 99 / 100
    torch.testing.assert_close(methods.both_ends(problem), once + step * at_zero)


def test_one_integral_is_the_one_asked_for() -> None:
    problem = SMOOTH.problem(2, 3, 0)
    every = methods.trapezoid(problem).flatten()
    for number in (0, 8, 9, 17):
        torch.testing.assert_close(methods.trapezoid(problem.one(number)).squeeze(), every[number])


def test_parts_give_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SMOOTH.problem(2, 3, 0)
    whole = methods.trapezoid(problem)
    monkeypatch.setattr(methods, "_AT_A_TIME", 7 * problem.integrals)
    torch.testing.assert_close(methods.trapezoid(problem), whole)


def test_settings_are_what_they_are_called() -> None:
    problem = Setting("thin", 0.001, (100.0, 100.0)).problem(5, 4, 0)
    values = torch.linalg.eigvalsh(problem.density.covariance_matrix)
    torch.testing.assert_close(values[:, 1] / values[:, 0], values.new_full((5,), 100.0))
    assert problem.integrals == 5 * 16
    torch.testing.assert_close(
        problem.basis.covariances[3], 0.001 * torch.eye(2, dtype=torch.float64)
    )
    ratios = torch.linalg.eigvalsh(SMOOTH.problem(50, 1, 0).density.scale)
    assert bool((ratios[:, 1] / ratios[:, 0] <= 4 + 1e-9).all())


def test_single_integrals_are_not_next_to_nothing() -> None:
    exact = torch.tensor([[1.0, 1e-9], [1e-2, 0.0]])
    assert sorted(integrals._worth(exact, 4, 0)) == [0, 2]


def test_error_is_relative_to_one_plus_the_value() -> None:
    assert integrals.largest_error(
        torch.tensor([3.0, 0.1]), torch.tensor([9.0, 0.0])
    ) == pytest.approx(0.6)


# ---- the run


def test_progress_reaches_one_and_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    shares: list[float] = []
    labels: set[str] = set()

    def advance(what: str, share: float) -> None:
        labels.add(what)
        shares.append(share)

    integrals.run(replace(TINY, threads=before + 1), advance)
    assert sum(shares) == pytest.approx(1)
    assert labels == {"smooth", "narrow"}
    assert torch.get_num_threads() == before


def test_without_scipy_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.integrate", None)
    results = integrals.run(replace(TINY, settings=(SMOOTH,))).as_json()["results"]
    missing = 'ModuleNotFoundError: scipy is missing; pip install -c constraints.txt ".[papers]"'
    assert [e["error"] for e in results] == [missing] * 2 + [""] * 4
    assert [e["largest_error"] is None for e in results] == [True] * 2 + [False] * 4


def test_a_sweep_refuses_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="singles must be >= 1, got 0"):
        integrals.Sweep(singles=0)
    with pytest.raises(ValueError, match="settings must not be empty"):
        integrals.Sweep(settings=())


def test_times_and_errors_as_text() -> None:
    shown = [tables.seconds(x) for x in (2.5, 0.0123456, 4.5e-6, 7e-9, None)]
    assert shown == ["2.5 s", "12.3 ms", "4.5 µs", "7 ns", "–"]
    assert [tables.error(x) for x in (1.26e-9, None)] == ["1.3e-09", "–"]


# ---- the command


@pytest.mark.smoke
def test_quick_prints_tables_and_writes_json_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrals, "QUICK", TINY)
    monkeypatch.setattr(Neighbours, "share", lambda self: 0.5)
    out = tmp_path / "integrals.json"
    arguments = ["integrals", "--quick", "--out", str(out)]
    result = CliRunner().invoke(commands, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for text in (*(method.name for method in METHODS), "up to 3 pieces", "narrow"):
        assert text in result.stdout
    assert "Do not trust" in result.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["settings"]["densities"] == 2
    picture = out.with_suffix(".svg")
    assert result.stdout.splitlines()[-2:] == [str(out), str(picture)]
    ElementTree.parse(picture)
    assert "#0a0b0" not in picture.read_text(encoding="utf-8")  # every placeholder was replaced


def test_the_full_sweep_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrals, "FULL", replace(TINY, settings=(NARROW,)))
    result = CliRunner().invoke(commands, ["integrals"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "narrow" in result.stdout
    assert "smooth" not in result.stdout


def test_help_shows_an_example() -> None:
    result = CliRunner().invoke(commands, ["integrals", "--help"])
    assert "Example: python -m benchmarks integrals --quick" in " ".join(result.output.split())
