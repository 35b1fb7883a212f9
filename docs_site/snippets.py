"""The Python blocks of a page: found, run in order in one namespace, their outputs put in.

Needs neither mkdocs nor matplotlib, unless a block draws, so that tests can run the pages as well.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch

# A fence of any language covers what it shows up to its like: that is not run. In a list or a
# quote it may end at another depth. A comment hides what it holds; one in a code span does not.
_FENCE = (
    r"^(?P<nested>(?:[ \t>]|[-*+] |\d+[.)] )+)?(?P<fence>`{3,}(?=[^`\n]*$)|~{3,}(?!~))"
    r"(?P<info>[^\n]*)(?:\n(?P<code>.*?)(?P<closed>^(?(nested)[ \t>]*)(?P=fence)[ ]*$))?"
)
_COMMENT = r"(?<!`)(?P<comment><!--.*?(?:-->|\Z))"
_FOUND = re.compile(f"{_FENCE}|{_COMMENT}", re.DOTALL | re.MULTILINE)
_SHOWN = re.compile(r"\n\n?```text\n(?P<shown>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"\s*(?:\.?py|\{(?:[^}]*[\s.:])?py)", re.IGNORECASE)
_HIDDEN = re.compile(f"(?:`{{3,}}|~{{3,}}){_PYTHON.pattern}", re.IGNORECASE)
_INFO = re.compile(r'python(?: picture="(?P<caption>[^"]+)")?\s*')


class SnippetError(Exception):
    """A block that cannot be run, with its page and place."""


@dataclass(frozen=True)
class Block:
    """code, and where it stands. shown: the output that the page's source gives; None if it gives
    none. caption: of a picture; None if it draws none. start, end: what to replace in the text."""

    code: str
    line: int  # of the fence
    number: int  # from 1
    start: int
    end: int
    shown: str | None = None
    caption: str | None = None


def blocks(text: str, page: str = "the page") -> list[Block]:
    """In order. What looks like a block and would not be run is refused."""
    found: list[Block] = []
    for match in _FOUND.finditer(text):
        wrong = _wrong(match)
        if wrong:
            raise SnippetError(f"{page}: {wrong}: line {line_of(text, match)}")
        info = None if match["comment"] else _INFO.fullmatch(match["info"])
        if info is None:
            continue
        output = _SHOWN.match(text, match.end())
        shown, end = (output["shown"], output.end()) if output else (None, match.end())
        place = (line_of(text, match), len(found) + 1, match.start(), end)
        found.append(Block(match["code"], *place, shown, info["caption"]))
    return found


def _wrong(match: re.Match[str]) -> str:
    """Why a fence or a comment is refused; nothing if it is not."""
    if match["comment"]:
        hidden = _HIDDEN.search(match["comment"])
        return "a block in a comment is not run; take it out" if hidden else ""
    fence, info = match["fence"], match["info"]
    if not match["closed"]:
        return f"the fence {fence}{info} is never closed by a line {fence}"
    if not _PYTHON.match(info):
        return ""
    if match["nested"]:
        return "a block that is indented, quoted or in a list is not run"
    if fence != "```" or not _INFO.fullmatch(info):
        return (
            "a block that runs begins with ```python and after it nothing or "
            f'picture="caption", got {fence}{info}'
        )
    return ""


def comments(text: str) -> Iterator[re.Match[str]]:
    """Those that no fence shows."""
    return (match for match in _FOUND.finditer(text) if match["comment"])


def line_of(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


# ---- running


@contextmanager
def fresh(page: str) -> Iterator[dict[str, Any]]:
    """The namespace of a page, as a module that torch.compile and pickle find by its name."""
    module = types.ModuleType("page_" + re.sub(r"\W", "_", page.removesuffix(".md")))
    torch.manual_seed(0)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield module.__dict__
    finally:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before


@contextmanager
def _streams(printed: io.StringIO) -> Iterator[None]:
    """Nothing to read: a block that asks would wait for whoever builds. Progress bars are lost."""
    before = sys.stdin
    sys.stdin = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.stdin = before


def run(block: Block, namespace: dict[str, Any], page: str = "the page") -> str:
    """What it prints; and, as in a notebook, the value of a last bare expression, unless the block
    draws: there it is a thing of matplotlib."""
    name = f"{page}, block {block.number}"
    printed = io.StringIO()
    if block.caption is not None:
        namespace.pop("figure", None)  # that of an earlier block is not this one's picture
    try:
        tree = ast.parse(block.code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with _streams(printed):
            exec(compile(tree, name, "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
                if value is not None and block.caption is None:
                    print(repr(value))
    except (Exception, SystemExit) as error:  # an exit would end the build as if all were well
        raise SnippetError(f"{name} (line {_line(block, name, error)}): {_told(error)}") from error
    return printed.getvalue()


def _line(block: Block, name: str, error: BaseException) -> int:
    """Of the page: the statement that failed, or the fence."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return block.line + (error.lineno or 0)
    frames = traceback.extract_tb(error.__traceback__)
    return block.line + next((f.lineno or 0 for f in frames if f.filename == name), 0)


def _told(error: BaseException) -> str:
    """The message of a SyntaxError without its place, which is told already."""
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


# ---- the page as it is shown


@dataclass(frozen=True)
class Picture:
    """A figure of a page, as the text of an SVG file."""

    name: str
    svg: str


def produced(text: str, page: str) -> tuple[str, list[Picture]]:
    """The page with the outputs of its blocks, and its pictures."""
    parts: list[str] = []
    pictures: list[Picture] = []
    end = 0
    with fresh(page) as namespace:
        for block in blocks(text, page):
            output = run(block, namespace, page)
            parts += [text[end : block.start], f"```python\n{block.code}```", _fenced(output)]
            if block.caption is not None:
                stem = page.rpartition("/")[2].removesuffix(".md")
                made = Picture(f"{stem}-{block.number}.svg", figure(namespace, block, page))
                pictures.append(made)
                parts.append(f"\n\n![{block.caption}]({made.name}){{ .produced }}")
            end = block.end
    return "".join([*parts, text[end:]]), pictures


def _fenced(output: str) -> str:
    """With a fence longer than any inside."""
    if not output.strip():
        return ""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", output)), default=0))
    return f"\n\n{fence} {{ .text .output }}\n{output.rstrip()}\n{fence}"


def figure(namespace: dict[str, Any], block: Block, page: str) -> str:
    """What the block bound to the name `figure`, as SVG that is the same in every build."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = namespace.get("figure")
    if not isinstance(drawn, Figure):
        raise SnippetError(
            f"{page}, block {block.number} (line {block.line}): a block with a picture binds a "
            f"matplotlib Figure to the name figure, got {type(drawn).__name__}"
        )
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "fenchel"}):
        drawn.savefig(buffer, format="svg", bbox_inches="tight", metadata=nothing)
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
