"""Attention over an image: at the right place, in one scale, and only where it makes sense."""

from __future__ import annotations

import doctest
import subprocess
import sys
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import fenchel as fl
import fenchel.continuous as fc
from fenchel.lens.pictures import attention_map, layers, overlay
from fenchel.lens.pictures.layers import MASSES, Numbers, layer_of

GREY = np.full((90, 150, 3), 0.5)
MIDDLE = torch.tensor([0.45, 0.55], dtype=torch.float64)
SHAPE = torch.tensor([[0.006, 0.003], [0.003, 0.01]], dtype=torch.float64)


def paraboloid(row: float = 0.45, column: float = 0.55, scale: float = 1.0) -> fc.Paraboloid:
    mean = torch.tensor([row, column], dtype=torch.float64)
    return fc.Paraboloid.from_covariance(mean, scale * SHAPE)


def pair(first: float, family: Any, apart: float = 0.2) -> fc.Mixture:
    mean = torch.stack([MIDDLE - apart / 2, MIDDLE + apart / 2])
    mixing = torch.tensor([first, 1 - first], dtype=torch.float64)
    return fc.Mixture(mixing, family.from_covariance(mean, torch.stack([SHAPE, SHAPE / 4])))


DENSITIES = {
    "Gaussian": fc.Gaussian(MIDDLE, SHAPE),
    "Paraboloid": paraboloid(),
    "alpha 1.5": fc.TsallisGaussian.from_covariance(MIDDLE, SHAPE, 1.5),
    "alpha 3": fc.TsallisGaussian.from_covariance(MIDDLE, SHAPE, torch.tensor(3.0).double()),
    "near 1": fc.TsallisGaussian.from_covariance(MIDDLE, SHAPE, 1 + 1e-7),
    "near 1, float32": fc.TsallisGaussian.from_covariance(MIDDLE.float(), SHAPE.float(), 1.001),
    "two Gaussians": pair(0.7, fc.Gaussian),
    "two paraboloids": pair(0.3, fc.Paraboloid),
    "one of two": pair(1.0, fc.Paraboloid),
}


def one_hot(row: int, column: int, shape: tuple[int, int] = (6, 8)) -> torch.Tensor:
    weights = torch.zeros(shape)
    weights[row, column] = 1
    return weights


def pixels(figure: Figure) -> list[Numbers]:
    """What each axes shows, (h, w, 3) in 0..255."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba()).astype(float)[..., :3]
    return [_cut(picture, ax) for ax in figure.axes]


def _cut(picture: Numbers, ax: Axes) -> Numbers:
    box = ax.get_window_extent()
    rows = slice(round(len(picture) - box.y1), round(len(picture) - box.y0))
    return picture[rows, round(box.x0) : round(box.x1)]


def colored(panel: Numbers) -> Numbers:
    """Where it is coloured, as (row, column) in [0, 1]: grey, black and white are not."""
    where = np.argwhere(np.ptp(panel, axis=-1) > 40)
    return (where + 0.5) / panel.shape[:2]


# ---- where things are


def test_a_cell_and_a_narrow_density_at_its_centre_coincide() -> None:
    row, column = 1, 6
    centre = np.array([(row + 0.5) / 6, (column + 0.5) / 8])
    things = {"cell": one_hot(row, column), "density": paraboloid(*centre, scale=0.1)}
    figure = attention_map(GREY, things)
    figure.set_dpi(200)
    plain, cell, density, _ = pixels(figure)
    assert len(colored(plain)) == 0
    pixel = 1 / np.array(plain.shape[:2])
    for panel in (cell, density):
        assert len(colored(panel)) > 20
        assert (abs(colored(panel).mean(0) - centre) < 1.5 * pixel).all()
    inside = abs(colored(cell) - centre) < 0.5 / np.array([6, 8]) + 1.5 * pixel
    assert inside.all()
    for panel, ax in zip((cell, density), figure.axes[1:], strict=False):
        assert (abs(middle_of_the_edge(ax) - centre) < 1e-6).all()
        white = (np.argwhere(panel.min(-1) > 225) + 0.5) / panel.shape[:2]
        assert (abs(white.mean(0) - centre) < 1.5 * pixel).all()


def middle_of_the_edge(ax: Axes) -> Numbers:
    """(row, column)"""
    x, y = np.asarray(ax.lines[-1].get_data(), dtype=float)
    return np.array([np.nanmin(y) + np.nanmax(y), np.nanmin(x) + np.nanmax(x)]) / 2


def test_panels_have_the_shape_of_the_image() -> None:
    for height, width in ((40, 120), (120, 40), (300, 20)):
        figure = attention_map(np.zeros((height, width)), one_hot(0, 0))
        panels = pixels(figure)[:2]
        for panel in panels:
            assert panel.shape[0] / panel.shape[1] == pytest.approx(height / width, rel=0.04)


def test_the_image_comes_first_and_untouched() -> None:
    image = np.random.default_rng(0).random((6, 9, 3))
    first, second, _ = attention_map(image, one_hot(0, 0)).axes
    assert np.array_equal(first.images[0].get_array(), image)
    assert len(first.images) == 1
    assert not first.lines
    assert not np.array_equal(second.images[0].get_array(), image)


@pytest.mark.parametrize("bright", [0.0, 1.0])
def test_lines_are_seen_on_bright_and_on_dark(bright: float) -> None:
    image = np.full((60, 60), bright)
    for thing in (paraboloid(scale=3.0), one_hot(2, 2)):
        panel = pixels(attention_map(image, thing))[1]
        assert (panel.max(-1) < 30).sum() > 100
        assert (panel.min(-1) > 225).sum() > 100
    grey = overlay.greyed(np.full((1, 1, 3), bright)) * 255
    assert grey.min() > 30
    assert grey.max() < 225


# ---- what the lines are


def cells(side: int) -> Numbers:
    line = (np.arange(side) + 0.5) / side
    return np.stack(np.meshgrid(line, line, indexing="ij"), -1)


def prob(density: Any, points: Numbers) -> Numbers:
    return np.asarray(density.prob(torch.as_tensor(points).to(density.mean)), dtype=float)


@pytest.mark.parametrize("name", DENSITIES)
@pytest.mark.parametrize("mass", MASSES)
def test_thin_lines_hold_their_mass(name: str, mass: float) -> None:
    density = DENSITIES[name]
    line = layer_of(density).mass[mass]
    level = prob(density, line[~np.isnan(line[:, 0])])
    peak = prob(density, cells(100)).max()
    assert level.max() - level.min() < 0.02 * peak  # a mixture's line is interpolated
    everywhere = prob(density, cells(1000))
    held = everywhere[everywhere > np.median(level)].sum() / everywhere.sum()
    assert held == pytest.approx(mass, abs=2e-3)


def test_the_lines_of_a_gaussian_are_at_half_and_a_tenth_of_its_peak() -> None:
    density = DENSITIES["Gaussian"]
    for mass, line in layer_of(density).mass.items():
        expected = (1 - mass) * float(density.prob(MIDDLE))
        assert prob(density, line) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["Paraboloid", "alpha 1.5", "alpha 3", "one of two"])
def test_the_thick_line_is_where_the_density_ends(name: str) -> None:
    density = DENSITIES[name]
    edge = layer_of(density).edge
    edge = edge[~np.isnan(edge[:, 0])]
    centre = np.asarray(density.mean)
    assert len(edge) > 300
    assert (prob(density, centre + (edge - centre) * 0.999) > 0).all()
    assert (prob(density, centre + (edge - centre) * 1.001) == 0).all()


def test_gaussians_have_no_edge() -> None:
    for name in ("Gaussian", "two Gaussians"):
        assert len(layer_of(DENSITIES[name]).edge) == 0


def test_the_edge_of_a_mixture_is_that_of_the_union() -> None:
    density = pair(0.3, fc.Paraboloid, apart=0.15)
    edge = layer_of(density).edge
    line = edge[~np.isnan(edge[:, 0])]
    assert 200 < len(line) < 2 * 362 - 50  # some of both ellipses, not all
    assert prob(density, line).max() < 1e-9 * prob(density, cells(100)).max()
    apart = pair(0.3, fc.Paraboloid, apart=0.5)
    assert int((~np.isnan(layer_of(apart).edge[:, 0])).sum()) == 2 * 362
    same = fc.Mixture(
        torch.tensor([0.5, 0.5], dtype=torch.float64), paraboloid().expand(torch.Size([2]))
    )
    assert len(layer_of(same).edge) > 362  # drawn twice rather than not at all


def test_cells_without_weight_are_fenced_off() -> None:
    assert len(layer_of(torch.ones(3, 4)).edge) == 0
    edge = layer_of(one_hot(1, 2, (4, 5))).edge
    line = edge[~np.isnan(edge[:, 0])]
    corners = {(round(4 * r), round(5 * c)) for r, c in line}
    assert corners == {(1, 2), (1, 3), (2, 2), (2, 3)}
    assert len(line) == 4 * 2


def test_only_an_edge_is_a_whole_line() -> None:
    """Told apart in the legend and on the map, also without colour or width."""
    figure = attention_map(GREY, paraboloid())
    (legend,) = figure.legends
    for lines in (figure.axes[1].lines, legend.get_lines()):
        broken = [line.is_dashed() for line in lines]
        assert broken == [True, True, False]
        patterns = {line._unscaled_dash_pattern for line in lines}  # type: ignore[attr-defined]
        assert len({str(pattern) for pattern in patterns}) == 3


def test_titles_keep_off_the_edge(tmp_path: Any) -> None:
    for things in (paraboloid(), {"two\nlines": one_hot(0, 0)}, paraboloid(1.05)):
        figure = attention_map(GREY, things)
        figure.savefig(tmp_path / "map.png", dpi=100)
        height = figure.bbox.height
        top = max(ax.title.get_window_extent().y1 for ax in figure.axes[:2])
        assert height - top > 0.05 * figure.dpi


@pytest.mark.parametrize(("row", "share"), [(0.45, 1.0), (1.0, 0.5), (1.05, 0.25), (1.3, 0.0)])
def test_a_density_beside_the_image_says_so(row: float, share: float) -> None:
    density = fc.Gaussian(torch.tensor([row, 0.5]).double(), 0.0055 * torch.eye(2).double())
    layer = layer_of(density)
    assert layer.on_image == pytest.approx(share, abs=2e-3)
    title = attention_map(GREY, {"name": density}).axes[1].get_title()
    notes = {
        0.25: "name\n(25 % of it on the image)",
        0.0: "name\n(less than 1 % of it on the image)",
    }
    if row != 1.0:  # at the very half either is right
        assert title == notes.get(share, "name")


def test_what_a_layer_returns_can_be_drawn() -> None:
    layer = fl.nn.ContinuousAttention2d((4, 4), fl.Tsallis(2.0), functions=4)
    features, scores = torch.randn(2, 16, 3), torch.randn(2, 16)
    assert layer_of(layer(features[0], scores[0])).title == "Paraboloid"
    with pytest.raises(ValueError, match=r"what\.density must be one.*\(2,\).*what\.density\[0\]"):
        attention_map(GREY, layer(features, scores))


# ---- one scale


def test_weights_and_densities_share_one_scale_and_one_bar() -> None:
    weights = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    things = {"weights": weights, "Gaussian": DENSITIES["Gaussian"], "two": pair(0.5, fc.Gaussian)}
    figure = attention_map(GREY, things)
    tops = [ax.images[1].norm.vmax for ax in figure.axes[1:4]]
    largest = max(layer_of(thing).peak for thing in things.values())
    assert tops == [largest] * 3
    assert len(figure.axes) == 1 + 3 + 1
    assert figure.axes[-1].get_ylim() == pytest.approx((0, largest))
    for thing in things.values():
        assert layer_of(thing).values.mean() == pytest.approx(1, abs=1e-3)
    assert [ax.get_title() for ax in figure.axes[:4]] == ["image", *things]


def test_weights_are_divided_by_their_sum_and_by_the_area_of_a_cell() -> None:
    expected = np.array([[0.0, 1.0], [1.0, 2.0]])
    for weights in ([[0, 1], [1, 2]], torch.tensor([[0, 0.25], [0.25, 0.5]])):
        assert np.array_equal(layer_of(weights).values, expected)


def test_a_density_narrower_than_the_raster_still_sets_the_scale() -> None:
    place = fc.match_moments(
        one_hot(2, 3).flatten(), fc.cell_centers(6, 8), fc.Paraboloid, floor=1e-7
    )
    peak = float(place.log_peak.exp())
    assert layer_of(place).peak == pytest.approx(peak, rel=1e-4)


def test_top_is_used_or_refused() -> None:
    bounded = attention_map(GREY, DENSITIES["Gaussian"], top=2.0)
    assert bounded.axes[1].images[1].norm.vmax == 2
    assert bounded.axes[-1].get_ylim() == (0, 2)
    assert bounded.axes[-1]._colorbar.extend == "max"
    assert attention_map(GREY, one_hot(0, 0), top=99.0).axes[-1]._colorbar.extend == "neither"
    for top in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="top must be"):
            attention_map(GREY, one_hot(0, 0), top=top)


def test_panels_wrap() -> None:
    things = {str(k): one_hot(0, k) for k in range(6)}
    figure = attention_map(GREY, things, columns=3)
    assert len(figure.axes) == 8
    boxes = [ax.get_subplotspec() for ax in figure.axes[:7]]
    assert [box.rowspan.start for box in boxes if box] == [0, 0, 0, 1, 1, 1, 2]
    with pytest.raises(ValueError, match="columns must be >= 1"):
        attention_map(GREY, things, columns=0)


# ---- what it takes


def test_any_common_image_is_the_same_image() -> None:
    whole = np.arange(60, dtype=np.uint8).reshape(5, 4, 3) * 4
    wanted = whole / 255
    for image in (whole, wanted, torch.from_numpy(whole), torch.tensor(wanted, requires_grad=True)):
        shown = attention_map(image, one_hot(0, 0)).axes[0].images[0].get_array()
        assert np.allclose(shown, wanted, atol=1e-12)
    flat = attention_map(whole[..., 0], one_hot(0, 0)).axes[0].images[0].get_array()
    assert np.array_equal(flat, np.repeat(wanted[..., :1], 3, -1))


def test_any_precision_and_gradients_are_taken() -> None:
    weights = torch.rand(3, 3, dtype=torch.bfloat16, requires_grad=True)
    mean = MIDDLE.float().requires_grad_()
    figure = attention_map(GREY, {"w": weights, "d": fc.Gaussian(mean, SHAPE.float())})
    assert len(figure.axes) == 4


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (torch.zeros(3, 8, 9), ValueError, r"\(3, 8, 9\); move the channels last"),
        (torch.zeros(2, 8, 9, 3), ValueError, r"image\[0\]"),
        (torch.zeros(8, 9, 4), ValueError, r"image\[\.\.\., :3\]"),
        (torch.zeros(8), ValueError, r"\(H, W, 3\) or \(H, W\), got \(8,\)"),
        (torch.zeros(0, 4, 3), ValueError, r"got \(0, 4, 3\)"),
        (torch.full((8, 9), 2.0), ValueError, r"\[0, 1\], got 2 to 2; divide it by 255"),
        (torch.full((8, 9), -0.1), ValueError, r"\[0, 1\], got -0.1"),
        (torch.full((8, 9), torch.nan), ValueError, "image must be finite"),
        (torch.zeros(8, 9, dtype=torch.int64), TypeError, "uint8, or floats"),
        ("photo.png", TypeError, "image must hold real numbers, got str"),
        ([[0.0], [0.0, 1.0]], TypeError, "image must be an array of numbers"),
    ],
)
def test_bad_images_are_refused(image: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_map(image, one_hot(0, 0))


BATCH = fc.Gaussian(torch.zeros(4, 2), torch.eye(2))


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (torch.ones(196), ValueError, r"what must be weights \(rows, columns\).*reshape"),
        (torch.ones(2, 14, 14), ValueError, r"got \(2, 14, 14\)"),
        (torch.zeros(3, 3), ValueError, "what must not sum to zero"),
        (torch.tensor([[1.0, -0.5]]), ValueError, "not scores"),
        (torch.tensor([[1.0, torch.nan]]), ValueError, "what must be finite"),
        (torch.tensor([[1.0, torch.inf]]), ValueError, "what must be finite"),
        (fc.Gaussian(torch.zeros(3), torch.eye(3)), ValueError, "d = 2, got d = 3"),
        (BATCH, ValueError, r"got a batch \(4,\); take one: what\[0\]"),
        (
            fc.Mixture(torch.full((2, 4), 0.25), BATCH),
            ValueError,
            r"Mixture\(what\.mixing\[0\], what\.components\[0\]\)",
        ),
        (paraboloid(45.0, 80.0), ValueError, "no mass on the image.*not pixels"),
        ({"a": torch.zeros(2, 2)}, ValueError, r"what\['a'\] must not sum to zero"),
        ({}, ValueError, "empty mapping"),
        (None, TypeError, "what must hold real numbers, got NoneType"),
    ],
)
def test_bad_attention_is_refused(what: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_map(GREY, what)


def test_the_ways_out_of_a_batch_work() -> None:
    mixture = fc.Mixture(torch.full((2, 4), 0.25), BATCH)
    one = fc.Mixture(mixture.mixing[0], mixture.components[0])
    assert layer_of(BATCH[0]).title == "Gaussian"
    assert layer_of(one).title == "4 × Gaussian"


def test_a_density_that_became_nan_is_refused() -> None:
    density = fc.Gaussian(MIDDLE.clone(), SHAPE)
    density.mean[0] = torch.nan  # in place: the constructor cannot see it
    with pytest.raises(ValueError, match="NaN"):
        attention_map(GREY, density)


# ---- matplotlib


def test_nothing_global_is_touched_and_matplotlib_waits() -> None:
    code = """
import sys
import fenchel.lens.pictures
assert not any(name.startswith("matplotlib") for name in sys.modules), "loaded too early"
import matplotlib, torch
before = matplotlib.rcParams.copy()
figure = fenchel.lens.pictures.attention_map(torch.zeros(4, 5), torch.eye(3))
assert "matplotlib.pyplot" not in sys.modules
for name in set(before) - {"backend"}:  # which resolves itself when it is read
    assert matplotlib.rcParams[name] == before[name], name
"""
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def test_the_function_is_no_module_whatever_was_imported_first() -> None:
    import fenchel.lens.pictures.attention_map

    assert callable(fenchel.lens.pictures.attention_map)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"fenchel\[report\]\""):
        attention_map(GREY, one_hot(0, 0))


def test_the_example_runs() -> None:
    module = sys.modules["fenchel.lens.pictures.attention_map"]
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0
    assert doctest.testmod(layers).failed == 0


def test_it_can_be_saved_as_a_drawing(tmp_path: Any) -> None:
    path = tmp_path / "map.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        attention_map(GREY, {"a title": pair(0.4, fc.Paraboloid)}).savefig(path)
    text = path.read_text()
    assert "a title" in text
    assert "holds 90 % of the mass" in text
    assert "edge of the support" in text
