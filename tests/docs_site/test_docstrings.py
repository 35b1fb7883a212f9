"""Docstrings as Markdown."""

from docs_site import docstrings


def test_lines_are_joined_and_examples_are_code():
    text = """First line
    goes on.

    >>> f(1)
    2

        found = f(2)

        p = argmin |x|
    """
    assert docstrings.made(text).split("\n\n") == [
        "First line goes on.",
        "```pycon\n>>> f(1)\n2\n```",
        "```python\nfound = f(2)\n```",
        "```text\np = argmin |x|\n```",
    ]


def test_code_at_the_margin_is_code_and_words_are_not():
    assert docstrings.made("hf.register()\nx = f(1)").startswith("```python")
    assert docstrings.made("steps: (...)") == "- `steps`: (...)"
    assert docstrings.made("Moments") == "Moments"


def test_arguments_become_a_list():
    text = """About it.
    base: how much
    room. More
    mask (..., n): True. norm, order: of x;
    goes on
    """
    assert docstrings.made(text).splitlines() == [
        "About it.",
        "",
        "- `base`: how much room. More",
        "- `mask` (..., n): True.",
        "- `norm`, `order`: of x; goes on",
    ]


def test_an_argument_ends_with_its_indented_lines():
    text = "a: one\n    goes on\nThen words."
    assert docstrings.made(text) == "- `a`: one goes on\n\nThen words."


def test_formulas_are_not_markup_but_code_and_emphasis_are():
    assert docstrings.escaped("p* = <s, q*> [a][b]") == r"p\* = &lt;s, q\*&gt; \[a\]\[b\]"
    assert docstrings.escaped("x_i and `x_i <y>`") == r"x\_i and `x_i <y>`"
    assert docstrings.escaped("a *prior* makes") == "a *prior* makes"
