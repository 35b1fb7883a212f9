"""Formulas between dollars, and dollars that are none."""

import xml.etree.ElementTree as etree

import pytest
from markdown import markdown

from docs_site.formulas import FormulaError, Formulas

MATHML = "{http://www.w3.org/1998/Math/MathML}"


def shown(text):
    return markdown(text, extensions=["fenced_code", Formulas()])


def parsed(text):
    """What is shown, as a tree: MathML must be well formed."""
    return etree.fromstring(f"<body>{shown(text)}</body>")


def symbols(tree):
    return ["".join(math.itertext()).replace(" ", "") for math in tree.iter(f"{MATHML}math")]


def test_a_formula_in_a_line_becomes_mathml():
    tree = parsed(r"Take $p^* = \arg\max_p \langle s, p\rangle$ and $x_i \lt y_i$.")
    first, second = symbols(tree)
    assert first.startswith("p*=argmax")
    assert second == "xi<yi"
    assert tree.find("p").text == "Take "
    assert [math.get("display") for math in tree.iter(f"{MATHML}math")] == ["inline", "inline"]


@pytest.mark.parametrize("text", ["$$\nx_1 * y_1 * z\n$$", "$$x_1 * y_1 * z$$"])
def test_a_formula_of_its_own_is_a_block_and_its_stars_are_no_markup(text):
    tree = parsed(f"Before.\n\n{text}\n\nAfter.")
    assert [child.tag for child in tree] == ["p", "div", "p"]
    (found,) = symbols(tree)
    assert "".join("*" if letter in "*∗" else letter for letter in found) == "x1*y1*z"
    assert next(tree.iter(f"{MATHML}math")).get("display") == "block"


def test_angles_are_kept():
    assert symbols(parsed("If $a<b$ and $c>d$ then\n\n$$e<f$$")) == ["a<b", "c>d", "e<f"]


@pytest.mark.parametrize(
    "text",
    ["`$x$`", "```\n$x$\n```", "    $x$", "it costs $5 and $6", r"\$x\$", "a $ b $ c", "$HOME"],
)
def test_code_and_prices_are_left_alone(text):
    assert "<math" not in shown(text)
    assert "$" in shown(text)


@pytest.mark.parametrize(
    ("latex", "told"),
    [(r"\frac{1}", "mfrac has 1"), (r"\nothing x", "nothing is not known"), ("x_", "no MathML")],
)
def test_what_is_no_formula_stops_the_build(latex, told):
    with pytest.raises(FormulaError, match=told) as raised:
        shown(f"${latex}$")
    assert latex in str(raised.value)


def test_bars_of_any_size_are_bars():
    (found,) = symbols(parsed(r"$\Big\lvert x \Big\rvert + \bigl\lvert y \bigr\rvert$"))
    assert found == "|x|+|y|"


def test_names_are_set_apart_from_letters_and_not_from_brackets():
    (math,) = parsed(r"$x \log x + \operatorname{KL}(p)$").iter(f"{MATHML}math")
    tags = [(child.tag.removeprefix(MATHML), child.text) for child in math[0]]
    thin = ("mspace", None)
    assert tags[:5] == [("mi", "x"), thin, ("mi", "log"), thin, ("mi", "x")]
    assert tags[6:8] == [("mi", "KL"), ("mo", "(")]


@pytest.mark.parametrize(
    "text",
    [
        "$$\n\nx\n\n$$",
        "$$\nx\n\ny\n$$",
        "$$x",
        "so x$$ is",
        "$$\nx $y$\n$$",
        "- item\n\n    $$\n\n",
    ],
)
def test_dollars_without_their_like_are_refused(text):
    with pytest.raises(FormulaError, match=r"no formula from .*same paragraph"):
        shown(f"Before.\n\n{text}\n\nAfter.")


@pytest.mark.parametrize("text", ["`$$`", "```\n$$\n```", "    $$", r"\$\$", r"a \$\$x\$\$ b"])
def test_two_dollars_that_are_no_formula_are_left_alone(text):
    assert "$$" in shown(text)
