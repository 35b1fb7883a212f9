"""Blocks of a page: found where they are, run in order, refused where they would not run."""

import io
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


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "raise SystemExit", "exit()"])
def test_an_exit_is_an_error(code):
    with pytest.raises(snippets.SnippetError, match=r"a\.md, block 1 \(line \d\): SystemExit"):
        snippets.produced(f"```python\n{code}\n```\n", "a.md")


def test_who_builds_can_stop_a_block():
    with pytest.raises(KeyboardInterrupt):
        run_all("```python\nraise KeyboardInterrupt\n```\n")


@pytest.mark.parametrize("code", ["input()", "import sys\nsys.stdin.readline()[0]"])
def test_a_block_has_nothing_to_read(code, monkeypatch):
    stdin = io.StringIO("of the builder\n")
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(snippets.SnippetError, match=r"EOFError|IndexError"):
        run_all(f"```python\n{code}\n```\n")
    assert sys.stdin is stdin
    assert stdin.read() == "of the builder\n"


@pytest.mark.parametrize(
    "start",
    [
        *("~~~python", "``` python", "```py", "```Python", "```PY3", "````python", "```pycon"),
        *("```{.python}", "``` { .python }", "```{#a .py}", "~~~{.py}"),
        *("> ```python", ">```python", "- ```python", "1. ```python", "> - ~~~ Py", "\t```python"),
    ],
)
def test_what_looks_like_a_block_and_would_not_run_is_refused(start):
    end = "".join(letter for letter in start if letter in "`~")
    with pytest.raises(snippets.SnippetError, match=r"a\.md: a block that .*: line 3$"):
        snippets.blocks(f"# A\n\n{start}\n1\n{'> ' * (start[0] == '>')}{end}\n", "a.md")


@pytest.mark.parametrize(
    "text",
    [
        "```python\n1\n",
        "```python\n1\n````\n",
        "```python\n1\n  ```\n",
        "````text\n```python\n1\n```\n",
        "~~~\n```python\n1\n```\n~~~~\n",
        "> ```python\n> 1\n",
        "```text",
    ],
)
def test_a_fence_that_is_never_closed_is_refused(text):
    with pytest.raises(snippets.SnippetError, match=r"never closed .*: line 3$"):
        snippets.blocks(f"# A\n\n{text}")


@pytest.mark.parametrize(
    "comment", ["<!--\n{}\n-->", "A <!-- <!-- b\n{}\n-->", "<!-- {}", "<!-- {} -->"]
)
def test_a_block_in_a_comment_is_refused(comment):
    text = "# A\n\n" + comment.replace("{}", "```python\n1\n```") + "\n"
    with pytest.raises(snippets.SnippetError, match=r"in a comment .*: line 3$"):
        snippets.blocks(text)


@pytest.mark.parametrize(
    "shown",
    [
        "~~~text\n```python\n1 / 0\n```\n~~~",
        "```text\n```python\n1 / 0\n```",
        "- ```text\n  ```python\n  ```",
        "```text\n<!--\n```",
        "`<!--` begins a comment",
        "<!-- a comment\n```text\n-->",
        "```a``` is code",
    ],
)
def test_what_only_shows_a_block_or_a_comment_is_not_run(shown):
    (block,) = snippets.blocks(f'{shown}\n\n```python\ns = """\n  ```py\n  ```\n"""\n```\n')
    assert block.code == 's = """\n  ```py\n  ```\n"""\n'


def test_comments_are_those_that_no_fence_shows():
    text = "<!-- a -->\n```text\n<!-- b -->\n```\n`<!-- c -->` <!-- d\n-->\n"
    assert [match[0] for match in snippets.comments(text)] == ["<!-- a -->", "<!-- d\n-->"]


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


def test_the_picture_of_an_earlier_block_is_not_shown_again():
    text = DRAWN + '\n```python picture="Another"\nother = 1\n```\n'
    with pytest.raises(snippets.SnippetError, match=r"block 2 \(line 8\).*got NoneType"):
        snippets.produced(text, "a.md")


def test_a_block_without_a_picture_knows_the_figure():
    assert run_all(DRAWN + "\n```python\nlen(figure.axes)\n```\n") == ["drawn\n", "1\n"]


def test_an_output_with_fences_keeps_its_own():
    made, _ = snippets.produced("```python\nprint('````')\n```\n", "a.md")
    assert "````` { .text .output }\n````\n`````" in made
