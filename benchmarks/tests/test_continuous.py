"""The benchmark of continuous attention measures what it says. No test depends on a time."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fenchel as fl
import fenchel.continuous as fc
from benchmarks import continuous
from benchmarks import continuous_methods as methods
from benchmarks.attention_rounds import Rounds
from benchmarks.command import commands
from benchmarks.continuous_methods import KINDS, Images, Layers, Mixtures
from benchmarks.maps import DIRECTIONS
from tests import needs

needs.package("sklearn", "the benchmark of continuous attention")

IMAGES = Images(batch=2, side=4, channels=6, functions=9)
MIXTURES = Mixtures(batch=3, modes=2, iterations=5, side=5)
TINY = continuous.Sweep(
    images=IMAGES,
    mixtures=MIXTURES,
    layers=Layers(embed=8, heads=2, functions=4, lengths=(16, 512, 1024)),
    rounds=Rounds(1, 1, 0.1),
    threads=1,
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(json.dumps(continuous.run(TINY).as_json()))


# ---- the JSON


def test_json_has_every_method(document: dict[str, Any]) -> None:
    assert document["bench"] == "continuous"
    assert document["machine"]["torch"] == torch.__version__
    assert document["settings"]["images"]["channels"] == 6
    names = [(e["method"], e["direction"]) for e in document["results"]]
    assert names == [(kind.name, direction) for kind in KINDS for direction in DIRECTIONS]
    assert [e["method"] for e in document["mixtures"]] == ["scikit-learn", "fl fit_mixture"]
    pairs = [(e["n"], e["method"]) for e in document["layers"]]
    assert pairs == [(n, name) for n in (16, 512, 1024) for name, _ in methods.LAYERS]
    every = [*document["results"], *document["mixtures"], *document["layers"]]
    assert {e["error"] for e in every} == {""}
    assert [e["sizes"] for e in document["growth"]] == [[512, 1024]] * 2


def test_ratios_are_to_the_first_of_their_group(document: dict[str, Any]) -> None:
    base = {e["direction"]: e["seconds"] for e in document["results"] if e["method"] == "softmax"}
    slow = {kind.name for kind in KINDS if kind.slow}
    assert slow == {"fl Tsallis(1.5)"}
    for entry in document["results"]:
        if entry["method"] not in slow:  # those have a softmax of their own
            assert entry["ratio"] == pytest.approx(entry["seconds"] / base[entry["direction"]])
        assert entry["ratio"] > 0
    for part in ("mixtures", "layers"):
        for first, second in zip(document[part][::2], document[part][1::2], strict=True):
            assert first["ratio"] == 1
            assert second["ratio"] == pytest.approx(second["seconds"] / first["seconds"])


def test_growth_is_the_power_of_the_tokens() -> None:
    entries = [
        {"method": methods.STANDARD, "n": n, "seconds": 1e-9 * n**2, "error": ""}
        for n in (256, 512, 1024, 2048)
    ]
    entries.append({"method": methods.CONTINUOUS, "n": 512, "seconds": 1.0, "error": ""})
    (fitted,) = continuous.growth(entries)  # one size has no slope
    assert fitted["method"] == methods.STANDARD
    assert fitted["exponent"] == pytest.approx(2)
    assert fitted["sizes"] == [512, 1024, 2048]


# ---- attention over a grid


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_backward_reaches_features_and_every_parameter(kind: methods.Kind) -> None:
    gradients = methods.image_thunk(kind, IMAGES, "forward+backward")()
    assert isinstance(gradients, tuple)
    shapes = [tuple(g.shape) for g in gradients]
    assert shapes == [(2, 16, 6), (6, 6), (6,), (1, 6), (1,)]
    assert all(float(g.abs().max()) > 0 for g in gradients[:4])  # softmax ignores the last bias


def test_kinds_compute_what_they_are_called() -> None:
    features = IMAGES.features()
    scores = 3 * features[..., 0]
    outputs = {kind.name: kind.make(IMAGES)(features, scores) for kind in KINDS}
    weights = fl.softmax(scores)
    torch.testing.assert_close(outputs["softmax"], torch.einsum("bl,blc->bc", weights, features))
    assert outputs["head alone"] is scores
    positions = fc.cell_centers(4, 4)
    basis = fc.GaussianBasis.grid(3, 1 / 9, 2)
    values = fc.fit_values(features, positions, basis, padding=True)
    densities = {
        "fl Shannon()": fc.match_moments(weights, positions, fc.Gaussian),
        "fl Tsallis(2)": fc.match_moments(weights, positions, fc.Paraboloid),
        "fl Tsallis(1.5)": fc.match_moments(weights, positions, fc.TsallisGaussian, alpha=1.5),
        "fl Shannon(), 4 modes": fc.fit_mixture(weights, positions, 4),
    }
    assert densities.keys() | {"softmax", "head alone"} == outputs.keys()
    for name, density in densities.items():
        torch.testing.assert_close(outputs[name], values.expect(density), rtol=1e-4, atol=1e-5)
    one, four = outputs["fl Shannon()"], outputs["fl Shannon(), 4 modes"]
    assert not torch.allclose(one, four, atol=1e-3)
    assert not torch.allclose(one, outputs["fl Tsallis(2)"], atol=1e-5)


def test_the_forward_pass_records_nothing_and_the_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    output = methods.image_thunk(KINDS[2], IMAGES, "forward")()
    assert isinstance(output, torch.Tensor)
    assert not output.requires_grad
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- mixtures


def test_both_fits_are_the_same_fit(document: dict[str, Any]) -> None:
    assert document["log_likelihood_difference"] < 1e-10


def test_another_number_of_iterations_is_another_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the difference can tell."""
    longer = methods.ours(replace(MIXTURES, iterations=6))
    monkeypatch.setattr(methods, "ours", lambda sizes: longer)
    difference = methods.likelihood_difference(MIXTURES)
    assert difference is not None
    assert difference > 1e-7


def test_scikit_learn_does_all_iterations_from_its_own_start() -> None:
    fits = methods.sklearn(MIXTURES)()
    assert [fit.n_iter_ for fit in fits] == [5, 5, 5]
    means = MIXTURES.start().components.mean
    assert len({tuple(mean.flatten().tolist()) for mean in means}) == 3
    still = methods.sklearn(replace(MIXTURES, iterations=1))()[0]
    assert still.n_iter_ == 1
    assert abs(still.means_ - fits[0].means_).max() > 1e-3


def test_without_scikit_learn_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.mixture", None)
    document = continuous.run(TINY).as_json()
    peer, ours = document["mixtures"]
    assert peer["error"] == (
        'ModuleNotFoundError: sklearn is missing; pip install -c constraints.txt ".[papers]"'
    )
    assert ours["error"] == ""
    assert ours["seconds"] > 0
    assert peer["ratio"] is ours["ratio"] is document["log_likelihood_difference"] is None
    assert any("–" in row for row in continuous.listings(document)[1].rows)


# ---- layers


def test_layers_are_alike_but_for_attention() -> None:
    sizes = Layers(embed=8, heads=2, functions=4)
    standard, ours = (make(sizes) for _, make in methods.LAYERS)
    count: Callable[[torch.nn.Module], int] = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    assert count(standard) == count(ours)
    assert isinstance(standard, torch.nn.TransformerEncoderLayer)
    assert standard.norm_first
    for _, make in methods.LAYERS:
        output = methods.layer_thunk(make, sizes, 20)()
        assert isinstance(output, torch.Tensor)
        assert output.shape == (1, 20, 8)
        assert not output.requires_grad


# ---- the run and the command


def test_progress_reaches_one_and_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    shares: list[float] = []
    labels: list[str] = []

    def advance(what: str, share: float) -> None:
        labels.append(what)
        shares.append(share)

    report = continuous.run(replace(TINY, threads=before + 1), advance)
    assert report.threads == before + 1
    assert sum(shares) == pytest.approx(1)
    assert list(dict.fromkeys(labels))[:3] == ["attention", "mixtures", "16 tokens"]
    assert torch.get_num_threads() == before


@pytest.mark.smoke
def test_quick_prints_tables_and_writes_json_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "QUICK", replace(TINY, threads=None))
    out = tmp_path / "continuous.json"
    arguments = ["continuous", "--quick", "--threads", "1", "--out", str(out)]
    result = CliRunner().invoke(commands, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for text in (*(kind.name for kind in KINDS), "scikit-learn", "fl ContinuousTransformerLayer"):
        assert text in result.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["settings"]["threads"] == 1
    picture = out.with_suffix(".svg")
    assert result.stdout.splitlines()[-2:] == [str(out), str(picture)]
    ElementTree.parse(picture)
    assert "#0a0b0" not in picture.read_text(encoding="utf-8")


def test_without_matplotlib_the_json_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "FULL", TINY)
    monkeypatch.delitem(sys.modules, "benchmarks.pictures", raising=False)
    monkeypatch.delitem(sys.modules, "fenchel.lens.pictures.draw", raising=False)
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "continuous.json"
    result = CliRunner().invoke(commands, ["continuous", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "no picture: matplotlib" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["continuous.json"]


def test_a_folder_that_is_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("continuous", "integrals"):
        result = CliRunner().invoke(commands, [command, "--out", str(tmp_path / "file" / "x.json")])
        assert result.exit_code == 2
