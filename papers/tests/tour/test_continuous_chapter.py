"""The chapter on continuous attention: what it says about areas and errors is so."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

import fenchel.continuous as fc
from papers.tour.chapter import Chapter, Tour
from papers.tour.chapters import continuous
from tests import needs

QUICK = Tour(seed=0, quick=True)


@pytest.fixture(scope="module")
def written() -> Chapter:
    return continuous.chapter(QUICK)


@pytest.fixture(scope="module")
def density() -> fc.Paraboloid:
    mean = torch.tensor([0.4, 0.6], dtype=torch.float64)
    covariance = torch.tensor([[0.01, 0.004], [0.004, 0.02]], dtype=torch.float64)
    return fc.Paraboloid.from_covariance(mean, covariance)


def column(chapter: Chapter, name: str) -> dict[str, float]:
    (table,) = chapter.tables
    place = table.header.index(name)
    return {str(row[0]): float(str(row[place])) for row in table.rows}


def test_the_chapter_renders(written: Chapter) -> None:
    assert written.title == "Continuous attention"
    assert [len(figure.panels) for figure in written.figures] == [6, 1]
    assert all(panel.startswith("<svg") for panel in written.figures[0].panels)
    assert "scikit-learn" not in written.intro


def test_sparse_densities_leave_part_of_the_image_alone(written: Chapter) -> None:
    weight, most = column(written, "image with weight"), column(written, "image for 90 %")
    for name in ("softmax on cells", "Gaussian", "two Gaussians"):
        assert weight[name] == 100
    for name in ("Paraboloid", "two paraboloids"):
        assert 5 < most[name] < weight[name] < 80
    assert most["two Gaussians"] < most["Gaussian"]
    assert column(written, "mass off the image")["softmax on cells"] == 0


def test_the_same_seed_gives_the_same_attention() -> None:
    scene = continuous.drawing()
    first, again = (continuous.attentions(scene, QUICK)["two Gaussians"] for _ in range(2))
    assert isinstance(first, fc.Mixture)
    assert isinstance(again, fc.Mixture)
    assert torch.equal(first.components.mean, again.components.mean)


def test_densities_have_the_moments_of_the_weights() -> None:
    things = continuous.attentions(continuous.drawing(), QUICK)
    weights = things["softmax on cells"]
    assert isinstance(weights, Tensor)
    places = fc.cell_centers(14, 14).double()
    mean = weights.flatten() @ places
    for name in ("Gaussian", "Paraboloid"):
        density = things[name]
        assert isinstance(density, fc.Density)
        assert torch.allclose(density.mean, mean, atol=1e-12)
    row, column_ = divmod(int(weights.argmax()), 14)
    assert weights[continuous.drawing().cell] == weights.max()
    assert weights[row, column_] > 5 * weights.mean()


def test_without_scikit_learn_a_drawing_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    scene = continuous.photograph()
    assert scene.note.count(".") == 1
    assert "scikit-learn" in scene.note
    assert np.array_equal(scene.image, continuous.drawing().image)
    assert scene.note in continuous.chapter(QUICK).intro


def test_the_photograph_is_the_one_of_scikit_learn() -> None:
    needs.package("sklearn", "the photograph of the tour")
    scene = continuous.photograph()
    assert scene.image.shape == (427, 640, 3)
    assert scene.note == ""


def test_shares() -> None:
    values = np.zeros((10, 10))
    values[0, :9] = 10.0
    values[1, 0] = 5.0
    assert continuous.shares(values) == pytest.approx((0.10, 0.09, 0.05))


def by_brute_force(density: fc.Paraboloid, basis: fc.GaussianBasis) -> Tensor:
    """Gauss–Legendre in the radius and many angles, from the densities themselves."""
    x, w = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(200))
    radius, weight = (x + 1) / 2, w / 2
    angle = torch.arange(600, dtype=torch.float64) * (2 * torch.pi / 600)
    reach = density.support.factor * (2 * density.level).sqrt()
    circle = torch.stack([angle.cos(), angle.sin()], -1) @ reach.mT
    points = density.mean + radius[:, None, None] * circle  # (200, 600, 2)
    area = (weight * radius)[:, None] * (2 * torch.pi / 600) * reach.det().abs()
    values = basis(points.reshape(-1, 2))
    integral: Tensor = (density.prob(points) * area).reshape(-1) @ values
    return integral


@pytest.mark.parametrize("deviation", [0.3, 0.05])
def test_the_trapezoid_rule_is_right(density: fc.Paraboloid, deviation: float) -> None:
    basis = continuous.functions(density, deviation)
    expected = by_brute_force(density, basis)
    assert expected.max() > 0.5
    assert torch.allclose(continuous.trapezoid(density, basis, 2048), expected, rtol=0, atol=1e-11)


def test_few_steps_of_the_angle_are_wrong(density: fc.Paraboloid) -> None:
    basis = continuous.functions(density, 0.03)
    angle, ours = continuous.errors(density, basis, [16, 1024])
    assert angle[16] > 0.1
    assert angle[1024] < 1e-12
    assert min(ours.values()) < 1e-11


def test_the_nodes_of_expect_do_not_depend_on_the_width(density: fc.Paraboloid) -> None:
    for deviation in (0.1, 0.01):
        ours = continuous.errors(density, continuous.functions(density, deviation), [16])[1]
        assert min(n for n, error in ours.items() if error < 1e-9) < 150
        assert len(ours) == 12


def test_the_first_number_of_nodes_that_is_enough() -> None:
    assert continuous._first({8: 1e-10, 16: 1e-3, 32: 1e-9, 64: 1e-12}) == "32"
    assert continuous._first({8: 1.0, 16: 1e-3}) == "over 16"
