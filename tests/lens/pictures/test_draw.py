"""Pictures show the texts that they are given as they stand."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fenchel.lens.pictures import draw

NAMES = (r"a$\x$b", r"$5 and $6", r"back\$slash", "one $ alone", r"$\frac{1}$")  # of folders


def shown(svg: str, name: str) -> int:
    return svg.count(f">{name}<")


@pytest.mark.parametrize("name", NAMES)
def test_a_text_of_any_kind_stands_as_it_is(name: str) -> None:
    def paint(figure: Figure) -> None:
        figure.suptitle(name)
        left, right = figure.subplots(1, 2)
        left.set_title(name)
        left.plot([0, 1], [0, 1], label=name)
        left.legend()
        left.set(xlabel=name, ylabel=name)
        left.annotate(name, (0.5, 0.5))
        right.text(0.5, 0.5, name)
        right.set_yticks([0, 1], [name, name])
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center")

    assert shown(draw.panel(paint, "wide", 3.0), name) == 10


def test_powers_on_a_logarithmic_axis_are_still_formulas() -> None:
    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        ax.set(xscale="log", yscale="log", xlim=(1e-3, 1e3), ylim=(2e-4, 4e-4), title=NAMES[0])
        ax.plot([1], [3e-4])

    svg = draw.panel(paint)
    assert shown(svg, NAMES[0]) == 1
    assert r">$\mathdefault" not in svg
    assert svg.count("<tspan") > 10


def test_a_file_of_its_own(tmp_path: Path) -> None:
    path = draw.save(lambda figure: figure.suptitle(NAMES[0]), tmp_path / "a.svg", (3, 2))
    assert path.exists()
