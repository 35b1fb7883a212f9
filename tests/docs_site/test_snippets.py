"""Blocks of a page: found where they are, run in order, refused where they would not run."""

import sys
from textwrap import dedent

import pytest
import torch

from docs_site import snippets

PAGE = dedent(
    """\
    # A page

    ```python
    import torch
    x = 2
    ```

    Words.

    ```python
    print("x is", x)
    x + 1
    ```

    ```text
    something old
    ```

    The end.
    """
)


def run_all(text):
    with snippets.fresh("a.md") as namespace:
        return [snippets.run(block, namespace, "a.md") for block in snippets.blocks(text)]


def test_outputs_replace_what_stood_there_and_leave_the_rest():
    made, pictures = snippets.produced(PAGE, "a.md")
    output = "``` { .text .output }\nx is 2\n3\n```"
    assert made == PAGE.replace("```text\nsomething old\n```", output)
    assert pictures == []


def test_what_the_source_shows_is_known():
    first, second = snippets.blocks(PAGE)
    assert (first.shown, second.shown) == (None, "something old\n")
    assert (first.line, second.line, second.number) == (3, 10, 2)


def test_text_further_down_is_no_output():
    text = "```python\nprint(1)\n```\n\nWords.\n\n```text\nkept\n```\n"
    (block,) = snippets.blocks(text)
    assert block.shown is None
    assert "kept" in snippets.produced(text, "a.md")[0]


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("None", ""),
        ("x = 1", ""),
        ("print('a'); 'b'", "a\n'b'\n"),
        ("if True:\n    5", ""),
        ("", ""),
    ],
)
def test_the_last_expression_is_shown_as_in_a_notebook(code, output):
    assert run_all(f"```python\n{code}\n```\n") == [output]


def test_each_page_starts_from_the_same_seed_and_an_empty_namespace():
    text = "```python\nimport torch\nprint('y' in globals())\ny = 1\nprint(torch.rand(1))\n```\n"
    (first,) = run_all(text)
    torch.rand(3)
    assert run_all(text) == [first]
    assert first.startswith("False\n")
    assert "page_a" not in sys.modules


def test_a_class_of_a_page_is_found_by_its_module():
    code = "import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A"
    assert run_all(f"```python\n{code}\n```\n") == ["True\n"]


def test_what_longer_fences_show_is_not_run():
    text = '````text\n```python picture="x"\n1 / 0\n```\n````\n\n```python\n1\n```\n'
    assert run_all(text) == ["1\n"]


@pytest.mark.parametrize("error", ["1 / 0", "raise ValueError('no')", "def f(:"])
def test_an_error_names_page_block_and_line(error):
    text = PAGE + f"\n```python\ny = 1\n{error}\n```\n"
    line = text.splitlines().index(error) + 1
    with pytest.raises(snippets.SnippetError, match=rf"a\.md, block 3 \(line {line}\): \w+Error"):
        snippets.produced(text, "a.md")


@pytest.mark.parametrize("info", [" title='x'", ' picture=""', "3", ' picture="a" more'])
def test_a_block_that_would_be_left_out_is_refused(info):
    with pytest.raises(snippets.SnippetError, match="line 3"):
        snippets.blocks(f"# A\n\n```python{info}\n1\n```\n")
    with pytest.raises(snippets.SnippetError, match=r"indented.*line 2"):
        snippets.blocks("- item\n  ```python\n  1\n  ```\n")


DRAWN = """\
```python picture="A line that rises"
from matplotlib.figure import Figure
figure = Figure(figsize=(2, 1))
print("drawn")
figure.subplots().plot([0, 1])
```
"""


def test_a_picture_follows_its_block_and_is_the_same_every_time():
    made, (picture,) = snippets.produced(DRAWN, "api/a.md")
    assert picture.name == "a-1.svg"
    assert picture.svg.startswith("<svg")
    code, output, shown = made.split("\n\n")
    assert code.startswith("```python\nfrom matplotlib")
    assert output == "``` { .text .output }\ndrawn\n```"
    assert shown == "![A line that rises](a-1.svg){ .produced }\n"
    assert snippets.produced(DRAWN, "api/a.md")[1] == [picture]


@pytest.mark.parametrize(("code", "found"), [("other = 1", "NoneType"), ("figure = 1", "int")])
def test_a_picture_that_is_not_drawn_is_missed(code, found):
    text = f'```python picture="A line"\n{code}\n```\n'
    with pytest.raises(snippets.SnippetError, match=rf"block 1 \(line 1\).*got {found}"):
        snippets.produced(text, "a.md")


def test_an_output_with_fences_keeps_its_own():
    made, _ = snippets.produced("```python\nprint('````')\n```\n", "a.md")
    assert "````` { .text .output }\n````\n`````" in made
