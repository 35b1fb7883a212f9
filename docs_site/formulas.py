"""Formulas between dollars become MathML, which browsers show without scripts or fonts.

Inline patterns and blocks come after code in Python-Markdown, so that code is left alone.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as etree
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

from latex2mathml.converter import convert_to_element
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

# No space inside the dollars, no digit after them: $5 and $6 are prices.
_INLINE = r"(?<![\\$\w])\$(?![\s$])((?:\\.|[^$\\])*?)(?<!\s)\$(?![\w$])"
_DISPLAY = r"(?<![\\$])\$\$((?:\\.|[^$\\])+?)\$\$(?!\$)"
_ALONE = r"(?<![\\$])\$\$([^\n]{0,40})"  # what the pattern above did not take
_AFTER_CODE = 185  # backticks have 190, escapes 180: a formula keeps its backslashes

# Written in another way, for the package.
_KNOWN = (
    (r"\\arg\s*\\(max|min)(?![A-Za-z])", r"\\operatorname{arg\1}"),
    (r"\\(bigg?|Bigg?)[lr]?\s*\\[lr]vert(?![A-Za-z])", r"\\\1|"),
)
_SCRIPTS = {"msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
_ARGUMENTS = {"mfrac": 2, "mroot": 2, **_SCRIPTS}
_ROWS = ("math", "mrow", "mstyle", "mtd")
_SIGNS = ("mo", "mspace")
_THIN = "0.167em"


class FormulaError(ValueError):
    """A formula that is not LaTeX."""


def mathml(latex: str, display: bool) -> str:
    """One <math> element. What the package does not know it passes on as it is, which no reader
    should see."""
    written = latex.strip()
    for pattern, known in _KNOWN:
        written = re.sub(pattern, known, written)
    try:
        tree = convert_to_element(written, display="block" if display else "inline")
    except Exception as error:  # the package raises a dozen kinds
        raise FormulaError(f"no MathML for ${latex.strip()}$: {type(error).__name__}") from error
    for element in tree.iter():
        element.text = unescape(element.text or "")  # signs come as &#x0002A;
    wrong = _wrong(tree)
    if wrong:
        raise FormulaError(f"no MathML for ${latex.strip()}$: {wrong}")
    for row in tree.iter():
        if row.tag in _ROWS:
            row[:] = _spaced(list(row))
    return etree.tostring(tree, encoding="unicode")


def _wrong(tree: etree.Element) -> str:
    for element in tree.iter():
        if "\\" in (element.text or ""):
            return f"{element.text} is not known"
        if len(element) != _ARGUMENTS.get(element.tag, len(element)):
            return f"{element.tag} has {len(element)} argument(s), not {_ARGUMENTS[element.tag]}"
    return ""


def _spaced(children: list[etree.Element]) -> Iterator[etree.Element]:
    """Names as TeX sets them: a thin space on either side, but none before or after a sign."""
    for place, child in enumerate(children):
        base = _base(child)
        named = base.tag in ("mi", "mo") and re.fullmatch("[A-Za-z]{2,}", base.text or "")
        if named:
            base.tag = "mi"  # as an operator it would have wide spaces
        if named and place and _base(children[place - 1]).tag not in _SIGNS:
            yield etree.Element("mspace", width=_THIN)
        yield child
        if named and place + 1 < len(children) and _base(children[place + 1]).tag not in _SIGNS:
            yield etree.Element("mspace", width=_THIN)


def _base(element: etree.Element) -> etree.Element:
    """Without its indices."""
    return _base(element[0]) if element.tag in _SCRIPTS else element


class _Formula(InlineProcessor):
    def __init__(self, pattern: str, md: Markdown, owner: Formulas, display: bool) -> None:
        super().__init__(pattern, md)
        self.owner, self.display = owner, display

    def handleMatch(self, m: re.Match[str], data: str) -> Any:
        stored = self.md.htmlStash.store(self.owner.mathml(m[1], self.display))
        return stored, m.start(0), m.end(0)


class _Alone(InlineProcessor):
    """Dollars whose like is not in the same paragraph would be shown as they are."""

    def __init__(self, md: Markdown, owner: Formulas) -> None:
        super().__init__(_ALONE, md)
        self.owner = owner

    def handleMatch(self, m: re.Match[str], data: str) -> Any:
        raise self.owner.refused(
            f"no formula from {m[0]!r}: it ends with $$ in the same paragraph, without blank "
            "lines or dollars inside; dollars that are none are written \\$ or as code"
        )


class _Block(BlockProcessor):
    """A paragraph that is one formula: no <p> around it."""

    _WHOLE = re.compile(rf"^{_DISPLAY}\s*$", re.DOTALL)

    def __init__(self, md: Markdown, owner: Formulas) -> None:
        super().__init__(md.parser)
        self.owner = owner

    def test(self, parent: etree.Element, block: str) -> bool:
        return bool(self._WHOLE.match(block))

    def run(self, parent: etree.Element, blocks: list[str]) -> None:
        match = self._WHOLE.match(blocks.pop(0))
        assert match is not None
        element = etree.SubElement(parent, "div", {"class": "formula"})
        made = self.owner.mathml(match[1], display=True)
        element.text = self.parser.md.htmlStash.store(made)


class Formulas(Extension):
    """error: raised where a formula is none. page: what is being read, for its message."""

    def __init__(self, error: Callable[[str], Exception] = FormulaError) -> None:
        super().__init__()
        self.error = error
        self.page = ""

    def extendMarkdown(self, md: Markdown) -> None:
        display = _Formula(_DISPLAY, md, self, display=True)
        inline = _Formula(_INLINE, md, self, display=False)
        md.inlinePatterns.register(display, "formula-display", _AFTER_CODE + 1)
        md.inlinePatterns.register(inline, "formula", _AFTER_CODE)
        md.inlinePatterns.register(_Alone(md, self), "formula-alone", _AFTER_CODE - 1)
        md.parser.blockprocessors.register(_Block(md, self), "formula-block", 75)
        md.ESCAPED_CHARS.append("$")

    def mathml(self, latex: str, display: bool) -> str:
        try:
            return mathml(latex, display)
        except FormulaError as problem:
            raise self.refused(str(problem)) from problem

    def refused(self, told: str) -> Exception:
        return self.error(f"{self.page}: {told}" if self.page else told)
